"""A training from its start to its end: processes, devices, the run's folder, what it prints last.

`open_run` is what a `train.py` enters once; `fit` trains the run that it yields.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import jax

from experiments.harness import cli
from experiments.harness.cli import config_files, display
from experiments.harness.runs import distributed, run_folder
from experiments.harness.runs import text_cache as run_files
from experiments.harness.runs.bootstrap import described_score
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.run_folder import Run
from experiments.harness.training import build
from experiments.harness.training.flops import peak_of
from experiments.harness.training.task import StoppingMetric, Task, stopping_metric
from experiments.harness.training.training_config import StrategyName
from jaxformer import records
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import to_plain
from jaxformer.distributed import Strategy, agreed, make_mesh, replicated, sharded, single
from jaxformer.distributed.mesh import Device
from jaxformer.errors import ConfigError, Diverged
from jaxformer.pretrained import last_steps
from jaxformer.pretrained.run_weights import weights_of
from jaxformer.runtime import setup_process

C = TypeVar("C")

_FILES = {
    "scores.json": "the scores, with what is needed to repeat them",
    "metrics.jsonl": "loss and speed over time",
    "config.json, env.json": "all settings; versions, devices, compiler options",
    "checkpoints/": "the weights",
}


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that is being trained: its settings, devices, folder and checkpoints."""

    config: Any
    """The run's configuration, with the sizes of the run that it starts from."""
    devices: Strategy
    """The devices that compute a step, and how they hold the parameters of its model."""
    checkpoints: Checkpoints
    log: Run
    """The run's folder, with its metrics and its environment."""
    watched: StoppingMetric
    """The score that early stopping goes by."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.log.folder

    def settled(self, **fields: Any) -> "OpenRun":
        """This run with `fields` that were found since it was opened; config.json has them too."""
        config, path = replace(self.config, **fields), self.folder / "config.json"
        if distributed.is_first():
            plain = to_plain(config)
            stored = config_files.read_object(path) | {name: plain[name] for name in fields}
            records.write_json(path, stored)
        return replace(self, config=config)

    def write_scores(self, scores: Mapping[str, Any]) -> None:
        """Writes scores.json, which ends a training; of several processes the first does."""
        if distributed.is_first():
            run_folder.scores_of(self.folder).write(dict(scores))
            self.log.add_environment(finished=run_folder.now())


@contextmanager
def open_run(
    experiment: str,
    config: Any,
    scores: Sequence[str],
    loggers: Iterable[Logger] = (),
    parent: Callable[[Any], Any] = lambda config: config,
) -> Iterator[OpenRun]:
    """Within it, a run of `experiment` trains: its processes, devices, folder and checkpoints.

    `scores` are the names of the scores of every evaluation; early stopping goes by the first.
    `parent` gives a configuration the sizes of the run that it starts from. Raises `ConfigError`
    for settings that cannot be, before anything is written.
    """
    build.check(config)
    watched = stopping_metric(config.training, scores)
    with ExitStack() as stack:
        stack.enter_context(distributed.joined(config))
        # Before the screen: it starts a thread, and glibc gives a thread that starts earlier a heap
        # of its own, which returns its large memory to the system after each step. Compiled
        # programs are code: they never come from a folder that may be a stranger's.
        setup = setup_process(run_files.cache_folder() / "programs")
        stack.enter_context(display.opened())
        devices = choose_devices(config.strategy, config.mesh, setup.compiler_options)
        config = parent(with_found_parts(config, experiment))
        log = run_folder.open_folder(
            config.runs, experiment, config.name, config, may_differ=config.free_fields()
        )
        build.DEVICE_CHECKS.clear()  # those of an earlier run in this process
        log.loggers += build.build_loggers(config.training, log.folder, loggers)
        stack.callback(log.call, "close")  # also on a signal, or where training diverges
        peak, training = peak_of(devices, config.model.dtype), config.training
        log.add_environment(setup=str(setup), utilization=str(peak))
        if config.verbose:
            display.say(f"{setup}\n{peak}")
        total = config.optimizer.total_steps
        each = {"evaluated": training.evaluate_every, "saved": training.save_every}
        often = [f", {word} every {steps:,}" for word, steps in each.items() if 0 < steps < total]
        steps = f"{total:,} steps on {peak.devices} x {peak.kind}{''.join(often)}"
        display.say(f"{log.folder}\n{steps}\nCtrl-C saves and ends; the same command goes on")
        if setup.platform != "cpu":  # where the tests have compared them
            from experiments.harness.training.device_check import check_products

            check_products(config.model.dtype)
        keep = training.average_checkpoints + 1  # one may be damaged
        checkpoints = stack.enter_context(Checkpoints(log.folder / "checkpoints", keep=keep))
        run = OpenRun(
            config=config, devices=devices, checkpoints=checkpoints, log=log, watched=watched
        )
        try:
            yield run
        except Exception as error:  # a signal is none
            log.add_environment(failed=cli.sentence(error))
            raise


def with_found_parts(config: C, experiment: str) -> C:
    """`config` with the parts that its run in `experiment` has found, once it has a checkpoint."""
    run: Any = config
    if run.training.grad_accumulation or run.training.usual_parts == 1:
        return config
    folder = run_folder.folder_of(run.runs, experiment, run.name)
    if not Checkpoints(folder / "checkpoints").steps():
        return config
    stored = config_files.read_object(folder / "config.json").get("training", {})
    found = replace(run.training, grad_accumulation=stored.get("grad_accumulation"))
    return replace(run, training=found)


def choose_devices(
    strategy: StrategyName,
    mesh: str,
    options: Mapping[str, str] = MappingProxyType({}),
    devices: Sequence[Device] | None = None,
) -> Strategy:
    """The devices that compute a run's steps: one of `devices`, or all; None: those JAX sees.

    "auto" is "replicated" where there are several devices, else "single". "replicated" keeps a copy
    of the state on each, "sharded" its parts on `mesh`, such as "data=2,fsdp=2,tensor=2" (empty:
    all of them along data). The compiler gets `options`. Raises `ConfigError` for a mesh without
    "sharded", or one with another number of devices.
    """
    count = jax.device_count() if devices is None else len(devices)
    if strategy == "sharded":
        return sharded(make_mesh(mesh or f"data={count}", devices), compiler_options=options)
    if mesh:
        raise ConfigError(f"mesh={mesh!r} needs --strategy sharded, got strategy={strategy!r}")
    if strategy == "replicated" or (strategy == "auto" and count > 1):
        return replicated(devices, compiler_options=options)
    return single(devices[0] if devices else None, compiler_options=options)


def choose_weights(run: OpenRun, task: Task) -> Any:
    """The final weights: the mean of the last checkpoints, or those of the best one alone.

    Both are evaluated as the task's `evaluate` says. The better score, the one that early stopping
    watches, wins; the mean wins a tie, and one that is not finite never wins. weights.json records
    the choice. Raises `Diverged` where one of them is not finite.
    """
    training, checkpoints = run.config.training, run.checkpoints
    score = run.watched.name
    assert task.evaluate is not None
    last = last_steps(checkpoints, training.average_checkpoints)
    # Only the first process notes a validation: another one may not see that of the last step yet.
    best = int(agreed(checkpoints.best_step() or 0))
    chosen: tuple[float, list[int], Any, float] | None = None
    diverged: list[str] = []
    for steps in [last, [best]] if best and last != [best] else [last]:
        params = checkpoints.average_params(
            steps, tree=training.result_tree, shardings=run.devices.shardings
        )
        names = ", ".join(map(str, steps))
        with display.phase(f"validating the weights of step {names}"):
            scores = task.evaluate(params, 0).scores
        metric, value = run.watched.of(scores), scores[score]
        display.say(f"  validation {described_score(score, value)}")
        # BLEU is 0 where the loss is NaN.
        if not (math.isfinite(value) and math.isfinite(scores.get("validation_loss", 0.0))):
            diverged.append(names)
        elif chosen is None or metric < chosen[0]:
            chosen = metric, steps, params, value
    if chosen is None:
        raise Diverged(
            "the validation of no checkpoint is finite: lower the learning rate, or train with "
            "--model.dtype float32, under another --name"
        )
    _, steps, params, value = chosen
    if distributed.is_first():
        note = {"steps": steps, "tree": training.result_tree, score: value}
        weights_of(run.folder).write(note)
    if diverged:
        raise Diverged(
            f"the validation of the weights of step {', '.join(diverged)} is not finite: the "
            f"result of {run.folder} is step {steps[0]}. Evaluate it, or lower the learning "
            "rate and train under another --name"
        )
    return params


def describe_folder(
    folder: Path, files: Mapping[str, str], commands: Iterable[tuple[str, ...]]
) -> str:
    """The files of the run in `folder`, the experiment's own `files` first, and the next commands.

    A command is a module of `experiments` and its further arguments; each gets the run. The last
    one writes the page of the run.
    """
    lines = [f"Everything is in {folder}:"]
    lines += [
        f"  {names:<23} {content}"
        for names, content in {**files, **_FILES}.items()
        if all((folder / name).exists() for name in names.split(", "))
    ]
    lines += ["", "Next:"]
    for module, *args in commands:
        words = ["python", "-m", f"experiments.{module}", "--run", str(folder), *args]
        lines.append("  " + shlex.join(words))
    lines.append("  " + shlex.join(["python", "-m", "experiments.runs", "page", str(folder)]))
    return "\n".join(lines)
