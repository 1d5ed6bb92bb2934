"""Options that choose a run, its weights and the devices that hold them."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from experiments.harness.runs import distributed
from experiments.harness.runs.distributed import ProcessOptions
from jaxformer import storage
from jaxformer.config import (
    Natural,
)
from jaxformer.distributed import (
    Strategy,
    make_mesh,
    parse_mesh,
    replicated,
    sharded,
    single,
)
from jaxformer.pretrained import CheckpointName, RunWeights, select_weights


@dataclass(frozen=True)
class RunOptions(ProcessOptions):
    """The weights that a command uses."""

    run: str = ""
    """The folder of the run."""
    _: KW_ONLY
    checkpoint: CheckpointName = "final"
    """Weights to load: final (chosen when training ended; before: the newest), best (of the best
    validation), last (of the newest step), average (mean of the last steps) or ema (moving
    average)."""
    step: Natural | None = None
    """The step whose weights are used, if its checkpoint is kept; None: --checkpoint decides."""
    mesh: str = ""
    """The division of the weights of a model that is too large for one device, such as tensor=4 or
    fsdp=4,tensor=2. Empty: the first device has them, or each device of several processes."""

    def __post_init__(self):
        super().__post_init__()
        parse_mesh(self.mesh)

    @property
    def folder(self) -> Path:
        """The folder of the run, here or in a bucket."""
        return storage.to_path(self.run)

    @property
    def strategy(self) -> Strategy:
        """Placement of the weights."""
        if self.mesh:
            return sharded(make_mesh(self.mesh))
        return replicated() if distributed.is_several() else single()

    @property
    def weights(self) -> RunWeights:
        """The weights that these options name; raises as `select_weights` does."""
        return select_weights(self.folder, self.checkpoint, self.step)
