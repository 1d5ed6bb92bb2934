"""The share of a GPU's memory that a command takes."""

import os

GPU_MEMORY_SHARE = 0.9
"""NVIDIA advises 0.8 to 0.9 for JAX, which takes 0.75 if nothing is said. The rest is for CUDA,
cuDNN and NCCL."""

_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
_OF_USERS = (
    _VARIABLE,
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)
"""Environment variables by which a user says how JAX takes memory (docs.jax.dev, "GPU memory
allocation")."""


def take_gpu_memory() -> None:
    """Lets JAX take `GPU_MEMORY_SHARE` of each GPU, unless the user has said otherwise.

    It works before JAX starts its devices, and also for the processes that this one starts.
    """
    if not any(name in os.environ for name in _OF_USERS):
        os.environ[_VARIABLE] = str(GPU_MEMORY_SHARE)
