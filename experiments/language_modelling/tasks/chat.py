"""Conversations: a causal model learns the assistant's answers, and no other token.

They become text by chat templates in Jinja, as the folders of `transformers` have them.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness.runs.sources import json_lines
from experiments.harness.training.finetuning import Examples, LabelledBatch, check_count, padded
from experiments.language_modelling.load_run import LoadedRun
from experiments.language_modelling.tasks.task import Scored, Task
from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError, shorten
from jaxformer.nn.models import DecoderOnly
from jaxformer.pretrained.hf_folder import read_json
from jaxformer.text.data import StreamBatch
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.text.tokenizers.tokenizer import all_special_ids
from jaxformer.training.losses import causal_loss

Message = Mapping[str, Any]
"""{"role": "system", "user" or "assistant", "content": text}."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ bos_token }}{{ message.role }}:\n"
    "{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant:\n{% endif %}"
)
"""The template of a tokenizer without one of its own."""


class ChatTemplate(NamedTuple):
    """A template and the names of the special tokens that it may write.

    >>> source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    >>> template = ChatTemplate(source, {"eos_token": "</s>"})
    >>> template.render([{"role": "user", "content": "Hello"}])
    'user: Hello</s>'
    """

    source: str
    tokens: Mapping[str, str]

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of `messages`; with `add_generation_prompt` what begins an answer follows.

        Raises `ConfigError` for a template that fails, and `DataError` where it refuses `messages`.
        """
        jinja2 = optional_dependencies.load("jinja2")
        options = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return _compiled(self.source).render(**options, **self.tokens)
        except jinja2.exceptions.UndefinedError as error:
            raise ConfigError(f"the chat template uses an undefined name: {error}") from error
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template, line {error.lineno}: {error}") from error
        except (jinja2.exceptions.TemplateError, TypeError) as error:
            raise DataError(f"the chat template refuses the messages: {error}") from error

    def answers(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text of `messages`, and the start and end in it of each of the assistant's answers.

        An answer begins after what `add_generation_prompt` writes, and includes what ends it.
        Raises `DataError` where the template writes earlier messages otherwise when later ones
        follow.
        """
        text, spans = self.render(messages), []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:number], add_generation_prompt=True)
                after = self.render(messages[: number + 1])
                if not (text.startswith(after) and after.startswith(before)):
                    raise DataError(
                        f"message {number + 1}: the chat template writes it otherwise when other "
                        "messages follow: give one answer in each conversation, as the last message"
                    )
                spans.append((len(before), len(after)))
        return text, spans


def load_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The template in chat_template.jinja or tokenizer_config.json, else `PLAIN_TEMPLATE`.

    The names of special tokens are those of tokenizer_config.json, else the tokenizer's. Raises
    `DataError` for a file that cannot be read.
    """
    name = "tokenizer_config.json"
    config = read_json(folder / name) if (folder / name).is_file() else {}
    tokens = special_names(tokenizer)
    for name, value in config.items():
        value = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    source, template = config.get("chat_template"), folder / "chat_template.jinja"
    if template.is_file():
        source = template.read_text(encoding="utf-8")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    return ChatTemplate(source if isinstance(source, str) else PLAIN_TEMPLATE, tokens)


def special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """The tokenizer's special tokens as templates name them, such as `eos_token`; "" for none."""
    ids = tokenizer.special._asdict().items()
    return {f"{x}_token": "" if i is None else tokenizer.token(i) for x, i in ids}


def check_messages(texts: Sequence[str], tokenizer: Tokenizer, where: str = "") -> None:
    """Raises `DataError`, which begins with `where`, for a text with the name of a special token.

    In a conversation that a template has written, a model would take it for the token.
    """
    names = sorted(all_special_ids(tokenizer.library_tokenizer))
    for text in texts:
        written = [name for name in names if name in text]
        if written:
            raise DataError(
                f"{where}a message contains {written[0]!r}, the name of a special token, which a "
                "model takes for the token: remove it"
            )


def read_conversations(path: Path) -> list[list[Message]]:
    """The `messages` of each line of a .jsonl file.

    Raises `DataError` naming the first line without messages that have a role and a text, or
    without an answer of the assistant.
    """
    conversations = []
    for number, record in json_lines(path):
        messages = record.get("messages") if isinstance(record, dict) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise DataError(
                f'{path}:{number}: needed {{"messages": [{{"role": .., "content": text}}, ..]}}, '
                f"got {shorten(repr(record))}"
            )
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(
                f"{path}:{number}: no message has the role assistant: there is nothing to learn"
            )
        conversations.append(messages)
    if not conversations:
        raise DataError(f"{path}: there are no conversations: give at least one")
    return conversations


def _is_message(message: Any) -> bool:
    texts = ("role", "content")
    return isinstance(message, dict) and all(isinstance(message.get(x), str) for x in texts)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """The template in the environment in which transformers renders templates."""
    jinja2 = optional_dependencies.load("jinja2")
    extension: Any = optional_dependencies.load("jinja2.ext").Extension
    sandbox = optional_dependencies.load("jinja2.sandbox").ImmutableSandboxedEnvironment

    class Generation(extension):
        """{% generation %}: what is in it is written as it is."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja2's own escapes HTML

    environment = sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    return environment.from_string(source)


def read(options: Any) -> tuple[list[list[Message]], list[list[Message]]]:
    """The conversations to learn from and to test with, as `options` say."""
    train, test = (read_conversations(Path(x)) for x in (options.train, options.test))
    check_count(options, len(train), "conversations")
    return train, test


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
        return causal(params, StreamBatch(batch.tokens, learned, batch.example_ids), rng)

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
    template = load_template(options.folder, tokenizer)
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
