"""Text to a tokenizer and ids: `python -m experiments.language_modelling.prepare --preset NAME`."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed, downloads, run_folder, sources
from experiments.harness.runs.shares import share_of, shares_of
from experiments.harness.runs.text_cache import NOTHING_KEPT, TextCache
from experiments.harness.training.training_config import text_cache
from experiments.language_modelling import corpus
from experiments.language_modelling.corpus import Corpus, Part, load_mixture
from experiments.language_modelling.id_text import (
    IdPart,
    amount_of,
    describe_documents,
    is_ids,
)
from experiments.language_modelling.load_run import with_pretrained_sizes
from experiments.language_modelling.nanogpt_characters import read_characters
from experiments.language_modelling.objectives import objective_of
from experiments.language_modelling.presets import PRESETS, DataConfig, LanguageConfig
from jaxformer import storage
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig, import_by_name, is_import_name
from jaxformer.distributed import assert_processes_agree
from jaxformer.errors import CheckpointError, ConfigError, DataError
from jaxformer.records import Record
from jaxformer.text import tokenizers
from jaxformer.text.data import (
    MaskedStream,
    Mixture,
    Stream,
    Tokens,
    encode_documents,
)
from jaxformer.text.metrics import TextSize
from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS, SPECIAL_TOKENS, Tokenizer

TOKENIZER = Path("tokenizer", "tokenizer.json")
_MANY_PASSES = 10
"""Passes over a text after which a model without dropout may know it by heart."""
_PUBLISHED = {"gpt2": ("vocab.json", "merges.txt"), "bert-base-uncased": ("vocab.txt",)}
_LEARNED: dict[str, Callable[..., Tokenizer]] = {
    "bpe": partial(tokenizers.train_bpe, prefix=""),
    "words": tokenizers.train_words,
    "characters": lambda text, size, **options: tokenizers.train_characters(text, **options),
}


class Encoded(NamedTuple):
    """A part of the text as ids, and how much text it was; None: not counted, as of training text
    that came as ids."""

    tokens: Tokens
    documents: int | None
    amount: TextSize | None

    def counted(self, tokenizer: Tokenizer) -> "Encoded":
        """The same with documents and amount, for which ids are decoded if need be."""
        if self.amount is not None:
            return self
        return Encoded(self.tokens, *amount_of(self.tokens, tokenizer))


class MixedText(NamedTuple):
    """A text of a mixture: its name, its share of the rows, and its parts."""

    name: str
    share: float
    train: Encoded
    validation: Encoded


class Prepared(NamedTuple):
    """The text, ready to train on. `model` has the size of the tokenizer's vocabulary.

    For a mixture, `train` and `validation` belong to its first text; `mixture` has all of them.
    """

    model: TransformerConfig
    tokenizer: Tokenizer
    batches: Stream | MaskedStream | Mixture
    train: Encoded
    validation: Encoded
    test: Encoded | None
    mixture: tuple[MixedText, ...] = ()


def prepare(config: LanguageConfig, folder: Path) -> Prepared:
    """Makes the tokenizer and encodes the text into `folder`, unless that is done.

    Raises `CheckpointError` rather than replace the text that a run was trained on, `DataError`
    for text of less than one row and for what cannot be read or found.
    """
    cache = text_cache(config)
    with distributed.together():
        parts = _parts(load_mixture(config.data, cache))
        if distributed.is_first():
            _prepare(config, folder, parts, cache)
    tokenizer = load_tokenizer(folder)
    texts = {name: open_encoded(folder, name, tokenizer, cache) for name in parts}
    assert_processes_agree({f"{name} text": x.tokens.fingerprint for name, x in texts.items()})
    shares = _short_names(shares_of(config.data.train))
    train_texts = [texts[name] for name in part_names(config.data, "train")]
    validation_texts = [texts[name] for name in part_names(config.data, "validation")]
    streams = [objective_of(config).stream(text.tokens, tokenizer, config) for text in train_texts]
    mixture = zip(shares.items(), train_texts, validation_texts, strict=False)
    return Prepared(
        model=sized(config, tokenizer),
        tokenizer=tokenizer,
        batches=Mixture(dict(zip(shares, streams, strict=True)), shares) if shares else streams[0],
        train=train_texts[0],
        validation=validation_texts[0],
        test=texts.get("test"),
        mixture=tuple(
            MixedText(name, share / sum(shares.values()), train, validation)
            for (name, share), train, validation in mixture
        ),
    )


def _short_names(shares: dict[str, float]) -> dict[str, float]:
    """`shares` by the names of files without their folders, where these differ."""
    short = [Path(name).name for name in shares]
    if len(set(short)) < len(short):
        return shares
    return dict(zip(short, shares.values(), strict=True))


def part_names(data: DataConfig, part: str) -> list[str]:
    """The names in a run's folder of the part train, validation or test: of a mixture one a text.

    >>> part_names(DataConfig(train=("a.txt=3", "b.txt=1")), "train")
    ['train-1', 'train-2']
    """
    count = len(shares_of(data.train))
    if count == 0 or part == "test":
        return [part]
    return [f"{part}-{number}" for number in range(1, count + 1)]


def _parts(texts: dict[str, Corpus]) -> dict[str, Part | IdPart]:
    """The parts of all `texts` by their names in a run's folder, those to train on first."""
    numbers = [""] if "" in texts else [f"-{number}" for number in range(1, len(texts) + 1)]
    parts: dict[str, Part | IdPart] = {}
    for number, text in zip(numbers, texts.values(), strict=True):
        parts[f"train{number}"] = text.train
    for number, text in zip(numbers, texts.values(), strict=True):
        parts[f"validation{number}"] = text.validation
    test = next(iter(texts.values())).test
    return parts if test is None else parts | {"test": test}


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
    if "ids" in note:
        tokens = _open_ids(note, tokenizer)
    else:
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
    amount = None if note["amount"] is None else TextSize(*note["amount"])
    return Encoded(tokens, note["documents"], amount)


