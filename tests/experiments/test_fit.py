"""The loop that all experiments share: order, evaluations, checkpoints, resuming, stopping."""

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxformer as jf
from experiments.harness.cli.exit_codes import exit_code
from experiments.harness.runs.run_folder import Run
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.training.early_stopping import StoppingMetric
from experiments.harness.training.final_weights import choose_weights
from experiments.harness.training.fit import fit
from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.parameters import evaluated_params
from experiments.harness.training.task import Cost, EvaluationResult, Task
from experiments.harness.training.training_config import OptimizerConfig, TrainingConfig
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig
from jaxformer.distributed import single
from jaxformer.errors import CheckpointError, Diverged
from jaxformer.pretrained.run_weights import weights_of
from jaxformer.training import lora
from jaxformer.training.train_step import init_train_state, make_train_step
from tests.experiments.commands import metrics_of
from tests.stored import stored

TOTAL = 17
OPTIMIZER = optax.adam(0.1)


def loss(params, batch, rng):
    noise = jax.random.normal(rng, params["w"].shape)
    return jnp.sum((batch["x"] @ (params["w"] + 0.1 * noise)) ** 2), jnp.float32(len(batch["x"]))


STEP = jax.jit(make_train_step(loss, OPTIMIZER))


def first_state():
    return init_train_state({"w": jnp.arange(1.0, 4.0)}, OPTIMIZER, jax.random.key(3))


class Numbers(NamedTuple):
    fingerprint: str = "a"

    def batch(self, number, rows=None):
        return {"x": np.random.default_rng(number).standard_normal((5, 3)).astype(np.float32)}


def evaluate(run, params, step):
    return EvaluationResult({"validation_loss": float(jnp.sum(params["w"] ** 2))})


def task_of(evaluate=evaluate, **changes):
    given = {
        "model": None,
        "make_step": None,
        "batches": Numbers(),
        "cost": lambda run, batch: Cost(7, 11),
    }
    return Task(**given | {"evaluate": evaluate} | changes)


def run_in(folder, checkpoints, total=TOTAL, **training):
    options = {"log_every": 2, "save_every": 5, "evaluate_every": 5, "average_checkpoints": 1}
    watched = StoppingMetric("validation_loss", 1.0)
    settings = TrainingConfig(**options | training)
    config = SimpleNamespace(
        training=settings,
        optimizer=OptimizerConfig(total_steps=total),
        model=TransformerConfig(7, 8, 16, 2),
        profile=False,
    )
    return OpenRun(
        watched=watched,
        checkpoints=checkpoints,
        log=Run(folder),
        config=config,
        devices=single(),
    )


def fitted(folder, evaluate=evaluate, origin="a", total=TOTAL, **training):
    """The files of a run in `folder`, and its last state."""
    with Checkpoints(folder / "checkpoints", keep=7) as checkpoints:
        run = run_in(folder, checkpoints, total=total, **training)
        return fit(run, STEP, first_state(), task_of(evaluate, batches=Numbers(origin)))


def saved(folder):
    return Checkpoints(folder / "checkpoints")


