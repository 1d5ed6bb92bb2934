"""Devices that a step is compiled for and that this machine need not have.

Compiling needs the compiler, not the device: `libtpu` for a TPU (extra `compilers`), JAX's CUDA
plugin for an NVIDIA GPU (extra `cuda13`). Nothing can be run on these devices.
"""

import contextlib
import math
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from experiments.harness.training.chips import ACCELERATORS
from jaxformer.distributed.mesh import Device
from jaxformer.errors import ConfigError, MissingExtra
from jaxformer.optional_dependencies import packages_of

Compiler = Literal["cpu", "tpu", "cuda"]

# libtpu reads them when it is loaded. They stop it from asking for a machine in Google's cloud, and
# let several processes load it.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class TpuCore(NamedTuple):
    """Figures of a TPU chip from which the time of a step is computed.

    `clock` is in cycles per second: the peak FLOP/s / the FLOPs a cycle of the matrix units. `link`
    is in bytes per second: what a chip sends along one axis of its torus, in both directions
    together; `network`, what it sends to other slices.
    """

    clock: float
    link: float
    network: float
    host: str  # a topology to compile for one chip, whose first device is used
    devices: int = 1  # of a chip, as JAX sees it


TPUS = {
    # 4 matrix units; links and network: jax-ml.github.io/scaling-book, "TPU specs".
    "v5e": TpuCore(1.5e9, 0.9e11, 3.125e9, "1x1"),
    # 8 matrix units in two cores, which JAX sees as one device.
    "v5p": TpuCore(1.75e9, 1.8e11, 6.25e9, "2x2x1"),
    "v6e": TpuCore(1.75e9, 1.8e11, 12.5e9, "1x1"),
    # One of the two cores of a chip, with half of its links; 4 matrix units.
    "tpu7x": TpuCore(2.2e9, 0.9e11, 6.25e9, "1x1x1", devices=2),
}


GPUS = {path.stem: path for path in sorted((Path(__file__).parent / "gpus").iterdir())}
"""Files of XLA's GpuTargetConfigProto by name. XLA has such files itself, but JAX has no function
that takes one by its name."""


class Target(NamedTuple):
    """Devices by name: `h100`, `h100x8`, `v5e`, `v5e:4x4`, `2xv5e:4x4` (two slices).

    `count` is the number of devices, 0 where the name does not say one; a chip of `tpu7x` is two.
    `topology` is the shape of each of `slices` of TPUs, such as "4x4", else "".
    """

    accelerator: str
    count: int  # type: ignore[assignment]  # hides `tuple.count`
    topology: str
    slices: int = 1

    def devices_of(self, mesh_size: int, strategy: str) -> int:
        """The number of devices for a mesh of `mesh_size`.

        Raises `ConfigError` for several devices with the strategy "single".
        """
        if strategy == "single" and self.count > 1:
            raise ConfigError(
                f"the target has {self.count} devices, but strategy='single' uses one of them: "
                "give --strategy replicated or sharded"
            )
        return self.count or mesh_size


def parse_target(name: str) -> Target:
    """The target that `name` says; `ConfigError` for an unknown one."""
    match = _TARGET.fullmatch(name)
    if match is None or not _is_target(match):
        raise ConfigError(
            f"target={name!r} is unknown: give one of {', '.join(ACCELERATORS)}; several GPUs as "
            "h100x8, several chips of a TPU as v5e:4x4, slices of them as 2xv5e:4x4"
        )
    accelerator = match["accelerator"]
    topology = match["topology"] or ""
    slices = int(match["slices"] or 1)
    count = 0  # the name does not say a number
    if topology:
        chips = math.prod(map(int, topology.split("x")))
        count = slices * chips * TPUS[accelerator].devices
    elif match["gpus"]:
        count = int(match["gpus"])
    if count == 0 and (topology or match["gpus"]):
        raise ConfigError(f"target={name!r} has no devices: give at least one")
    return Target(accelerator, count, topology, slices)


_TARGET = re.compile(
    r"(?:(?P<slices>\d+)x)?(?P<accelerator>[a-z]\w*?)(?:x(?P<gpus>\d+)|:(?P<topology>\d+(?:x\d+)+))?"
)


