"""A student learns from the probabilities of its teacher."""

import json
from dataclasses import replace

import jax
import pytest

from experiments.harness.training.initialization import find_run
from experiments.translation import teacher
from experiments.translation.load_run import load_run
from experiments.translation.train import train
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import CheckpointError, ConfigError
from tests.experiments.commands import metrics_of
from tests.experiments.tiny_runs import translation_config

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(translation_run):
    """The folder of the teacher."""
    return translation_run.folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return translation_config(tmp_path_factory.mktemp("students"))


def with_teacher(base, run, **changes):
    training = replace(base.training, teacher=str(run), **changes)
    return replace(base, name="student", training=training)


@pytest.fixture(scope="module")
def student(base, run):
    """A smaller run that learns from the teacher alone."""
    config = with_teacher(base, run, distillation_weight=1.0)
    config = replace(config, model=replace(config.model, d_ff=10))
    return config, train(config).folder


def test_a_student_learns_the_teachers_probabilities(run, student):
    _, folder = student
    lines = metrics_of(folder, "loss")
    assert [line["loss"] for line in lines] == [line["teacher_loss"] for line in lines]
    found, before = load_run(folder), load_run(run)
    assert found.target_tokenizer.fingerprint == before.target_tokenizer.fingerprint
    parent = find_run(str(run))
    sizes = [sum(x.size for x in jax.tree.leaves(each.params)) for each in (found, before)]
    assert sizes[0] < sizes[1], "only the student's parameters are saved"
    note = json.loads((folder / "teacher.json").read_text())
    assert note["run"] == str(run) and note["sha256"] == teacher.digest(parent)
    assert note["sha256"] != teacher.digest(find_run(f"{run}@6"))


@pytest.mark.slow
def test_a_teacher_equal_to_the_student_has_no_gradient(base, run):
    """The cross-entropy with one's own distribution is at its minimum."""
    config = with_teacher(base, run, distillation_weight=1.0)
    own = replace(config, name="own", init_from=f"{run}@7")
    own = replace(own, training=replace(own.training, teacher=f"{run}@7"))
    lines = metrics_of(train(own).folder, "loss")
    assert lines[0]["grad_norm"] < 1e-5 < lines[0]["loss"]


@pytest.mark.slow
def test_a_resumed_student_is_refused_another_teacher(base, run, student):
    config, folder = student
    content = (folder / "teacher.json").read_text()
    longer = replace(config, optimizer=replace(config.optimizer, total_steps=3))
    try:
        note = {"run": str(run), "sha256": "0" * 64}
        (folder / "teacher.json").write_text(json.dumps(note))
        with pytest.raises(
            CheckpointError, match="have changed since .* began: give the teacher's"
        ):
            train(longer)
    finally:
        (folder / "teacher.json").write_text(content)
    assert Checkpoints(train(longer).folder / "checkpoints").newest_step() == 3
    with pytest.raises(ConfigError, match="teacher='nowhere' is not the folder of a trained run"):
        train(replace(with_teacher(base, "nowhere"), name="none"))
    with pytest.raises(ConfigError, match="distillation_weight=1.5, but it must be in"):
        with_teacher(base, run, distillation_weight=1.5)
    with pytest.raises(ConfigError, match="is learned by the experiment's own loss, but loss="):
        with_teacher(base, run, loss="a.b:c")
