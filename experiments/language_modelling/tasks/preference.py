"""The better one of two answers: a causal model learns to prefer it (Rafailov et al. 2023)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from scipy.special import expit

from experiments.harness.runs import distributed
from experiments.harness.runs.records import json_lines
from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.parent import parent_of
from experiments.harness.training.rows import predict
from experiments.language_modelling import finetune_start
from experiments.language_modelling.finetune_presets import FinetuneConfig, TaskOptions
from experiments.language_modelling.tasks import chat
from experiments.language_modelling.tasks.chat_template import (
    ChatTemplate,
    Message,
    check_no_tools,
    is_message,
)
from experiments.language_modelling.tasks.finetune_task import Encoded, FinetuneTask, Scored
from jaxformer.errors import ConfigError, DataError, shorten
from jaxformer.pipelines.batching import pad_right
from jaxformer.records import Record
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.preference import PreferenceBatch, answer_log_probs, preference_loss

REFERENCE = "reference.json"
"""The file of a run with the log-probabilities of all answers before its first step."""


class Pair(NamedTuple):
    """A conversation so far, and two answers."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def read(config: FinetuneConfig, path: str) -> list[Pair]:
    """The pairs of a .jsonl file, each line with `prompt`, `chosen` and `rejected`.

    Each is a text, or a list of messages; answers without a prompt are whole conversations, whose
    common beginning is the prompt. Raises `ConfigError` for a model that does not continue text,
    and `DataError`, naming the first one, for a line of another form or with equal answers.
    """
    if config.objective != "causal":
        raise ConfigError(
            f"{config.init_from} is a masked model, but task='preference' needs one that continues "
            "text: use a causal run"
        )
    pairs = [_read_pair(record, f"{path}:{number}") for number, record in json_lines(Path(path))]
    if not pairs:
        raise DataError(f"{path}: there are no pairs of answers: give at least one")
    return pairs


def _read_pair(record: Any, where: str) -> Pair:
    fields = record if isinstance(record, dict) else {}
    prompt = _messages(fields.get("prompt", []), "user")
    chosen = _messages(fields.get("chosen"), "assistant")
    rejected = _messages(fields.get("rejected"), "assistant")
    if prompt is None or chosen is None or rejected is None:
        raise DataError(
            f'{where}: needed {{"prompt": .., "chosen": .., "rejected": ..}}, each a text or a '
            f"list of messages, got {shorten(repr(record))}"
        )
    check_no_tools(fields, where)
    pair = Pair(prompt, chosen, rejected)
    if not pair.prompt:
        pair = _without_common_beginning(pair)
    for name, messages in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{where}: no message of {name} has the role assistant: give an answer")
    if pair.chosen == pair.rejected:
        raise DataError(f"{where}: chosen and rejected are equal: leave the line out")
    return pair


