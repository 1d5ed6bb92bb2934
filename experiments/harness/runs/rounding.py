"""Numbers as text: digits, and the half width of an interval."""

import numpy as np


def shown(value: float) -> str:
    """`value` with four significant digits: 16,140, 0.004240, 6e-05."""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def plus_minus(half: float, form: str) -> str:
    """Text such as " ± 0.12" for a half width in the format `form`; "" for NaN."""
    return "" if np.isnan(half) else f" ± {half:{form}}"


def decimals(value: float, half: float = float("nan")) -> int:
    """The decimals of `value` that its 95 % interval of the half width `half` leaves certain.

    The half width keeps two digits, and one where they are above 35, as the Particle Data Group
    rounds. Without a half width (NaN or 0) `value` keeps its own decimals: at most four below 10,
    two below 1,000, and none from there on.

    >>> decimals(41.38, 1.56), decimals(41.38, 0.41), decimals(41.38)
    (1, 1, 2)
    """
    if np.isnan(half) or half <= 0.0:
        if abs(value) >= 1_000:
            most = 0
        elif abs(value) >= 10:
            most = 2
        else:
            most = 4
        return min(most, len(repr(value).partition(".")[2]))
    exponent = int(np.floor(np.log10(half)))
    return max(0, (1 if half / 10.0**exponent < 3.55 else 0) - exponent)


def rounded(value: float, half: float = float("nan")) -> str:
    """Text such as "41.4 ± 1.6": `value` and the half width of its interval (see `decimals`)."""
    form = f",.{decimals(value, half)}f"
    return f"{value:{form}}{plus_minus(half, form)}"
