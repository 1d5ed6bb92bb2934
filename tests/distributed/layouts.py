"""The work of many devices, in one child process with 8 virtual ones, for `test_strategies`."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from jaxformer.checkpoint import Checkpoints
from jaxformer.config import (
    AttentionOptions,
    EmbeddingOptions,
    FeedForwardOptions,
    NormOptions,
    Rotary,
    TransformerConfig,
)
from jaxformer.distributed import (
    CompiledStep,
    make_mesh,
    parse_mesh,
    replicated,
    sharded,
    single,
)
from jaxformer.distributed.gathering import Gathering, on_shards, row_axes
from jaxformer.distributed.torus import line_stages
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import Axes
from jaxformer.nn.blocks import Block
from jaxformer.nn.dense import Dense
from jaxformer.nn.embeddings import Embedding, LMHead
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.nn.remat import REMAT
from jaxformer.ops.cross_entropy import cross_entropy
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.lookup import lookup
from jaxformer.ops.masks import AttentionMask
from jaxformer.ops.partitioning import divide_positions
from jaxformer.text.data import PairBatch, StreamBatch
from jaxformer.training.losses import causal_loss, seq2seq_loss
from jaxformer.training.muon import scale_by_muon
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.parameters import flatten
from jaxformer.training.train_step import init_train_state
from tests.hlo import collectives

P = PartitionSpec
ROWS, BASE = 16, dict(vocab_size=22, d_model=10, d_ff=14, num_heads=2, head_dim=6)
NOISY = dict(dropout_rate=0.2, attention=AttentionOptions(dropout_rate=0.1))
TRANSLATOR = EncoderDecoder(
    TransformerConfig(**BASE, **NOISY, num_encoder_layers=1, num_decoder_layers=1, use_bias=False)
)
WRITER = DecoderOnly(
    TransformerConfig(
        **BASE,
        dropout_rate=0.2,
        num_decoder_layers=1,
        attention=AttentionOptions(num_kv_heads=1, dropout_rate=0.1),
        norm=NormOptions("rms", placement="pre"),
        feed_forward=FeedForwardOptions("silu", gated=True),
        embeddings=EmbeddingOptions(tied="none"),
        positions=Rotary(),
    ),
    block=REMAT["blocks"],
)
SCANNED_READER = DecoderOnly(
    replace(
        WRITER.config,
        d_ff=16,
        num_heads=4,
        num_decoder_layers=2,
        attention=AttentionOptions(num_kv_heads=2, dropout_rate=0.1),
        scan_layers=True,
    )
)
LAYOUTS = {
    "translator": ("one", "replicated", "partitioned"),
    "writer": ("one", "gathered_at_use", "odd_length"),
    "scanned_reader": ("one", "sequence", "sequence_and_tensor"),
    "whole_logits": ("one", "sequence_and_tensor"),
}
MESHES = {
    "odd_length": "data=2,fsdp=2,sequence=2",
    "sequence": "fsdp=2,sequence=4",
    "sequence_and_tensor": "fsdp=2,sequence=2,tensor=2",
}
PLACES = [(case, name) for case, names in LAYOUTS.items() for name in names]
OTHERS = [(case, name) for case, name in PLACES if name != "one"]


def pairs(seed: int) -> PairBatch:
    """16 ragged pairs; the last row is empty."""
    rng = np.random.default_rng(seed)
    source, target = np.zeros((ROWS, 5), np.int32), np.zeros((ROWS, 8), np.int32)
    for row in range(ROWS - 1):
        for side, words in ((source, rng.integers(1, 5)), (target, rng.integers(1, 8))):
            side[row, : words + 1] = rng.integers(3, 22, size=words + 1)
    return PairBatch(source, target, np.arange(ROWS, dtype=np.int32))


def texts(seed: int, length: int = 7) -> StreamBatch:
    """16 rows of two documents each, with ragged ends."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 22, size=(ROWS, length + 1)).astype(np.int32)
    place = np.arange(length + 1, dtype=np.int32)[None, :]
    cut = rng.integers(1, length, size=(ROWS, 1)).astype(np.int32)
    segments = 1 + (place >= cut).astype(np.int32)
    positions = np.where(place >= cut, place - cut, place)
    inside = np.arange(length)[None, :] < rng.integers(2, length + 1, size=(ROWS, 1))
    valid = (segments[:, 1:] == segments[:, :-1]) & inside
    return StreamBatch(tokens, valid, np.arange(ROWS, dtype=np.int32), segments, positions)


