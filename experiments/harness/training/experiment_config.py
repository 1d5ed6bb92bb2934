"""The configuration of a run as the harness reads it, whatever the experiment."""

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from experiments.harness.runs.distributed import ProcessChoice
from jaxformer.config import TransformerConfig

if TYPE_CHECKING:
    from experiments.harness.training.training_config import (
        OptimizerConfig,
        StrategyName,
        TrainingConfig,
    )


class ExperimentConfig(ProcessChoice, Protocol):
    """A frozen dataclass: the fields of `RunConfig`, and five that each experiment defines."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    may_change: ClassVar[tuple[str, ...]]

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        ...

    @property
    def model(self) -> TransformerConfig:
        """The sizes of the model."""
        ...

    @property
    def data(self) -> object:
        """The text and its batches, with the fields of the experiment."""
        ...

    @property
    def training(self) -> "TrainingConfig":
        """The settings of the training."""
        ...

    @property
    def optimizer(self) -> "OptimizerConfig":
        """The optimizer and its schedule."""
        ...

    @property
    def strategy(self) -> "StrategyName":
        """The placement of the state on devices."""
        ...

    @property
    def mesh(self) -> str:
        """The mesh of a sharded run."""
        ...

    @property
    def runs(self) -> str:
        """The folder of all experiments' runs."""
        ...

    @property
    def init_from(self) -> str:
        """The run or folder whose weights the run starts from, or empty."""
        ...

    @property
    def continue_from(self) -> str:
        """The run whose state the run goes on from, or empty."""
        ...

    @property
    def verbose(self) -> bool:
        """Whether compiler options and formulas are printed."""
        ...

    @property
    def profile(self) -> bool:
        """Whether a trace of a few steps is written."""
        ...

    def free_fields(self) -> list[str]:
        """Dotted names of the fields that may differ when the run is resumed."""
        ...

    def without_effect(self) -> dict[str, str]:
        """Reasons why options change nothing with the other settings, by their dotted names."""
        ...


class BatchOptions(Protocol):
    """The options of data whose batches may be the user's own."""

    @property
    def batches(self) -> str:
        """Batches of the user's own as package.module:name, or empty."""
        ...


class ConfigWithBatches(ExperimentConfig, Protocol):
    """The configuration of an experiment whose batches may be the user's own."""

    @property
    def data(self) -> BatchOptions:
        """The text and its batches."""
        ...
