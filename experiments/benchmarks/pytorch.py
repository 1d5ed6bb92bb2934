"""PyTorch as it is measured, and what is told of its models."""

from types import ModuleType
from typing import Any

from jaxformer import extras
from jaxformer.processors import cores


def load(threads: int | None = None) -> ModuleType:
    """PyTorch on `threads`, None for as many as this process has processors."""
    torch = extras.load("torch")
    torch.set_num_threads(threads or cores())
    return torch


def facts(model: Any) -> dict[str, Any]:
    """How many numbers the model holds, and on how many threads PyTorch runs."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": count, "threads": extras.load("torch").get_num_threads()}