def _open_ids(note: dict[str, Any], tokenizer: Tokenizer) -> Tokens:
    """The ids in the files of `note`; `DataError` where they have changed since it was written."""
    part = IdPart(**note["ids"])
    tokens = part.open(tokenizer.vocab_size)
    if tokens.fingerprint != note["text"]:
        raise DataError(
            f"{part.paths[0]}, or a file given with it, has changed since the run was prepared: "
            "bring back the old one, or use another --name"
        )
    return tokens


def encode_part(
    config: LanguageConfig, part: Part | IdPart, tokenizer: Tokenizer, path: Path
) -> Encoded:
    """`part` as ids, which are in the file `path` where it comes as text."""
    if isinstance(part, IdPart):
        return Encoded(part.open(tokenizer.vocab_size), None, None).counted(tokenizer)
    tokens = encode_documents(
        part.documents(), tokenizer, path, isolate_documents=config.isolate_documents
    )
    metadata = corpus.metadata_of(part)
    return Encoded(tokens, metadata.documents, metadata.amount)


def sized(config: LanguageConfig, tokenizer: Tokenizer) -> TransformerConfig:
    """The model with the size of the learned vocabulary, which may be smaller than asked for.

    A model whose weights come from elsewhere keeps its own size; `ConfigError` where that is less.
    """
    if config.init_from or config.continue_from:
        tokenizer.check_fits(config.model.vocab_size)
        return config.model
    return replace(config.model, vocab_size=tokenizer.vocab_size)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the run in `folder`."""
    return tokenizers.load(folder / TOKENIZER)


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 (hex) of the tokenizer's files in the run's `folder`: the same in all versions."""
    return tokenizers.digest(folder / TOKENIZER.parent)


def text_digest(folder: Path, names: Sequence[str]) -> str:
    """SHA-256 (hex) of the parts `names` of the text of the run in `folder`; "" where it has none.

    For one part it is the digest of its text, as `part_names` names it.
    """
    digests = [note["text"] for note in (_note(folder, name) for name in names) if note]
    if len(digests) < 2:
        return "".join(digests)
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def describe(prepared: Prepared, config: LanguageConfig) -> str:
    """The sizes of the prepared text, in a few lines, and a hint where the model may learn it."""
    lines = [f"{name}: {_describe_part(part)}" for name, part in _described_parts(prepared).items()]
    for name, part in _described_parts(prepared).items():
        is_measured = not name.startswith("train")
        if is_measured and (description := describe_unknown(part, prepared.tokenizer)):
            lines.append(f"{name}: {description}")
    size, steps = prepared.tokenizer.vocab_size, prepared.batches.steps_per_epoch
    lines.append(f"vocabulary {size:,}, {steps:,} batches an epoch")
    trained = [share_of(name)[0] for name in config.data.train]
    held_out = {"validation": config.data.validation, "test": config.data.test}
    cache = text_cache(config)
    for name, files in held_out.items():
        for file in files:
            if any(_are_alike(file, other, cache) for other in trained):
                lines.append(f"{name}: {file} is trained on, too")
    for file in config.data.test:
        if any(_are_alike(file, other, cache) for other in config.data.validation):
            lines.append(f"test: {file} is validated on, too")
    if isinstance(prepared.batches, Mixture):
        total = config.optimizer.total_steps
        lines += describe_passes(prepared, prepared.batches, total)
    passes = config.optimizer.total_steps / steps
    if passes > _MANY_PASSES and config.model.dropout_rate == 0.0:
        lines.append(
            f"{passes:.0f} passes over the text without dropout: if the validation loss rises, "
            "give --model.dropout_rate 0.1 or fewer --optimizer.total_steps"
        )
    return "\n".join(lines)