def _is_target(match: re.Match[str]) -> bool:
    """Whether the parts of a name fit together: only TPUs have a topology, only GPUs a number."""
    if match["accelerator"] not in ACCELERATORS:
        return False
    if match["accelerator"] in TPUS:
        return not match["gpus"] and (bool(match["topology"]) or not match["slices"])
    return not match["topology"] and not match["slices"]


def check_compiler(compiler: Compiler, target: Target) -> None:
    """Raises `ConfigError` where `compiler` cannot compile for `target`."""
    allowed = {"cpu": tuple(ACCELERATORS), "tpu": tuple(TPUS), "cuda": tuple(GPUS)}
    if target.accelerator not in allowed[compiler]:
        raise ConfigError(
            f"--compiler {compiler} compiles for {', '.join(allowed[compiler])}, but the target is "
            f"{target.accelerator}: choose another of the two; --compiler cpu estimates any target"
        )


def devices(target: Target, count: int) -> Sequence[Device]:
    """The `count` devices of a target to compile for with its own compiler.

    JAX itself runs on the CPU. Raises `MissingExtra` without that compiler, and `ConfigError` for
    an unknown topology.
    """
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_platforms", "cpu")
    if target.accelerator in TPUS:
        return _tpu_devices(target, count)
    return _gpu_devices(target, count)


def _tpu_devices(target: Target, count: int) -> Sequence[Device]:
    from jax.experimental import topologies

    if find_spec("libtpu") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise MissingExtra(
            "--compiler tpu needs libtpu, which is not installed: pip install "
            f"{packages_of('compilers') or 'libtpu'} with Python 3.12 or later (this is {version}) "
            "or -e '.[compilers]' in a copy of the repository; --compiler cpu needs no other "
            "compiler"
        )
    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)
    topology = target.topology or TPUS[target.accelerator].host
    if count > 1 and not target.topology:
        raise ConfigError(
            f"a mesh of {count} devices needs as many chips, but the target {target.accelerator} "
            f"is one: say their topology, such as {target.accelerator}:4x4"
        )
    name = f"{target.accelerator}:{topology}"
    try:
        slices = {"num_slices": target.slices} if target.slices > 1 else {}
        described = topologies.get_topology_desc(name, "tpu", **slices).devices
    except Exception as error:
        message = " ".join(str(error).split())
        raise ConfigError(
            f"libtpu knows no topology {name!r} ({message[:200]}): give one such as v5e:4x4, "
            "v5p:2x2x2"
        ) from error
    return described[:count]


def _gpu_devices(target: Target, count: int) -> Sequence[Device]:
    from jax.experimental import topologies

    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(find_spec(name) for name in plugins):
        raise MissingExtra(
            "--compiler cuda needs JAX's CUDA plugin, which is not installed: pip install "
            "'jax[cuda13]'; no GPU is needed. --compiler cpu needs no other compiler"
        )
    config = GPUS[target.accelerator].read_text(encoding="utf-8")
    _answer_for(config)
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config, topology=f"1x1x{count}"
    ).devices


def _answer_for(gpu_config: str) -> None:
    """Tells JAX's cuDNN attention the compute capability of the GPU that `gpu_config` describes.

    It would ask the first GPU of the process, which has none, and refuse heads of more than 128.
    """
    from jax._src.cudnn import fused_attention_stablehlo

    capability = re.search(r"cuda_compute_capability \{([^}]*)", gpu_config)
    numbers = re.findall(r"\d+", capability[1]) if capability else []
    known = tuple(map(int, [*numbers, "0"][:2]))  # a minor version of 0 is left out

    def at_least(required: str) -> bool:
        return known >= tuple(map(int, required.split(".")))

    fused_attention_stablehlo.check_compute_capability = at_least


def start_devices(count: int) -> None:
    """Starts JAX with `count` virtual devices of the CPU.

    Raises `ConfigError` if JAX has already started with other devices.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has started, perhaps with these devices
    if jax.device_count() != count or jax.default_backend() != "cpu":
        raise ConfigError(
            f"a plan for {count} devices needs as many virtual ones, but JAX has started with "
            f"{jax.device_count()} on {jax.default_backend()}: plan in a new process"
        )
