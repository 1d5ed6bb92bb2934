"""Conversations: their files, and their text by chat templates in Jinja, as in `transformers`."""

import datetime
import functools
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.runs.records import json_lines
from jaxformer import optional_dependencies, storage
from jaxformer.errors import ConfigError, DataError, shorten
from jaxformer.pretrained import is_pretrained, locate_model
from jaxformer.records import write_json
from jaxformer.storage import read_json
from jaxformer.text.tokenizers import Tokenizer

TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"

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
        options = {
            "messages": [_without_nulls(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
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

        An answer begins after what `add_generation_prompt` writes, and includes what ends it. White
        space that the template writes only after the last message is in no answer. Raises
        `DataError` where the template writes earlier messages otherwise when later ones follow.
        """
        text = self.render(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = self.render(messages[:number], add_generation_prompt=True)
                start = end_of_prefix(text, asked)
                end = end_of_prefix(text, self.render(messages[: number + 1]))
                if start is None or end is None or start > end:
                    raise DataError(
                        f"message {number + 1}: the chat template writes it otherwise when other "
                        "messages follow: give one answer in each conversation, as the last message"
                    )
                spans.append((start, end))
        if spans and spans[-1][1] == len(text):
            start, end = spans[-1]
            spans[-1] = start, end - len(self._tail(text, messages[:-1]))
        return text, spans

    def _tail(self, text: str, earlier: Sequence[Message]) -> str:
        """The white space that ends `text` because its last message is the last one.

        It is what follows `earlier` alone, and does not follow them in `text`.
        """
        alone = self.render(earlier)
        end = end_of_prefix(text, alone)
        tail = alone[end:] if end is not None and text.startswith(alone[:end]) else ""
        return tail if tail.isspace() and text.endswith(tail) else ""

    def with_source(self, path: str) -> "ChatTemplate":
        """The template in the file `path`; `DataError` for one that cannot be read."""
        try:
            source = storage.to_path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot read the file: {error}") from error
        return self._replace(source=source)

    def save(self, folder: Path) -> None:
        """Writes the template into `folder`, as `load_template` reads it."""
        storage.write(folder / TEMPLATE, self.source.encode())
        write_json(folder / _CONFIG, dict(self.tokens))


def end_of_prefix(text: str, prefix: str) -> int | None:
    """The place in `text` where `prefix` ends, None if it does not begin with it.

    White space may be of another length; at the end of `prefix`, what both have counts.

    >>> end_of_prefix("ask: it says: yes", "ask:\nit says:  ")
    14
    """
    if text.startswith(prefix):
        return len(prefix)
    visible = "".join(prefix.split())
    if not "".join(text.split()).startswith(visible):
        return None
    places = (place for place, character in enumerate(text) if not character.isspace())
    end = 0
    if visible:
        end = next(itertools.islice(places, len(visible) - 1, None)) + 1
    space = prefix[len(prefix.rstrip()) :]
    return end + len(os.path.commonprefix([space, text[end:]]))


def load_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of the model in `folder` as `find_template` reads it, else `PLAIN_TEMPLATE`."""
    template = find_template(folder, tokenizer)
    return template if template.source else template._replace(source=PLAIN_TEMPLATE)


def find_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The template in chat_template.jinja or tokenizer_config.json; its source is "" without one.

    A folder with a LoRA adapter and no template has the template of the adapter's base. The names
    of special tokens come from tokenizer_config.json, else the tokenizer's. Raises `DataError` for
    a file that cannot be read.
    """
    config = read_json(folder / _CONFIG, default={})
    has_template = (folder / TEMPLATE).is_file() or "chat_template" in config
    if not has_template and is_pretrained(folder):
        folder = locate_model(folder)
        config = read_json(folder / _CONFIG, default={}) | config
    tokens = special_names(tokenizer)
    for name, value in config.items():
        value = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    source, template = config.get("chat_template"), folder / TEMPLATE
    if template.is_file():
        source = template.read_text(encoding="utf-8")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    return ChatTemplate(source if isinstance(source, str) else "", tokens)


def special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """The tokenizer's special tokens as templates name them, such as `eos_token`; "" for none."""
    ids = tokenizer.special._asdict().items()
    return {f"{x}_token": "" if i is None else tokenizer.token(i) for x, i in ids}


def check_messages(texts: Sequence[str], tokenizer: Tokenizer, where: str = "") -> None:
    """Raises `DataError`, which begins with `where`, for a text with the name of a special token.

    In a conversation that a template has written, a model would take it for the token.
    """
    for text in texts:
        name = tokenizer.find_special_name(text)
        if name is not None:
            raise DataError(
                f"{where}a message contains {name!r}, the name of a special token, which a "
                "model takes for the token: remove it"
            )


def _without_nulls(message: Message) -> Message:
    """`message` without the fields that are null, which transformers leaves out too."""
    return {name: value for name, value in message.items() if value is not None}


def read_conversations(path: Path) -> list[list[Message]]:
    """The `messages` of each line of a .jsonl file.

    Raises `DataError` naming the first line without messages that have a role and a text, without
    an answer of the assistant, or with tools or documents, which no template is given here.
    """
    conversations = []
    for number, record in json_lines(path):
        messages = record.get("messages") if isinstance(record, dict) else None
        if not isinstance(messages, list) or not all(map(is_message, messages)):
            raise DataError(
                f'{path}:{number}: needed {{"messages": [{{"role": .., "content": text}}, ..]}}, '
                f"got {shorten(repr(record))}"
            )
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(
                f"{path}:{number}: no message has the role assistant: there is nothing to learn"
            )
        check_no_tools(record, f"{path}:{number}")
        conversations.append(messages)
    if not conversations:
        raise DataError(f"{path}: there are no conversations: give at least one")
    return conversations


def check_no_tools(record: Mapping[str, Any], where: str) -> None:
    """Raises `DataError`, which begins with `where`, for tools or documents in a record."""
    for name in ("tools", "documents"):
        if record.get(name):
            raise DataError(
                f"{where}: the conversation has {name}, which the chat template is not given: "
                "write them into a message of the system, or leave the line out"
            )


def is_message(message: Any) -> bool:
    """Whether `message` has a role and a text."""
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

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """The filter of transformers, with its arguments; jinja2's own escapes HTML."""
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    return environment.from_string(source)