def _are_alike(one: str, other: str, cache: TextCache) -> bool:
    """Whether two sources are one, or two files of text with the same content."""
    paths = [Path(os.path.expanduser(name)) for name in (one, other)]
    if one == other or not all(path.is_file() for path in paths):
        return one == other
    if is_ids((one,)) or paths[0].stat().st_size != paths[1].stat().st_size:
        return False  # ids may be many gigabytes
    return sources.identity(one, cache) == sources.identity(other, cache)


def _described_parts(prepared: Prepared) -> dict[str, Encoded]:
    """The parts of the text by the names that are shown."""
    parts: dict[str, Encoded] = {}
    for text in prepared.mixture:
        parts[f"train, {text.name}"] = text.train
        parts[f"validation, {text.name}"] = text.validation
    if not prepared.mixture:
        parts = {"train": prepared.train, "validation": prepared.validation}
    return parts if prepared.test is None else parts | {"test": prepared.test}


def describe_passes(prepared: Prepared, batches: Mixture, steps: int) -> list[str]:
    """The share of each text, and how many times it is read in so many steps: a line each."""
    passes = batches.passes(steps)
    return [
        f"{text.name}: {text.share:.4g} of the rows, read {passes[text.name]:.2f} times in "
        f"{steps:,} steps"
        for text in prepared.mixture
    ]


def _describe_part(part: Encoded) -> str:
    """The size of a part of the text."""
    if part.amount is None:
        return describe_documents(part.tokens)
    return (
        f"{part.documents:,} documents, {part.amount.words:,} words, {part.amount.bytes:,} bytes, "
        f"{len(part.tokens.ids):,} tokens"
    )


def describe_unknown(text: Encoded, tokenizer: Tokenizer) -> str:
    """The share of the tokens of `text` that stand for words without a token; empty for none."""
    unknown = tokenizer.special.unk
    if unknown in (None, tokenizer.special.bos, tokenizer.special.eos):
        return ""
    count = text.tokens.count(unknown)
    share = f"{count / max(len(text.tokens.ids), 1):.1%}"
    return (
        f"{share} of the tokens are <unk>: the words behind them are in no score" if count else ""
    )


def _prepare(
    config: LanguageConfig, folder: Path, parts: dict[str, Part | IdPart], cache: TextCache
) -> None:
    train = {name: part for name, part in parts.items() if name.startswith("train")}
    if not all(_is_current(config, folder, name, part, cache) for name, part in train.items()):
        if Checkpoints(folder / "checkpoints").steps():
            raise CheckpointError(
                f"{folder} was trained on other text than this: give it the same training files, "
                "or use another --name"
            )
        for note in (folder / "data").glob("*.json"):
            note.unlink()  # the other parts were encoded by another tokenizer
        _write_tokenizer(config, folder / TOKENIZER.parent, list(train.values()), cache)
    for name, part in parts.items():
        if not _is_current(config, folder, name, part, cache):
            _write(config, folder, name, part, cache)


def _write_tokenizer(
    config: LanguageConfig, folder: Path, parts: list[Part | IdPart], cache: TextCache
) -> None:
    """Makes the tokenizer that reads all of `parts`; of texts it may be learned."""

    def make(folder: Path) -> None:
        with display.phase("making the tokenizer"):
            _make_tokenizer(config, parts).save(folder / TOKENIZER.name)

    texts = [part for part in parts if isinstance(part, Part)]
    if config.data.tokenizer in _LEARNED and len(texts) == len(parts):
        identities = [corpus.identity(text, cache) for text in texts]
        made_from = ["tokenizer", _how(config, texts[0])[0], identities]
        cache.fill(folder, made_from, make)
    else:
        NOTHING_KEPT.fill(folder, None, make)


def _write(
    config: LanguageConfig, folder: Path, name: str, part: Part | IdPart, cache: TextCache
) -> None:
    """Puts the ids of `part` into the run's folder, and then notes what they are.

    For ids that others made only the note is written.
    """
    path = folder / "data" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # written again when everything else is
    digest = tokenizer_digest(folder)
    how = {"how": _how(config, part), "tokenizer": digest}
    if isinstance(part, IdPart):
        Record(path).write(how | _note_of_ids(part, load_tokenizer(folder), name, cache))
    else:
        _encode(config, path.parent, name, part, load_tokenizer(folder), digest, cache)
        Record(path).write(how | corpus.metadata_of(part, cache)._asdict())


