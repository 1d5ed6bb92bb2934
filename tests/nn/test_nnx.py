"""A model as a module of NNX, and dropout by the streams of Flax."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxformer as jf
from jaxformer.nn.dropout import Dropout
from tests.documents import PAGES, blocks
from tests.two_processes import finished, start

PAGE = "experiments/guides/nnx.md"
B, S, T, V = 2, 7, 5, 17
RECIPE = jf.TransformerConfig(
    V, 12, 13, 3, num_encoder_layers=2, num_decoder_layers=2, dropout_rate=0.5, pooler="tanh"
)
CAUSAL = replace(RECIPE, pooler="none")
TOKENS = np.arange(B * T).reshape(B, T) % V
SOURCE = np.arange(B * S).reshape(B, S) % V
REAL = np.arange(T) < np.array([[5], [3]])
FAMILIES = {
    "decoder": (jf.DecoderOnly(CAUSAL), (TOKENS,)),
    "decoder with windows in one loop": (
        jf.DecoderOnly(replace(CAUSAL, scan_layers=True, window=jf.WindowOptions(3, 2))),
        (TOKENS,),
    ),
    "encoder": (jf.EncoderOnly(RECIPE), (TOKENS, REAL)),
    "encoder-decoder": (jf.EncoderDecoder(CAUSAL), (SOURCE, TOKENS)),
    "masked": (jf.MaskedLanguageModel(RECIPE), (TOKENS, REAL)),
    "classifier": (jf.Classifier(jf.EncoderOnly(RECIPE), 3), (TOKENS, REAL)),
}

TABLE = """
import json, re, jax
from flax import nnx
import jaxformer as jf
from tests.documents import PAGES, blocks

page = "experiments/guides/nnx.md"
(block,) = blocks(page, "python")
variables = {}
block.run(variables)
for row in re.findall(r"^\\| [^`|]* \\| `([^`]*)` \\| `[^`]*` \\|$", PAGES[page], re.M):
    *lines, last = row.split("; ")
    names = dict(variables)
    names["model"] = jf.to_nnx(names["linen"], names["params"], rngs=nnx.Rngs(0, dropout=1))
    exec("\\n".join(lines), names)
    print(json.dumps([row, repr(eval(last, names))]), flush=True)
"""


@pytest.mark.long
def test_each_line_of_the_table_of_the_guide_has_the_value_that_stands_there():
    (done,) = finished(start("-c", TABLE, devices=4))
    found = [json.loads(line) for line in done.out.splitlines()]
    rows = re.findall(r"^\| [^`|]* \| `(.*)` \| `(.*)` \|$", PAGES[PAGE], re.M)
    assert found == [list(row) for row in rows] and len(rows) > 20
    assert len([line for line in PAGES[PAGE].splitlines() if line.startswith("|")]) == len(rows) + 2
    assert len(blocks(PAGE, "python")) == 1


def leaves(output):
    return [np.asarray(x) for x in jax.tree.leaves(output)]


def differ(a, b):
    return any(np.abs(x - y).max() > 1e-3 for x, y in zip(leaves(a), leaves(b), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_computes_in_nnx_what_it_does_in_linen_and_drops_by_a_stream(
    family, random_params, assert_equal
):
    linen, inputs = FAMILIES[family]
    params = random_params(linen, *inputs)
    model = jf.to_nnx(linen, params, rngs=nnx.Rngs(0, dropout=1))
    plain = jax.jit(linen.apply)({"params": params}, *inputs)
    call = nnx.jit(lambda model: model(*inputs))
    first, second = call(model), call(model)
    assert differ(first, second) and differ(first, plain)
    model.eval()
    jax.tree.map(lambda x, y: assert_equal(x, y, 1e-5), call(model), plain)
    # Linen's own idiom draws the same masks for the same key, and none without.
    drop = jax.jit(lambda key: linen.apply({"params": params}, *inputs, rngs={"dropout": key}))
    one, again, other = (drop(jax.random.key(seed)) for seed in (3, 3, 5))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert differ(one, plain) and differ(one, other)
    # An explicit key counts, whatever the mode and the streams.
    rng = jf.DropoutRng(jax.random.key(3), jnp.arange(B))
    expected = jax.jit(lambda: linen.apply({"params": params}, *inputs, dropout_rng=rng))()
    given = nnx.jit(lambda model: model(*inputs, dropout_rng=rng))(model)
    jax.tree.map(lambda x, y: assert_equal(x, y, 1e-5), given, expected)


class Sum(nn.Module):
    """A block that adds a mask of dropout to its input."""

    layer: int | None = None

    @nn.compact
    def __call__(self, x, mask=None, *, dropout_rng=None, **inputs):
        noise = jax.random.uniform(self.make_rng("noise")) if self.has_rng("noise") else 0.0
        return x + Dropout(0.5, "mask")(jnp.ones_like(x), dropout_rng) + 100.0 * noise


@pytest.mark.parametrize("scan", [False, True])
def test_each_layer_draws_from_a_stream_anew(scan):
    stack = jf.Stack(23, lambda layer: Sum(layer), output_norm=False, scan=scan)
    x = jnp.zeros((B, T, 11))
    drop = jax.jit(lambda keys: stack.apply({}, x, rngs=keys))
    dropped = drop({"dropout": jax.random.key(0)})
    values = set(np.unique(dropped).tolist())
    assert len(values) > 10 and values <= set(range(0, 47, 2))  # one mask for all gives 0 and 46
    noisy = drop({"noise": jax.random.key(0)})
    assert np.unique(noisy).size == 1 and abs(noisy.mean() / 100 - 23 / 2) < 4
    one_for_all = 23 * jax.random.uniform(jax.random.key(0))
    assert not np.allclose(noisy / 100, one_for_all)


DEVICES = """
import json
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P
import jaxformer as jf

