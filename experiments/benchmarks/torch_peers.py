"""PyTorch as a peer of benchmarks."""

from types import ModuleType
from typing import Any

from jaxformer import optional_dependencies
from jaxformer.runtime import cpu_count


def load_torch(threads: int | None = None) -> ModuleType:
    """PyTorch, set to `threads`; None: as many as this process has processors."""
    torch = optional_dependencies.load("torch")
    torch.set_num_threads(threads or cpu_count())
    return torch


def torch_metadata(model: Any) -> dict[str, Any]:
    """The number of parameters of `model` and of PyTorch's threads."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": count, "threads": optional_dependencies.load("torch").get_num_threads()}
