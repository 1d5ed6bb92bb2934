"""Compilers of accelerators that are not here: devices of a topology, and what programs contain."""

from collections import Counter
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

from experiments.harness.planning import ask_for_schedules, devices, parse_target
from experiments.harness.planning.hlo import Program
from experiments.harness.planning.schedules import take_schedules
from jaxformer import DecoderOnly, OptimizerConfig, TransformerConfig
from jaxformer.config import EmbeddingOptions, Learned, NormOptions
from jaxformer.nn.remat import REMAT
from jaxformer.text.data import StreamBatch
from jaxformer.training.losses import causal_loss
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.train_step import init_train_state
from tests.compilers.recorded import Recorded


@pytest.fixture(autouse=True)
def precision_of_users():
    """Products as users' programs have them; the other tests ask for exact ones."""
    with jax.default_matmul_precision("default"):
        yield


@pytest.fixture(autouse=True)
def no_schedules_of_earlier_tests():
    """The schedules that libtpu writes are read once."""
    take_schedules()


@pytest.fixture(scope="session")
def tpu_devices():
    """tpu_devices("v5e:4x4") -> the devices of that topology, to compile for."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install -e '.[compilers]' (Python 3.12)")
    ask_for_schedules()

    def devices_of(name: str) -> list[jax.Device]:
        target = parse_target(name)
        return list(devices(target, target.count))

    return devices_of


@pytest.fixture(scope="session")
def gpus():
    """gpus("h100", 4) -> that many GPUs of one host, to compile for."""
    if find_spec("jax_cuda13_plugin") is None:
        pytest.skip("the CUDA plugin is not installed: pip install -e '.[cuda13]'")

    def devices_of(name: str, count: int) -> list[jax.Device]:
        return list(devices(parse_target(name), count))

    return devices_of


@pytest.fixture(scope="session")
def h100s(gpus):
    """h100s(4) -> that many H100s of one host, to compile for."""
    return partial(gpus, "h100")


KERNELS = {"mosaic": "tpu_custom_call", "triton": "__gpu$xla.gpu.triton", "cudnn": "__cudnn$fmha"}


def counts(compiled: jax.stages.Compiled) -> Counter[str]:
    """The number of times that a step runs a kernel of Mosaic, Triton or cuDNN."""
    executed = Program(compiled.as_text() or "").executed
    return Counter(
        {
            name: sum(run.times for run in executed if run.instruction.target.startswith(target))
            for name, target in KERNELS.items()
        }
    )


CONFIG = TransformerConfig(
    vocab_size=1024,
    d_model=256,
    d_ff=512,
    num_heads=4,
    num_decoder_layers=2,
    max_len=512,
    norm=NormOptions(placement="pre"),
    embeddings=EmbeddingOptions(tied="output"),
    positions=Learned(),
    dtype="bfloat16",
)


def compiled_step(
    strategy,
    rows,
    sharding,
    *,
    block=REMAT["none"],
    config=CONFIG,
    parts=1,
    documents=True,
    compiler_options=None,
    **options,
):
    """The train step of a GPT on packed documents, and the attention functions it uses.

    `options` are those of `Strategy.step`; without `documents` each row is one text.
    """
    attention = Recorded()
    model = DecoderOnly(config, attention, block)
    strategy = strategy.for_model(model)
    optimizer = make_optimizer(OptimizerConfig())

    def make_state():
        params = model.init(jax.random.key(0), jnp.zeros((2, 128), jnp.int32))["params"]
        return init_train_state(params, optimizer, jax.random.key(1))

    def leaf(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    length = config.max_len
    batch = StreamBatch(
        tokens=leaf(jnp.int32, rows, length + 1),
        loss_mask=leaf(jnp.bool_, rows, length),
        example_ids=leaf(jnp.int32, rows),
        segments=leaf(jnp.int32, rows, length + 1) if documents else None,
        positions=leaf(jnp.int32, rows, length + 1) if documents else None,
    )
    step = strategy.step(causal_loss(model), optimizer, grad_accumulation=parts, **options)
    lowered = step.lower(strategy.abstract(make_state), batch)
    program = lowered.compile(compiler_options=compiler_options)
    return program, {name for name, spec in attention.calls if spec.queries == length}
