"""Training states on disk: sealed when all is written, restored exactly or refused."""

from jaxformer.checkpoint.manifest import CheckpointError
from jaxformer.checkpoint.store import Checkpoints

__all__ = ["CheckpointError", "Checkpoints"]
