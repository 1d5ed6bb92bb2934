"""Text to tokenizers and ids: `python -m experiments.translation.prepare --preset NAME`."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed, run_folder, user_cache
from experiments.harness.runs.overlap import count_overlap, describe_overlap
from experiments.harness.runs.shared_inputs import described_lines
from experiments.harness.runs.text_cache import NOTHING_KEPT, TextCache
from experiments.harness.training import parent
from experiments.harness.training.training_config import text_cache
from experiments.translation.corpus import Corpus, Text, fingerprint, open_corpus
from experiments.translation.known_words import write_known_words
from experiments.translation.presets import PRESETS, DataConfig, TranslationConfig
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig, import_by_name, is_import_name
from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.distributed import assert_processes_agree
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines.translation import first_ids, source_ids, target_ids, with_target_language
from jaxformer.pretrained import load_without_weights
from jaxformer.records import Record
from jaxformer.text import tokenizers
from jaxformer.text.data import PairBatches, PairIds, bucket_pairs, encode_pairs
from jaxformer.text.tokenizers import Tokenizer

EXPERIMENT = "translation"
S = TypeVar("S", SearchConfig, TranslationOptions)


@dataclass(frozen=True)
class Side:
    """The encoder of the lines of one side of the pairs."""

    encode_batch: Callable[[Sequence[str]], list[list[int]]]
    """The ids of each line, without EOS where the batches add it; none for a blank line."""
    vocab_size: int


class TextFacts(NamedTuple):
    """Numbers of pairs with which a run may not learn, or seem to learn, what it should."""

    trained: Mapping[str, int]
    """Pairs of validation and test that are in the training text."""
    pairs: int
    """Pairs of the training text."""
    copies: int
    """Pairs of the training text that have the same text on both sides."""


class Prepared(NamedTuple):
    """The text, ready to train on. `model` has the sizes of learned vocabularies."""

    model: TransformerConfig
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    batches: PairBatches
    validation: Text
    test: Text
    facts: TextFacts


def prepare(config: TranslationConfig, folder: Path) -> Prepared:
    """Trains the tokenizers and encodes the training text into `folder`, unless it is there.

    One joint vocabulary when `config.model.source_vocab_size` is None, else one a side; a run that
    starts from another one copies its vocabularies. Raises `CheckpointError` rather than replace
    the text that a run was trained on, `DataError` for damaged files.
    """
    cache, start = text_cache(config), parent.start_folder(config, EXPERIMENT)
    with distributed.together():
        corpus = open_corpus(config.data, cache)
        if start not in (None, folder) and distributed.is_first():
            _copy_tokenizers(start, folder)
        wanted = {"text": corpus.fingerprint, "vocabularies": _wanted(config, folder, start)}
    assert_processes_agree(
        {
            "the training text": corpus.fingerprint,
            "the validation text": described_lines(*corpus.validation),
            "the test text": described_lines(*corpus.test),
        }
    )
    with distributed.together():
        if distributed.is_first():
            _prepare(config, cache, corpus.train, wanted, folder, start is None)
    validation, test = corpus.validation, corpus.test
    with distributed.together():  # the first process shows them
        facts = _facts(corpus, cache) if distributed.is_first() else TextFacts({}, 0, 0)
    del corpus  # the batches are planned without the training text in memory
    source_tokenizer, target_tokenizer = load_tokenizers(folder)
    model, data = config.model, config.data
    if start is None:
        model = sized(model, source_tokenizer, target_tokenizer)
    batches = bucket_pairs(
        *(cache.whole_tokens(folder / "data" / f"{side}.tokens") for side in ("source", "target")),
        seed=config.training.seed,
        batch_tokens=data.batch_tokens,
        buckets=data.buckets,
        max_len=config.model.max_len,
        pad_to_multiple=data.pad_to_multiple,
        batch_size_multiple=data.batch_size_multiple * config.training.parts,
        special=sides(config, source_tokenizer, target_tokenizer)[1],
    )
    return Prepared(model, source_tokenizer, target_tokenizer, batches, validation, test, facts)


def _facts(corpus: Corpus, cache: TextCache) -> TextFacts:
    """The facts of the text, for which all of it is read once."""
    parts = {"validation": corpus.validation, "test": corpus.test}

    def count() -> dict[str, Any]:
        held_out = {name: list(zip(*text, strict=True)) for name, text in parts.items()}
        source, target = corpus.train()
        copies = sum(map(str.__eq__, source, target))
        trained = count_overlap(zip(source, target, strict=True), held_out)
        return TextFacts(trained, len(source), copies)._asdict()

    texts = [corpus.fingerprint, *(fingerprint(text) for text in parts.values())]
    return TextFacts(**cache.record(["facts", *texts], count))


def _describe_facts(prepared: Prepared, sizes: Mapping[str, int]) -> list[str]:
    """A line for each fact that somebody should know; `sizes` count the held-out parts."""
    trained, pairs, copies = prepared.facts
    validation, test = (list(zip(*x, strict=True)) for x in (prepared.validation, prepared.test))
    lines = describe_overlap(trained, sizes, "pairs")
    validated = count_overlap(validation, {"test": test})
    lines += describe_overlap(validated, sizes, "pairs", "validated on")
    if copies > pairs / 2:
        lines.append(
            f"{copies:,} of {pairs:,} training pairs have the same text on both sides: a model "
            "learns to copy it"
        )
    return lines


def with_start(config: TranslationConfig) -> TranslationConfig:
    """`config` with the sizes, the ids and the search of what it starts from, if it does.

    Dropout and dtype stay as in `config`, and so do settings of the search that are not the
    defaults. Raises `ConfigError` for a model that does not translate, or has no tokenizer.
    """
    folder = parent.start_folder(config, EXPERIMENT)
    if folder is None:
        return config
    loaded = load_without_weights(folder)
    config = parent.with_start(config, folder, loaded)
    if loaded.config is None and not isinstance(loaded.model, EncoderDecoder):
        raise ConfigError(
            f"{folder} holds a {type(loaded.model).__name__}, which does not translate"
        )
    if loaded.tokenizer is None:
        raise ConfigError(f"{folder} has no tokenizer.json: write one there")
    search, options = loaded.choose_settings((), {}, SearchConfig, TranslationOptions)
    return replace(
        config,
        search=_over(search, config.search),
        translation=_over(options, config.translation),
    )


def _over(below: S, settings: S) -> S:
    """`below` with each of `settings` that is not the default."""
    default = type(settings)()
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    changes = {name: x for name, x in values.items() if x != getattr(default, name)}
    return replace(below, **changes)


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
    target = tokenizers.load(folder / "tokenizer" / "target.json")
    source = folder / "tokenizer" / "source.json"
    return (tokenizers.load(source) if source.exists() else target), target


def sides(
    config: TranslationConfig, source: Tokenizer, target: Tokenizer
) -> tuple[tuple[Side, Side], PairIds]:
    """Source and target as the run's search reads and writes them, and the ids of their batches.

    A text has the prefix and the special tokens around it, also where it is cut.
    """
    search, options = with_target_language(target, config.search, config.translation)
    eos, data = search.eos[0], config.data
    # The last id of a folder's source may be another than EOS.
    added = eos if source.template is None and source.languages is None else None

    def ended(rows: list[list[int]], length: int) -> list[list[int]]:
        if length:
            most = min(length, config.model.max_len)
            rows = [[*row[: most - 1], *row[-1:]] if len(row) > most else row for row in rows]
        return rows if added is None else [row[:-1] for row in rows]

    def read(lines: Sequence[str]) -> list[list[int]]:
        return ended(source_ids(lines, source, search, options), data.source_len)

    def written(lines: Sequence[str]) -> list[list[int]]:
        return ended(target_ids(lines, target, search, options, first_ids(source)), data.target_len)

    two_sides = Side(read, source.vocab_size), Side(written, target.vocab_size)
    return two_sides, PairIds(options.pad, options.bos, added)


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
    sizes = {"validation": len(prepared.validation.source), "test": len(prepared.test.source)}
    lines = (
        f"training pairs {len(batches.pairs):,} (left out: {dropped}), "
        f"validation {sizes['validation']:,}, test {sizes['test']:,}\n"
        f"vocabulary {prepared.target_tokenizer.vocab_size:,}, "
        f"{batches.steps_per_epoch:,} batches an epoch, {batches.padding_share:.1%} padding\n"
        + textwrap.fill(f"shapes (rows x source > target): {shapes}", 79)
    )
    return "\n".join([lines, *_describe_facts(prepared, sizes)])


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each tokenizer's file, by its name."""
    return {
        path.name: user_cache.file_digest(path) for path in sorted(folder.glob("tokenizer/*.json"))
    }