sizes = {"d_model": 8, "d_ff": 14, "num_heads": 2, "dropout_rate": 0.5, "num_decoder_layers": 2}
key, tokens = jax.random.key(3), jnp.tile(jnp.arange(5), (4, 1))
data = Mesh(np.array(jax.devices()), ("data",))
both = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
linen = jf.DecoderOnly(jf.TransformerConfig(11, **sizes, scan_layers=True))
params = jax.jit(linen.init)(key, tokens)["params"]
graph, state = nnx.split(jf.to_nnx(linen, params, rngs=nnx.Rngs(0, dropout=1)))
calls = {
    "stream": lambda state, x: linen.apply({"params": params}, x, rngs={"dropout": key}),
    "key": lambda state, x: linen.apply({"params": params}, x, dropout_rng=key),
    "nnx": lambda state, x: nnx.merge(graph, state)(x),
}
rows = P("data")
for name, call in calls.items():
    specs = {"in_specs": (P(), rows), "out_specs": rows}
    shard_map = jax.shard_map(call, mesh=data, **specs, check_vma=False)
    two_axes = jax.shard_map(call, mesh=both, **specs, check_vma=True)
    mapped = {
        "pmap": jax.pmap(call, in_axes=(None, 0))(state, tokens[:, None])[:, 0],
        "shard_map": jax.jit(shard_map)(state, tokens),
        "two axes": jax.jit(two_axes)(state, tokens),
    }
    for kind, found in mapped.items():
        different = len(np.unique(np.asarray(found).round(4), axis=0))
        print(json.dumps([name, kind, different]), flush=True)

# A loss of one's own in a step on a mesh.
def loss(params, batch, rng):
    logits = linen.apply({"params": params}, batch["x"], rngs={"dropout": rng})
    firsts = jnp.where(batch["row"][:, None] == jnp.arange(4), logits[:, -1, :1], 0.0).sum(0)
    return logits.sum(), jnp.float32(1), {f"row {i}": firsts[i] for i in range(4)}

import optax
for mesh in ("data", "fsdp"):
    strategy = jf.sharded(Mesh(np.array(jax.devices()), (mesh,))).for_model(linen, tokens)
    optimizer = optax.sgd(0.1)
    train = strategy.shard_state(jf.init_train_state(params, optimizer, key))
    batch = strategy.shard_batch({"x": np.asarray(tokens), "row": np.arange(4)})
    _, metrics = strategy.step(loss, optimizer)(train, batch)
    rows = {round(float(metrics[f"row {i}"]), 4) for i in range(4)}
    print(json.dumps(["step", mesh, len(rows)]))
