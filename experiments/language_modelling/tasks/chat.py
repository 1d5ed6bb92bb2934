"""Conversations: a causal model learns the assistant's answers, and no other token."""

import ast
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness.training.finetuning import Examples, LabelledBatch, check_count, padded
from experiments.language_modelling import stdlib
from experiments.language_modelling.chat_templates import (
    ChatTemplate,
    Message,
    check_messages,
    load_template,
    read_conversations,
)
from experiments.language_modelling.load_run import LoadedRun
from experiments.language_modelling.tasks.task import Scored, Task
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import DecoderOnly
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.losses import causal_loss

_LONGEST_ANSWER = 200


class _Stream(NamedTuple):
    """A batch as `causal_loss` reads it."""

    tokens: Any
    loss_mask: Any
    example_ids: Any
    segments: None = None
    positions: None = None


def read(options: Any) -> tuple[list[list[Message]], list[list[Message]]]:
    """The conversations to learn from and to test with, as `options` say."""
    if options.train:
        train, test = (read_conversations(Path(x)) for x in (options.train, options.test))
    else:
        train, test = made_conversations("train"), made_conversations("test")
    check_count(options, len(train), "conversations")
    return train, test


def made_conversations(part: stdlib.Part) -> list[list[Message]]:
    """Signatures of the standard library, answered by the first line of their docstrings."""
    conversations: list[list[Message]] = []
    for path in stdlib.files(part):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                asked = f"def {node.name}({ast.unparse(node.args)}):"
                answer = text.split("\n")[0][:_LONGEST_ANSWER]
                if answer:
                    messages = {"user": asked, "assistant": answer}.items()
                    conversations.append([{"role": x, "content": y} for x, y in messages])
    return conversations


def make(
    options: Any, loaded: LoadedRun, train: list[list[Message]], test: list[list[Message]]
) -> Task:
    """The task of the run's own model; `ConfigError` for one that is masked."""
    model = loaded.model
    if not isinstance(model, DecoderOnly):
        raise ConfigError(
            f"{options.run} is a masked model, but task='chat' needs one that continues text: use "
            "a causal run"
        )
    length = min(options.seq_len, model.config.max_len)
    template = find_template(options, loaded.tokenizer)
    trained, tested = (
        encode_conversations(texts, template, loaded.tokenizer, length) for texts in (train, test)
    )
    causal = causal_loss(model)

    def loss(params: Any, batch: LabelledBatch, rng: jax.Array | None) -> Any:
        learned = batch.labels[:, 1:] & batch.loss_mask[:, None]
        return causal(params, _Stream(batch.tokens, learned, batch.example_ids), rng)

    def outputs(params: Any, batch: LabelledBatch) -> jax.Array:
        logits = model.apply({"params": params}, batch.tokens[:, :-1])
        return _answer_sums(logits, batch.tokens[:, 1:], batch.labels[:, 1:])

    def score(sums: np.ndarray) -> Scored:
        nats, right, count = sums.sum(0)
        lines = [json.dumps({"loss": x[0] / x[2], "tokens": int(x[2])}) for x in sums.tolist()]
        return Scored({"accuracy": float(right / count), "loss": float(nats / count)}, lines)

    title = f"share of the tokens of the answers in {len(tested.tokens)} test conversations right"
    files = {"chat_template.jinja": template.source}
    return Task(model, trained, tested, loss, jax.jit(outputs), score, title, files)


def find_template(options: Any, tokenizer: Tokenizer) -> ChatTemplate:
    """The template in the file --chat_template, or that of the run's folder."""
    template = load_template(Path(options.run), tokenizer)
    if not options.chat_template:
        return template
    try:
        return template._replace(source=Path(options.chat_template).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{options.chat_template}: cannot read the file: {error}") from error


def encode_conversations(
    conversations: list[list[Message]], template: ChatTemplate, tokenizer: Tokenizer, length: int
) -> Examples:
    """Rows of at most `length` + 1 ids; `labels` mark the tokens of the assistant's answers.

    A longer conversation is cut. Raises `DataError` for a message that contains the name
    of a special token, and where no answer is left.
    """
    for number, messages in enumerate(conversations, start=1):
        contents = [message["content"] for message in messages]
        check_messages(contents, tokenizer, f"conversation {number}: ")
    texts = [template.answers(messages) for messages in conversations]
    encoded = tokenizer.encode_with_special([text for text, _ in texts])
    rows, masks = [], []
    for (ids, offsets), (_, spans) in zip(encoded, texts, strict=True):
        starts = np.array([start for start, _ in offsets], np.int64)
        learned = np.zeros(len(ids), bool)
        for start, end in spans:
            learned |= (starts >= start) & (starts < end)
        if learned[: length + 1].any():
            rows.append(ids[: length + 1])
            masks.append(learned[: length + 1])
    if not rows:
        raise DataError(
            f"no answer begins within {length} tokens of its conversation: give a larger seq_len"
        )
    labels = np.zeros((len(rows), length + 1), bool)
    for i, mask in enumerate(masks):
        labels[i, : len(mask)] = mask
    return padded(rows, labels, tokenizer.special.pad, length + 1)


def _answer_sums(logits: Any, labels: Any, learned: Any) -> jax.Array:
    """The nats, the right tokens and the number of the tokens of answers of each row [B, 3]."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    nats = -jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
    right = jnp.argmax(logits, axis=-1) == labels
    return jnp.stack([jnp.sum(x * learned, axis=1) for x in (nats, right, learned)], axis=1)
