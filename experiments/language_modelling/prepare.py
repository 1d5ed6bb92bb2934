"""Text to a tokenizer and ids: `python -m experiments.language_modelling.prepare --preset NAME`."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed, downloads, run_folder
from experiments.harness.runs.text_cache import NOTHING_KEPT, TextCache
from experiments.harness.training.training_config import text_cache
from experiments.language_modelling import corpus
from experiments.language_modelling.corpus import Corpus, Part, load_corpus
from experiments.language_modelling.load_run import with_pretrained_sizes
from experiments.language_modelling.objectives import objective
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig, import_by_name, is_import_name
from jaxformer.errors import CheckpointError, ConfigError, DataError
from jaxformer.records import Record
from jaxformer.text import tokenizers
from jaxformer.text.data import (
    MaskedStream,
    Stream,
    Tokens,
    encode_documents,
)
from jaxformer.text.metrics import TextSize
from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS, SPECIAL_TOKENS, Tokenizer

TOKENIZER = Path("tokenizer", "tokenizer.json")
_WINDOW = 64
"""Tokens among which a line is looked for that begins a prompt."""
_PLACES = 12
"""Places for each prompt where such lines are looked for."""
_MANY_PASSES = 10
"""Passes over a text after which a model without dropout may know it by heart."""
_PUBLISHED = {"gpt2": ("vocab.json", "merges.txt"), "bert-base-uncased": ("vocab.txt",)}
_LEARNED: dict[str, Callable[..., Tokenizer]] = {
    "bpe": partial(tokenizers.train_bpe, prefix=""),
    "words": tokenizers.train_words,
    "characters": lambda text, size, **options: tokenizers.train_characters(text, **options),
}


class Encoded(NamedTuple):
    """A part of the text as ids, and how much text it was."""

    tokens: Tokens
    documents: int
    amount: TextSize


class Prepared(NamedTuple):
    """The text, ready to train on. `model` has the size of the tokenizer's vocabulary."""

    model: TransformerConfig
    tokenizer: Tokenizer
    batches: Stream | MaskedStream
    train: Encoded
    validation: Encoded
    test: Encoded | None


def prepare(config: LanguageConfig, folder: Path) -> Prepared:
    """Makes the tokenizer and encodes the text into `folder`, unless that is done.

    Raises `CheckpointError` rather than replace the text that a run was trained on, `DataError`
    for text of less than one row and for what cannot be read or found.
    """
    cache = text_cache(config)
    with distributed.together():
        parts = load_corpus(config.data, cache)
        if distributed.is_first():
            _prepare(config, folder, parts, cache)
    tokenizer = load_tokenizer(folder)
    train = open_encoded(folder, "train", tokenizer, cache)
    validation = open_encoded(folder, "validation", tokenizer, cache)
    test = open_encoded(folder, "test", tokenizer, cache) if parts.test else None
    batches = objective(config).stream(train.tokens, tokenizer, config)
    return Prepared(sized(config, tokenizer), tokenizer, batches, train, validation, test)


def open_encoded(
    folder: Path, name: str, tokenizer: Tokenizer, cache: TextCache = NOTHING_KEPT
) -> Encoded:
    """The part `name` of the text of the run in `folder`.

    Raises `ConfigError` where it was encoded by another tokenizer, `DataError` for damaged files.
    """
    path = folder / "data" / f"{name}.tokens"
    note = _note(folder, name)
    if not note:
        raise DataError(f"{folder / 'data'} has no {name} text: prepare the run, or give files")
    if note["tokenizer"] != tokenizer_digest(folder):
        raise ConfigError(
            f"{path} was not encoded by {folder / TOKENIZER}: put the run's own tokenizer there, "
            "or use another --name"
        )
    tokens = cache.whole_tokens(path)
    if len(tokens.ids) < 2:
        raise DataError(
            f"the {name} text has {len(tokens.ids)} tokens, but 2 are needed: give more"
        )
    if (tokens.vocab_size or 0) > tokenizer.vocab_size:
        raise DataError(
            f"{path} was written for ids up to {(tokens.vocab_size or 0) - 1}, but the vocabulary "
            f"ends at {tokenizer.vocab_size - 1}: remove {folder / 'data'} and prepare the text "
            "again"
        )
    return Encoded(tokens, note["documents"], TextSize(*note["amount"]))


