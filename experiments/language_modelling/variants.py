"""Variants of the tables of results, for `experiments.sweep --cells`."""

from collections.abc import Iterator

from experiments.harness.sweeping import Overrides


def shakespeare_changes() -> Iterator[Overrides]:
    """`shakespeare_char_cpu`, and one change after the other, none with more parameters."""
    changes: list[Overrides] = [
        {},
        {"model.positions": "rotary"},
        {"model.norm": "rms"},
        {"model.gated": True, "model.activation": "silu", "model.d_ff": 346},
        {"optimizer.learning_rate": 3e-3},
        {"optimizer.name": "muon"},
    ]
    made: Overrides = {}
    for change in changes:
        made |= change
        yield dict(made)