CASES = {
    "translator": (TRANSLATOR, seq2seq_loss(TRANSLATOR, pad=0, label_smoothing=0.1), pairs),
    "writer": (WRITER, causal_loss(WRITER, loss_chunk=5), texts),
    "scanned_reader": (
        SCANNED_READER,
        causal_loss(SCANNED_READER, loss_chunk=5),
        partial(texts, length=12),
    ),
    "whole_logits": (SCANNED_READER, causal_loss(SCANNED_READER), partial(texts, length=12)),
}


def recorded_adam() -> optax.GradientTransformation:
    """Adam that keeps the last gradient in its state."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, _, params=None: (grads, grads),
    )
    return optax.chain(keep, optax.adam(3e-3))


def state_maker(model: Any, optimizer: optax.GradientTransformation) -> Any:
    tokens = jnp.ones((2, 3), jnp.int32)
    inputs = (tokens, tokens) if isinstance(model, EncoderDecoder) else (tokens,)

    def make_state():
        params = model.init(jax.random.key(1), *inputs)["params"]
        return init_train_state(params, optimizer, jax.random.key(2), ema=True)

    return make_state


def layout(name: str) -> tuple[Any, dict[str, Any]]:
    """The devices of a layout, and the options of its step."""
    if name == "one":
        return single(), {}
    if name == "replicated":
        return replicated(jax.devices()[:4]), {}
    at_use = {"gather_at": "use", "grad_accumulation": 2}
    devices = sharded(make_mesh(MESHES.get(name, "data=2,fsdp=2,tensor=2")))
    return devices, at_use if name in ("gathered_at_use", "sequence") else {}


def train(case: str, name: str, steps: int) -> dict[str, Any]:
    """The results of a case in a layout: start, first gradient, what each device holds."""
    model, loss, batch = CASES[case]
    devices, options = layout(name)
    devices = devices.for_model(model)
    optimizer = recorded_adam()
    make_state = jax.jit(state_maker(model, optimizer))  # traced once for all that call it
    kernels = []

    def observed() -> Any:
        kernels.append(jax.config.jax_threefry_gpu_kernel_lowering)
        return make_state()

    state = devices.init(observed)
    held = {path: leaf.sharding for path, leaf in flatten(state).items()}
    out = {f"start/{path}": leaf for path, leaf in flatten(devices.gather(state.params)).items()}
    step = devices.step(loss, optimizer, ema_decay=0.9, **options)
    compiled = [0]

    def count(name: str, *_: Any, **__: Any) -> None:
        compiled[0] += name.endswith("backend_compile_duration")

    for number in range(steps):
        placed = devices.shard_batch(batch(number))
        jax.monitoring.register_event_duration_secs_listener(count)
        state, _ = step(state, placed)
        jax.monitoring.unregister_event_duration_listener(count)
        if number == 0:
            first = devices.gather(state.opt_state[0])
    out |= {f"gradient/{path}": leaf for path, leaf in flatten(first).items()}
    stays = (leaf.sharding == held[path] for path, leaf in flatten(state).items())
    expected = flatten(devices.abstract(make_state))
    matches = (expected[path].sharding == sharding for path, sharding in held.items())
    facts = {"compiled": compiled[0], "stays": all(stays), "as_abstract": all(matches)}
    facts |= {"kernel": kernels[-1]}
    out["facts"] = json.dumps(facts)
    return {f"{case}/{name}/{key}": value for key, value in out.items()}


class Toy(NamedTuple):
    tokens: np.ndarray
    example_ids: np.ndarray
    strength: float
    nothing: None = None


def toy_loss(params: Any, batch: Toy, rng: Any) -> Any:
    """A model that compiles in no time: each token from the last one, with dropout by row."""
    inputs, labels = batch.tokens[:, :-1], batch.tokens[:, 1:]
    logits = params["table"][inputs]
    if rng is not None:
        logits = DropoutMask(DropoutRng(rng, batch.example_ids), "toy", 0.3)(logits)
    logits = logits * batch.strength
    return *cross_entropy(logits, labels, labels != 0), {"ids": jnp.sum(labels)}


def toy_batch() -> Toy:
    tokens = np.random.default_rng(3).integers(0, 22, size=(ROWS, 5))
    return Toy(tokens, np.arange(ROWS), 0.7)


def toy_state() -> Any:
    table = jnp.zeros((22, 22)).at[2, 3].set(1.0)
    return init_train_state({"table": table}, optax.sgd(1.0), jax.random.key(0))


def toy_runs() -> dict[str, Any]:
    """A batch with a scalar and None, everywhere, also where the user's mesh is Explicit."""
    few = jax.devices()[:4]
    explicit = jax.make_mesh((2, 2), ("tensor", "fsdp"), devices=few)
    mesh = make_mesh("data=4", few)
    ways = {"one": single(), "replicated": replicated(few), "partitioned": sharded(mesh)}
    out = {}
    for name, devices in (ways | {"explicit": sharded(explicit)}).items():
        step = devices.step(toy_loss, optax.sgd(1.0), grad_accumulation=2)
        evaluate = devices.evaluate(toy_loss)
        with jax.set_mesh(explicit):
            state = devices.init(toy_state)
            placed = devices.shard_batch(toy_batch())
            sums = evaluate(state.params, placed)
            out[f"toy/{name}/sums"] = np.array([sums[x] for x in ("loss", "tokens", "ids")])
            state, metrics = step(state, placed)
        out[f"toy/{name}/ids"] = np.array(metrics["ids"])
        out[f"toy/{name}/table"] = devices.gather(state.params)["table"]
    out["toy/refused"] = json.dumps([*refused(replicated(few)), *refused(sharded(mesh))])
    return out


