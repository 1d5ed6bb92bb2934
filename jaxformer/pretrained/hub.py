"""Names of a hub as folders."""

import os
import re
from pathlib import Path

from jaxformer import extras
from jaxformer.config import ConfigError

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.spm", "*.model"]


def locate(name: str | os.PathLike[str]) -> Path:
    """The folder `name`, or where there is none the hub's model of this name, downloaded.

    `MissingExtra` for a hub's name without `huggingface_hub`; `ConfigError` for what is neither a
    folder nor such a name, or cannot be had.
    """
    path = Path(name)
    if path.exists() or not isinstance(name, str) or not _NAME.fullmatch(name):
        return path
    try:
        library = extras.load("huggingface_hub")
    except extras.MissingExtra as error:
        raise extras.MissingExtra(f"{name} is not a folder; as a hub's name, {error}") from error
    try:
        return Path(library.snapshot_download(name, allow_patterns=_WANTED))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name} is not a folder, and the hub does not give it: {str(error)[:300]}"
        ) from error
