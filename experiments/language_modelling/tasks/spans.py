"""Answers that are parts of a text, as in SQuAD: an encoder learns where each starts and ends."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import linen as nn

from experiments.language_modelling.finetune_presets import FinetuneConfig
from experiments.language_modelling.tasks.finetune_task import Encoded, FinetuneTask, Scored
from experiments.language_modelling.tasks.rows import (
    Row,
    inputs,
    row_tokenizer,
    rows_of,
    write_facts,
)
from experiments.language_modelling.tasks.squad import (
    NO_ANSWER,
    Question,
    best_answers,
    read_questions,
    score_answers,
)
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import SpanPredictor
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.losses import span_loss


class Windows(NamedTuple):
    """Rows of question and context: of a long context several, which overlap.

    Row i is about question `of[i]`, and `offsets[i]` [T, 2] are start and end in the context of
    each of its tokens, -1 for tokens that are not of the context.
    """

    of: np.ndarray
    offsets: np.ndarray


def read(config: FinetuneConfig, path: str) -> list[Question]:
    """The questions of a file of SQuAD; `ConfigError` for a causal model, which sees no text after
    a token."""
    if config.objective == "causal":
        raise ConfigError(
            f"{config.init_from} is a causal model, but task='spans' needs an encoder: use a "
            "masked run"
        )
    return read_questions(path)


def facts(config: FinetuneConfig, folder: Path, tokenizer: Tokenizer, items: Any) -> list[str]:
    """No labels."""
    return []


def make_model(config: FinetuneConfig, backbone: nn.Module, facts: Any) -> SpanPredictor:
    """A model on `backbone` that finds answers."""
    return SpanPredictor(backbone)


def encode(
    config: FinetuneConfig, tokenizer: Tokenizer, items: Sequence[Question], facts: Any
) -> Encoded:
    """Rows of ids; neighbouring windows of a context share `task.doc_stride` tokens.

    A question is cut to half of a row. Raises `ConfigError` where a window would have no token
    that the one before has not.
    """
    length, doc_stride = config.data.seq_len, config.task.doc_stride
    library = tokenizer.library_tokenizer
    rows = row_tokenizer(config, tokenizer)
    rows.enable_truncation(length, stride=doc_stride, strategy="only_second")
    frame = rows.num_special_tokens_to_add(True)
    windows: list[Row] = []
    answers, of, offsets = [], [], []
    for number, each in enumerate(items):
        asked = library.encode(each.question, add_special_tokens=False).offsets[: length // 2]
        room = length - frame - len(asked)
        if room <= doc_stride:
            raise ConfigError(
                f"doc_stride={doc_stride} leaves no new token in a window of {room} tokens: give "
                "a smaller one, or a larger seq_len"
            )
        first = rows.encode(each.question[: asked[-1][1] if asked else 0], each.context)
        for window in (first, *first.overflowing):
            of_context = np.array([side == 1 for side in window.sequence_ids])
            places = np.where(of_context[:, None], np.array(window.offsets, np.int32), -1)
            windows.append(Row.of(window))
            answers.append(_label(each, places))
            of.append(number)
            offsets.append(places)
    examples = rows_of(config, tokenizer, windows, np.array(answers, np.int32))
    return Encoded(items, examples, Windows(np.array(of), np.stack(offsets)))


def outputs(model: Any) -> Callable[[Any, Any], Any]:
    """The logits of start and end of each row [B, 2, T]."""
    return lambda params, batch: model.apply({"params": params}, *inputs(batch))


def score(config: FinetuneConfig, logits: np.ndarray, text: Encoded, facts: Any) -> Scored:
    """F1 and exact match of the answers."""
    unanswerable = any(not each.answers for each in text.items)
    answers = best_answers(logits, text, config.task.max_answer_tokens, may_be_none=unanswerable)
    right = [each.answers for each in text.items]
    # By number: files of several languages use the same keys.
    scores = score_answers(dict(enumerate(answers)), dict(enumerate(right)))
    table = {
        "source": [each.question for each in text.items],
        "model": answers,
        "reference": [next(iter(each), "") for each in right],
    }
    return Scored({"f1": scores["f1"], "exact": scores["exact"]}, table)


def _label(question: Question, places: np.ndarray) -> tuple[int, int]:
    """The first and the last token of the first answer, if the window has all of it."""
    if not question.answers:
        return NO_ANSWER, NO_ANSWER
    start = question.starts[0]
    end = start + len(question.answers[0])
    inside = np.flatnonzero((places[:, 0] >= 0) & (places[:, 1] > start) & (places[:, 0] < end))
    if not len(inside) or places[inside[0], 0] > start or places[inside[-1], 1] < end:
        return NO_ANSWER, NO_ANSWER
    return int(inside[0]), int(inside[-1])


SPANS = FinetuneTask(
    scores=("validation_f1", "validation_exact"),
    loss=span_loss,
    read=read,
    facts=facts,
    write_facts=write_facts,
    encode=encode,
    make_model=make_model,
    inputs=inputs,
    outputs=outputs,
    score=score,
)