def refused(devices: Any) -> list[str]:
    """What is said of rows that do not divide among devices, or not in so many parts."""
    messages = []
    step = devices.step(toy_loss, optax.sgd(1.0), grad_accumulation=3)
    batches = (
        toy_batch(),
        jax.tree.map(lambda leaf: leaf[:6] if np.ndim(leaf) else leaf, toy_batch()),
    )
    for batch in batches:
        try:
            step(devices.init(toy_state), devices.shard_batch(batch))
        except ConfigError as error:
            messages.append(str(error))
    return messages


def equal_trees(given: Any, expected: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, given, expected)))


def moves(checkpoints: Checkpoints) -> dict[str, Any]:
    """A state from 8 devices on 1, 2 and 4, moved and restored, and a batch on 1, 2, 4 and 8."""
    make_state = jax.jit(state_maker(TRANSLATOR, optax.adam(1e-3)))
    state = sharded(make_mesh("data=2,fsdp=2,tensor=2")).for_model(TRANSLATOR).init(make_state)
    checkpoints.save(1, state, {})
    batch, equal = pairs(5), {}
    for text in ("data=1", "fsdp=2", "data=2,tensor=2", "data=2,fsdp=4"):
        count = int(np.prod(list(parse_mesh(text).values())))
        devices = sharded(make_mesh(text, jax.devices()[:count])).for_model(TRANSLATOR)
        there = devices.shard_state(state)
        restored, _ = checkpoints.restore(devices.abstract(make_state))
        same = [equal_trees(devices.gather(s), devices.gather(state)) for s in (there, restored)]
        same.append(flatten(restored).keys() == flatten(there).keys())
        where = flatten(devices.shardings(state))
        same += [
            a.sharding.is_equivalent_to(where[k], a.ndim) for k, a in flatten(restored).items()
        ]
        placed = devices.shard_batch(batch)
        rows = {piece.data.shape[0] for leaf in placed for piece in leaf.addressable_shards}
        whole = equal_trees(devices.gather(placed), batch)
        table = there.params["embedding"]["table"]
        part = max(piece.data.size for piece in table.addressable_shards) / table.size
        equal[text] = [all(same), whole, sorted(rows), part]
    return {"moves": json.dumps(equal)}


class Tied(nn.Module):
    """A model that uses one table three times, as a tied translator does."""

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        table = self.param("table", nn.initializers.ones, (22, 10))
        kernel = self.param("kernel", nn.initializers.ones, (10, 10))
        x = table[source].sum(1, keepdims=True) + table[target]
        return jnp.tanh(x @ kernel) @ table.T


def tied_loss(params: Any, batch: PairBatch, rng: Any) -> Any:
    logits = Tied().apply({"params": params}, batch.source, batch.target[:, :-1])
    return cross_entropy(logits, batch.target[:, 1:], batch.target[:, 1:] != 0)


