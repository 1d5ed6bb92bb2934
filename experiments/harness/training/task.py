"""A task: the model that a run trains, its batches, its step and its evaluation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.samples import Sample
from jaxformer.distributed import Strategy
from jaxformer.text.data import Batches
from jaxformer.training.train_step import TrainState


class EvaluationResult(NamedTuple):
    """Scores to log, and texts to show beside them."""

    scores: Mapping[str, float]
    """Numbers by their names, such as validation_loss."""
    samples: Sequence[Sample] = ()


class Cost(NamedTuple):
    """The cost of a step on a batch."""

    positions: int
    """Positions of the batch in which a token is predicted, padding included."""
    flops: int
    """FLOPs of the step by the model's equations."""


InitAndStep = tuple[Callable[[], TrainState], Any]
"""The function that makes the first state, and the compiled step."""
MakeStep = Callable[[Any, Any, Any, Strategy], InitAndStep]
"""A function of (config, model, batch, devices)."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a run: model, loss, batches and scores.

    Its functions are given the run, whose configuration `start` settles, and so need nothing else
    that changes.
    """

    model: Any
    """The model; its parameters are in the state."""
    make_step: MakeStep
    """Makes the first state, and the step that trains on `batches`."""
    batches: Batches
    evaluate: Callable[[OpenRun, Any, int], EvaluationResult] | None
    """(run, parameters, step) -> scores of the validation text; step 0: a candidate for the
    result."""
    cost: Callable[[OpenRun, Any], Cost] | None = None
    """(run, placed batch) -> cost of a step: the share of padding, and the utilization."""
    read_start: Callable[[OpenRun], Any] | None = None
    """Reads the parameters that a run starts with, where they do not come from a run of the same
    model; missing ones start anew, and None means random ones. The state takes their memory."""
    evaluates_adapters: bool = False
    """Whether `evaluate` and the final score take adapters in their matrices (`attach_adapters`),
    as functions do that only apply the model; False: merged, which are a second copy in memory."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of every checkpoint besides the fingerprint of `batches`."""
