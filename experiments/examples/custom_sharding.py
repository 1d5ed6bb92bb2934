"""Shards a model by custom rules: `python -m experiments.examples.custom_sharding`.

Rules map parameter paths to mesh axes. Custom rules come first and the package's rules follow.
"""

from dataclasses import dataclass

import jax
import optax
from jax.sharding import PartitionSpec as P

from experiments.examples import series
from experiments.examples.inside_linen import SeriesModel
from experiments.harness import cli
from experiments.harness.planning import start_devices
from jaxformer.config import check_at_least
from jaxformer.distributed import RULES, Rule, Strategy, make_mesh, sharded, single
from jaxformer.training.parameters import flatten
from jaxformer.training.train_step import TrainState, init_train_state

CUSTOM_RULES = (
    Rule(r"^enter/kernel$", P(None, "fsdp")),  # [1, D]
    Rule(r"^classes/kernel$", P(("fsdp", "tensor"))),  # [D, 2]
    # The package's rule also divides it along fsdp.
    Rule(r"feed_forward/up/kernel$", P(None, "tensor")),  # [D, F]
)
"""The first rule that matches a path applies."""


@dataclass(frozen=True)
class CustomShardingOptions:
    """How long the model is trained."""

    steps: int = 5
    """Number of training steps, on four virtual devices and on one."""

    def __post_init__(self):
        check_at_least(self, 1, "steps")


def make_state() -> TrainState:
    """Returns the initial state of `inside_linen.SeriesModel`."""
    inputs = series.random_batch(0).series[:2]
    params = SeriesModel().init(jax.random.key(0), inputs)["params"]
    return init_train_state(params, optax.sgd(0.1), jax.random.key(1))


def train(devices: Strategy, steps: int) -> tuple[TrainState, list[float]]:
    """Trains for `steps` on `devices`; returns the state and the loss before each step."""
    step = devices.step(series.loss_of(SeriesModel()), optax.sgd(0.1))
    state, losses = devices.init(make_state), []
    for number in range(steps):
        state, metrics = step(state, devices.shard_batch(series.random_batch(number)))
        losses.append(float(metrics["loss"] / metrics["tokens"]))
    return state, losses


def layout(state: TrainState) -> list[str]:
    """Returns a line for each parameter: path, shape, and the shape of a device's part."""
    lines = []
    for path, leaf in flatten(state.params).items():
        part = leaf.addressable_shards[0].data.shape
        lines.append(f"{path:45} {list(leaf.shape)} -> {list(part)}")
    return lines


def main(options: CustomShardingOptions) -> None:
    """Prints the layout of the parameters, and the losses on four devices and on one."""
    start_devices(4)
    devices = sharded(make_mesh("fsdp=2,tensor=2"), (*CUSTOM_RULES, *RULES))
    state, sharded_losses = train(devices, options.steps)
    print("\n".join(layout(state)))
    _, single_losses = train(single(), options.steps)
    for name, losses in (("four devices", sharded_losses), ("one device", single_losses)):
        print(f"{name:13} losses", " ".join(f"{loss:.6f}" for loss in losses))


if __name__ == "__main__":
    cli.start(main, {"default": CustomShardingOptions()}, __doc__)
