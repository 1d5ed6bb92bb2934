"""The files of SQuAD 1.1 and 2.0, the answers that logits give, and their scores."""

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.language_modelling.tasks.finetune_task import Encoded
from jaxformer.errors import DataError
from jaxformer.storage import to_path

NO_ANSWER = 0
"""The index of the first token stands for no answer."""


class Question(NamedTuple):
    """A question about a text, with the right answers and where each starts; none: no answer."""

    key: str
    question: str
    context: str
    answers: list[str]
    starts: list[int]


def read_questions(path: str) -> list[Question]:
    """The questions of a file in the JSON format of SQuAD 1.1 and 2.0.

    Raises `DataError` for a file of another form, and for an answer that is not in its context.
    """
    try:
        articles = json.loads(to_path(path).read_text(encoding="utf-8-sig"))["data"]
        questions = [
            _question(paragraph["context"], item)
            for article in articles
            for paragraph in article["paragraphs"]
            for item in paragraph["qas"]
        ]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot read the file: {error}") from error
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path}: needed the JSON of SQuAD (data, paragraphs, context, qas, question, answers, "
            f"text, answer_start), but {error} is missing"
        ) from error
    if not questions:
        raise DataError(f"{path}: there are no questions: give at least one")
    for each in questions:
        for answer, start in zip(each.answers, each.starts, strict=True):
            if each.context[start : start + len(answer)] != answer:
                raise DataError(
                    f"{path}: question {each.key!r}: the answer {answer!r} is not at {start} of "
                    "its context"
                )
    return questions


def best_answers(
    logits: np.ndarray, text: Encoded, max_answer_tokens: int, *, may_be_none: bool
) -> list[str]:
    """For each question the part of its context with the highest sum of start and end logits.

    `logits` [N, 2, T] belong to the rows. With `may_be_none` an answer is "" where the first
    token's sum, of the window in which that is lowest, is higher still (Devlin et al. 2019, section
    4.3).
    """
    answers, best = [""] * len(text.items), np.full(len(text.items), -np.inf)
    none = np.full(len(text.items), np.inf)
    for window, number, places in zip(logits, *text.notes, strict=True):
        none[number] = min(none[number], float(window[:, NO_ANSWER].sum()))
        score, first, last = _best_span(window, places[:, 0] >= 0, max_answer_tokens)
        if score > best[number]:
            context = text.items[number].context
            answers[number] = context[places[first, 0] : places[last, 1]].strip()
            best[number] = score
    if may_be_none:
        return ["" if none[n] > best[n] else answer for n, answer in enumerate(answers)]
    return answers


def _best_span(logits: np.ndarray, real: np.ndarray, most: int) -> tuple[float, int, int]:
    """The highest sum of a start and an end logit of a span of `most` tokens, and their indices."""
    starts, ends = (np.where(real, side, -np.inf) for side in logits.astype(np.float64))
    later = np.arange(len(real)) - np.arange(len(real))[:, None]
    sums = np.where((later >= 0) & (later < most), starts[:, None] + ends, -np.inf)
    first, last = np.unravel_index(np.argmax(sums), sums.shape)
    return float(sums[first, last]), int(first), int(last)


def score_answers(
    predictions: Mapping[Any, str], answers: Mapping[Any, Sequence[str]]
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
        predicted = normalize_answer(predictions[question])
        exact += max(float(predicted == gold) for gold in golds)
        f1 += max(_word_f1(predicted.split(), gold.split()) for gold in golds)
    return {"exact": exact / len(answers), "f1": f1 / len(answers)}


def normalize_answer(text: str) -> str:
    """`text` in lower case, without punctuation and articles, with single spaces.

    >>> normalize_answer(" The  U.S.-led plan")
    'usled plan'
    """
    text = "".join(x for x in text.lower() if x not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _word_f1(predicted: list[str], gold: list[str]) -> float:
    """The harmonic mean of precision and recall of words; 1 where both are empty."""
    if not predicted or not gold:
        return float(predicted == gold)
    same = sum((Counter(predicted) & Counter(gold)).values())
    return 2.0 * same / (len(predicted) + len(gold))


def _question(context: str, item: dict[str, Any]) -> Question:
    answers = [] if item.get("is_impossible") else item["answers"]
    texts = [answer["text"] for answer in answers]
    starts = [int(answer["answer_start"]) for answer in answers]
    return Question(str(item["id"]), item["question"], context, texts, starts)
