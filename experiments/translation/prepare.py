"""Text to tokenizers and ids: `python -m experiments.translation.prepare --preset NAME`."""

import shutil
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed, run_files, run_folder
from experiments.harness.runs.run_files import NOTHING_KEPT, TextCache
from experiments.harness.training import initialization
from experiments.harness.training.training_config import text_cache
from experiments.translation.corpus import Text, open_corpus, write_known_words
from experiments.translation.presets import PRESETS, DataConfig, TranslationConfig
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig, import_by_name, is_import_name
from jaxformer.distributed import assert_processes_agree
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.records import Record
from jaxformer.text import tokenizers
from jaxformer.text.data import PairBatches, bucket_pairs, encode_pairs
from jaxformer.text.tokenizers import Tokenizer


class Prepared(NamedTuple):
    """The text, ready to train on. `model` has the sizes of the learned vocabularies."""

    model: TransformerConfig
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    batches: PairBatches
    validation: Text
    test: Text


def prepare(config: TranslationConfig, folder: Path) -> Prepared:
    """Trains the tokenizers and encodes the training text into `folder`, unless it is there.

    One joint vocabulary when `config.model.source_vocab_size` is None, else one a side. Raises
    `CheckpointError` rather than replace the text that a run was trained on, `DataError` for
    damaged files.
    """
    cache = text_cache(config)
    with distributed.together():
        corpus = open_corpus(config.data, cache)
        wanted = {"text": corpus.fingerprint, "vocabularies": _wanted(config, folder)}
    assert_processes_agree({"training text": wanted["text"]})
    with distributed.together():
        if distributed.is_first():
            _prepare(config, cache, corpus.train, wanted, folder)
    source_tokenizer, target_tokenizer = load_tokenizers(folder)
    model = sized(config.model, source_tokenizer, target_tokenizer)
    data = config.data
    batches = bucket_pairs(
        *(cache.whole_tokens(folder / "data" / f"{side}.tokens") for side in ("source", "target")),
        seed=config.training.seed,
        batch_tokens=data.batch_tokens,
        buckets=data.buckets,
        max_len=config.model.max_len,
        pad_to_multiple=data.pad_to_multiple,
        batch_size_multiple=data.batch_size_multiple * config.training.parts,
    )
    return Prepared(
        model, source_tokenizer, target_tokenizer, batches, corpus.validation, corpus.test
    )


def with_parent(config: TranslationConfig) -> TranslationConfig:
    """`config` with the sizes of the run it starts from; `ConfigError` where that is no run."""
    config = initialization.with_parent(config, "translation")
    folder = run_folder.folder_of(config.runs, "translation", config.name)
    known = initialization.parent_of(config) or initialization.is_begun(folder)
    if config.init_from and not known:
        initialization.refuse_parent("init_from", config.init_from)
    return config