"""


@pytest.mark.long
def test_each_device_draws_masks_of_its_own_by_a_stream_or_a_key():
    (done,) = finished(start("-c", DEVICES, devices=4))
    found = [json.loads(line) for line in done.out.splitlines()]
    assert len(found) == 3 * 3 + 2
    # Of two axes one divides the rows: two devices have the same two of them.
    assert [line for line in found if line[-1] != 4] == []


def test_random_parameters_are_those_of_the_stream_and_any_module_becomes_one_of_nnx(rng):
    linen, _ = FAMILIES["decoder"]
    one, same, other = (jf.to_nnx(linen, rngs=nnx.Rngs(seed)) for seed in (0, 0, 1))
    tables = [np.asarray(model.embedding["table"][...]) for model in (one, same, other)]
    np.testing.assert_array_equal(tables[0], tables[1])
    assert np.abs(tables[0] - tables[2]).max() > 0.1
    named = jf.to_nnx(linen, rngs=nnx.Rngs(params=0, dropout=1))
    assert named.embedding["table"].shape == (V, 12)
    x = rng.standard_normal((B, T, 12), np.float32)
    block = jf.to_nnx(jf.Block(3, 13, dropout_rate=0.5), inputs=(x,), rngs=nnx.Rngs(0))
    assert differ(block(x), block(x))


def test_a_model_of_nnx_decodes_and_trains_without_leaving_it(random_params, assert_equal):
    linen, (source, target) = FAMILIES["encoder-decoder"]
    params = random_params(linen, source, target)
    model = jf.to_nnx(linen, params, rngs=nnx.Rngs(0, dropout=1))
    expected = linen.apply({"params": params}, source, target)
    cache = model.init_cache(source, max_length=T)
    logits, cache = nnx.jit(lambda model, cache: model.decode_step(target[:, None], cache))(
        model, cache
    )
    assert_equal(logits[:, 0], expected, 1e-5)  # in training too nothing is dropped

    batch = jf.PairBatch.create(source, target, vocab_size=V)
    loss = jf.seq2seq_loss(model, pad=0)
    found = loss(model, batch, jax.random.key(1))
    given = jf.seq2seq_loss(linen, pad=0)(params, batch, jax.random.key(1))
    assert_equal(found[0], given[0], 1e-5)
    assert_equal(loss(nnx.state(model, nnx.Param), batch, jax.random.key(1))[0], given[0], 1e-5)
    chunked = jf.seq2seq_loss(model, pad=0, loss_chunk=3)(model, batch, jax.random.key(1))
    assert_equal(chunked[0], given[0], 1e-5)

    optimizer = optax.sgd(0.1)
    state = jf.init_train_state(jf.from_nnx(model)[1], optimizer, jax.random.key(2))
    state, metrics = jax.jit(jf.make_train_step(loss, optimizer))(state, batch)
    start = jf.init_train_state(jax.tree.map(jnp.asarray, params), optimizer, jax.random.key(2))
    step = jax.jit(jf.make_train_step(jf.seq2seq_loss(linen, pad=0), optimizer))
    ours, expected_metrics = step(start, batch)
    assert_equal(metrics["loss"], expected_metrics["loss"], 1e-6)
    nnx.update(model, state.params)
    jax.tree.map(lambda x, y: assert_equal(x, y, 1e-6), jf.from_nnx(model)[1], ours.params)


def test_what_takes_a_linen_model_names_the_way_back(random_params):
    linen, inputs = FAMILIES["decoder"]
    params = random_params(linen, *inputs)
    model = jf.to_nnx(linen, params)
    for refused in (
        lambda: jf.read_taps(model, params, TOKENS),
        lambda: jf.read_taps(model, TOKENS),
        lambda: jf.tap_names(model),
        lambda: jf.Patched(model, {}),
        lambda: jf.with_attention_weights(model),
        lambda: jf.parameter_axes(model),
        lambda: jf.Loaded(model, params),
    ):
        with pytest.raises(jf.ConfigError, match=r"NNXModel .* jf\.from_nnx\(model\)"):
            refused()
    for name in ("init", "bind", "clone", "config", "attention_fn"):
        with pytest.raises(AttributeError, match=rf"no '{name}', .* jf\.from_nnx\(model\)"):
            getattr(model, name)
    with pytest.raises(jf.ConfigError, match="params nor rngs"):
        jf.to_nnx(linen)
    with pytest.raises(jf.ConfigError, match="params .*Loaded"):
        jf.to_nnx(jf.Loaded(linen, params), params)
    for other in (model, nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jf.Ensemble(linen), 3):
        with pytest.raises(jf.ConfigError, match=type(other).__name__):
            jf.to_nnx(other, params)
    with pytest.raises(jf.ConfigError, match="Linear.*to_nnx"):
        jf.from_nnx(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
