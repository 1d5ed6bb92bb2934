"""Our Transformer and its twin in PyTorch: `python -m experiments.pytorch_twin.compare`.

From the same weights and on the same batches: outputs, gradients, a training, and the time of an
update. Prints a table; all numbers are kept in runs/pytorch_twin/NAME.
"""

import json
import os
import sys
from dataclasses import dataclass, replace

import jax

from experiments import commands, runs
from experiments.planning import with_machine
from experiments.translation.prepare import Prepared, describe, prepare
from experiments.translation.presets import PRESETS, TranslationConfig
from jaxformer import extras
from jaxformer.config import check_least


@dataclass(frozen=True)
class Comparison(TranslationConfig):
    """A preset of translation, and how long to look: `steps` updates side by side.

    The time of an update is the median of `rounds` of `timed_steps` each, the two in turn.
    """

    steps: int = 100
    rounds: int = 5
    timed_steps: int = 10

    def __post_init__(self):
        super().__post_init__()
        check_least(self, 1, "steps", "rounds", "timed_steps")


def presets() -> dict[str, Comparison]:
    """The presets whose model the twin has.

    That of the grammar is smaller, has the positions of the paper, and one shape of batch, so that
    the whole comparison takes about a minute.
    """
    grammar, tiny = PRESETS["grammar"], PRESETS["multi30k_tiny"]
    sizes = replace(grammar.model, d_model=64, d_ff=128, vocab_size=1_000, positions="sinusoidal")
    data = replace(grammar.data, buckets=1, tokens=1_024)
    grammar = replace(grammar, model=sizes, data=data)
    return with_machine({preset.name: preset for preset in (grammar, tiny)}, Comparison)


def main(config: Comparison) -> None:
    """Prints the comparison and writes comparison.json, and each step's losses beside it."""
    torch = extras.load("torch")
    from experiments.pytorch_twin import comparison

    run = runs.open_run(config.runs, "pytorch_twin", config.name, config)
    run.resume(0)
    prepared = prepare(config, run.folder)
    print(describe(prepared))
    quiet = _without_dropout(prepared)
    ours = comparison.assemble_ours(config, quiet)
    same = comparison.agreement(ours)
    course = comparison.trajectory(ours, config.steps)
    noisy = ours if quiet.model == prepared.model else comparison.assemble_ours(config, prepared)
    speed = comparison.speed(noisy, config.timed_steps, config.rounds)
    for number, losses in enumerate(zip(*course[:3], strict=True), start=1):
        run.log(number, **dict(zip(("loss", "twin_loss", "rounding_loss"), losses, strict=True)))
    run.close()
    found = {
        "agreement": same._asdict(),
        "trajectory": course._asdict(),
        "speed": speed._asdict(),
        "threads": {"cores": os.cpu_count(), "torch": torch.get_num_threads()},
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
    }
    text = json.dumps(found, indent=2) + "\n"
    (run.folder / "comparison.json").write_text(text, encoding="utf-8")
    print("\n".join(report(found)))
    print(f"all numbers: {run.folder / 'comparison.json'}")


def report(found: dict) -> list[str]:
    """The lines of the table that `main` prints."""
    same, course, speed = found["agreement"], found["trajectory"], found["speed"]
    apart = _apart(course["ours"], course["twin"])
    rounding = _apart(course["ours"], course["rounding"])
    steps = len(apart)
    lines = [
        "with equal weights, on one batch              twin against ours",
        f"  logits, greatest difference                 {same['logits']:.1e}",
        f"  loss, relative                              {same['loss']:.1e}",
        f"  gradient, norm of the difference, relative  {same['gradient']:.1e}",
        "",
        "training, loss in nats a token    ours      twin   apart   ours moved by rounding, apart",
    ]
    for number in sorted({1, 2, 5, 10, 20, 50, steps}):
        if number <= steps:
            i = number - 1
            pair = f"{course['ours'][i]:9.4f} {course['twin'][i]:9.4f}"
            lines.append(f"  before update {number:<12} {pair} {apart[i]:9.1e} {rounding[i]:15.1e}")
    versions, threads = found["versions"], found["threads"]
    return [
        *lines,
        f"  greatest of {steps} updates {'':>24}{max(apart):9.1e} {max(rounding):15.1e}",
        f"  weights at the end, of the way they went  {course['weights']:10.1e} "
        f"{course['rounding_weights']:15.1e}",
        "",
        f"an update, median of {len(speed['rounds_ours'])} rounds in turn, "
        f"{threads['cores']} cores ({threads['torch']} threads of torch)",
        f"  ours, JAX {versions['jax']:<18} {speed['ours']:9.1f} ms",
        f"  twin, PyTorch {versions['torch']:<14} {speed['twin']:9.1f} ms "
        f"({speed['twin'] / speed['ours']:.2f} times ours)",
    ]


def _apart(ours: list[float], theirs: list[float]) -> list[float]:
    return [abs(a - b) / abs(a) for a, b in zip(ours, theirs, strict=True)]


def _without_dropout(prepared: Prepared) -> Prepared:
    """The two draw other random numbers, so only without any are they one function."""
    rates = {f"{kind}dropout_rate": 0.0 for kind in ("", "attention_", "activation_")}
    return prepared._replace(model=replace(prepared.model, **rates))


if __name__ == "__main__":
    sys.exit(commands.run(lambda: main(commands.parse(presets(), description=__doc__))))
