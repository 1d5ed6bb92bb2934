"""Rotary frequencies for longer texts than in training."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float

from jaxformer.config.checks import Checked, Count, NonNegative, Positive, Range
from jaxformer.errors import ConfigError

Rates = Float[np.ndarray, " half"]
"""The angle per position of each rotated pair."""


@dataclass(frozen=True)
class NoScaling(Checked):
    """Rotary rates stay as they are; the base of all scalings."""

    def rates(self, rates: Rates, base: float) -> Rates:
        """The angles per position of all pairs, from those without scaling."""
        return rates

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and keys."""
        return 1.0


@dataclass(frozen=True)
class Linear(NoScaling):
    """Divides all rates by `factor` (Chen et al. 2023).

    >>> positions = jf.Rotary(scaling=jf.Linear(factor=4.0))
    """

    factor: Annotated[float, Range(1)] = 1.0
    """The length of texts divided by that in training."""

    def rates(self, rates: Rates, base: float) -> Rates:
        """The share `kept` of each rate, and what is left divided by `factor`."""
        kept = self.kept(rates, base)
        return (rates * (kept + (1 - kept) / self.factor)).astype(np.float32)

    def kept(self, rates: Rates, base: float) -> Rates:
        """The share of each rate that is not divided."""
        return np.zeros_like(rates)


@dataclass(frozen=True)
class Llama3(Linear):
    """Divides the rates of slow pairs by `factor`, keeps the rates of fast ones (Llama 3.1).

    >>> positions = jf.Rotary(base=5e5, scaling=jf.Llama3(factor=8.0))
    """

    low_freq_factor: Positive = 1.0
    """Pairs of fewer turns than this in `original_len` tokens are divided."""
    high_freq_factor: float = 4.0
    """Pairs of more turns than this are kept; those between are interpolated."""
    original_len: Count = 8192
    """The length of texts in training, in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor="
                f"{self.low_freq_factor}"
            )

    def kept(self, rates: Rates, base: float) -> Rates:
        """The share of each rate that is kept, by its turns in `original_len` tokens."""
        turns = self.original_len * rates / (2 * np.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return np.clip(kept, 0, 1)


@dataclass(frozen=True)
class Yarn(Linear):
    """As `Llama3`, interpolated over the pair's number, with a magnitude (Peng et al. 2023).

    >>> round(jf.Yarn(factor=4.0).magnitude, 3)
    1.139
    """

    beta_fast: float = 32.0
    """Pairs of more turns than this in `original_len` tokens are kept."""
    beta_slow: Positive = 1.0
    """Pairs of fewer turns than this are divided; those between are interpolated."""
    original_len: Count = 8192
    """The length of texts in training, in tokens."""
    attention_factor: NonNegative | None = None
    """The factor of rotated queries and keys; None: 0.1 ln(`factor`) + 1 (equation 22)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(
                f"beta_fast={self.beta_fast} must be above beta_slow={self.beta_slow}"
            )

    def kept(self, rates: Rates, base: float) -> Rates:
        """The share of each rate that is kept: all of it up to a certain pair."""
        half = len(rates)

        def pair_of(turns: float) -> float:
            """The pair, not rounded, that makes so many turns in `original_len` positions."""
            return half * np.log(self.original_len / (2 * np.pi * turns)) / np.log(base)

        low = max(np.floor(pair_of(self.beta_fast)), 0)
        high = min(np.ceil(pair_of(self.beta_slow)), 2 * half - 1)
        width = high - low or 1e-3
        return 1 - np.clip((np.arange(half, dtype=np.float32) - low) / width, 0, 1)

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and keys."""
        if self.attention_factor is None:
            return 0.1 * math.log(self.factor) + 1.0
        return self.attention_factor
