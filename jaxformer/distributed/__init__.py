"""The same training step on one device or on many; the strategy is a value, chosen once.

    strategy = single()                                           # jit
    strategy = replicated()                                       # data parallel
    strategy = sharded(make_mesh("data=2,fsdp=2,tensor=2")).for_model(model)  # a divided state

    state = strategy.init(make_state)
    step = strategy.step(loss, optimizer, grad_accumulation=4)
    state, metrics = step(state, strategy.shard_batch(batch))

All three compute the same gradient: sums are added over devices and divided once, and dropout
depends on the example's id, not on how a batch is split (`jaxformer.ops.dropout`).
"""

from jaxformer.distributed.compiled_step import CompiledStep
from jaxformer.distributed.device_memory import check_fits
from jaxformer.distributed.joining import initialize
from jaxformer.distributed.mesh import make_mesh, parse_mesh
from jaxformer.distributed.processes import agreed, assert_processes_agree
from jaxformer.distributed.sharding_rules import RULES, partition_specs
from jaxformer.distributed.strategies import Strategy, replicated, sharded, single, strategy_of
from jaxformer.distributed.termination import Termination

__all__ = [
    "RULES",
    "CompiledStep",
    "Strategy",
    "Termination",
    "agreed",
    "assert_processes_agree",
    "check_fits",
    "initialize",
    "make_mesh",
    "parse_mesh",
    "partition_specs",
    "replicated",
    "sharded",
    "single",
    "strategy_of",
]