def step_collectives() -> dict[str, Any]:
    """The data that devices send each other in a step with accumulation, and within a block."""
    few, found, optimizer = jax.devices()[:4], {}, optax.sgd(1.0)

    def make_state():
        params = Tied().init(jax.random.key(0), *pairs(0)[:2])["params"]
        return init_train_state(params, optimizer, jax.random.key(0))

    both = sharded(make_mesh("data=2,fsdp=2", few))
    for name, devices, gather_at in (
        ("replicated", replicated(few), "step"),
        ("data=4", sharded(make_mesh("data=4", few)), "step"),
        ("data=2,fsdp=2: step", both, "step"),
        ("data=2,fsdp=2: use", both, "use"),
    ):
        step = devices.step(tied_loss, optimizer, grad_accumulation=4, gather_at=gather_at)
        program = step.lower(devices.init(make_state), devices.shard_batch(pairs(0))).compile()
        found[name] = sorted((c.kind, c.in_loop, c.size) for c in collectives(program))
    for cross in (False, True):
        found["decoder" if cross else "encoder"] = block_all_reduces(cross)
    return {"collectives": json.dumps(found)}


class Layers(nn.Module):
    """Three layers in one scan, a user's own: [3, 10, 14] and [3, 14, 10]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(module: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            w_in = module.param("w_in", nn.initializers.normal(0.3), (10, 14))
            w_out = module.param("w_out", nn.initializers.normal(0.3), (14, 10))
            return x + jnp.tanh(x @ w_in) @ w_out, None

        scan = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(self, x, None)[0]


def scanned() -> dict[str, Any]:
    """A step of `Layers` whose parameters are gathered at use, and on one device."""
    x, optimizer, few = np.random.default_rng(0).normal(size=(8, 10)), optax.sgd(1.0), 4
    paths = {"w_in": P(None, "fsdp"), "w_out": P("fsdp")}
    mesh = make_mesh("data=2,fsdp=2", jax.devices()[:few])
    spread = sharded(mesh, paths=paths).for_model(Layers(), x[:2])

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        y = Layers().apply({"params": params}, batch["x"])
        return jnp.sum(y**2), jnp.float32(y.shape[0])

    def make_state() -> Any:
        params = Layers().init(jax.random.key(0), x[:2])["params"]
        return init_train_state(params, optimizer, jax.random.key(0))

    out = {}
    for name, devices, gather_at in (("one", single(), "step"), ("use", spread, "use")):
        step, state = devices.step(loss, optimizer, gather_at=gather_at), devices.init(make_state)
        batch = devices.shard_batch({"x": x})
        program = step.lower(state, batch).compile()
        found = sorted((c.kind, c.in_loop, c.size) for c in collectives(program))
        out[f"scanned/{name}/collectives"] = json.dumps(found)
        after = devices.gather(step(state, batch)[0].params)
        out |= {f"scanned/{name}/params/{path}": leaf for path, leaf in flatten(after).items()}
    return out


TORUS = {
    "plane": [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1), (1, 0)],
    "cube": [(x, y, z) for z in (0, 1) for x in (0, 1) for y in (0, 1)],
}


def staged() -> dict[str, Any]:
    """The gradient of 8 devices that lie on two or three axes of a torus."""
    mesh, rng = make_mesh("fsdp=8", jax.devices()), np.random.default_rng(0)
    params, specs = {"w": jnp.ones((3, 16, 5))}, {"w": P(None, "fsdp")}
    rows = rng.normal(size=(8, 3, 16, 5)).astype(np.float32)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return jnp.sum(params["w"] * batch[0]), jnp.float32(1.0), {}

    out = {"torus/expected": rows.sum(0)}
    for name, places in TORUS.items():
        gathering = Gathering(specs, ("fsdp",), stages=line_stages(places))
        sums = jax.shard_map(
            lambda params, batch, gathering=gathering: gathering.gradient_sums(
                loss, params, batch, jax.random.key(0), 1
            )[0],
            mesh=mesh,
            in_specs=(specs, P("fsdp")),
            out_specs=specs,
            check_vma=False,
        )
        program = jax.jit(sums).lower(params, rows).compile()
        out[f"torus/{name}"] = program(params, rows)["w"]
        found = [(c.kind, c.size) for c in collectives(program) if c.kind == "reduce-scatter"]
        out[f"torus/{name}/collectives"] = json.dumps(found)
    return out


DIVISIONS = {
    "matrix": ("fsdp=4,tensor=2", P("fsdp", "tensor")),
    "table": ("fsdp=4,tensor=2", P("tensor", "fsdp")),
    "layers of heads": ("data=2,fsdp=2,tensor=2", P(None, "fsdp", "tensor")),
    "sequence": ("fsdp=4,sequence=2", P("fsdp", "sequence")),
    "three axes": ("fsdp=2,sequence=2,tensor=2", P("sequence", "fsdp", "tensor")),
    "one dimension": ("fsdp=4,tensor=2", P(None, ("fsdp", "tensor"))),
    "one dimension, tensor first": ("fsdp=4,tensor=2", P(("tensor", "fsdp"))),
}
SHARED_DIMENSION = ("one dimension", "one dimension, tensor first")
SEPARATE_DIMENSIONS = tuple(name for name in DIVISIONS if name not in SHARED_DIMENSION)


def divided_twice() -> dict[str, Any]:
    """The gradient of a parameter that fsdp and another axis divide, and what is sent for it."""
    shape = (16, 24, 8)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=shape).astype(np.float32)}
    batch = rng.normal(size=(8, *shape)).astype(np.float32)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return jnp.sum(jnp.sin(nn.unbox(params)["w"]) * batch.sum(0)), jnp.float32(1.0), {}

    out = {"divided/expected": np.cos(params["w"]) * batch.sum(0)}
    for name, (text, spec) in DIVISIONS.items():
        mesh, specs = make_mesh(text), {"w": spec}
        for at in ("step", "use"):
            gathering = Gathering(specs, row_axes(mesh), at)
            sums = on_shards(
                lambda params, batch, gathering=gathering: gathering.gradient_sums(
                    loss, params, batch, jax.random.key(0), 1
                )[0],
                mesh,
                specs,
                specs,
            )
            where = {"w": jax.sharding.NamedSharding(mesh, spec)}
            step = CompiledStep(sums, mesh, in_shardings=(where, None), out_shardings=where)
            program = step.lower(params, batch).compile()
            out[f"divided/{name}/{at}"] = step(params, batch)["w"]
            found = [(c.kind, c.size) for c in collectives(program)]
            out[f"divided/{name}/{at}/collectives"] = json.dumps(sorted(found))
    return out


MUON_MESHES = (
    "data=8",
    "fsdp=8",
    "fsdp=4,tensor=2",
    "data=2,fsdp=4",
    "data=2,fsdp=2,tensor=2",
    "fsdp=2,sequence=2,tensor=2",
)
MUON_AXES = {
    name: Axes(inputs, outputs, layers, is_hidden=True)
    for name, inputs, outputs, layers in (
        ("query", ("embed",), ("heads", "head_dim"), 1),
        ("key", ("embed",), ("heads", "head_dim"), 1),
        ("out", ("heads", "head_dim"), ("embed",), 1),
        ("up", ("embed",), ("mlp",), 1),
        ("down", ("mlp",), ("embed",), 1),
        ("alone", ("mlp",), ("embed",), 0),
    )
}
MUON_SHAPES = {
    "query": (2, 32, 8, 4),
    "key": (2, 32, 8, 4),
    "out": (2, 8, 4, 32),
    "up": (3, 32, 64),
    "down": (3, 64, 32),
    "alone": (64, 32),
}


def muon_updates() -> dict[str, Any]:
    """Two updates by Muon on one device and on meshes, what is sent and what is computed."""
    rng = np.random.default_rng(0)
    params, gradient = (
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in MUON_SHAPES.items()}
        for _ in range(2)
    )
    config = OptimizerConfig("constant", "muon", learning_rate=0.1, warmup_steps=0)
    optimizer = make_optimizer(config, axes=MUON_AXES)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        products = jax.tree.map(lambda p, g: jnp.sum(p * g), params, gradient)
        return sum(jax.tree.leaves(products)) * jnp.mean(batch), jnp.float32(1.0)

    def make_state() -> Any:
        return init_train_state(jax.tree.map(jnp.asarray, params), optimizer, jax.random.key(0))

    out = {}
    meshes = {name: sharded(make_mesh(name), axes=MUON_AXES) for name in MUON_MESHES}
    for name, devices in ({"one": single()} | meshes).items():
        state, batch = devices.init(make_state), devices.shard_batch(np.ones(8, np.float32))
        step = devices.step(loss, optimizer)
        program = step.lower(state, batch).compile()
        sent = sum(each.size for each in collectives(program) if each.kind != "all-reduce")
        out[f"muon/{name}/facts"] = json.dumps([sent, program.cost_analysis()["flops"]])
        for _ in range(2):
            state, _ = step(state, batch)
        out |= {f"muon/{name}/params/{k}": x for k, x in devices.gather(state.params).items()}
    with jax.set_mesh(make_mesh("data=4,fsdp=2")):
        for slices in (1, 2):
            results = jax.jit(partial(muon_update, slices=slices))(gradient)
            out |= {f"muon/slices/{slices}/{k}": np.asarray(x) for k, x in results.items()}
    return out


def muon_update(gradient: Any, slices: int) -> Any:
    """Muon's first update on the current mesh, whose data axis lies across `slices`."""
    muon = scale_by_muon(0.9, MUON_AXES)
    specs = {path: PartitionSpec() for path in gradient}
    return muon.update(gradient, muon.init(gradient), specs=specs, slices=slices)[0]


