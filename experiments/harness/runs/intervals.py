"""Confidence intervals of means over runs."""

import warnings
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxformer import optional_dependencies


def t_half_width(values: Float[np.ndarray, " runs"]) -> float:
    """Half of the 95 % t-interval of the mean of `values`; NaN for fewer than two."""
    return _half_width("ttest_1samp", values, 0.0) if len(values) > 1 else float("nan")


def welch_half_width(a: Float[np.ndarray, " M"], b: Float[np.ndarray, " N"]) -> float:
    """Half of the 95 % interval of the difference of two means; NaN for fewer than two values."""
    if min(len(a), len(b)) < 2:
        return float("nan")
    return _half_width("ttest_ind", a, b, equal_var=False) if a.std() + b.std() else 0.0


def _half_width(test: str, *values: Any, **options: Any) -> float:
    """Half of the 95 % confidence interval of a test of scipy; equal values are no warning."""
    stats: Any = optional_dependencies.load("scipy.stats")  # its import takes a second
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        interval = getattr(stats, test)(*values, **options).confidence_interval()
    return float(interval.high - interval.low) / 2
