"""Answers that are a part of a text, as in SQuAD: exact match and F1."""

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.harness.training.finetuning import Examples, LabelledBatch, check_count
from experiments.language_modelling.load_run import LoadedRun
from experiments.language_modelling.tasks.task import Scored, Task, apply, row_tokenizer, rows_of
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.heads import SpanPredictor
from jaxformer.nn.models import EncoderOnly
from jaxformer.training.losses import span_loss

_NO_ANSWER = 0  # the index of the first token stands for it


class Question(NamedTuple):
    """A question about a text, with the right answers and where each starts; none: no answer."""

    key: str
    question: str
    context: str
    answers: list[str]
    starts: list[int]


class Windows(NamedTuple):
    """Rows of question and context: of a long context several, which overlap.

    Row i is about question `of[i]`, and `offsets[i]` [T, 2] are start and end in the context of
    each of its tokens, -1 for tokens that are not of the context.
    """

    examples: Examples
    of: np.ndarray
    offsets: np.ndarray


def read(options: Any) -> tuple[list[Question], list[Question]]:
    """The questions to learn from and to test with, as `options` say."""
    train, test = read_questions(options.train), read_questions(options.test)
    check_count(options, len(train), "questions")
    return train, test


def read_questions(path: str) -> list[Question]:
    """The questions of a file in the JSON format of SQuAD 1.1 and 2.0.

    Raises `DataError` for a file of another form, and for an answer that is not in its context.
    """
    try:
        articles = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
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


def make(options: Any, loaded: LoadedRun, train: list[Question], test: list[Question]) -> Task:
    """The task of a model that finds answers on the run's encoder.

    Raises `ConfigError` for a causal model, whose tokens do not see the text that follows them.
    """
    if not isinstance(loaded.model, EncoderOnly):
        raise ConfigError(
            f"{options.run} is a causal model, but task='spans' needs an encoder: use a masked run"
        )
    length = min(options.seq_len, loaded.model.config.max_len)
    trained, windows = (
        make_windows(questions, loaded, length, options.doc_stride) for questions in (train, test)
    )
    model = SpanPredictor(loaded.model)
    may_be_none = any(not each.answers for each in train)

    def outputs(params: Any, batch: LabelledBatch) -> Any:
        return apply(model, params, batch)

    def score(logits: np.ndarray) -> Scored:
        answers = best_answers(
            logits, windows, test, options.max_answer_tokens, may_be_none=may_be_none
        )
        metrics = score_answers(answers, {each.key: each.answers for each in test})
        metrics = {"f1": metrics["f1"], "exact": metrics["exact"]}
        return Scored(metrics, [json.dumps(answers, ensure_ascii=False)])

    title = f"F1 of the answers to {len(test)} test questions"
    rows = trained.examples, windows.examples
    return Task(model, *rows, span_loss(model), jax.jit(outputs), score, title)


def make_windows(
    questions: list[Question], loaded: LoadedRun, length: int, doc_stride: int
) -> Windows:
    """Rows of `length` ids; neighbouring windows of a context share `doc_stride` tokens.

    A question is cut to half of a row. Raises `ConfigError` where a window would have no token
    that the one before has not.
    """
    tokenizer = row_tokenizer(loaded, length)
    tokenizer.enable_truncation(length, stride=doc_stride, strategy="only_second")
    frame, library = tokenizer.num_special_tokens_to_add(True), loaded.tokenizer.library_tokenizer
    windows, labels, of, offsets = [], [], [], []
    for number, each in enumerate(questions):
        asked = library.encode(each.question, add_special_tokens=False).offsets[: length // 2]
        room = length - frame - len(asked)
        if room <= doc_stride:
            raise ConfigError(
                f"doc_stride={doc_stride} leaves no new token in a window of {room} tokens: give "
                "a smaller one, or a larger seq_len"
            )
        first = tokenizer.encode(each.question[: asked[-1][1] if asked else 0], each.context)
        for window in (first, *first.overflowing):
            of_context = np.array([side == 1 for side in window.sequence_ids])
            places = np.where(of_context[:, None], np.array(window.offsets, np.int32), -1)
            windows.append(window)
            labels.append(_label(each, places))
            of.append(number)
            offsets.append(places)
    examples = rows_of(loaded, windows, np.array(labels, np.int32))
    return Windows(examples, np.array(of), np.stack(offsets))


def best_answers(
    logits: np.ndarray,
    windows: Windows,
    questions: list[Question],
    max_answer_tokens: int,
    *,
    may_be_none: bool,
) -> dict[str, str]:
    """The part of each context with the highest sum of start and end logits [N, 2, T].

    With `may_be_none` it is "" where the first token's sum, of the window in which that is lowest,
    is higher still (Devlin et al. 2019, section 4.3).
    """
    best = {each.key: (-np.inf, "") for each in questions}
    none = dict.fromkeys(best, np.inf)
    for window, number, places in zip(logits, windows.of, windows.offsets, strict=True):
        each = questions[number]
        none[each.key] = min(none[each.key], float(window[:, _NO_ANSWER].sum()))
        score, first, last = _best_span(window, places[:, 0] >= 0, max_answer_tokens)
        if score > best[each.key][0]:
            text = each.context[places[first, 0] : places[last, 1]].strip()
            best[each.key] = score, text
    return {
        key: "" if may_be_none and none[key] > score else text
        for key, (score, text) in best.items()
    }


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


def _label(question: Question, places: np.ndarray) -> tuple[int, int]:
    """The first and the last token of the first answer, if the window has all of it."""
    if not question.answers:
        return _NO_ANSWER, _NO_ANSWER
    start = question.starts[0]
    end = start + len(question.answers[0])
    inside = np.flatnonzero((places[:, 0] >= 0) & (places[:, 1] > start) & (places[:, 0] < end))
    if not len(inside) or places[inside[0], 0] > start or places[inside[-1], 1] < end:
        return _NO_ANSWER, _NO_ANSWER
    return int(inside[0]), int(inside[-1])


def _best_span(logits: np.ndarray, real: np.ndarray, most: int) -> tuple[float, int, int]:
    """The highest sum of a start and an end logit of a span of `most` tokens, and their indices."""
    starts, ends = (np.where(real, side, -np.inf) for side in logits.astype(np.float64))
    later = np.arange(len(real)) - np.arange(len(real))[:, None]
    sums = np.where((later >= 0) & (later < most), starts[:, None] + ends, -np.inf)
    first, last = np.unravel_index(np.argmax(sums), sums.shape)
    return float(sums[first, last]), int(first), int(last)
