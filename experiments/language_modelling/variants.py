"""Variants of the tables of results, for `experiments.sweep --cells`."""

from collections.abc import Iterator

from experiments.harness.results.sweeping import Overrides


def shakespeare_changes() -> Iterator[Overrides]:
    """`shakespeare_char_cpu`, and one change after the other, none with more parameters."""
    changes: list[Overrides] = [
        {},
        {"model.positions": "rotary"},
        {"model.norm.kind": "rms"},
        {
            "model.feed_forward.gated": True,
            "model.feed_forward.activation": "silu",
            "model.d_ff": 346,
        },
        {"optimizer.learning_rate": 3e-3},
        {"optimizer.name": "muon"},
        {
            "model.num_decoder_layers": 6,
            "model.d_model": 104,
            "model.d_ff": 280,
            "model.embeddings.tied": "none",
            "model.attention.query_key_norm": True,
            "optimizer.learning_rate": 4e-3,
            "optimizer.min_lr_ratio": 0.0,
        },
    ]
    made: Overrides = {}
    for change in changes:
        made |= change
        yield dict(made)