def encode_part(config: LanguageConfig, part: Part, tokenizer: Tokenizer, path: Path) -> Encoded:
    """`part` as ids in the file `path`."""
    tokens = encode_documents(
        part.documents(), tokenizer, path, isolate_documents=config.isolate_documents
    )
    metadata = corpus.metadata_of(part)
    return Encoded(tokens, metadata.documents, metadata.amount)


def sized(config: LanguageConfig, tokenizer: Tokenizer) -> TransformerConfig:
    """The model with the size of the learned vocabulary, which may be smaller than asked for.

    A model whose weights come from elsewhere keeps its own size.
    """
    if config.init_from or config.continue_from:
        return config.model
    return replace(config.model, vocab_size=tokenizer.vocab_size)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the run in `folder`."""
    return tokenizers.load(folder / TOKENIZER)


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 (hex) of the tokenizer's files in the run's `folder`: the same in all versions."""
    return tokenizers.digest(folder / TOKENIZER.parent)


def text_digest(folder: Path, name: str) -> str:
    """SHA-256 (hex) of the part `name` of the text of the run in `folder`; "" where it has none."""
    note = _note(folder, name)
    return note["text"] if note else ""


def begun_lines(prepared: Prepared, config: LanguageConfig, count: int = 3) -> tuple[str, ...]:
    """The first halves of `count` lines that stand apart in the validation text.

    A masked model gets whole lines, in which a word of the middle is masked.
    """
    tokenizer, ids = prepared.tokenizer, prepared.validation.tokens.ids
    window = min(_WINDOW, config.data.seq_len // 2)
    texts = [
        tokenizer.decode(ids[place : place + window].tolist())
        for place in np.linspace(0, len(ids), _PLACES * count, endpoint=False, dtype=int)
    ]
    lines = [line for text in texts for line in text.split("\n")[1:] if len(line.split()) > 3]
    lines = (lines or texts)[:: max(len(lines or texts) // count, 1)][:count]
    mask = tokenizer.special.mask
    prompts = []
    for words in (re.findall(r"\s*\S+", line) for line in lines):
        half = len(words) // 2
        if config.objective == "causal":
            prompts.append("".join(words[:half]))
        elif mask is not None and words:
            hidden = re.sub(r"\S+", lambda _: tokenizer.token(mask), words[half])
            prompts.append("".join([*words[:half], hidden, *words[half + 1 :]]))
    return tuple(dict.fromkeys(filter(None, prompts)))


def describe(prepared: Prepared, config: LanguageConfig) -> str:
    """The sizes of the prepared text, in a few lines, and a hint where the model may learn it."""
    lines = [
        f"{name}: {part.documents:,} documents, {part.amount.words:,} words, "
        f"{part.amount.bytes:,} bytes, {len(part.tokens.ids):,} tokens"
        for name in ("train", "validation", "test")
        if (part := getattr(prepared, name)) is not None
    ]
    for name, part in (("validation", prepared.validation), ("test", prepared.test)):
        if part is not None and (said := describe_unknown(part, prepared.tokenizer)):
            lines.append(f"{name}: {said}")
    size, steps = prepared.tokenizer.vocab_size, prepared.batches.steps_per_epoch
    lines.append(f"vocabulary {size:,}, {steps:,} batches an epoch")
    passes = config.optimizer.total_steps / steps
    if passes > _MANY_PASSES and config.model.dropout_rate == 0.0:
        lines.append(
            f"{passes:.0f} passes over the text without dropout: if the validation loss rises, "
            "give --model.dropout_rate 0.1 or fewer --optimizer.total_steps"
        )
    return "\n".join(lines)


def describe_unknown(text: Encoded, tokenizer: Tokenizer) -> str:
    """The share of the tokens of `text` that stand for words without a token; empty for none."""
    unknown = tokenizer.special.unk
    if unknown in (None, tokenizer.special.bos, tokenizer.special.eos):
        return ""
    count = np.count_nonzero(text.tokens.ids == unknown)
    share = f"{count / max(len(text.tokens.ids), 1):.1%}"
    return (
        f"{share} of the tokens are <unk>: the words behind them are in no score" if count else ""
    )


def _prepare(config: LanguageConfig, folder: Path, parts: Corpus, cache: TextCache) -> None:
    if not _is_current(config, folder, "train", parts.train, cache):
        if Checkpoints(folder / "checkpoints").steps():
            raise CheckpointError(
                f"{folder} was trained on other text than this: give it the same training files, "
                "or use another --name"
            )
        for note in (folder / "data").glob("*.json"):
            note.unlink()  # the other parts were encoded by another tokenizer
        _write_tokenizer(config, folder / TOKENIZER.parent, parts.train, cache)
        _write(config, folder, "train", parts.train, cache)
    for name, part in (("validation", parts.validation), ("test", parts.test)):
        if part and not _is_current(config, folder, name, part, cache):
            _write(config, folder, name, part, cache)


def _write_tokenizer(config: LanguageConfig, folder: Path, part: Part, cache: TextCache) -> None:
    def make(folder: Path) -> None:
        with display.phase("making the tokenizer"):
            _make_tokenizer(config, part).save(folder / TOKENIZER.name)

    if config.data.tokenizer in _LEARNED:
        made_from = ["tokenizer", _how(config, part)[0], corpus.identity(part, cache)]
        cache.fill(folder, made_from, make)
    else:
        NOTHING_KEPT.fill(folder, None, make)


def _write(config: LanguageConfig, folder: Path, name: str, part: Part, cache: TextCache) -> None:
    """Puts the ids of `part` into the run's folder, and then notes what they are."""
    path = folder / "data" / f"{name}.json"
    path.unlink(missing_ok=True)  # written again when everything else is
    tokenizer = load_tokenizer(folder)

    def make(folder: Path) -> None:
        total = corpus.metadata_of(part, cache).amount.bytes
        with display.phase(f"encoding the {name} text") as phase:
            encode_documents(
                part.documents(),
                tokenizer,
                folder / f"{name}.tokens",
                isolate_documents=config.isolate_documents,
                progress=lambda size: phase.encoded(size, total),
            )

    made_from = [name, tokenizer_digest(folder), config.isolate_documents]
    cache.fill(path.parent, [*made_from, corpus.identity(part, cache)], make)
    note = {
        "how": _how(config, part),
        "tokenizer": tokenizer_digest(folder),
        **corpus.metadata_of(part, cache)._asdict(),
    }
    Record(path).write(note)


def _note(folder: Path, name: str) -> dict:
    fields: dict[str, type] = {"how": list, "tokenizer": str, "text": str}
    fields |= {"documents": int, "amount": list}
    return Record(folder / "data" / f"{name}.json").read(**fields)


def _is_current(
    config: LanguageConfig, folder: Path, name: str, part: Part, cache: TextCache
) -> bool:
    """Whether `part` lies encoded in the run's folder."""
    note = _note(folder, name)
    if not note or note["how"] != _how(config, part):
        return False
    return note["text"] == corpus.metadata_of(part, cache).text


def _how(config: LanguageConfig, part: Part) -> list:
    """JSON of all that decides the ids besides the text."""
    special = list(_special_tokens(config))
    tokenizer = [config.data.tokenizer, config.model.vocab_size, special]
    field = [part.field] if part.field != "text" else []
    return [tokenizer, part.split, part.start, part.stop, config.isolate_documents, *field]


def _special_tokens(config: LanguageConfig) -> tuple[str, ...]:
    """The special tokens of a vocabulary that is learned here."""
    if config.objective == "masked":
        return MASKED_SPECIAL_TOKENS
    return SPECIAL_TOKENS if config.isolate_documents or config.data.tokenizer == "words" else ()


def _make_tokenizer(config: LanguageConfig, part: Part) -> Tokenizer:
    name, special = config.data.tokenizer, _special_tokens(config)
    text, size = chain.from_iterable(part.documents()), config.model.vocab_size
    if name in _LEARNED:
        return _LEARNED[name](text, size, special_tokens=special)
    if is_import_name(name):
        return import_by_name(name, "tokenizer")(text, size)
    if name in _PUBLISHED:
        paths = [downloads.find("tokenizers", f"{name}/{file}") for file in _PUBLISHED[name]]
        return tokenizers.load(paths[0].parent)
    if not Path(name).exists():
        known = ", ".join((*_LEARNED, *_PUBLISHED))
        raise ConfigError(
            f"tokenizer={name!r} is neither one of {known} nor a file or folder with a tokenizer"
        )
    return tokenizers.load(name)


def main(config: LanguageConfig) -> None:
    """Prepares the run's text and describes it."""
    with distributed.joined(config):
        config = with_pretrained_sizes(config)
        folder = run_folder.open_folder(
            config.runs, "language_modelling", config.name, config, may_differ=config.free_fields()
        ).folder
        print(describe(prepare(config, folder), config))
        print(f"prepared in {folder}")


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment="language_modelling")
