"""The answers that logits of start and end give."""

import numpy as np

from experiments.language_modelling.tasks.rows import Encoded

_NO_ANSWER = 0  # the index of the first token stands for it


def best_answers(
    logits: np.ndarray, text: Encoded, max_answer_tokens: int, *, may_be_none: bool
) -> dict[str, str]:
    """The part of each context with the highest sum of start and end logits [N, 2, T].

    With `may_be_none` it is "" where the first token's sum, of the window in which that is lowest,
    is higher still (Devlin et al. 2019, section 4.3).
    """
    best = {each.key: (-np.inf, "") for each in text.items}
    none = dict.fromkeys(best, np.inf)
    for window, number, places in zip(logits, *text.notes, strict=True):
        each = text.items[number]
        none[each.key] = min(none[each.key], float(window[:, _NO_ANSWER].sum()))
        score, first, last = _best_span(window, places[:, 0] >= 0, max_answer_tokens)
        if score > best[each.key][0]:
            answer = each.context[places[first, 0] : places[last, 1]].strip()
            best[each.key] = score, answer
    return {
        key: "" if may_be_none and none[key] > score else answer
        for key, (score, answer) in best.items()
    }


def _best_span(logits: np.ndarray, real: np.ndarray, most: int) -> tuple[float, int, int]:
    """The highest sum of a start and an end logit of a span of `most` tokens, and their indices."""
    starts, ends = (np.where(real, side, -np.inf) for side in logits.astype(np.float64))
    later = np.arange(len(real)) - np.arange(len(real))[:, None]
    sums = np.where((later >= 0) & (later < most), starts[:, None] + ends, -np.inf)
    first, last = np.unravel_index(np.argmax(sums), sums.shape)
    return float(sums[first, last]), int(first), int(last)