class OddVocabulary(nn.Module):
    """A tied table of 21 rows, which neither 2 nor 4 devices divide."""

    def setup(self) -> None:
        self.embedding = Embedding(21, 12)
        self.lm_head = LMHead(21)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.lm_head(divide_positions(jnp.tanh(self.embedding(tokens))), self.embedding)


ODD_LAYOUTS = {
    "data=2,tensor=4": {},
    "data=2,tensor=4: parts": {"grad_accumulation": 2},
    "data=2,tensor=4: use": {"gather_at": "use"},
    "data=2,fsdp=2,tensor=2": {"grad_accumulation": 2},
}


def odd_vocabulary() -> dict[str, Any]:
    """A step of `OddVocabulary` on one device and on meshes, and what is kept and sent."""
    model, optimizer = OddVocabulary(), optax.sgd(1.0)
    tokens = np.random.default_rng(0).integers(0, 21, size=(8, 9))

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        logits = model.apply({"params": params}, batch[:, :-1])
        return cross_entropy(logits, batch[:, 1:], batch[:, 1:] != 0)

    def make_state() -> Any:
        params = model.init(jax.random.key(0), tokens[:2])["params"]
        return init_train_state(params, optimizer, jax.random.key(0))

    out = {}
    for name, options in ({"one": {}} | ODD_LAYOUTS).items():
        mesh = make_mesh(name.partition(":")[0]) if name != "one" else None
        devices = (single() if mesh is None else sharded(mesh)).for_model(model, tokens[:2])
        state, batch = devices.init(make_state), devices.shard_batch(tokens)
        step = devices.step(loss, optimizer, **options)
        program = step.lower(state, batch).compile()
        found = [(c.kind, c.size, c.in_loop) for c in collectives(program)]
        table = state.params["embedding"]["table"]
        out[f"odd/{name}/kept"] = table.addressable_shards[0].data.size
        out[f"odd/{name}/collectives"] = json.dumps(found)
        out[f"odd/{name}/table"] = devices.gather(step(state, batch)[0].params)["embedding"][
            "table"
        ]
    return out


