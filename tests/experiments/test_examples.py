"""Public modules do as a part of other people's code: the examples of experiments/examples."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments.examples import custom_modules, inside_flax
from jaxformer.distributed import partition_specs
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import parameter_axes
from jaxformer.nn.models import EncoderDecoder

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
MODELS = custom_modules.models()


@pytest.mark.slow
@pytest.mark.parametrize("train", [inside_flax.train_linen, inside_flax.train_nnx])
def test_our_encoder_learns_inside_a_model_of_ones_own(train):
    held_out = inside_flax.random_batch(301, rows=500)
    losses, logits = train(held_out)
    assert losses[-1] < 0.5 * losses[0]
    assert np.mean(np.argmax(logits, axis=-1) == held_out.label) > 0.75


@pytest.fixture(scope="module")
def logits(random_params):
    """Tokens and, of each model with parts of its own, its logits at once and one by one."""
    tokens = custom_modules.repeating(0, rows=2, length=6).tokens
    found = {}
    for name, model in MODELS.items():
        params = random_params(model, tokens)
        variables = {"params": jax.tree.map(jnp.asarray, params)}

        def both(variables, model=model):
            def step(cache, column):
                one, cache = model.apply(
                    variables, column[:, None, None], cache, method="decode_step"
                )
                return cache, one[:, 0, 0]

            _, apart = jax.lax.scan(step, model.init_cache(2, max_length=7), tokens.T)
            return model.apply(variables, tokens), apart.swapaxes(0, 1)

        found[name] = jax.tree.map(np.asarray, jax.jit(both)(variables))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_ones_own_decodes_as_it_trains(logits, assert_equal, name):
    whole, apart = logits[name]
    assert_equal(apart, whole)


def test_each_part_of_ones_own_changes_the_function(logits):
    plain, _ = logits["standard"]
    for name in set(MODELS) - {"standard"}:
        assert np.abs(logits[name][0] - plain).max() > 1e-2


def test_a_parallel_block_refuses_to_read_a_source():
    config = replace(custom_modules.SIZES, num_encoder_layers=1)
    model = EncoderDecoder(config, block=custom_modules.parallel_block)
    with pytest.raises(ConfigError, match="parallel block"):
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 2), int), jnp.ones((1, 2), int))


def test_rules_of_ones_own_come_first_and_the_packages_follow():
    tokens = custom_modules.repeating(0).tokens
    model = MODELS["custom block"]
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens)["params"])
    sizes = {"data": 1, "fsdp": 2, "tensor": 2}
    axes = parameter_axes(model)
    specs = partition_specs(params, sizes, paths=custom_modules.CUSTOM_SPECS, axes=axes)
    theirs = partition_specs(params, sizes, axes=axes)
    path = "decoder/blocks_0/feed_forward/up/kernel"
    assert (specs[path], theirs[path]) == (P(None, "tensor"), P("fsdp", "tensor"))
    assert {path for path in specs if specs[path] != theirs[path]} == {path}


@pytest.mark.slow
def test_four_devices_under_a_rule_of_ones_own_learn_what_one_does():
    def lines(*words):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "experiments.examples.custom_modules", "--steps", "3"]
        command += words
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    one, four = lines(), lines("--mesh", "fsdp=2,tensor=2")
    losses = [[float(n) for n in re.findall(r"\d\.\d{6}", "".join(said))] for said in (one, four)]
    assert len(set(losses[0])) > 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert all(line.endswith("up [16, 24] in parts [16, 24]") for line in one)
    assert all(line.endswith("up [16, 24] in parts [16, 12]") for line in four)


@pytest.mark.slow
def test_order_is_learned_by_a_position_scheme_of_ones_own(capsys):
    custom_modules.main(custom_modules.CustomModulesOptions())
    lines = capsys.readouterr().out.splitlines()
    last = [float(line.split(" -> ")[1].split()[0]) for line in lines]
    assert len(last) == 4
    assert last[2] < 0.1 < min(last[0], last[1], last[3])
