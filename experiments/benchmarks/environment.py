"""The machine and the versions of a measurement, and PyTorch on all processors."""

import datetime
import importlib.metadata
import os
import platform
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxformer import optional_dependencies
from jaxformer.runtime import cpu_count

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "torch",
    "transformers",
    "ctranslate2",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu13",
)


def environment() -> dict[str, str | int | float | None]:
    """Returns date (UTC), processor, cores of this process, load of the last minute, versions.

    A package that is not installed has None. No device is started: each case reports its device.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the name of the processor, or of its architecture where `info` has none."""
    with suppress(OSError):
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load_torch(threads: int | None = None) -> ModuleType:
    """Returns PyTorch, set to `threads`; None: as many as this process has processors."""
    torch = optional_dependencies.load("torch")
    torch.set_num_threads(threads or cpu_count())
    return torch


def torch_metadata(model: Any) -> dict[str, Any]:
    """Returns the number of parameters of `model` and of PyTorch's threads."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": count, "threads": optional_dependencies.load("torch").get_num_threads()}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