LOOKUP_MESHES = ("tensor=4", "sequence=2,tensor=2", "data=2,tensor=4")


def lookups() -> dict[str, Any]:
    """Rows of a table on meshes, the gradient of the table, and what is sent for both."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(44, 10)).astype(np.float32)
    ids = rng.integers(-44, 44, size=(2, 8))
    ids[1, 2] = 44  # none of the table's
    slopes = rng.normal(size=(2, 8, 10)).astype(np.float32)

    def rows(table: jax.Array) -> jax.Array:
        return divide_positions(lookup(table, ids, jnp.bfloat16)).astype(jnp.float32)

    def gradient(table: jax.Array) -> jax.Array:
        return jax.grad(
            lambda table: jnp.sum(jnp.where(ids[..., None] < 44, rows(table), 0) * slopes)
        )(table)

    expected = table[np.minimum(ids, 43)].astype(jnp.bfloat16).astype(np.float32)
    expected[ids == 44] = np.nan
    exact = np.zeros_like(table)
    np.add.at(exact, ids[ids < 44], jnp.bfloat16(slopes[ids < 44]).astype(np.float32))
    out = {"lookup/rows": expected, "lookup/gradient": exact}
    for name in LOOKUP_MESHES:
        count = math.prod(parse_mesh(name).values())
        mesh = make_mesh(name, jax.devices()[:count])
        where = jax.sharding.NamedSharding(mesh, P("tensor"))
        for kind, function in {"rows": rows, "gradient": gradient}.items():
            step = CompiledStep(function, mesh, in_shardings=where)
            out[f"lookup/{name}/{kind}"] = step(jax.device_put(table, where))
            program = step.lower(jax.device_put(table, where)).compile()
            found = sorted((c.kind, c.size) for c in collectives(program))
            out[f"lookup/{name}/{kind}/collectives"] = json.dumps(found)
    return out


def gradient_along_sequence() -> dict[str, Any]:
    """The gradient of a matrix that two devices compute in bfloat16 from positions of their own."""
    model = Dense(3, use_bias=False, dtype=jnp.bfloat16)
    x = np.zeros((2, 4, 5), np.float32)
    x[:, :3, :] = np.array([256, 0, 1])[:, None]  # bfloat16 has no 257 between 256 and 258

    def gradient(kernel: jax.Array) -> jax.Array:
        def total(kernel: jax.Array) -> jax.Array:
            inputs = divide_positions(jnp.asarray(x, jnp.bfloat16))
            outputs = model.apply({"params": {"kernel": kernel}}, inputs)
            return jnp.sum(outputs[1].astype(jnp.float32))

        return jax.grad(total)(kernel)

    mesh = make_mesh("sequence=2", jax.devices()[:2])
    return {"along sequence": CompiledStep(gradient, mesh)(np.ones((5, 3), np.float32))}


class OneBlock(nn.Module):
    """A block between learned scales, so that gradients leave it as in the middle of a model."""

    cross: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = Block(num_heads=2, d_ff=14, head_dim=6, cross=self.cross, name="block")
        scales = [self.param(name, nn.initializers.ones, (1, 1, 10)) for name in ("x", "memory")]
        encoder_kv = block.cross_attention.keys_values(x * scales[1]) if self.cross else None
        x = x * scales[0]
        return block(
            x,
            AttentionMask(),
            encoder_kv=encoder_kv,
            encoder_mask=AttentionMask(),
        )


def block_all_reduces(cross: bool) -> list[list[int]]:
    """[forward, forward and backward]: what two devices tell each other that share one block."""
    model, x = OneBlock(cross), np.ones((4, 3, 10), np.float32)

    def loss(params, batch, rng):
        y = model.apply({"params": params}, batch["x"])
        return jnp.sum(y * y * y), jnp.float32(y.size)

    devices = sharded(make_mesh("tensor=2", jax.devices()[:2])).for_model(model, x)
    state = devices.init(
        lambda: init_train_state(
            model.init(jax.random.key(0), x)["params"], optax.sgd(1.0), jax.random.key(0)
        )
    )
    batch = devices.shard_batch({"x": x})
    forward = devices.evaluate(loss).lower(state.params, batch)
    both = devices.step(loss, optax.sgd(1.0)).lower(state, batch)
    return [[each.size for each in collectives(program.compile())] for program in (forward, both)]


def hessian_products() -> dict[str, Any]:
    """The Hessian of a loss of one block times a direction, on one and on two devices."""
    model, x = OneBlock(False), np.random.default_rng(0).normal(size=(4, 3, 10)).astype(np.float32)
    params = nn.unbox(model.init(jax.random.key(0), x)["params"])
    along = jax.tree.map(jnp.cos, params)

    def product(params: Any) -> Any:
        gradient = jax.grad(lambda params: jnp.sum(model.apply({"params": params}, x) ** 3))
        return jax.jvp(gradient, (params,), (along,))[1]

    out = {"hessian/one": ravel_pytree(jax.jit(product)(params))[0]}
    with jax.set_mesh(make_mesh("tensor=2", jax.devices()[:2])):
        out["hessian/two"] = ravel_pytree(jax.jit(product)(params))[0]
    return out


def compute(path: str) -> None:
    """Runs in the child process: everything the tests look at, into one file."""
    out = {}
    for case, name in PLACES:
        out |= train(case, name, 3)
    with Checkpoints(Path(path).parent / "checkpoints") as checkpoints:
        out |= toy_runs() | moves(checkpoints) | step_collectives() | scanned() | staged()
    out |= hessian_products() | divided_twice() | muon_updates()
    out |= lookups() | gradient_along_sequence() | odd_vocabulary()
    np.savez(path, **out)
