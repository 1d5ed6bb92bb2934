"""Folders of models: of `transformers`, read and written, and of runs, read.

Each family has one weight map of entries *our path, name of the tensor, transform* and one list of
settings for its config.json; both are used in both directions, on numpy arrays.
"""

from jaxformer.pretrained.generation_config import (
    generation_json,
    inexpressible_settings,
    load_eos,
    load_generation_config,
    load_sampling_config,
)
from jaxformer.pretrained.loaded import Loaded
from jaxformer.pretrained.loading import (
    is_pretrained,
    load,
    load_pretrained,
    load_without_weights,
    open_folder,
)
from jaxformer.pretrained.peft_adapters import locate_model
from jaxformer.pretrained.peft_saving import save_adapter
from jaxformer.pretrained.published_model import PublishedModel
from jaxformer.pretrained.run_weights import CheckpointName, RunWeights, last_steps, select_weights
from jaxformer.pretrained.saving import save_pretrained
from jaxformer.pretrained.trained_run import TrainedRun

__all__ = [
    "CheckpointName",
    "Loaded",
    "PublishedModel",
    "RunWeights",
    "TrainedRun",
    "generation_json",
    "inexpressible_settings",
    "is_pretrained",
    "last_steps",
    "load",
    "load_eos",
    "load_generation_config",
    "load_pretrained",
    "load_sampling_config",
    "load_without_weights",
    "locate_model",
    "open_folder",
    "save_adapter",
    "save_pretrained",
    "select_weights",
]
