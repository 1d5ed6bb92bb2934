"""Sharding by rules of one's own: `python -m experiments.research.own_rules`.

Where a parameter lives is decided outside the model, by a table over parameter paths: this one
says where those of one's own layers go, and the package's table goes on for the rest.
"""

import sys
from dataclasses import dataclass

import jax
import optax
from jax.sharding import PartitionSpec as P

from experiments import commands
from experiments.planning import start_devices
from experiments.research import series
from experiments.research.inside_linen import SeriesModel
from jaxformer.config import check_least
from jaxformer.parallel import RULES, Devices, Rule, make_mesh, one_device, partition
from jaxformer.training import TrainState, init_state

RULES_OF_OURS = (
    Rule(r"^enter/kernel$", P(None, "fsdp")),  # [1, D]
    Rule(r"^classes/kernel$", P(("fsdp", "tensor"))),  # [D, 2]
    # Against the package's rule, which also cuts it along fsdp.
    Rule(r"feed_forward/up/kernel$", P(None, "tensor")),  # [D, F]
)
"""The first rule that finds a path decides."""


@dataclass(frozen=True)
class RulesOptions:
    """How many steps are made, on four virtual devices of the CPU and on one."""

    steps: int = 5

    def __post_init__(self):
        check_least(self, 1, "steps")


def make_state() -> TrainState:
    """The state of `inside_linen.SeriesModel` before its first step."""
    params = SeriesModel(series.SIZES).init(jax.random.key(0), series.draw(0).series[:2])["params"]
    return init_state(params, optax.sgd(0.1), jax.random.key(1))


def train(devices: Devices, steps: int) -> tuple[TrainState, list[float]]:
    """The state after `steps` on `devices`, and the loss before each."""
    step = devices.step(series.loss_of(SeriesModel(series.SIZES)), optax.sgd(0.1))
    state, losses = devices.init(make_state), []
    for number in range(steps):
        state, metrics = step(state, devices.place(series.draw(number)))
        losses.append(float(metrics["loss"] / metrics["tokens"]))
    return state, losses


def layout(state: TrainState) -> list[str]:
    """A line for each parameter: its path, its shape, and the shape of a device's part of it."""
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        part = leaf.addressable_shards[0].data.shape
        lines.append(f"{name:45} {list(leaf.shape)} -> {list(part)}")
    return lines


def main(options: RulesOptions) -> None:
    """Prints what a device holds of each parameter, and the losses on four devices and on one."""
    start_devices(4)
    devices = partition(make_mesh("fsdp=2,tensor=2"), (*RULES_OF_OURS, *RULES))
    state, apart = train(devices, options.steps)
    print("\n".join(layout(state)))
    _, alone = train(one_device(), options.steps)
    for name, losses in (("four devices", apart), ("one device", alone)):
        print(f"{name:13} losses", " ".join(f"{loss:.6f}" for loss in losses))


if __name__ == "__main__":
    options = {"default": RulesOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