def _copy_tokenizers(start: Path, folder: Path) -> None:
    """Puts the tokenizers of what a run starts from into its `folder`."""
    loaded, place = load_without_weights(start), folder / "tokenizer"
    place.mkdir(parents=True, exist_ok=True)
    if loaded.tokenizer is not loaded.target_tokenizer:
        loaded.require_tokenizer().save(place / "source.json")
    loaded.require_target_tokenizer().save(place / "target.json")


def _wanted(config: TranslationConfig, folder: Path, start: Path | None) -> list:
    """The settings that decide tokenizers and ids besides the text, as JSON."""
    data, model = config.data, config.model
    wanted: list = [data.tokenizer, model.vocab_size, model.source_vocab_size]
    if data.lowercase:
        wanted.append("lowercase")
    ids = _id_settings(config.search, config.translation) + [data.source_len, data.target_len]
    usual = _id_settings(SearchConfig(), TranslationOptions()) + [0, 0]
    if ids != usual:
        wanted.append(ids)
    return wanted if start is None else [*wanted, _digests(folder)]


def _id_settings(search: SearchConfig, options: TranslationOptions) -> list:
    """The settings that decide how texts begin and end."""
    languages = options.source_language, options.target_language
    return [search.eos[0], search.forced_bos, options.bos, options.pad, options.prefix, *languages]


