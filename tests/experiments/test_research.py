"""Each program of `experiments/examples/research.py` gives the values of the plain computation."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import export
from jax.flatten_util import ravel_pytree

import jaxformer as jf
from experiments.examples import research
from jaxformer.decoding.sampling import SamplerInputs
from jaxformer.ops.attention import blockwise, reference
from jaxformer.text.tokenizers import train_characters

KEY = jax.random.key(0)
TOKENS = jax.random.randint(jax.random.key(1), (3, 7), 0, 23)


@pytest.fixture(scope="module")
def gpt():
    model = jf.DecoderOnly(research.GPT)
    return model, model.init(KEY, TOKENS)["params"]


def plain_loss(model):
    def loss(params, batch, rng):
        logits = model.apply({"params": params}, batch[:, :-1])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return jnp.sum(nats), jnp.float32(nats.size)

    return loss


def assert_close(got, expected, tolerance=1e-5):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), got, expected)


def test_the_balance_of_experts_is_the_same_in_a_loop_and_reaches_the_router():
    (model, loss), (scanned, scanned_loss) = (
        research.mixture_of_experts(scan) for scan in (False, True)
    )
    loss, scanned_loss = jax.jit(loss), jax.jit(scanned_loss)
    params = jax.jit(model.init)(KEY, TOKENS)["params"]
    value, count, auxiliary = loss(params, TOKENS, None)
    # Equal shares have balance 1 in each layer, times the number of tokens.
    assert 0.9 * 3 < auxiliary["balance"] / count < 3 * 3
    assert_close(scanned_loss(jf.stack_blocks(params), TOKENS, None), (value, count, auxiliary))

    def balance(params):
        return loss(params, TOKENS, None)[2]["balance"]

    router = jax.jit(jax.grad(balance))(params)["decoder"]["blocks_2"]["feed_forward"]["router"][
        "kernel"
    ]
    assert jnp.abs(router).max() > 1e-3


def test_tokens_after_a_soft_prompt_are_those_of_the_whole_text_again(gpt):
    model, params = gpt
    prompt = jax.random.normal(KEY, (3, 5, 16))
    got = jax.jit(partial(research.generate_after_prompt, model, length=4))(params, prompt)
    vectors = prompt
    for i in range(4):
        token = model.apply({"params": params}, vectors)[:, -1].argmax(-1)
        np.testing.assert_array_equal(got[:, i], token)
        added = params["embedding"]["table"][token][:, None] * 4.0
        vectors = jnp.concatenate([vectors, added], axis=1)


def test_a_caption_depends_on_the_image_and_on_no_later_word():
    model = research.Captioner(research.GPT)
    images = jax.random.normal(KEY, (3, 8, 12, 2))
    params = model.init(KEY, images, TOKENS)
    logits = model.apply(params, images, TOKENS)
    later = model.apply(params, images, TOKENS.at[:, 4:].set(1))
    assert_close(later[:, :4], logits[:, :4])
    other = model.apply(params, images.at[1].multiply(-1), TOKENS)
    changed = jnp.abs(other - logits).max(axis=(1, 2)) > 1e-3
    assert changed.tolist() == [False, True, False]
    assert params["params"]["encoder"]["positions"]["table"].shape[-1] == 16


def test_differential_attention_is_the_difference_of_two_maps_with_a_cache_too():
    x = jax.random.normal(KEY, (2, 5, 12))
    module = research.DifferentialAttention(3, head_dim=8, value_head_dim=4)
    out, variables = module.init_with_output(KEY, x, mask=jf.AttentionMask(causal=True))
    p = variables["params"]
    q, k, v = (
        jnp.einsum("btd,dnh->bnth", x, p[name]["kernel"]) for name in ("query", "key", "value")
    )

    def weights(part):
        logits = jnp.einsum("bnth,bnsh->bnts", q[..., part], k[..., part]) / 2.0
        return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((5, 5))), logits, -jnp.inf))

    maps = weights(slice(4)) - 0.3 * weights(slice(4, 8))
    plain = jnp.einsum("bnts,bnsh,nhd->btd", maps, v, p["out"]["kernel"])
    assert_close(out, plain)
    block = partial(jf.Block, make_attention=research.DifferentialAttention)
    config = replace(research.GPT, head_dim=8, value_head_dim=4)
    model = jf.DecoderOnly(config, block=block)
    params = model.init(KEY, TOKENS)["params"]
    logits = model.apply({"params": params}, TOKENS)
    cache = model.apply({"params": params}, 3, max_length=7, method="init_cache")
    for t in range(7):
        tokens = TOKENS[:, None, t : t + 1]
        step, cache = model.apply({"params": params}, tokens, cache, method="decode_step")
        assert_close(step[:, 0, 0], logits[:, t])


def test_hyper_connections_begin_as_the_plain_residual_network():
    x, mask = jax.random.normal(KEY, (2, 5, 16)), jf.AttentionMask(causal=True)
    model = research.HyperEncoder(4)
    out, variables = model.init_with_output(KEY, x, mask)
    params = variables["params"]
    plain = jf.Encoder(4, 2, 20, norm_options=jf.NormOptions(placement="pre"))
    blocks = {name: tree for name, tree in params.items() if name.startswith("blocks")}
    norm = {"final_norm": {"scale": jnp.ones(16), "bias": jnp.zeros(16)}}
    expected = plain.apply({"params": blocks | norm}, x, mask)
    centred = out - out.mean(-1, keepdims=True)
    assert_close(centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6), expected)
    moved = jax.tree.map(lambda leaf: leaf * 1.1, params)
    assert jnp.abs(model.apply({"params": moved}, x, mask) - out).max() > 1e-3


def test_contrastive_decoding_takes_what_the_large_model_says_more(gpt):
    large, params = gpt
    small = jf.DecoderOnly(replace(research.GPT, num_decoder_layers=1))
    other = small.init(jax.random.key(2), TOKENS)["params"]
    models = [(large, {"params": params}), (small, {"params": other})]
    steps, caches = [], []
    for model, variables in models:
        run = partial(model.apply, variables, method="decode_step")
        steps.append(lambda tokens, cache, run=run: _first(run(tokens[..., None], cache)))
        cache = model.apply(variables, 3, max_length=12, method="init_cache")
        caches.append(run(TOKENS[:, None, :-1], cache)[1])
    step = research.contrastive_step(*steps, weight=0.7)
    prompts = SamplerInputs(TOKENS[:, -1], jnp.full(3, 4), jnp.arange(3))
    settings = jf.SamplingConfig(max_new_tokens=4, temperature=0.0)
    got = jf.sample(step, tuple(caches), prompts, KEY, settings).tokens[:, 0]
    text = TOKENS
    for i in range(4):
        expert, amateur = (
            jax.nn.log_softmax(model.apply(variables, text)[:, -1]) for model, variables in models
        )
        likely = jnp.exp(expert) >= 0.1 * jnp.exp(expert).max(-1, keepdims=True)
        token = jnp.where(likely, expert - 0.7 * amateur, -jnp.inf).argmax(-1)
        np.testing.assert_array_equal(got[:, i], token)
        text = jnp.concatenate([text, token[:, None]], axis=1)


def _first(result):
    logits, cache = result
    return logits[:, :, 0], cache


def test_gradients_of_examples_sum_to_that_of_the_batch(gpt):
    model, params = gpt
    loss = plain_loss(model)
    each = jax.jit(partial(research.per_example_gradients, loss))(params, TOKENS)
    gradient = jax.jit(jax.grad(lambda params, tokens: loss(params, tokens, None)[0]))
    whole = gradient(params, TOKENS)
    assert_close(jax.tree.map(lambda x: x.sum(axis=0), each), whole)
    alone = gradient(params, TOKENS[1:2])
    assert_close(jax.tree.map(lambda x: x[1], each), alone)


def test_a_hessian_vector_product_is_the_derivative_of_the_gradient(gpt):
    model, params = gpt
    loss = plain_loss(model)
    vector = jax.tree.map(lambda x: jax.random.normal(KEY, x.shape), params)
    got = jax.jit(partial(research.hessian_vector_product, loss))(params, TOKENS, vector)

    def slope(params):
        gradient = jax.grad(lambda params: loss(params, TOKENS, None)[0])(params)
        return optax.tree.vdot(gradient, vector)

    assert_close(got, jax.jit(jax.grad(slope))(params), 1e-3)  # reverse over reverse


def test_an_exported_step_gives_the_logits_of_the_model(gpt):
    model, params = gpt
    step = export.deserialize(bytearray(research.exported_step(model, params, 3, 7))).call
    cache = model.apply({"params": params}, 3, max_length=7, method="init_cache")
    logits = model.apply({"params": params}, TOKENS)
    cache = cache.replace(length=jnp.asarray(cache.length))
    for t in range(7):
        got, cache = step(params, TOKENS[:, None, t : t + 1], cache)
        assert_close(got[:, 0, 0], logits[:, t])


def test_the_step_under_shard_map_and_pmap_is_that_under_jit(gpt):
    model, params = gpt
    loss, optimizer = plain_loss(model), optax.sgd(0.1)
    devices = jax.device_count()
    batch = jnp.concatenate([TOKENS] * devices)[: 2 * devices]
    states = [jf.init_train_state(params, optimizer, KEY) for _ in range(3)]
    by_shard_map, by_pmap = research.sharded_steps(loss, optimizer)
    plain, metrics = jax.jit(jf.make_train_step(loss, optimizer))(states[0], batch)
    parts = batch.reshape(devices, 2, -1)
    for state, sums in (by_shard_map(states[1], batch), by_pmap(states[2], parts)):
        assert_close(state.params, plain.params)
        assert_close(sums, metrics)


def test_parameters_that_orbax_alone_has_stored_are_loaded_in_two_lines(gpt, tmp_path):
    model, params = gpt
    tokenizer = train_characters(["the cat sat on a mat"])
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "params", params)
    checkpointer.wait_until_finished()
    shapes = jax.eval_shape(model.init, KEY, TOKENS)["params"]
    restored = ocp.StandardCheckpointer().restore(tmp_path / "params", shapes)
    loaded, plain = (jf.Loaded(model, x, tokenizer) for x in (restored, params))
    options = {"temperature": 0.0, "max_new_tokens": 5}
    assert jf.complete(loaded, "the", **options) == jf.complete(plain, "the", **options)


def test_words_are_salient_that_the_prediction_depends_on(gpt):
    model, params = gpt
    got = research.saliency(model, params, TOKENS)
    # Along the input itself the logit changes by the sum of gradient times input.
    vectors = params["embedding"]["table"][TOKENS] * 4.0

    def best(scale):
        return model.apply({"params": params}, vectors * (1 + scale))[:, -1].max(axis=-1)

    slope = (best(1e-3) - best(-1e-3)) / 2e-3
    assert_close(got.sum(axis=1), slope, 2e-2)
    assert jnp.abs(got).min(axis=1).max() > 0


@pytest.mark.peer
def test_a_layer_of_torch_computes_the_same_here_and_goes_back_unchanged():
    torch = pytest.importorskip("torch")
    from jaxformer.pretrained import torch_layers

    theirs = torch.nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    block, params = research.from_torch(state, num_heads=3, d_ff=20)
    x = np.random.default_rng(0).standard_normal((2, 5, 12), np.float32)
    out = block.apply({"params": params}, x)
    with torch.no_grad():
        np.testing.assert_allclose(out, theirs.eval()(torch.tensor(x)), rtol=1e-5, atol=1e-5)
    back = torch_layers.to_torch(params, torch_layers.encoder_layer(state))
    assert back.keys() == state.keys()
    for name in state:
        np.testing.assert_array_equal(back[name], state[name])


@pytest.mark.parametrize(
    ("options", "forward", "hessian"),
    [
        ({}, True, True),
        ({"attention_fn": blockwise}, False, True),
        ({"loss_chunk": 5}, False, True),
        ({"dtype": "bfloat16"}, False, True),
    ],
)
def test_forward_mode_works_where_the_guide_says_so(gpt, options, forward, hessian):
    options = dict(options)
    loss_chunk = options.pop("loss_chunk", 0)
    attention_fn = options.pop("attention_fn", reference)
    _, params = gpt
    batch = jf.StreamBatch.create(TOKENS, vocab_size=23)

    def value(params, attention_fn=attention_fn, loss_chunk=loss_chunk, **options):
        model = jf.DecoderOnly(replace(research.GPT, **options), attention_fn)
        return jf.causal_loss(model, loss_chunk=loss_chunk)(params, batch, None)[0]

    ours = partial(value, **options)
    plain = partial(value, attention_fn=reference, loss_chunk=0)
    along = jax.tree.map(jnp.cos, params)
    tolerance = 5e-2 if "dtype" in options else 1e-5
    for derived, works in ((lambda f: f, forward), (jax.grad, hessian)):
        if not works:
            with pytest.raises(TypeError, match="forward-mode"):
                jax.jvp(derived(ours), (params,), (along,))
            continue
        got, expected = (
            ravel_pytree(jax.jvp(derived(function), (params,), (along,))[1])[0]
            for function in (ours, plain)
        )
        assert jnp.linalg.norm(got - expected) < tolerance * jnp.linalg.norm(expected)
