"""Compares jaxformer's Transformer with PyTorch's: `python -m experiments.torch_reference.compare`.

Both start from the same weights and get the same batches. Prints the differences of outputs,
gradients and training, and the time of an update; writes runs/torch_reference/NAME.
"""

import json
import os
from dataclasses import dataclass, replace
from typing import Any

import jax

from experiments.harness import cli
from experiments.harness.planning import with_options
from experiments.harness.runs import run_folder
from experiments.translation.prepare import Prepared, describe, prepare
from experiments.translation.presets import PRESETS, TranslationConfig
from jaxformer import optional_dependencies
from jaxformer.config import Sinusoidal, check_at_least


@dataclass(frozen=True)
class Comparison(TranslationConfig):
    """A preset of translation, and the length of the comparison."""

    steps: int = 100
    """Number of updates of which the losses are compared."""
    rounds: int = 5
    """Number of timed rounds; each measures both models."""
    timed_steps: int = 10
    """Number of updates of each model in a round."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 1, "steps", "rounds", "timed_steps")


def presets() -> dict[str, Comparison]:
    """Returns the presets that the PyTorch reference supports.

    `grammar` is made smaller, with the positions of the paper and one batch shape, so that the
    comparison takes about a minute.
    """
    grammar, tiny = PRESETS["grammar"], PRESETS["multi30k_tiny"]
    sizes = replace(grammar.model, d_model=64, d_ff=128, vocab_size=1_000, positions=Sinusoidal())
    data = replace(grammar.data, buckets=1, batch_tokens=1_024)
    grammar = replace(grammar, model=sizes, data=data)
    return with_options({preset.name: preset for preset in (grammar, tiny)}, Comparison)


def main(config: Comparison) -> None:
    """Prints the comparison; writes comparison.json and the losses of each step."""
    torch = optional_dependencies.load("torch")
    from experiments.torch_reference import comparison

    run = run_folder.open_run(config.runs, "torch_reference", config.name, config)
    run.resume(0)
    prepared = prepare(config, run.folder)
    print(describe(prepared))
    no_dropout = _without_dropout(prepared)
    side = comparison.assemble_jax(config, no_dropout)
    agreement = comparison.agreement(side)
    trajectory = comparison.trajectory(side, config.steps)
    timed = (
        side if no_dropout.model == prepared.model else comparison.assemble_jax(config, prepared)
    )
    speed = comparison.speed(timed, config.timed_steps, config.rounds)
    for number, losses in enumerate(zip(*trajectory[:3], strict=True), start=1):
        run.log(
            number, **dict(zip(("loss", "reference_loss", "rounding_loss"), losses, strict=True))
        )
    run.close()
    found = {
        "agreement": agreement._asdict(),
        "trajectory": trajectory._asdict(),
        "speed": speed._asdict(),
        "threads": {"cores": os.cpu_count(), "torch": torch.get_num_threads()},
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
    }
    text = json.dumps(found, indent=2) + "\n"
    (run.folder / "comparison.json").write_text(text, encoding="utf-8")
    print("\n".join(report(found)))
    print(f"all numbers: {run.folder / 'comparison.json'}")


def report(found: dict) -> list[str]:
    """Returns the lines of the table that `main` prints."""
    agreement, trajectory, speed = found["agreement"], found["trajectory"], found["speed"]
    apart = _relative(trajectory["jaxformer"], trajectory["reference"])
    rounding = _relative(trajectory["jaxformer"], trajectory["rounding"])
    steps = len(apart)
    lines = [
        "same weights, one batch                  reference against jaxformer",
        f"  logits, greatest difference                 {agreement['logits']:.1e}",
        f"  loss, relative                              {agreement['loss']:.1e}",
        f"  gradient, norm of the difference, relative  {agreement['gradient']:.1e}",
        "",
        "training, loss in nats per token   "
        "jaxformer reference  apart  jaxformer after rounding, apart",
    ]
    for number in sorted({1, 2, 5, 10, 20, 50, steps}):
        if number <= steps:
            i = number - 1
            pair = f"{trajectory['jaxformer'][i]:14.4f} {trajectory['reference'][i]:9.4f}"
            lines.append(f"  before update {number:<12} {pair} {apart[i]:9.1e} {rounding[i]:19.1e}")
    versions, threads = found["versions"], found["threads"]
    return [
        *lines,
        f"  greatest of {steps} updates {'':>29}{max(apart):9.1e} {max(rounding):19.1e}",
        f"  final weights, relative to their movement {trajectory['weights']:15.1e} "
        f"{trajectory['rounding_weights']:19.1e}",
        "",
        f"an update, median of {len(speed['rounds_jaxformer'])} rounds in turn, "
        f"{threads['cores']} cores ({threads['torch']} threads of torch)",
        f"  jaxformer, JAX {versions['jax']:<13} {speed['jaxformer']:9.1f} ms",
        f"  reference, PyTorch {versions['torch']:<9} {speed['reference']:9.1f} ms "
        f"({speed['reference'] / speed['jaxformer']:.2f} times jaxformer)",
    ]


def _relative(values: list[float], others: list[float]) -> list[float]:
    return [abs(a - b) / abs(a) for a, b in zip(values, others, strict=True)]


def _without_dropout(prepared: Prepared) -> Prepared:
    """Dropout draws different random numbers in the two libraries, so it is switched off."""
    rates: dict[str, Any] = {
        f"{kind}dropout_rate": 0.0 for kind in ("", "attention_", "activation_", "word_")
    }
    return prepared._replace(model=replace(prepared.model, **rates))


if __name__ == "__main__":
    cli.start(main, presets(), __doc__)
