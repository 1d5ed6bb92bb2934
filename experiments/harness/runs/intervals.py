"""Confidence intervals of means over runs."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxformer import optional_dependencies


def t_half_width(values: Float[np.ndarray, " runs"]) -> float:
    """Half of the 95 % t-interval of the mean of `values`; NaN for fewer than two."""
    if len(values) < 2:
        return float("nan")
    return _half_width(lambda stats: stats.ttest_1samp(values, 0.0))


def welch_half_width(a: Float[np.ndarray, " M"], b: Float[np.ndarray, " N"]) -> float:
    """Half of the 95 % interval of the difference of two means; NaN for fewer than two values."""
    if min(len(a), len(b)) < 2:
        return float("nan")
    if a.std() + b.std() == 0:
        return 0.0
    return _half_width(lambda stats: stats.ttest_ind(a, b, equal_var=False))


def _half_width(test: Callable[[Any], Any]) -> float:
    """Half of the 95 % interval of `test(scipy.stats)`; equal values are no warning."""
    stats = optional_dependencies.load("scipy.stats")  # its import takes a second
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        interval = test(stats).confidence_interval()
    return float(interval.high - interval.low) / 2
