"""Adapters: what is trained, what keeps its bits, and what merging gives."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.distributed import make_mesh, sharded, single
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import parameter_axes
from jaxformer.nn.models import DecoderOnly
from jaxformer.nn.stacked_blocks import stack_blocks, unstack_blocks
from jaxformer.pretrained import load_pretrained, save_pretrained
from jaxformer.text.data import StreamBatch
from jaxformer.training import lora
from jaxformer.training.lora import (
    FROZEN,
    adapter_loss,
    add_adapters,
    merge_adapters,
    replace_base,
    without_adapters,
)
from jaxformer.training.losses import causal_loss
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.parameters import flatten
from jaxformer.training.train_step import init_train_state, make_train_step
from tests.configs import small
from tests.two_processes import finished, start

RANK = 3
SMALL = small(d_ff=14, num_heads=2, num_decoder_layers=1, norm__placement="pre")
RATES = OptimizerConfig(
    "constant", learning_rate=0.1, warmup_steps=1, weight_decay=0.1, grad_clip_norm=1.0
)
BLOCKS = "blocks.*/kernel$"


def of_decoder(**sizes):
    model = DecoderOnly(replace(SMALL, **sizes))
    ids = np.random.default_rng(3).integers(0, 11, (4, 8))
    batch = StreamBatch.create(ids, vocab_size=11)
    return model, causal_loss(model), batch, (batch.tokens[:, :-1],)


def adapted(random_params, model, inputs, targets=BLOCKS):
    params = random_params(model, *inputs)
    settings = {"rank": RANK, "alpha": 6.0, "targets": targets, "axes": parameter_axes(model)}
    return jax.jit(partial(add_adapters, **settings))(params, jax.random.key(5))


def trained(params, loss, batch, axes, steps=3):
    """The state after `steps` steps, and the loss before and after them."""
    optimizer = make_optimizer(replace(RATES, freeze=FROZEN), axes=axes)
    loss = adapter_loss(loss, axes=axes)
    step = jax.jit(make_train_step(loss, optimizer, grad_accumulation=2))
    state = init_train_state(jax.tree.map(jnp.copy, params), optimizer, jax.random.key(1))
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def case(random_params):
    model, loss, batch, inputs = of_decoder(scan_layers=True, num_decoder_layers=2)
    params = adapted(random_params, model, inputs)
    return params, *trained(params, loss, batch, parameter_axes(model))


def is_adapter(path):
    return path.endswith(("_lora/a", "_lora/b"))


def test_only_adapters_are_trained_and_have_optimizer_state(case):
    params, state, losses = case
    assert losses[-1] < losses[0]
    for path, leaf in flatten(params).items():
        assert np.array_equal(flatten(state.params)[path], leaf) != is_adapter(path), path
    moments = [path for path, x in flatten(state.opt_state).items() if np.ndim(x)]
    assert moments and all(map(is_adapter, moments))
    assert len(moments) == 2 * sum(map(is_adapter, flatten(params)))


def test_merged_parameters_are_the_base_and_the_scaled_product(case, assert_equal):
    params, state, _ = case
    merged = merge_adapters(state.params)
    assert flatten(merged).keys() == flatten(without_adapters(params)).keys()
    seen = flatten(state.params)
    for path, leaf in flatten(merged).items():
        if f"{path}_lora/a" in seen:
            a, b = (np.asarray(seen[f"{path}_lora/{x}"], np.float64) for x in "ab")
            change = (6.0 / RANK * (a @ b)).reshape(leaf.shape)
            assert_equal(leaf, np.asarray(seen[path], np.float64) + change, 1e-6)
            assert np.abs(change).max() > 1e-3
        else:
            np.testing.assert_array_equal(leaf, seen[path])


def test_nothing_changes_before_the_first_step(case):
    params, _, _ = case
    base = flatten(without_adapters(params))
    for path, leaf in flatten(merge_adapters(params)).items():
        np.testing.assert_array_equal(leaf, base[path])


def test_stacked_blocks_merge_as_separate_ones(random_params, assert_equal):
    model, _, _, inputs = of_decoder(scan_layers=True, num_decoder_layers=2)
    params = adapted(random_params, model, inputs)
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
    apart = flatten(merge_adapters(unstack_blocks(params)))
    for path, leaf in flatten(unstack_blocks(merge_adapters(params))).items():
        assert_equal(apart[path], leaf, 1e-6)
    assert flatten(stack_blocks(unstack_blocks(params))).keys() == flatten(params).keys()


def print_losses():
    """Prints the losses of three steps on one device, and on four that divide the parameters."""
    model, loss, batch, inputs = of_decoder(scan_layers=True)
    params = jax.jit(model.init)(jax.random.key(0), *inputs)["params"]
    axes = parameter_axes(model)
    params = add_adapters(params, jax.random.key(5), rank=4, alpha=6.0, targets=BLOCKS, axes=axes)
    optimizer = make_optimizer(replace(RATES, freeze=FROZEN), axes=axes)
    mesh = sharded(make_mesh("fsdp=2,tensor=2"), axes=axes)
    for devices, gather_at in ((single(), "step"), (mesh, "use")):
        step = devices.step(adapter_loss(loss, axes=axes), optimizer, gather_at=gather_at)
        state = init_train_state(jax.tree.map(jnp.copy, params), optimizer, jax.random.key(1))
        state, losses = devices.shard_state(state), []
        for _ in range(3):
            state, metrics = step(state, devices.shard_batch(batch))
            losses.append(float(metrics["loss"]))
        print(json.dumps(losses))


@pytest.mark.long
def test_steps_on_a_mesh_are_those_of_one_device(assert_equal):
    code = "from tests.training import test_lora; test_lora.print_losses()"
    (done,) = finished(start("-c", code, devices=4))
    one, divided = map(json.loads, done.out.splitlines())
    assert one[2] < one[0]
    assert_equal(divided, one)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("targets", [BLOCKS, "table$|query/kernel$"])
def test_the_gradient_of_adapters_beside_matrices_is_that_of_merged_ones(
    random_params, rng, assert_equal, scan_layers, targets
):
    model, loss, batch, inputs = of_decoder(scan_layers=scan_layers, num_decoder_layers=2)
    params = adapted(random_params, model, inputs, targets)
    params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), params)
    axes = parameter_axes(model)

    def gradient(axes):
        def total(params):
            return adapter_loss(loss, axes=axes)(params, batch, None)[0]

        return jax.jit(jax.value_and_grad(total))(params)

    (merged, expected), (beside, found) = gradient(None), gradient(axes)
    assert_equal(beside, merged, 1e-6)
    for path, leaf in flatten(expected).items():
        assert_equal(flatten(found)[path], leaf, 1e-5)
        assert bool(np.any(leaf)) == is_adapter(path), path


@pytest.mark.parametrize(("scan_layers", "share"), [(False, 0.5), (True, 1.0)])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_of_adapters_keeps_no_second_copy_of_the_matrices(scan_layers, share, parts):
    model, loss, batch, inputs = of_decoder(
        scan_layers=scan_layers, num_decoder_layers=3, d_model=192, d_ff=768
    )
    axes = parameter_axes(model)
    options = {"rank": RANK, "alpha": 6.0, "targets": BLOCKS, "axes": axes}
    optimizer = make_optimizer(replace(RATES, freeze=FROZEN), axes=axes)

    def first_state():
        params = model.init(jax.random.key(0), *inputs)["params"]
        params = add_adapters(params, jax.random.key(5), **options)
        return init_train_state(params, optimizer, jax.random.key(1))

    state = jax.eval_shape(first_state)
    base = sum(x.size * 4 for x in jax.tree.leaves(without_adapters(state.params)))
    step = make_train_step(adapter_loss(loss, axes=axes), optimizer, grad_accumulation=parts)
    memory = jax.jit(step, donate_argnums=0).lower(state, batch).compile().memory_analysis()
    assert memory.temp_size_in_bytes < share * base


def test_each_adapter_is_drawn_from_a_key_of_its_own():
    params = {f"q{i}": {"kernel": np.ones((5 + i % 2, 7), np.float32)} for i in range(5)}
    rng = jax.random.key(3)
    found = add_adapters(params, rng, rank=2, alpha=1.0, targets="kernel")
    for number, path in enumerate(sorted(params)):
        inputs, key = 5 + number % 2, jax.random.fold_in(rng, number)
        limit = inputs**-0.5
        expected = jax.random.uniform(key, (inputs, 2), jnp.float32, -limit, limit)
        np.testing.assert_array_equal(found[path]["kernel_lora"]["a"], expected)


def test_a_trained_adapter_is_in_the_folder_that_is_saved(random_params, tmp_path, assert_equal):
    model, loss, batch, inputs = of_decoder(
        feed_forward=jf.FeedForwardOptions("gelu_tanh"),
        embeddings=jf.EmbeddingOptions(scale=False, tied="output"),
        positions=jf.Learned(),
        d_ff=24,
    )
    params = jax.tree.map(lambda x: np.asarray(x) + 0.1, adapted(random_params, model, inputs))
    merged = merge_adapters(params)
    save_pretrained(tmp_path / "gpt2", model, merged, family="gpt2")
    found = load_pretrained(tmp_path / "gpt2")

    @jax.jit
    def both(params, merged):
        return adapter_loss(loss)(params, batch, None)[0], loss(merged, batch, None)[0]

    assert_equal(*both(params, found.params))


def test_parameters_in_numpy_stay_there():
    params = {"up": {"kernel": np.ones((5, 7), np.float32)}}
    found = add_adapters(params, jax.random.key(0), rank=2, alpha=1.0, targets="up")
    merged = merge_adapters(jax.tree.map(np.asarray, found))
    assert isinstance(merged["up"]["kernel"], np.ndarray)


def test_a_new_base_keeps_the_adapters():
    params = {"up": {"kernel": np.ones((5, 7), np.float32), "bias": np.ones(7, np.float32)}}
    found = add_adapters(params, jax.random.key(0), rank=2, alpha=1.0, targets="up")
    base = jax.tree.map(lambda leaf: 2 * leaf, params)
    new = flatten(replace_base(found, base))
    assert new.keys() == flatten(found).keys()
    np.testing.assert_array_equal(new["up/kernel_lora/a"], found["up"]["kernel_lora"]["a"])
    np.testing.assert_array_equal(new["up/bias"], base["up"]["bias"])
    assert flatten(replace_base({"other": 3}, base)).keys() == flatten(base).keys()


@pytest.mark.parametrize("targets", ["nowhere", "bias$"])
def test_targets_without_a_matrix_are_refused(targets):
    params = {"up": {"kernel": np.ones((5, 7)), "bias": np.ones(7)}}
    with pytest.raises(ConfigError, match="lora_targets="):
        add_adapters(params, jax.random.key(0), rank=2, alpha=1.0, targets=targets)


def test_a_module_whose_name_ends_like_an_adapters_is_none(rng):
    params = {
        "q": {"kernel": rng.standard_normal((3, 5), np.float32)},
        "q_lora": {"kernel": np.ones((5, 2), "f"), "a": np.ones(7, "f")},
    }
    adapted = lora.add_adapters(
        params, jax.random.key(0), rank=2, alpha=3.0, targets="q/kernel$", axes=None
    )
    for found in (lora.merge_adapters(adapted), lora.without_adapters(adapted)):
        jax.tree.map(np.testing.assert_array_equal, found, params)
    assert set(lora.replace_base(adapted, params)["q"]) == {"kernel", "kernel_lora"}
