"""A run that is being trained: processes, devices, folder and checkpoints.

`open_run` is what a `train.py` enters once; `fit` trains the run that it yields.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from experiments.harness import cli
from experiments.harness.cli import config_files, display
from experiments.harness.runs import distributed, environment, run_folder, user_cache
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.run_folder import Run
from experiments.harness.training import build, named_values
from experiments.harness.training.chips import Peak, peak_of
from experiments.harness.training.device_check import check_products
from experiments.harness.training.devices import choose_devices
from experiments.harness.training.doubtful_settings import doubts
from experiments.harness.training.early_stopping import StoppingMetric, stopping_metric
from experiments.harness.training.experiment_config import ExperimentConfig
from experiments.harness.training.first_contact import FirstContact, remembered_kernels
from experiments.harness.training.memory_remedies import remedies
from jaxformer import records
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig, to_plain
from jaxformer.distributed import Strategy, Termination
from jaxformer.errors import is_out_of_memory
from jaxformer.runtime import setup_process

C = TypeVar("C", bound=ExperimentConfig)


@dataclass(frozen=True, kw_only=True)
class OpenRun(Generic[C]):
    """A run that is being trained: its settings, devices, folder and checkpoints."""

    config: C
    """The run's configuration."""
    devices: Strategy
    """The devices that compute a step, and how they hold the parameters of its model."""
    checkpoints: Checkpoints
    """The states that are saved in the run's folder."""
    log: Run
    """The run's folder, with its metrics and its environment."""
    watched: StoppingMetric
    """The score that early stopping goes by."""
    contact: FirstContact = field(default_factory=FirstContact)
    """The run's assumptions about its devices, for env.json; the model adds some."""
    termination: Termination | None = None
    """The end of one of several processes on a signal; None: this process is the only one."""
    found_parts: int | None = None
    """The parts of a batch that an earlier start of the run has found."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.log.folder

    def with_model(self, model: TransformerConfig) -> "OpenRun[C]":
        """This run with the sizes that its text decides; config.json keeps those asked for."""
        return replace(self, config=replace(self.config, model=model))

    def watching(self, scores: Sequence[str]) -> "OpenRun[C]":
        """This run with early stopping by the first of `scores`, unless its settings name one.

        `scores` are the names of scores that tell something of the run's validation text.
        """
        return replace(self, watched=stopping_metric(self.config.training, scores))

    def record_settings(self, **fields: Any) -> None:
        """Writes `fields` that were found since the run was opened to config.json."""
        path = self.folder / "config.json"
        if distributed.is_first():
            plain = to_plain(replace(self.config, **fields))
            stored = config_files.read_object(path) | {name: plain[name] for name in fields}
            records.write_json(path, stored)

    def write_scores(self, scores: Mapping[str, Any]) -> None:
        """Writes scores.json, which ends a training; of several processes the first does."""
        if distributed.is_first():
            run_folder.scores_of(self.folder).write(dict(scores))
            self.log.add_environment(finished=environment.now())


@contextmanager
def open_run(
    experiment: str,
    config: C,
    scores: Sequence[str],
    loggers: Iterable[Logger] = (),
    parent: Callable[[C], C] = lambda config: config,
) -> Iterator[OpenRun[C]]:
    """A run of `experiment` that trains within the block: processes, devices, folder, checkpoints.

    `scores` are the names of the scores of every evaluation; early stopping goes by the first.
    `parent` gives a configuration the sizes of the run that it starts from. Raises `ConfigError`
    for settings that cannot be, before anything is written.
    """
    named_values.check_named_values(config)
    watched = stopping_metric(config.training, scores)
    with ExitStack() as stack:
        termination = stack.enter_context(distributed.joined(config))
        # Before the screen: it starts a thread, and glibc gives a thread that starts earlier a heap
        # of its own, which returns its large memory to the system after each step. Compiled
        # programs are code: they never come from a folder that may be a stranger's.
        setup = setup_process(user_cache.cache_folder() / "programs")
        stack.enter_context(display.opened())
        devices = choose_devices(config.strategy, config.mesh, setup.compiler_options)
        with distributed.together():
            config = parent(config)
            found = found_parts(config, experiment)
        stored = with_parts(config, found)
        distributed.check_same_settings(stored)  # it has sizes of what it starts from
        log = run_folder.open_folder(
            config.runs, experiment, config.name, stored, may_differ=config.free_fields()
        )
        log.loggers += build.build_loggers(config.training, log.folder, loggers)
        stack.callback(log.call, "close")  # also on a signal, or where training diverges
        peak = peak_of(devices, config.model.dtype)
        log.add_environment(setup=str(setup), utilization=str(peak))
        if config.verbose:
            display.say(f"{setup}\n{peak}")
        display.say(_announcement(config, log.folder, peak))
        for doubt in doubts(config):
            display.say(f"warning: {doubt}")
        known = environment.environment_of(log.folder).read(earlier=list)
        contact = FirstContact(kernels=remembered_kernels(known))
        if setup.platform != "cpu":  # on a CPU the tests have compared the products
            check_products(config.model.dtype, contact.checks)
        keep = config.training.average_checkpoints + 1  # one may be damaged
        checkpoints = stack.enter_context(Checkpoints(log.folder / "checkpoints", keep=keep))
        run = OpenRun(
            config=config,
            devices=devices,
            checkpoints=checkpoints,
            log=log,
            watched=watched,
            contact=contact,
            termination=termination,
            found_parts=found,
        )
        try:
            yield run
        except Exception as error:  # a signal is no Exception: it does not fail the run
            if not is_out_of_memory(error):
                log.add_environment(failed=cli.sentence(error))
                raise
            short = cli.OutOfMemory(f"{cli.memory_asked_for(error)}. {remedies(config)}")
            log.add_environment(failed=str(short))
            raise short from error


def _announcement(config: ExperimentConfig, folder: Path, peak: Peak) -> str:
    """The first lines on the screen: the folder, the work, and how to stop."""
    total = config.optimizer.total_steps
    work = [f"{total:,} steps on {peak.devices} x {peak.kind}"]
    if 0 < config.training.evaluate_every < total:
        work.append(f"evaluated every {config.training.evaluate_every:,}")
    if 0 < config.training.save_every < total:
        work.append(f"saved every {config.training.save_every:,}")
    return f"{folder}\n{', '.join(work)}\nCtrl-C saves and ends; the same command goes on"


def found_parts(config: ExperimentConfig, experiment: str) -> int | None:
    """The parts that the run of `config` has found, once it has a checkpoint.

    None where it has found none, and where its configuration gives them.
    """
    training = config.training
    if training.grad_accumulation or training.usual_parts == 1:
        return None
    folder = run_folder.folder_of(config.runs, experiment, config.name)
    if not Checkpoints(folder / "checkpoints").steps():
        return None
    stored = config_files.read_object(folder / "config.json").get("training", {})
    return stored.get("grad_accumulation")


def with_parts(config: C, parts: int | None) -> C:
    """`config` with a batch in `parts` parts; None leaves `config` as it is."""
    if parts is None:
        return config
    return replace(config, training=replace(config.training, grad_accumulation=parts))
