"""Where a measurement was made: what is printed and kept with every result."""

import datetime
import importlib.metadata
import os
import platform
from contextlib import suppress
from pathlib import Path

from jaxformer.processors import cores

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
    """Date (UTC), processor, cores of this process, load of the last minute, and versions.

    None for a package that is not installed. No device is touched: what a subject computes on is
    among its own facts.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": cores(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; that of its kind where the system does not tell."""
    with suppress(OSError):
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
