"""The tables of the guide to reliability say what happens to a setting that changes on resume."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.harness.cli.config_files import flat
from experiments.harness.runs.run_folder import open_folder, refuse_differences
from experiments.language_modelling.finetune_presets import PRESETS as FINETUNING
from experiments.language_modelling.presets import PRESETS as LANGUAGE
from experiments.translation.presets import PRESETS as TRANSLATION
from jaxformer.config import to_plain
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.nn.axes import Axes

GUIDE = Path(__file__).parents[2] / "experiments" / "guides" / "reliability.md"
CONFIGS = {
    "translation": TRANSLATION["grammar"],
    "language modelling": LANGUAGE["python_stdlib"],
    "finetuning": next(iter(FINETUNING.values())),
}


def table(title):
    """{name in the first column: second column} of the table whose first column has `title`."""
    rows = {}
    (text,) = re.findall(rf"^\| {title} \|.*\n\|---\|---\|\n((?:\|.*\n)+)", GUIDE.read_text(), re.M)
    for line in text.splitlines():
        names, what = line.strip("| ").split(" | ")
        rows |= dict.fromkeys(re.findall(r"`([\w.]+)`", names), what)
    return rows


RUN, OPTIMIZER = table("setting"), table("field of `OptimizerConfig`")


def row_of(name):
    """What the guide says of the setting `name`: the longest name that it begins with."""
    known = [known for known in RUN if name == known or name.startswith(f"{known}.")]
    return RUN[max(known, key=len)] if known else "missing in the guide"


def changed(settings, name):
    """`settings`, nested, with another value of the dotted `name`."""
    first, _, rest = name.partition(".")
    inner = changed(settings[first], rest) if rest else "another value"
    return settings | {first: inner}


@pytest.mark.parametrize("experiment", CONFIGS)
def test_each_setting_of_a_run_is_taken_over_or_refused_as_the_guide_says(experiment, tmp_path):
    config = CONFIGS[experiment]
    optimizer = replace(config.optimizer, schedule="constant")
    config = replace(config, optimizer=optimizer)
    stored = to_plain(config)
    wrong = {}
    for name in flat(stored):
        try:
            refuse_differences(stored, changed(stored, name), tmp_path, config.free_fields())
            found = "taken over"
        except ConfigError as error:
            assert f"{name} is " in str(error)
            found = "refused"
        if not row_of(name).startswith(found):
            wrong[name] = f"{found}, but the guide says: {row_of(name)}"
    assert not wrong


def test_each_name_in_the_table_is_a_setting_of_a_run():
    known = {name for config in CONFIGS.values() for name in flat(to_plain(config))}
    unknown = [x for x in RUN if not any(k == x or k.startswith(f"{x}.") for k in known)]
    assert not unknown


@pytest.mark.parametrize("schedule", ["constant", "inverse_square_root", "cosine", "linear", "wsd"])
def test_the_number_of_steps_is_taken_over_where_the_schedule_does_not_depend_on_it(
    schedule, tmp_path
):
    config = replace(CONFIGS["translation"], name="run")
    optimizer = replace(config.optimizer, schedule=schedule, warmup_steps=2, total_steps=40)
    config = replace(config, optimizer=optimizer)
    more = replace(config, optimizer=replace(optimizer, total_steps=60))

    def opened(config):
        return open_folder(tmp_path, "translation", "run", config, may_differ=config.free_fields())

    folder = opened(config).folder
    (folder / "checkpoints" / "7").mkdir(parents=True)
    if f"`{schedule}`" in RUN["optimizer.total_steps"]:
        opened(more)
        assert json.loads((folder / "config.json").read_text())["optimizer"]["total_steps"] == 60
    else:
        with pytest.raises(ConfigError, match="optimizer.total_steps is 40 there but 60 here"):
            opened(more)


def test_a_function_of_ones_own_is_refused_also_in_a_row_that_is_taken_over(tmp_path):
    config = CONFIGS["language modelling"]
    own = replace(config, training=replace(config.training, attention_fn="a.b:c"))
    with pytest.raises(ConfigError, match="training.attention_fn is"):
        refuse_differences(to_plain(config), to_plain(own), tmp_path, config.free_fields())


# The optimizer in Python

PARAMS = {"a": {"kernel": jnp.ones((3, 5))}, "b": {"bias": jnp.ones(5)}}
AXES = {"a/kernel": Axes(("in",), ("out",), is_hidden=True), "b/bias": Axes()}
WSD = jf.OptimizerConfig(
    schedule="wsd", warmup_steps=4, total_steps=20, grad_clip_norm=1.0, weight_decay=0.1
)
MUON = replace(WSD, name="muon")
CHANGES = {
    "learning_rate": (WSD, 0.5, 3),
    "schedule": (WSD, "linear", 17),
    "warmup_steps": (WSD, 7, 3),
    "total_steps": (WSD, 60, 17),
    "min_lr_ratio": (WSD, 0.7, 17),
    "decay_fraction": (WSD, 0.6, 17),
    "b1": (WSD, 0.5, 3),
    "b2": (WSD, 0.5, 3),
    "eps": (WSD, 1.0, 3),
    "momentum": (MUON, 0.5, 3),
    "ns_coeffs": (MUON, "polar_express", 3),
    "grad_clip_norm": (WSD, 0.5, 3),
    "weight_decay": (WSD, 0.5, 3),
    "name": (WSD, "lion", 3),
    "freeze": (WSD, "^b/", 3),
}
"""The settings before, another value, and the updates before the change."""


def made(config):
    return jf.make_optimizer(config, axes=AXES)


def gradient(number):
    return jax.tree.map(lambda x: jnp.cos(number + jnp.arange(x.size)).reshape(x.shape), PARAMS)


def saved_after(config, updates, folder):
    """The state of an optimizer after so many updates, saved in `folder`."""
    optimizer = made(config)
    state = optimizer.init(PARAMS)
    update = jax.jit(optimizer.update)
    for number in range(updates):
        _, state = update(gradient(number), state, PARAMS)
    with jf.Checkpoints(folder) as checkpoints:
        checkpoints.save(updates, state)
    return state


def next_update(config, state):
    return jax.tree.leaves(made(config).update(gradient(99), state, PARAMS)[0])


def test_the_table_has_each_field_of_an_optimizer_once():
    assert set(OPTIMIZER) - {"state"} == {field.name for field in fields(jf.OptimizerConfig)}
    assert set(CHANGES) == {field.name for field in fields(jf.OptimizerConfig)}


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_of_a_restored_optimizer_is_kept_taken_over_or_refused_as_the_guide_says(
    field, tmp_path
):
    config, value, updates = CHANGES[field]
    state, other = saved_after(config, updates, tmp_path), replace(config, **{field: value})
    try:
        restored, _ = jf.Checkpoints(tmp_path).restore(made(other).init(PARAMS))
    except CheckpointError:
        found = "refused"
    else:
        before, after = next_update(config, state), next_update(other, restored)
        same = all(map(np.array_equal, before, after))
        found = "kept" if same else "taken over"
    assert OPTIMIZER[field].startswith(found)


@pytest.mark.parametrize("field", ["grad_clip_norm", "weight_decay"])
def test_a_part_of_an_optimizer_that_comes_or_goes_is_refused(field, tmp_path):
    assert "from 0 or to 0 refused" in OPTIMIZER[field]
    without = replace(WSD, **{field: 0.0})
    for before, after in ((WSD, without), (without, WSD)):
        folder = tmp_path / str(before is WSD)
        saved_after(before, 1, folder)
        with pytest.raises(CheckpointError, match="optimizer"):
            jf.Checkpoints(folder).restore(made(after).init(PARAMS))


def test_a_restored_state_gets_another_rate_by_one_call(tmp_path):
    rates = {rate: replace(WSD, learning_rate=rate) for rate in (0.1, 0.02)}
    state = jf.init_train_state(PARAMS, made(rates[0.1]), jax.random.key(0))
    with jf.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    fresh = jf.init_train_state(PARAMS, made(rates[0.02]), jax.random.key(0))
    restored, _ = jf.Checkpoints(tmp_path).restore(fresh)
    expected = next_update(rates[0.02], fresh.opt_state)
    assert not np.array_equal(next_update(rates[0.02], restored.opt_state)[0], expected[0])
    state = jf.with_learning_rate(restored, 0.02)
    for leaf, right in zip(next_update(rates[0.02], state.opt_state), expected, strict=True):
        np.testing.assert_array_equal(leaf, right)


def test_a_rate_that_cannot_be_and_a_state_without_one_are_refused():
    state = jf.init_train_state(PARAMS, made(WSD), jax.random.key(0))
    for rate in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="learning_rate="):
            jf.with_learning_rate(state, rate)
    own = jf.make_optimizer(WSD, lambda count: 0.1)
    with pytest.raises(ConfigError, match="learning rate"):
        jf.with_learning_rate(jf.init_train_state(PARAMS, own, jax.random.key(0)), 0.1)


def test_the_rate_of_a_state_on_a_mesh_keeps_its_place():
    mesh = jax.make_mesh((1,), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = jf.init_train_state(PARAMS, made(WSD), jax.random.key(0))
    state = jax.device_put(state, place)
    leaves = jax.tree.leaves(jf.with_learning_rate(state, 0.3).opt_state)
    assert all(leaf.sharding == place for leaf in leaves)
