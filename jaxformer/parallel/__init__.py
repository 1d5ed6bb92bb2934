"""The same step on many devices: what differs is a value, chosen once.

    devices = one_device()                                        # jit
    devices = replicate()                                         # pmap, data parallel
    devices = partition(make_mesh("data=2,fsdp=2,tensor=2"))      # jit over a mesh

    state = devices.init(make_state)
    step = devices.step(loss, optimizer, accumulation=4)
    state, metrics = step(state, devices.place(batch))

All three compute one gradient: sums cross devices, are divided once, and dropout belongs to the
row (`jaxformer.dropout`).
"""

from jaxformer.parallel.devices import (
    Devices,
    OneDevice,
    Partitioned,
    Program,
    Replicated,
    one_device,
    partition,
    replicate,
)
from jaxformer.parallel.machines import agree, start
from jaxformer.parallel.mesh import AXES, make_mesh, parse_mesh
from jaxformer.parallel.rules import RULES, Rule, partition_specs

__all__ = [
    "AXES",
    "RULES",
    "Devices",
    "OneDevice",
    "Partitioned",
    "Program",
    "Replicated",
    "Rule",
    "agree",
    "make_mesh",
    "one_device",
    "parse_mesh",
    "partition",
    "partition_specs",
    "replicate",
    "start",
]
