"""Training states on disk: committed when everything is written, restored exactly or refused."""

from jaxformer.checkpoint.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
