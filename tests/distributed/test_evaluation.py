"""A model on many devices is evaluated where its parameters are, with the results of one device.

Everything that needs devices runs in one child process with 8 virtual ones, started once.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxformer as jf
from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import Strategy, make_mesh, strategy_of
from jaxformer.pipelines import score_pairs, stream
from jaxformer.text.tokenizers import SPECIAL_TOKENS, train_words
from tests.made_once import made_once
from tests.two_processes import finished, start

pytestmark = pytest.mark.long

MESHES = ("data=8", "data=2,fsdp=2,tensor=2")
LINES = ["a rose", "a red rose is a rose", "", "rose and a rose is red red red rose", "a"]
SPECIAL = (*SPECIAL_TOKENS, "<mask>")
TOKENIZER = train_words(["a rose is a red rose and eine Rose ist rot"], 40, special_tokens=SPECIAL)
SIZES = dict(vocab_size=TOKENIZER.vocab_size, d_model=16, d_ff=24, num_heads=4, max_len=16)
TRANSLATOR = jf.EncoderDecoder(
    jf.TransformerConfig(**SIZES, num_encoder_layers=1, num_decoder_layers=1)
)
WRITER = jf.DecoderOnly(jf.TransformerConfig(**SIZES, num_decoder_layers=1))
FILLER = jf.MaskedLanguageModel(jf.TransformerConfig(**SIZES, num_encoder_layers=1))


def first_params(model: Any, count: int) -> Any:
    """Random parameters."""
    inputs, rng = [jnp.ones((1, 3), int)] * count, np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    return jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape, np.float32), shapes)


def evaluated(put: Any) -> dict[str, Any]:
    """The results of all pipelines with parameters that `put(model, count of inputs)` places."""
    translator, writer, filler = put(TRANSLATOR, 2), put(WRITER, 1), put(FILLER, 1)
    tokenizers = TOKENIZER, TOKENIZER
    search, sampling = jf.SearchConfig(beam_size=3), jf.SamplingConfig(max_new_tokens=5)
    prompts, pairs = ["a rose", "red", "a a a a"], list(zip(LINES, LINES[::-1], strict=True))
    stop = jf.CompletionOptions(stop=("is",))
    best = jf.translate_with_details(jf.Loaded(TRANSLATOR, translator, *tokenizers), LINES, search)
    written = jf.complete_with_details(jf.Loaded(WRITER, writer, TOKENIZER), prompts, sampling)
    stopped = jf.complete_with_details(
        jf.Loaded(WRITER, writer, TOKENIZER), prompts, sampling, stop
    )
    masked = [f"{line} <mask>" for line in LINES if line]
    filled = jf.fill_mask_with_details(jf.Loaded(FILLER, filler, TOKENIZER), masked)
    vectors = jf.embed_with_details(jf.Loaded(FILLER, filler, TOKENIZER), masked)
    batch = jf.PairBatch.create(
        np.arange(5 * 4).reshape(5, 4) % 7, np.arange(5 * 6).reshape(5, 6) % 11, vocab_size=11
    )
    devices = strategy_of(translator)
    loss = devices.evaluate(jf.seq2seq_loss(TRANSLATOR, pad=0), gather_at="use")
    return {
        "translations": [[(x.ids, x.score) for x in each] for each in best],
        "completions": [x.ids for x in written],
        "stopped": [x.text for x in stopped],
        "streamed": list(stream(jf.Loaded(WRITER, writer, TOKENIZER), prompts, sampling)),
        "scores": [
            x.nats for x in jf.score_with_details(jf.Loaded(WRITER, writer, TOKENIZER), LINES)
        ],
        "pairs": score_pairs(jf.Loaded(TRANSLATOR, translator, *tokenizers), pairs),
        "filled": [[(x.token, x.probability) for x in mask[0]] for mask in filled],
        "vectors": [x.contextual.tolist() for x in vectors],
        "sums": {k: float(x) for k, x in loss(translator, devices.divide(batch)).items()},
    }


def trained(devices: Strategy, parts: int) -> list[float]:
    """The loss of a step on 5 rows with dropout, and the sum of the updated parameters."""
    model = WRITER.clone(config=replace(WRITER.config, dropout_rate=0.2))
    rows = np.random.default_rng(3).integers(4, SIZES["vocab_size"], (5, 9))
    whole, optimizer = jf.StreamBatch.create(rows, vocab_size=SIZES["vocab_size"]), optax.sgd(1.0)

    def make(select: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[select(5)], whole)

    def first_state() -> Any:
        params = model.init(jax.random.key(0), jnp.ones((1, 3), int))["params"]
        return jf.init_train_state(params, optimizer, jax.random.key(1))

    devices = devices.for_model(model)
    step = devices.step(jf.causal_loss(model), optimizer, grad_accumulation=parts)
    state, metrics = step(devices.init(first_state), devices.make_batch(make, parts))
    sums = [float(leaf.sum()) for leaf in jax.tree.leaves(state.params)]
    return [float(metrics["loss"]), float(metrics["tokens"]), *sums]


def averaged(devices: Strategy | None, folder: Path) -> tuple[Any, list[int]]:
    """The sum of each averaged parameter, and the bytes of them on each device."""
    shardings = None if devices is None else devices.for_model(WRITER).shardings
    with Checkpoints(folder) as checkpoints:
        mean = checkpoints.average_params([1, 2], shardings=shardings)
    leaves = jax.tree.leaves(mean)
    parts = [[x.data.nbytes for x in leaf.addressable_shards] for leaf in leaves if devices]
    sums = [float(np.sum(leaf, dtype=np.float64)) for leaf in map(np.asarray, leaves)]
    return sums, np.sum(parts, axis=0).tolist() if parts else []


def compute(folder: Path) -> dict[str, Any]:
    """The results on one device and on each mesh."""
    params = {model: first_params(model, count) for model, count in COUNTS.items()}
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            tree = jax.tree.map(lambda leaf, n=step: n * leaf, params[WRITER])
            checkpoints.save(step, {"params": tree})
    results: dict[str, Any] = {"one": evaluated(lambda model, _: params[model])}
    results["one"]["averaged"], _ = averaged(None, folder)
    results["one"]["trained"] = trained(jf.single(), 1)
    place = partial(jax.device_put, device=jax.devices()[-1])
    results["last"] = results["one"] | evaluated(lambda model, _: place(params[model]))
    for text in MESHES:
        devices = jf.sharded(make_mesh(text))
        found = evaluated(lambda m, _, d=devices: d.for_model(m).shard_state(params[m]))
        found["averaged"], results[f"bytes {text}"] = averaged(devices, folder)
        found["trained"] = trained(devices, 2)
        results[text] = found
    results["bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(params[WRITER]))
    return results


COUNTS = {TRANSLATOR: 2, WRITER: 1, FILLER: 1}


@pytest.fixture(scope="module")
def results(tmp_path_factory, worker_id) -> dict[str, Any]:
    folder = made_once(tmp_path_factory, "evaluation", compute_in_child, worker_id)
    return json.loads((folder / "results.json").read_text())


def compute_in_child(folder: Path) -> None:
    finished(start(__file__, folder, devices=8))


@pytest.mark.parametrize("mesh", [*MESHES, "last"])
def test_scores_texts_and_a_step_on_any_devices_are_those_of_the_first_one(mesh, results):
    for name, expected in results["one"].items():
        found, wanted = (jax.tree.leaves(each[name]) for each in (results[mesh], results["one"]))
        assert expected and len(found) == len(wanted), name
        for number, other in zip(found, wanted, strict=True):
            same = pytest.approx(other, rel=1e-5, abs=1e-6) if isinstance(other, float) else other
            assert number == same, name
    assert len(set(map(str, results["one"]["completions"]))) == 3


@pytest.mark.parametrize(("mesh", "parts"), [*zip(MESHES, (1, 4), strict=True)])
def test_checkpoints_are_averaged_where_the_parameters_are(mesh, parts, results):
    whole, on_each = results["bytes"], results[f"bytes {mesh}"]
    assert len(on_each) == 8 and max(on_each) == min(on_each)
    assert whole / parts <= on_each[0] <= whole / parts + 0.1 * whole  # biases are not divided


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    target = Path(sys.argv[1])
    (target / "results.json").write_text(json.dumps(compute(target / "checkpoints")))
