"""What a checkpoint has stored, read without the rules by which a model's weights are chosen."""

from typing import Any

from jaxformer.checkpoint import Checkpoints
from jaxformer.checkpoint.leaves import read_mean


def stored(checkpoints: Checkpoints, step: int | None = None, tree: str = "params") -> Any:
    """The field `tree` of the state of `step`, the newest by default, as numpy arrays.

    Adapters are not merged, and the bytes of the step are not verified.
    """
    checkpoints.wait()
    step = checkpoints.newest_step() if step is None else step
    return read_mean([checkpoints.folder / str(step) / "state"], tree)
