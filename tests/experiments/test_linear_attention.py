"""Linear attention between softmax attention is one function at once, in a cache and on devices."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.examples import linear_attention as example
from experiments.language_modelling import train
from jaxformer.decoding import SearchConfig, beam_search
from jaxformer.nn.models import EncoderDecoder
from tests.configs import small
from tests.experiments.commands import assert_resumes_to_the_bit
from tests.experiments.tiny_runs import language_config
from tests.pipelines.test_recurrent_blocks import search_without_cache
from tests.two_processes import finished, start

pytestmark = pytest.mark.long

B, T, V = 2, 11, 18
CONFIG = small(
    vocab_size=V,
    d_model=20,
    d_ff=14,
    num_heads=4,
    head_dim=6,
    value_head_dim=5,
    num_decoder_layers=3,
    max_len=29,
    norm__placement="pre",
    positions=jf.Rotary(),
    attention__num_kv_heads=2,
)
MODEL = jf.DecoderOnly(CONFIG, block=example.alternating)
PAIRS = jf.DecoderOnly(
    dataclasses.replace(CONFIG, num_decoder_layers=2, scan_layers=True), block=example.Pair
)
MODELS = {"alternating": MODEL, "pairs in a scan": PAIRS}
TOKENS = np.random.default_rng(3).integers(4, V, (B, T), np.int32)


@pytest.fixture(scope="module")
def params_of(random_params):
    return {name: random_params(model, TOKENS) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def params(params_of):
    return params_of["alternating"]


def plain_linear_attention(q, k, v, log_decay, starts, state):
    """The recurrence, a token and a head after the other, in float64."""
    q, k, v, log_decay, state = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, state))
    state, out = state.copy(), np.zeros(v.shape)
    for b, t, n in np.ndindex(q.shape[:3]):
        if starts[b, t]:
            state[b, n] = 0
        state[b, n] = np.exp(log_decay[b, t, n]) * state[b, n] + np.outer(k[b, t, n], v[b, t, n])
        out[b, t, n] = q[b, t, n] @ state[b, n]
    return out, state


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
def test_chunks_give_the_recurrence_written_out_in_float64(chunk, rng, assert_equal):
    q, k = rng.standard_normal((2, B, T, 3, 5))
    v, state = rng.standard_normal((B, T, 3, 7)), rng.standard_normal((B, 3, 5, 7))
    log_decay = -rng.exponential(size=(B, T, 3))
    starts = np.arange(T)[None] == np.array([[4], [7]])  # in the middle and at the end of a chunk
    arrays = q, k, v, log_decay, starts, state
    found = jax.jit(partial(example.linear_attention, chunk=chunk))(*arrays)
    for each, expected in zip(found, plain_linear_attention(*arrays), strict=True):
        assert_equal(each, expected, 1e-5)


def test_the_module_is_the_formula_in_float64(params, rng, assert_equal):
    """o from the recurrence, its norm, its gate and the projections, of plain numpy."""
    module = example.LinearAttention(4, head_dim=6, value_head_dim=5, num_kv_heads=2)
    x = rng.standard_normal((B, T, 20))
    variables = {"params": params["decoder"]["blocks_0"]["attention"]}
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    found = module.apply(variables, x, mask=jf.AttentionMask(causal=True))

    def project(name):
        return np.einsum("btd,dnh->btnh", x, p[name]["kernel"]) + p[name].get("bias", 0)

    q, (k, v) = project("query") / np.sqrt(6), (project(name) for name in ("key", "value"))
    k, v = (np.repeat(y, 2, axis=2) for y in (k, v))
    decay = 1 / (1 + np.exp(-(x @ p["decay"]["kernel"] + p["decay"]["bias"])))
    starts, state = np.zeros((B, T), bool), np.zeros((B, 4, 6, 5))
    heads, _ = plain_linear_attention(q, k, v, np.log(decay) / 16, starts, state)
    heads = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * p["head_norm"]["scale"]
    gate = project("gate")
    heads = heads * gate / (1 + np.exp(-gate))
    expected = np.einsum("btnh,nhd->btd", heads, p["out"]["kernel"]) + p["out"]["bias"]
    assert_equal(found, expected, 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_gives_what_the_whole_text_gives_whatever_is_read_at_once(
    name, params_of, assert_equal
):
    model, params = MODELS[name], params_of[name]

    @jax.jit
    def run(params):
        cache, parts = model.init_cache(B, max_length=T), []
        for begin, end in ((0, 4), (4, 5), (5, 6), (6, T)):
            part = TOKENS[:, None, begin:end]
            logits, cache = model.apply({"params": params}, part, cache, method="decode_step")
            parts.append(logits[:, 0])
        return jnp.concatenate(parts, axis=1), model.apply({"params": params}, TOKENS)

    assert_equal(*run(params))


@pytest.mark.parametrize("name", MODELS)
def test_beams_with_a_cache_are_those_of_texts_that_are_read_anew(name, params_of, assert_equal):
    model, first, limits = MODELS[name], jnp.array([4, 9]), jnp.array([7, 5])
    search = SearchConfig(beam_size=3, max_new_tokens=7, eos=(2,))

    @jax.jit
    def both(params):
        cache = model.init_cache(B, max_length=7, num_beams=3)
        found = beam_search(jf.make_step_fn(model, params), cache, first, limits, search)
        return found, search_without_cache(model, params, first, limits, search)

    found, expected = both(params_of[name])
    assert np.array_equal(found.tokens, expected.tokens)
    assert_equal(found.log_probs, expected.log_probs)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_all_lengths_are_continued_in_rows_that_others_have_left(
    name, params_of, assert_equal
):
    tokenizer = jf.train_characters(["abcdefghijkl"])
    loaded = jf.Loaded(MODELS[name], params_of[name], tokenizer)
    prompts = ["abcab", "ka", "hgf", "ab", "l", "cabcdefgh", "f"] * 11  # more than there are rows
    found = jf.complete_with_details(loaded, prompts, max_new_tokens=6, temperature=1.5)

    @jax.jit
    def log_probs(tokens):
        logits = loaded.model.apply({"params": loaded.params}, tokens)
        return jax.nn.log_softmax(logits[:, :-1])

    texts = [
        tokenizer.encode(prompt) + each.ids for prompt, each in zip(prompts, found, strict=True)
    ]
    padded = np.array([ids + [0] * (16 - len(ids)) for ids in texts])
    whole = np.asarray(log_probs(padded))
    for row, ids, each in zip(whole, texts, found, strict=True):
        begin = len(ids) - len(each.ids)
        chosen = [row[place - 1, ids[place]] for place in range(begin, len(ids))]
        assert_equal(each.log_probs, chosen, 1e-4)


def test_a_packed_document_begins_from_nothing(params, assert_equal):
    lengths = (4, 2, 5)
    segments = np.repeat([[1, 2, 3]], lengths, axis=1).repeat(B, axis=0)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].repeat(B, axis=0)
    packed = MODEL.apply({"params": params}, TOKENS, segments, positions)
    parts = np.split(TOKENS, np.cumsum(lengths)[:-1], axis=1)
    alone = [MODEL.apply({"params": params}, part) for part in parts]
    assert_equal(packed, np.concatenate(alone, axis=1))


def test_padding_before_and_within_a_text_changes_nothing(rng, assert_equal):
    module = example.LinearAttention(4)
    x = rng.standard_normal((B, T, 20))
    _, variables = module.init_with_output(jax.random.key(0), x, mask=jf.AttentionMask(causal=True))
    real = np.ones((B, T), bool)
    real[0, :3] = real[1, 5:8] = False
    mask = jf.AttentionMask(causal=True, padding_mask=real)
    found = module.apply(variables, x, mask=mask)
    for b in range(B):
        text = x[b : b + 1, real[b]]
        expected = module.apply(variables, text, mask=jf.AttentionMask(causal=True))
        assert_equal(found[b : b + 1, real[b]], expected)


@pytest.mark.parametrize(
    "mask", [None, jf.AttentionMask(), jf.AttentionMask(True, explicit=np.ones((B, T, T), bool))]
)
def test_a_mask_that_would_be_ignored_is_refused(mask, rng):
    with pytest.raises(jf.ConfigError, match="left to right"):
        example.LinearAttention(4).init(jax.random.key(0), jnp.ones((B, T, 20)), mask=mask)


def test_an_encoder_and_a_loop_of_unequal_layers_are_refused():
    config = dataclasses.replace(CONFIG, num_encoder_layers=2)
    model = EncoderDecoder(config, block=example.alternating)
    with pytest.raises(jf.ConfigError, match="DecoderOnly"):
        jax.eval_shape(model.init, jax.random.key(0), TOKENS, TOKENS)
    model = jf.DecoderOnly(dataclasses.replace(CONFIG, scan_layers=True), block=example.alternating)
    with pytest.raises(jf.ConfigError, match="Pair"):
        jax.eval_shape(model.init, jax.random.key(0), TOKENS)


def gradient(model, params):
    loss = jf.causal_loss(model)
    batch = jf.StreamBatch.create(TOKENS, vocab_size=V)
    key = jax.random.key(5)
    return jax.jit(jax.grad(lambda params: loss(params, batch, key)[0]))(params)


def test_recomputed_blocks_and_a_scan_have_the_same_gradient(params, params_of, assert_equal):
    config = dataclasses.replace(CONFIG, dropout_rate=0.2)
    plain, recomputed = (
        gradient(jf.DecoderOnly(config, block=block), params)
        for block in (example.alternating, example.recomputing)
    )
    jax.tree.map(assert_equal, recomputed, plain)
    config = dataclasses.replace(PAIRS.config, dropout_rate=0.2)
    scanned, apart = (
        jf.DecoderOnly(dataclasses.replace(config, scan_layers=scan), block=example.Pair)
        for scan in (True, False)
    )
    stacked = params_of["pairs in a scan"]
    found, expected = gradient(scanned, stacked), gradient(apart, jf.unstack_blocks(stacked))
    jax.tree.map(assert_equal, jf.unstack_blocks(found), expected)


def test_bfloat16_is_near_float32_and_decodes_as_it_reads(params, assert_equal):
    low = MODEL.clone(config=dataclasses.replace(CONFIG, dtype="bfloat16"))
    logits = [model.apply({"params": params}, TOKENS) for model in (low, MODEL)]
    assert_equal(*logits, 0.2)
    cache = low.init_cache(B, max_length=T)
    assert cache.layers[0].matrix.dtype == jnp.float32
    step, found = jax.jit(partial(low.apply, method="decode_step")), []
    for t in range(T):
        each, cache = step({"params": params}, TOKENS[:, None, t : t + 1], cache)
        found.append(each[:, 0])
    assert_equal(np.concatenate(found, axis=1), logits[0], 0.1)


def test_parameters_are_divided_decayed_and_adapted_by_the_names_of_their_axes():
    axes = jf.parameter_axes(MODEL)
    path = "decoder/blocks_0/attention"
    assert axes[f"{path}/decay/kernel"].names == ("embed", "heads")
    assert axes[f"{path}/gate/kernel"].names == ("embed", "heads", "head_dim")
    assert axes[f"{path}/query/kernel"].names == ("embed", "heads", "head_dim")
    assert f"{path}/query_norm/scale" not in axes
    assert not any("decay" in name for name in axes if "blocks_1" in name)


ON_MESH = """
import json
import jax, numpy as np, optax
import jaxformer as jf
from jax.sharding import PartitionSpec as P
from experiments.examples import linear_attention as example
from tests.experiments.test_linear_attention import CONFIG, V