def _prepare(
    config: TranslationConfig,
    cache: TextCache,
    read: Callable[[], Text],
    wanted: dict,
    folder: Path,
    is_first_text: bool,
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
    if is_first_text:
        (folder / "tokenizer" / "source.json").unlink(missing_ok=True)
        make = partial(_train_tokenizers, config, read)
        # The code of a user's tokenizer may change.
        tokenizer_cache = NOTHING_KEPT if is_import_name(config.data.tokenizer) else cache
        tokenizer_cache.fill(folder / "tokenizer", ["tokenizers", wanted], make)
    encode = partial(_encode, config, read, load_tokenizers(folder), is_first_text)
    cache.fill(folder / "data", ["pairs", wanted, _digests(folder)], encode)
    record.write(wanted | {"tokenizers": _digests(folder)})


def _train_tokenizers(config: TranslationConfig, read: Callable[[], Text], folder: Path) -> None:
    text, model, train = read(), config.model, partial(_train, config.data)
    with display.phase("training the tokenizer"):
        if model.source_vocab_size is None:
            target = train(chain(text.source, text.target), model.vocab_size)
        else:
            source = train(text.source, model.source_vocab_size)
            target = train(text.target, model.vocab_size)
            source.save(folder / "source.json")
        target.save(folder / "target.json")


def _encode(
    config: TranslationConfig,
    read: Callable[[], Text],
    tokenizer_pair: tuple[Tokenizer, Tokenizer],
    is_first_text: bool,
    folder: Path,
) -> None:
    text, (source, target) = read(), sides(config, *tokenizer_pair)[0]
    with display.phase(f"encoding {len(text.source):,} pairs"):
        encode_pairs(text.source, text.target, source, folder, target_tokenizer=target)
        if is_first_text:  # a model that the run starts from knows other words, too
            write_known_words(folder, text.source)


def _train(data: DataConfig, lines: Iterable[str], size: int) -> Tokenizer:
    kind = data.tokenizer
    if is_import_name(kind):  # your own function may need a list
        return tokenizers.require_standard_ids(import_by_name(kind, "tokenizer")([*lines], size))
    if kind == "characters":
        return tokenizers.train_characters(lines)
    if kind == "words":
        return tokenizers.train_words(lines, size)
    return tokenizers.train_bpe(lines, size, lowercase=data.lowercase)


def main(config: TranslationConfig) -> None:
    """Prepares the run's text and describes it."""
    with distributed.joined(config):
        config = with_start(config)
        folder = run_folder.open_folder(
            config.runs, EXPERIMENT, config.name, config, may_differ=config.free_fields()
        ).folder
        print(describe(prepare(config, folder)))
        print(f"prepared in {folder}")


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment=EXPERIMENT)
