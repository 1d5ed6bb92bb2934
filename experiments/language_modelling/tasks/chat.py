"""Conversations: a causal model learns the assistant's answers, and no other token."""

import warnings
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.harness.training.parent import parent_of
from experiments.language_modelling.finetune_presets import FinetuneConfig
from experiments.language_modelling.tasks.chat_template import (
    TEMPLATE,
    ChatTemplate,
    Message,
    check_messages,
    load_template,
    read_conversations,
)
from experiments.language_modelling.tasks.finetune_task import Encoded, FinetuneTask, Scored
from experiments.language_modelling.tasks.rows import in_blocks
from jaxformer.errors import ConfigError, DataError
from jaxformer.pipelines.batching import pad_right
from jaxformer.pretrained.hf_folder import locate
from jaxformer.storage import to_path
from jaxformer.text.data import StreamBatch
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.losses import causal_loss


def read(config: FinetuneConfig, path: str) -> list[list[Message]]:
    """The conversations of a file; `ConfigError` for a model that does not continue text."""
    if config.objective != "causal":
        raise ConfigError(
            f"{config.init_from} is a masked model, but task='chat' needs one that continues text: "
            "use a causal run"
        )
    return read_conversations(to_path(path))


def make_model(config: FinetuneConfig, backbone: nn.Module, facts: Any) -> nn.Module:
    """`backbone` itself, which continues text."""
    return backbone


def inputs(batch: StreamBatch) -> tuple[Any, ...]:
    """The arguments of the model."""
    return (batch.tokens[:, :-1],)


def facts(config: FinetuneConfig, folder: Path, tokenizer: Tokenizer, items: Any) -> ChatTemplate:
    """The template of the run in `folder`: --task.chat_template, or the template of its start."""
    source = folder
    if not (folder / TEMPLATE).is_file():  # the run has not begun
        parent = parent_of(config)
        source = locate(config.init_from) if parent is None else parent.folder
    template = load_template(source, tokenizer)
    given = config.task.chat_template
    return template.with_source(given) if given else template


def write_facts(folder: Path, facts: ChatTemplate) -> None:
    """Keeps the template in the run's `folder`."""
    facts.save(folder)


def encode(
    config: FinetuneConfig,
    tokenizer: Tokenizer,
    items: Sequence[list[Message]],
    facts: ChatTemplate,
) -> Encoded:
    """Rows of at most `data.seq_len` + 1 ids, of which the tokens of answers count.

    A longer conversation is cut; where no answer is left, it is left out with a warning. Raises
    what `encode_answers` raises, and `DataError` where no conversation is left.
    """
    length = config.data.seq_len
    texts = encode_answers(length, tokenizer, items, facts, [0] * len(items))
    has_answer = [learned.any() for _, learned in texts]
    kept = list(compress(items, has_answer))
    warn_of_cut(len(items) - len(kept), len(items), "conversations", length)
    ids, learned = zip(*compress(texts, has_answer), strict=True)
    tokens = pad_right(ids, len(ids), length + 1, tokenizer.padding_id)
    examples = StreamBatch(tokens, np.array(learned), np.arange(len(ids), dtype=np.int32))
    return Encoded(kept, examples)


def encode_answers(
    length: int,
    tokenizer: Tokenizer,
    items: Sequence[list[Message]],
    facts: ChatTemplate,
    first_answers: Sequence[int],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first `length` + 1 ids of each conversation, and which labels [length] are of answers.

    The answers of a conversation count from the number in `first_answers` on. Raises `DataError`
    for a message that contains the name of a special token, and `ConfigError` for a template that
    ends no answer.
    """
    for number, messages in enumerate(items, start=1):
        contents = [message["content"] for message in messages]
        check_messages(contents, tokenizer, f"conversation {number}: ")
    answered = map(facts.answers, items)
    written = (text[start:end] for text, spans in answered for start, end in spans)
    if all(tokenizer.find_special_name(answer) is None for answer in written):
        raise ConfigError(
            "the chat template ends no answer with a special token, so a model would never learn "
            "to stop: write eos_token after each message, or start from a model that has one"
        )
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for block in in_blocks(list(zip(items, first_answers, strict=True))):
        texts = [facts.answers(messages) for messages, _ in block]
        encoded = tokenizer.encode_with_special([text for text, _ in texts])
        for (ids, offsets), (_, spans), (_, first) in zip(encoded, texts, block, strict=True):
            starts = np.array([start for start, _ in offsets], np.int64)[: length + 1]
            answers = [(starts >= start) & (starts < end) for start, end in spans[first:]]
            learned = np.any(answers, axis=0)[1:]
            row = np.array(ids[: length + 1], np.int32)
            rows.append((row, np.pad(learned, (0, length - len(learned)))))
    return rows


def warn_of_cut(left_out: int, count: int, what: str, length: int) -> None:
    """Warns of examples that are `left_out` because no answer begins early enough.

    `what` the examples are, such as "conversations". Raises `DataError` where all are left out.
    """
    if left_out == count:
        raise DataError(
            f"no answer begins within {length} tokens of its conversation: give a larger "
            "--data.seq_len"
        )
    if left_out:
        warnings.warn(
            f"{left_out} of {count} {what} are left out: no answer begins within their first "
            f"{length} tokens: give a larger --data.seq_len",
            stacklevel=3,
        )


def outputs(model: Any) -> Callable[[Any, Any], Any]:
    """The nats, the right tokens and the number of the tokens of answers of each row [B, 3]."""

    def sums(params: Any, batch: StreamBatch) -> jax.Array:
        logits = model.apply({"params": params}, *inputs(batch))
        labels = batch.tokens[:, 1:]
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        nats = -jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
        numbers = nats, jnp.argmax(logits, axis=-1) == labels, batch.loss_mask
        return jnp.stack([jnp.sum(x * batch.loss_mask, axis=1) for x in numbers], axis=1)

    return sums


def score(config: FinetuneConfig, sums: np.ndarray, text: Encoded, facts: Any) -> Scored:
    """The loss, and the share of the tokens of answers that are right."""
    nats, right, count = sums.sum(0).tolist()
    columns = zip(("nats", "tokens"), sums[:, ::2].T.tolist(), strict=True)
    table = {"source": [last_asked(messages) for messages in text.items]}
    table |= {name: [f"{x:.9g}" for x in column] for name, column in columns}
    return Scored({"loss": nats / count, "accuracy": right / count, "tokens": count}, table)


def last_asked(messages: Sequence[Message]) -> str:
    """The last message of a user; "" where there is none."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return asked[-1] if asked else ""


CHAT = FinetuneTask(
    scores=("validation_loss", "validation_accuracy"),
    loss=causal_loss,
    read=read,
    facts=facts,
    write_facts=write_facts,
    encode=encode,
    make_model=make_model,
    inputs=inputs,
    outputs=outputs,
    score=score,
)