model = jf.DecoderOnly(CONFIG, block=example.alternating)
tokens = np.random.default_rng(7).integers(4, V, (8, 17), np.int32)
batch, optimizer = jf.StreamBatch.create(tokens, vocab_size=V), optax.sgd(0.5)
loss = jf.causal_loss(model)
tokenizer = jf.train_characters(["abcdefghijkl"])
prompts = ["abcab", "ka", "hgf", "ab", "l", "cabcdefgh", "f"] * 3


def state():
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])["params"]
    return jf.init_train_state(params, optimizer, jax.random.key(1))


def run(devices):
    devices = devices.for_model(model)
    step, now = devices.step(loss, optimizer), devices.shard_state(state())
    params, losses = now.params, []
    loaded = jf.Loaded(model, jax.tree.map(lambda x: x.copy(), params), tokenizer)
    texts = jf.complete_with_details(loaded, prompts, max_new_tokens=6)
    for _ in range(3):
        now, metrics = step(now, devices.shard_batch(batch))
        losses.append(float(metrics["loss"] / metrics["tokens"]))
    return losses, [text.ids for text in texts]


losses, texts = run(jf.single())
for mesh in ("fsdp=2,tensor=2", "data=2,tensor=2", "data=4", "sequence=2,tensor=2"):
    found, written = run(jf.sharded(jf.make_mesh(mesh)))
    print(json.dumps([mesh, found, losses, written == texts]))
