"""Variants of the tables of results, for `experiments.sweep --cells`."""

from collections.abc import Iterator
from typing import Any

from experiments.harness.cli import config_files
from experiments.harness.training.flops import causal_flops
from experiments.language_modelling.presets import python_stdlib

SCALING_SIZES = ((64, 2), (96, 3), (128, 4), (192, 6), (320, 8))
"""D and the number of layers of the models of `scaling`: 0.4 to 11 M parameters."""
SCALING_BUDGETS = (2e12, 6e12, 18e12)
"""FLOPs of a training."""


def shakespeare_changes() -> Iterator[dict[str, Any]]:
    """`shakespeare_char_cpu`, and one change after the other, none with more parameters.

    All have 768 tokens a step.
    """
    changes: list[dict[str, Any]] = [
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
        {"optimizer.momentum": 0.9},
        {"data.seq_len": 256, "data.batch_size": 3, "model.max_len": 256},
    ]
    made: dict[str, Any] = {}
    for change in changes:
        made |= change
        yield dict(made)


def scaling() -> Iterator[dict[str, Any]]:
    """`python_stdlib` in five sizes, each trained with three budgets of FLOPs.

    Heads have 32 features, F is 8/3 D as in the preset, and a twentieth of the steps is warm-up.
    """
    for width, layers in SCALING_SIZES:
        hidden = round(width * 8 / 3 / 8) * 8
        sizes: dict[str, Any] = {
            "model.d_model": width,
            "model.d_ff": hidden,
            "model.num_heads": width // 32,
            "model.num_decoder_layers": layers,
        }
        model = config_files.with_overrides(python_stdlib, sizes).model
        rows = 8
        length = python_stdlib.data.seq_len
        for budget in SCALING_BUDGETS:
            steps = round(budget / causal_flops(model, rows, length))
            yield {
                **sizes,
                "data.batch_size": rows,
                "optimizer.total_steps": steps,
                "optimizer.warmup_steps": max(steps // 20, 2),
            }