def load_tokenizers(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """The source and the target tokenizer of a run; one object when the vocabulary is joint.

    Raises `ConfigError` where one is not the run's own, `DataError` where it cannot be read.
    """
    record = Record(folder / "data" / "prepared.json").read(text=str)
    digests = _digests(folder)
    if record.get("tokenizers", digests) != digests:
        raise ConfigError(
            f"{folder / 'tokenizer'} does not hold the tokenizers that the run's text was encoded "
            "with: put the run's own there, or use another --name"
        )
    target = tokenizers.load_standard(folder / "tokenizer" / "target.json")
    source = folder / "tokenizer" / "source.json"
    return (tokenizers.load_standard(source) if source.exists() else target), target


def sized(model: TransformerConfig, source: Tokenizer, target: Tokenizer) -> TransformerConfig:
    """`model` with the sizes of the learned vocabularies, which may be smaller than asked for."""
    if model.source_vocab_size is None:
        return replace(model, vocab_size=target.vocab_size)
    return replace(model, vocab_size=target.vocab_size, source_vocab_size=source.vocab_size)


def describe(prepared: Prepared) -> str:
    """The sizes of the prepared text, in a few lines."""
    batches = prepared.batches
    shapes = ", ".join(
        f"{b.batch_size}x{b.source_length}>{b.target_length}" for b in batches.buckets
    )
    dropped = ", ".join(f"{n} {why}" for why, n in batches.dropped.items() if n) or "none"
    return (
        f"training pairs {len(batches.pairs):,} (left out: {dropped}), "
        f"validation {len(prepared.validation.source):,}, test {len(prepared.test.source):,}\n"
        f"vocabulary {prepared.target_tokenizer.vocab_size:,}, "
        f"{batches.steps_per_epoch:,} batches an epoch, {batches.padding_share:.1%} padding\n"
        + textwrap.fill(f"shapes (rows x source > target): {shapes}", 79)
    )


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each tokenizer's file, by its name."""
    return {path.name: run_files.digest(path) for path in sorted(folder.glob("tokenizer/*.json"))}


def _wanted(config: TranslationConfig, folder: Path) -> list:
    """The settings that decide tokenizers and ids besides the text, as JSON."""
    data, model = config.data, config.model
    wanted: list = [data.tokenizer, model.vocab_size, model.source_vocab_size]
    wanted += ["lowercase"] if data.lowercase else []
    parent = initialization.parent_of(config)
    if parent is None and not initialization.is_begun(folder):
        return wanted
    return [*wanted, _digests(parent.folder if parent else folder)]


def _prepare(
    config: TranslationConfig,
    cache: TextCache,
    read: Callable[[], Text],
    wanted: dict,
    folder: Path,
) -> None:
    record = Record(folder / "data" / "prepared.json")
    prepared = record.read(text=str)
    prepared.pop("tokenizers", None)
    if prepared not in ({}, wanted) and Checkpoints(folder / "checkpoints").steps():
        raise CheckpointError(
            f"{folder} was trained on other text than this: give it the same training files, or "
            "use another --name"
        )
    if prepared == wanted:
        return
    record.path.unlink(missing_ok=True)  # written again when everything else is
    (folder / "tokenizer" / "source.json").unlink(missing_ok=True)
    make = partial(_write_tokenizers, config, read)
    # The code of a user's tokenizer may change.
    tokenizer_cache = NOTHING_KEPT if is_import_name(config.data.tokenizer) else cache
    tokenizer_cache.fill(folder / "tokenizer", ["tokenizers", wanted], make)
    encode = partial(_encode, config.data, read, load_tokenizers(folder))
    cache.fill(folder / "data", ["pairs", wanted, _digests(folder)], encode)
    record.write(wanted | {"tokenizers": _digests(folder)})


def _write_tokenizers(config: TranslationConfig, read: Callable[[], Text], folder: Path) -> None:
    """Writes the tokenizers of the run that `config` starts from, or trains them."""
    parent = initialization.parent_of(config)
    if parent is not None:
        for path in parent.folder.glob("tokenizer/*.json"):
            shutil.copyfile(run_files.local_copy(path), folder / path.name)
        return
    text, model, train = read(), config.model, partial(_train, config.data)
    with display.phase("training the tokenizer"):
        if model.source_vocab_size is None:
            target = train([*text.source, *text.target], model.vocab_size)
        else:
            source = train(text.source, model.source_vocab_size)
            target = train(text.target, model.vocab_size)
            source.save(folder / "source.json")
        target.save(folder / "target.json")


def _encode(
    data: DataConfig,
    read: Callable[[], Text],
    tokenizer_pair: tuple[Tokenizer, Tokenizer],
    folder: Path,
) -> None:
    text, (source, target) = read(), tokenizer_pair
    with display.phase(f"encoding {len(text.source):,} pairs"):
        encode_pairs(text.source, text.target, source, folder, target_tokenizer=target)
        write_known_words(folder, text.source)


def _train(data: DataConfig, lines: list[str], size: int) -> Tokenizer:
    kind = data.tokenizer
    if is_import_name(kind):
        return tokenizers.require_standard_ids(import_by_name(kind, "tokenizer")(lines, size))
    if kind == "characters":
        return tokenizers.train_characters(lines)
    if kind == "words":
        return tokenizers.train_words(lines, size)
    return tokenizers.train_bpe(lines, size, lowercase=data.lowercase)


def main(config: TranslationConfig) -> None:
    """Prepares the run's text and describes it."""
    with distributed.joined(config):
        config = with_parent(config)
        folder = run_folder.open_folder(
            config.runs, "translation", config.name, config, may_differ=config.free_fields()
        ).folder
        print(describe(prepare(config, folder)))
        print(f"prepared in {folder}")


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment="translation")