def _messages(value: Any, role: str) -> list[Message] | None:
    """A text as the message of `role`, or messages as they are; None for anything else."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value if isinstance(value, list) and all(map(is_message, value)) else None


def _without_common_beginning(pair: Pair) -> Pair:
    """The pair of two whole conversations."""
    count = 0
    for first, second in zip(pair.chosen, pair.rejected, strict=False):
        if first != second:
            break
        count += 1
    return Pair(pair.chosen[:count], pair.chosen[count:], pair.rejected[count:])


def encode(
    config: FinetuneConfig, tokenizer: Tokenizer, items: Sequence[Pair], facts: ChatTemplate
) -> Encoded:
    """Pairs of rows of at most `data.seq_len` + 1 ids, of which the tokens of answers count.

    A longer text is cut; a pair of which an answer is cut off is left out with a warning. The
    reference is not known yet, and NaN. Raises what `chat.encode_answers` raises, and `DataError`
    where no pair is left.
    """
    length = config.data.seq_len
    texts = [[*pair.prompt, *answer] for pair in items for answer in (pair.chosen, pair.rejected)]
    asked = [sum(x["role"] == "assistant" for x in pair.prompt) for pair in items for _ in range(2)]
    encoded = chat.encode_answers(length, tokenizer, texts, facts, asked)
    pairs = list(zip(encoded[::2], encoded[1::2], strict=True))
    has_answers = [all(learned.any() for _, learned in pair) for pair in pairs]
    kept = list(compress(items, has_answers))
    chat.warn_of_cut(len(items) - len(kept), len(items), "pairs", length)
    pairs = list(compress(pairs, has_answers))
    rows = [ids for pair in pairs for ids, _ in pair]
    tokens = pad_right(rows, len(rows), length + 1, tokenizer.padding_id)
    examples = PreferenceBatch(
        tokens=tokens.reshape(len(kept), 2, length + 1),
        loss_mask=np.array([[learned for _, learned in pair] for pair in pairs]),
        reference=np.full((len(kept), 2), np.nan, np.float32),
        example_ids=np.arange(len(kept), dtype=np.int32),
    )
    return Encoded(kept, examples)


def with_reference(
    run: OpenRun[FinetuneConfig], model: nn.Module, rows: Mapping[str, PreferenceBatch]
) -> dict[str, PreferenceBatch]:
    """`rows` by split with the log-probabilities of their answers before the first step.

    They are computed once and kept in the run's folder; a run that goes on from another has those
    of that one. Raises `DataError` where its pairs are others than today's.
    """
    record = Record(run.folder / REFERENCE)
    kept = record.read()
    if not kept:
        kept = _first_reference(run, model, rows)
        with distributed.together():
            if distributed.is_first():
                record.write(kept)
    found = {}
    for split, examples in rows.items():
        reference = np.array(kept.get(split, []), np.float32).reshape(-1, 2)
        if len(reference) != len(examples.reference):
            raise DataError(
                f"{record.path} has {len(reference)} pairs of the {split} examples, but there are "
                f"{len(examples.reference)}: give the same files, or use another --name"
            )
        found[split] = examples._replace(reference=reference)
    return found


def _first_reference(
    run: OpenRun[FinetuneConfig], model: nn.Module, rows: Mapping[str, PreferenceBatch]
) -> dict[str, Any]:
    """The log-probabilities of both answers by split, before the first step of a training."""
    parent = parent_of(run.config)
    if run.config.continue_from and parent is not None:
        return Record(parent.folder / REFERENCE).read()
    params = finetune_start.read_weights(run)
    size = run.config.data.batch_size
    compute = jax.jit(partial(answer_log_probs, model))
    return {split: predict(compute, params, x, size).tolist() for split, x in rows.items()}


def inputs(batch: PreferenceBatch) -> tuple[Any, ...]:
    """The arguments of the model."""
    return (batch.tokens[:, 0, :-1],)


def outputs(model: Any) -> Callable[[Any, Any], Any]:
    """The log-probability of both answers of each pair [B, 2]."""
    return partial(answer_log_probs, model)


def score(
    config: FinetuneConfig, log_probs: np.ndarray, text: Encoded, facts: ChatTemplate
) -> Scored:
    """The loss, the share of pairs whose chosen answer has gained more, and the mean margin.

    `likelier` is the share of pairs whose chosen answer has the higher log-probability, whatever
    the reference says.
    """
    gains = log_probs.astype(np.float64) - text.examples.reference
    margin = config.task.beta * (gains[:, 0] - gains[:, 1])
    scores = {
        "loss": float(np.mean(-np.log(expit(margin)))),
        "accuracy": float(np.mean(margin > 0)),
        "margin": float(np.mean(margin)),
        "likelier": float(np.mean(log_probs[:, 0] > log_probs[:, 1])),
    }
    columns = {"chosen": log_probs[:, 0], "rejected": log_probs[:, 1], "margin": margin}
    table = {"source": [chat.last_asked(pair.prompt) for pair in text.items]}
    table |= {name: [f"{x:.9g}" for x in column] for name, column in columns.items()}
    return Scored(scores, table)


def loss_options(task: TaskOptions) -> dict[str, Any]:
    """The arguments of `preference_loss`."""
    return {"beta": task.beta}


PREFERENCE = FinetuneTask(
    scores=("validation_loss", "validation_accuracy"),
    loss=preference_loss,
    loss_options=loss_options,
    with_start=with_reference,
    read=read,
    facts=chat.facts,
    write_facts=chat.write_facts,
    encode=encode,
    make_model=chat.make_model,
    inputs=inputs,
    outputs=outputs,
    score=score,
)