summed = jf.make_train_step(loss, optimizer, reduce=lambda sums: jax.lax.psum(sums, "data"))
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
mapped = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
now, found = state(), []
for _ in range(3):
    now, metrics = mapped(now, batch)
    found.append(float(metrics["loss"] / metrics["tokens"]))
print(json.dumps(["shard_map", found, losses, True]))
"""


@pytest.mark.slow
def test_four_devices_train_and_write_what_one_does():
    (ended,) = finished(start("-c", ON_MESH, devices=4))
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert len(lines) == 5
    for mesh, found, expected, same in lines:
        assert found == pytest.approx(expected, rel=1e-5), mesh
        assert expected[2] < expected[0] and same, mesh


def test_a_run_resumes_to_the_bit_is_loaded_and_continues_texts(tmp_path):
    block = "experiments.examples.linear_attention:alternating"
    sizes = {"model__num_decoder_layers": 2, "model__dropout_rate": 0.1}
    config = language_config(tmp_path, training__block=block, **sizes)
    whole = train.train(config).folder
    assert_resumes_to_the_bit(train, config, whole)
    loaded = jf.load(whole, trust_code=True)
    greedy = {"temperature": 0.0, "max_new_tokens": 5}
    text = "the sun"
    assert jf.complete(loaded, text, **greedy) == jf.complete(loaded, [text, "a"], **greedy)[0]


def test_both_kinds_of_model_learn_a_text(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("sun moon star rain. " * 101)
    sizes = "--steps 60 --batch_size 5 --length 19 --d_model 24 --layers 2 --characters 13".split()
    losses = example.main([str(path), *sizes, "--learning_rate", "1e-2"])
    assert max(losses.values()) < 0.5 * np.log(11), "a guess among 11 characters is worse"
    assert "by beams: |" in capsys.readouterr().out
