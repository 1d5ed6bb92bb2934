"""Scores of answers, as the script of SQuAD computes them."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from jaxformer.errors import DataError


def score_answers(
    predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Exact match and F1 (0 to 1) of one prediction for each question, as in SQuAD 1.1 and 2.0.

    `answers` are the right ones of each question, by its id; a question without any is right if
    the prediction is empty. The best of the answers counts. Case, punctuation and articles do not
    count. Raises `DataError` for questions without a prediction. Rajpurkar et al. 2016, 2018.

    >>> score_answers({"q1": "the red roof", "q2": ""}, {"q1": ["A roof.", "red roofs"], "q2": []})
    {'exact': 0.5, 'f1': 0.8333333333333333}
    """
    missing = sorted(answers.keys() - predictions.keys())
    if missing or not answers:
        raise DataError(
            f"{len(missing)} of {len(answers)} questions have no prediction"
            f"{f', such as {missing[0]!r}' if missing else ''}: give one for each, at least one"
        )
    exact = f1 = 0.0
    for question, right in answers.items():
        golds = [answer for answer in map(normalize_answer, right) if answer] or [""]
        found = normalize_answer(predictions[question])
        exact += max(float(found == gold) for gold in golds)
        f1 += max(_word_f1(found.split(), gold.split()) for gold in golds)
    return {"exact": exact / len(answers), "f1": f1 / len(answers)}


def normalize_answer(text: str) -> str:
    """`text` in lower case, without punctuation and articles, with single spaces.

    >>> normalize_answer(" The  U.S.-led plan")
    'usled plan'
    """
    text = "".join(x for x in text.lower() if x not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _word_f1(found: list[str], gold: list[str]) -> float:
    """The harmonic mean of precision and recall of words; 1 where both are empty."""
    if not found or not gold:
        return float(found == gold)
    same = sum((Counter(found) & Counter(gold)).values())
    return 2.0 * same / (len(found) + len(gold))