def test_a_run_that_dies_while_it_evaluates_has_saved_and_evaluates_again(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fitted(whole)

    def dies_at_10(run, params, step):
        if step == 10:
            raise MemoryError("no room for the validation text")
        return evaluate(run, params, step)

    with pytest.raises(MemoryError):
        fitted(parts, evaluate=dies_at_10)
    assert saved(parts).steps() == [5, 10]
    assert saved(parts).metadata(10)["early_stopping"]["step"] == 5
    fitted(parts)
    assert metrics_of(parts) == metrics_of(whole)
    for step in saved(whole).steps():
        assert saved(parts).metadata(step) == saved(whole).metadata(step)
    assert saved(parts).best_step() == saved(whole).best_step() == 15


@pytest.mark.parametrize("is_accelerator", [True, False])
def test_the_next_step_is_begun_before_the_result_of_the_last_one_is_read_but_not_on_a_cpu(
    tmp_path, monkeypatch, is_accelerator
):
    if is_accelerator:
        loop = sys.modules[fit.__module__]
        monkeypatch.setattr(loop, "may_run_ahead", lambda devices: True)
    events = []

    class Result(SimpleNamespace):
        def __float__(self):
            events.append(("read", self.step))
            return self.value

        __int__ = lambda self: int(float(self))  # noqa: E731

    def step(state, batch):
        number = int(state.step) + 1
        events.append(("begun", number))
        metrics = {"loss": 1.0, "tokens": 5, "grad_norm": 1.0, "skipped": 0, "consecutive_skips": 0}
        metrics = {name: Result(value=float(x), step=number) for name, x in metrics.items()}
        return state.replace(step=state.step + 1), metrics

    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        run = run_in(tmp_path, checkpoints, total=7, save_every=0)
        fit(run, step, first_state(), task_of(None))
    order = {event: place for place, event in reversed(list(enumerate(events)))}
    for number in range(2, 7):  # the first one compiles, and is waited for
        assert (order["begun", number + 1] < order["read", number]) == is_accelerator


def test_loggers_begin_before_the_first_step_and_none_after_the_last(tmp_path):
    events = []

    class Slow:
        def begin(self, step):
            events.append(("begin", step))

        def log(self, step, metrics):
            events.append(("log", step))

    def step(state, batch):
        events.append(("step", int(state.step) + 1))
        return STEP(state, batch)

    def go_on(total):
        with Checkpoints(tmp_path / "checkpoints") as checkpoints:
            run = run_in(tmp_path, checkpoints, total=total, log_every=2, save_every=0)
            run.log.loggers.append(Slow())
            fit(run, step, first_state(), task_of(None))

    go_on(3)
    assert events[:2] == [("begin", 1), ("step", 1)] and events[-1] == ("log", 3)
    events.clear()
    go_on(3)
    assert events == [], "nothing is left to do"
    go_on(5)
    assert events[:2] == [("begin", 4), ("step", 4)]


def test_training_ends_when_the_score_is_tired_and_the_best_weights_are_chosen(tmp_path, capsys):
    scripted = iter([5.0, 9.0, 7.0, 8.5, 8.0])

    def scripted_score(run, params, step):
        return EvaluationResult({"validation_bleu": next(scripted)})

    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        run = run_in(tmp_path, checkpoints, patience=3, evaluate_every=1, save_every=2)
        run = replace(run, watched=StoppingMetric("validation_bleu", -1.0))
        fit(run, STEP, first_state(), task_of(scripted_score))
        assert checkpoints.steps() == [2, 4, 5] and checkpoints.best_step() == 2
        assert "better in 3 evaluations: training ends at step 5 of" in capsys.readouterr().out
        best = stored(checkpoints, 2)

        def validate(run, params, step):
            right = bool(np.all(params["w"] == best["w"]))
            return EvaluationResult({"validation_bleu": 9.0 if right else 8.0})

        chosen = choose_weights(run, task_of(validate))
    np.testing.assert_array_equal(chosen["w"], best["w"])
    note = json.loads((tmp_path / "weights.json").read_text())
    assert note["steps"] == [2] and note["validation_bleu"] == 9.0


def test_the_best_evaluation_is_saved_also_between_two_intervals_and_it_alone(tmp_path):
    there, scripted = {}, iter([7.0, 5.0, 9.0, 8.0, 6.0])

    def evaluate(run, params, step):
        checkpoints.wait()
        there[step] = checkpoints.steps()
        return EvaluationResult({"validation_loss": next(scripted)})

    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        run = run_in(tmp_path, checkpoints, evaluate_every=3, average_checkpoints=2)
        fit(run, STEP, first_state(), task_of(evaluate))
    assert checkpoints.best_step() == 6 and checkpoints.steps() == [6, 10, 15, 17]
    assert there == {3: [], 6: [3, 5], 9: [5, 6], 12: [5, 6, 10], 15: [6, 10, 15]}
    (tmp_path / "config.json").write_text('{"training": {"average_checkpoints": 2}}')
    assert RunOptions(str(tmp_path), checkpoint="best").weights.steps == [6]
    assert RunOptions(str(tmp_path), checkpoint="average").weights.steps == [15, 17]
    (state, _), whole = checkpoints.restore(first_state(), 6), fitted(tmp_path / "b", total=6)
    jax.tree.map(np.testing.assert_array_equal, state.params, whole.params)


def test_of_weights_without_a_finite_validation_the_good_step_is_the_result_with_code_70(tmp_path):
    fitted(tmp_path)
    with Checkpoints(tmp_path / "checkpoints", keep=7) as checkpoints:
        checkpoints.annotate(10, {}, -1.0)
        best = stored(checkpoints, 10)
        run = run_in(tmp_path, checkpoints)
        run = replace(run, watched=StoppingMetric("validation_bleu", -1.0))
        for is_lost in (("loss",), ("bleu", "loss")):

            def validate(run, params, step, lost=is_lost):
                good = bool(np.all(params["w"] == best["w"]))
                bad = {f"validation_{name}": math.nan for name in lost}
                return EvaluationResult({"validation_bleu": 0.0} | ({} if good else bad))

            said = "the weights of step 17 is not finite: the result of .* is step 10"
            with pytest.raises(Diverged, match=said) as raised:
                choose_weights(run, task_of(validate))
            assert exit_code(raised.value) == 70
            assert json.loads((tmp_path / "weights.json").read_text())["steps"] == [10]
        best = {"w": np.zeros(3)}
        with pytest.raises(Diverged, match="validation"):
            choose_weights(run, task_of(validate))


def test_a_run_that_trains_on_has_no_final_weights_until_its_new_end(tmp_path):
    fitted(tmp_path)
    weights_of(tmp_path).write({"steps": [5], "tree": "params"})
    fitted(tmp_path)
    assert (tmp_path / "weights.json").exists()
    fitted(tmp_path, total=TOTAL + 1)
    assert not (tmp_path / "weights.json").exists()


def test_checkpoints_of_other_batches_are_refused(tmp_path):
    fitted(tmp_path)
    with pytest.raises(CheckpointError, match="batches"):
        fitted(tmp_path, origin="b")


def test_a_resumed_training_compiles_its_step_once(tmp_path, compiled):
    def placed(total):
        with Checkpoints(tmp_path / "checkpoints", keep=7) as checkpoints:
            run = run_in(tmp_path, checkpoints, total=total, evaluate_every=0)
            step, state = jax.jit(make_train_step(loss, OPTIMIZER)), run.devices.init(first_state)
            before, saw = compiled[0], []

            def counted(*args):
                result = step(*args)
                saw.append(compiled[0] - before)
                return result

            fit(run, counted, state, task_of())
            return saw

    fresh, resumed = placed(5), placed(8)
    assert fresh[0] == fresh[-1] and resumed[0] == resumed[-1] > 0, (fresh, resumed)


def test_adapters_are_evaluated_in_their_matrices_which_stay_where_they_are(rng):
    model = jf.DecoderOnly(jf.TransformerConfig(11, 6, 14, 2, num_decoder_layers=1))
    ids = rng.integers(1, 11, (2, 5))
    params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
    options = {"rank": 3, "alpha": 6.0, "targets": "kernel$", "axes": jf.parameter_axes(model)}
    params = jf.add_adapters(params, jax.random.key(1), **options)
    params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), params)
    run = SimpleNamespace(devices=single().for_model(model))
    merged = evaluated_params(params, run, task_of())
    apart = evaluated_params(params, run, task_of(evaluates_adapters=True))
    matrix = params["decoder"]["blocks_0"]["feed_forward"]["up"]["kernel"]
    assert apart["decoder"]["blocks_0"]["feed_forward"]["up"]["kernel"].matrix is matrix
    logits = [jax.jit(model.apply)({"params": x}, ids) for x in (merged, apart)]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)
    base = model.apply({"params": lora.without_adapters(params)}, ids)
    assert np.abs(base - logits[0]).max() > 0.1
