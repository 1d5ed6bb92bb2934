"""Loss by parameters and tokens, a law fitted to a sweep: `experiments.language_modelling.scaling`.

    python -m experiments.language_modelling.scaling runs/sweeps/scaling --figure scaling.svg

The law is that of Hoffmann et al. 2022 (equation 2 and approach 3): E + A / N^a + B / D^b nats per
token for N parameters and D tokens. N are the parameters that are multiplied: FLOPs / (6 D).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from experiments.harness import cli
from experiments.harness.results.groups import expand, read_json
from experiments.harness.results.plots import COLORS
from experiments.harness.runs import run_folder
from experiments.harness.training.flops import causal_flops
from experiments.language_modelling.presets import LanguageConfig
from jaxformer import optional_dependencies
from jaxformer.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ScalingOptions:
    """The runs, and the file of the figure."""

    runs: tuple[str, ...] = ()
    """Finished runs of causal models on one text, or folders with such runs below them."""
    figure: str = ""
    """File of the figure, such as scaling.svg; empty: none."""


class Training(NamedTuple):
    """A finished training: N, D, nats per token of the test text, and D (width) and layers."""

    parameters: float
    tokens: float
    loss: float
    size: str

    @property
    def flops(self) -> float:
        """FLOPs of the training by the model's equations."""
        return 6.0 * self.parameters * self.tokens


class Law(NamedTuple):
    """floor + size / N^size_power + data / D^data_power, in nats per token."""

    floor: float
    size: float
    size_power: float
    data: float
    data_power: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats per token of a model of `parameters` after `tokens`."""
        by_size = self.size / parameters**self.size_power
        return self.floor + by_size + self.data / tokens**self.data_power

    def best_parameters(self, flops: float) -> float:
        """The N of the least loss that `flops` = 6 N D buy (Hoffmann et al. 2022, equation 4)."""
        powers = self.size_power + self.data_power
        balance = self.size_power * self.size / (self.data_power * self.data)
        return balance ** (1 / powers) * (flops / 6) ** (self.data_power / powers)


def read(folders: Iterable[str | Path]) -> list[Training]:
    """The finished runs in `folders`, the smallest model first."""
    trainings = []
    for folder in expand(folders, finished=True):
        config = run_folder.load_config(folder, LanguageConfig)
        model, data = config.model, config.data
        scores = read_json(folder / "scores.json")
        if config.objective != "causal" or "loss" not in scores:
            raise DataError(f"{folder} has no loss of a causal model: give finished runs of one")
        tokens = config.optimizer.total_steps * data.batch_size * data.seq_len
        flops = causal_flops(model, data.batch_size, data.seq_len) * config.optimizer.total_steps
        size = f"{model.num_decoder_layers} layers of {model.d_model}"
        trainings.append(Training(flops / (6 * tokens), tokens, scores["loss"], size))
    return sorted(trainings)


def fit(trainings: Sequence[Training]) -> Law:
    """The law with the least Huber loss of log-losses, of the best of 81 starts.

    Raises `DataError` for fewer than six trainings: the law has five constants.
    """
    if len(trainings) < 6:
        raise DataError(
            f"a law of five constants needs 6 trainings, but {len(trainings)} are given"
        )
    optimize = optional_dependencies.load("scipy.optimize")
    parameters, tokens, losses = np.array([each[:3] for each in trainings]).T

    def errors(constants: np.ndarray) -> np.ndarray:
        floor, size, size_power, data, data_power = constants
        terms = floor, size - size_power * np.log(parameters), data - data_power * np.log(tokens)
        return np.logaddexp.reduce(np.broadcast_arrays(*terms)) - np.log(losses)

    starts = [
        (floor, size, power, data, power)
        for floor in (-1.0, 0.0, 1.0)
        for size in (0.0, 5.0, 10.0)
        for data in (0.0, 5.0, 10.0)
        for power in (0.1, 0.3, 0.6)
    ]
    fits = [optimize.least_squares(errors, x, loss="huber", f_scale=1e-2) for x in starts]
    floor, size, size_power, data, data_power = min(fits, key=lambda each: each.cost).x
    return Law(math.exp(floor), math.exp(size), size_power, math.exp(data), data_power)


def draw(trainings: Sequence[Training], law: Law) -> "Figure":
    """Loss against FLOPs: a line of dots for each size, and the least loss that the law gives."""
    figure = optional_dependencies.load("matplotlib.figure").Figure(
        (6.4, 4.0), layout="constrained"
    )
    axes = figure.subplots()
    for size, color in zip(dict.fromkeys(each.size for each in trainings), COLORS, strict=False):
        same = sorted((each.flops, each.loss) for each in trainings if each.size == size)
        axes.plot(*zip(*same, strict=True), "o-", color=color, label=size)
    spent = [each.flops for each in trainings]
    budgets = np.geomspace(min(spent), max(spent), 50).tolist()
    best = [law.best_parameters(flops) for flops in budgets]
    losses = [law.loss(n, flops / (6 * n)) for n, flops in zip(best, budgets, strict=True)]
    axes.plot(budgets, losses, "k--", label="the best size, by the law")
    axes.set(xscale="log", xlabel="FLOPs of the training", ylabel="test loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def main(options: ScalingOptions) -> None:
    """Prints the law and how well it fits, and writes the figure."""
    trainings = read(options.runs)
    law = fit(trainings)
    print(
        f"{law.floor:.2f} + {law.size:.3g} / N^{law.size_power:.2f} + "
        f"{law.data:.3g} / D^{law.data_power:.2f} nats per token"
    )
    for each in trainings:
        print(
            f"  {each.size:16} N {each.parameters:9.3g}  D {each.tokens:9.3g}  "
            f"FLOPs {each.flops:8.1e}  loss {each.loss:.3f}  "
            f"by the law {law.loss(*each[:2]):.3f}"
        )
    for flops in sorted({float(f"{each.flops:.1e}") for each in trainings}):
        print(f"  best for {flops:.1e} FLOPs: N {law.best_parameters(flops):.2g}")
    if options.figure:
        draw(trainings, law).savefig(options.figure)
        print(f"the figure is in {options.figure}")


if __name__ == "__main__":
    cli.start(main, {"default": ScalingOptions()}, __doc__, positional="runs")