def _note_of_ids(part: IdPart, tokenizer: Tokenizer, name: str, cache: TextCache) -> dict[str, Any]:
    """The note on ids that others made; of those to measure it says how much text they are."""
    tokens = part.open(tokenizer.vocab_size)
    note = {"text": tokens.fingerprint, "ids": _as_json(part)}
    if name.startswith("train"):
        return note | {"documents": None, "amount": None}

    def count() -> dict[str, Any]:
        with display.phase(f"counting the words of the {name} text"):
            documents, amount = amount_of(tokens, tokenizer)
        return {"documents": documents, "amount": amount}

    counted = cache.record(["amount", tokens.fingerprint, tokenizer.fingerprint], count)
    return note | {key: counted[key] for key in ("documents", "amount")}


def _encode(
    config: LanguageConfig,
    folder: Path,
    name: str,
    part: Part,
    tokenizer: Tokenizer,
    digest: str,
    cache: TextCache,
) -> None:
    """Puts the ids of `part` into `folder`; the tokenizer's files have the SHA-256 `digest`."""

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

    made_from = [name, digest, config.isolate_documents, corpus.identity(part, cache)]
    cache.fill(folder, made_from, make)


def _note(folder: Path, name: str) -> dict:
    fields: dict[str, Any] = {"how": list, "tokenizer": str, "text": str}
    fields |= {"documents": int | None, "amount": list | None}
    return Record(folder / "data" / f"{name}.json").read(**fields)


def _is_current(
    config: LanguageConfig, folder: Path, name: str, part: Part | IdPart, cache: TextCache
) -> bool:
    """Whether `part` lies encoded in the run's folder, or is noted there where it comes as ids."""
    note = _note(folder, name)
    if not note or note["how"] != _how(config, part):
        return False
    if isinstance(part, IdPart):
        return note["text"] == part.open().fingerprint and note["ids"] == _as_json(part)
    return note["text"] == corpus.metadata_of(part, cache).text


def _as_json(part: IdPart) -> dict[str, Any]:
    """`part` as a note has it."""
    return part._asdict() | {"paths": list(part.paths)}


def _how(config: LanguageConfig, part: Part | IdPart) -> list:
    """JSON of all that decides the ids besides the text."""
    special = list(_special_tokens(config))
    tokenizer = [config.data.tokenizer, config.model.vocab_size, special]
    if isinstance(part, IdPart):
        return [tokenizer, "ids"]
    field = [part.field] if part.field != "text" else []
    return [tokenizer, part.split, part.start, part.stop, config.isolate_documents, *field]


def _special_tokens(config: LanguageConfig) -> tuple[str, ...]:
    """The special tokens of a vocabulary that is learned here."""
    if config.objective == "masked":
        return MASKED_SPECIAL_TOKENS
    return SPECIAL_TOKENS if config.isolate_documents or config.data.tokenizer == "words" else ()


def _make_tokenizer(config: LanguageConfig, parts: list[Part | IdPart]) -> Tokenizer:
    name, special = config.data.tokenizer, _special_tokens(config)
    size = config.model.vocab_size
    ids = next((part for part in parts if isinstance(part, IdPart)), None)
    if ids is not None and name in _LEARNED:
        raise ConfigError(
            f"tokenizer={name!r} is learned from text, but {ids.paths[0]} holds ids: give the "
            "tokenizer that made them: --data.tokenizer gpt2, a file or folder, nanoGPT's meta.pkl"
        )
    documents = (part.documents() for part in parts if isinstance(part, Part))
    text = chain.from_iterable(chain.from_iterable(documents))
    if name in _LEARNED:
        return _LEARNED[name](text, size, special_tokens=special)
    if is_import_name(name):
        return import_by_name(name, "tokenizer")(text, size)
    if name in _PUBLISHED:
        paths = [downloads.find("tokenizers", f"{name}/{file}") for file in _PUBLISHED[name]]
        return tokenizers.load(paths[0].parent)
    path = storage.to_path(name)
    if not path.exists():
        known = ", ".join((*_LEARNED, *_PUBLISHED))
        raise ConfigError(
            f"tokenizer={name!r} is neither one of {known} nor a file or folder with a tokenizer"
        )
    if path.suffix == ".pkl":
        return read_characters(path)
    return tokenizers.load(path)


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
