"""What a corpus is like before training: `python -m experiments.translation.describe_data`.

It takes the options of `train`, prepares the text as `train` does, and prints counts, lengths,
duplicates, what the settings leave out, and how much of the held-out text is in the training text.
Lengths are percentiles 1 / 50 / 90 / 99 / 100.
"""

import tempfile
from pathlib import Path

import numpy as np

from experiments.harness import cli
from experiments.harness.results import text_statistics
from experiments.harness.results.text_statistics import share, spread
from experiments.harness.training.training_config import text_cache
from experiments.translation.corpus import Text, open_corpus
from experiments.translation.prepare import Prepared, prepare
from experiments.translation.presets import PRESETS, TranslationConfig
from jaxformer.text.data import Tokens
from jaxformer.text.tokenizers import Tokenizer


def main(config: TranslationConfig) -> None:
    """Prints the report."""
    train = open_corpus(config.data, text_cache(config)).train()
    with tempfile.TemporaryDirectory() as folder:
        print(text_statistics.report(describe(config, train, prepare(config, Path(folder)))))


def describe(config: TranslationConfig, train: Text, prepared: Prepared) -> dict:
    """The rows of the report, by part."""
    sides = prepared.source_tokenizer, prepared.target_tokenizer
    batches = prepared.batches
    rows = {"train": _rows(config, train, sides, (batches.source, batches.target))}
    rows["train"]["padding of target positions"] = f"{batches.padding_share:.2%}"
    for name, text in (("validation", prepared.validation), ("test", prepared.test)):
        if text.source:
            lines = zip(sides, text, strict=True)
            tokens = [Tokens.from_lists(side.encode_batch(x)) for side, x in lines]
            rows[name] = _rows(config, text, sides, (tokens[0], tokens[1])) | _overlap(text, train)
    return rows


def _rows(
    config: TranslationConfig,
    text: Text,
    sides: tuple[Tokenizer, Tokenizer],
    tokens: tuple[Tokens, Tokens],
) -> dict[str, str]:
    count, lengths = len(text.source), [side.lengths + 1 for side in tokens]
    empty = np.minimum(*lengths) == 1
    long = ~empty & (np.maximum(*lengths) > config.model.max_len)
    pairs = text_statistics.digests(f"{a}\t{b}" for a, b in zip(*text, strict=True))
    copies = sum(a == b for a, b in zip(*text, strict=True))
    ratios = (lengths[1] / lengths[0])[~empty]
    rows = {"pairs": f"{count:,}"}
    for name, lines, side, length in zip(Text._fields, text, tokens, lengths, strict=True):
        words = sum(len(line.split()) for line in lines)
        rows[f"{name} words"] = f"{words:,}"
        rows[f"{name} tokens a word"] = f"{len(side.ids) / max(words, 1):.2f}"
        rows[f"{name} tokens a line, <eos> included"] = spread(length)
    for name, side, tokenizer in zip(Text._fields, tokens, sides, strict=True):
        unknown = text_statistics.count_id(side, tokenizer.special.unk)
        rows[f"{name} tokens unknown"] = share(unknown, len(side.ids))
    return rows | {
        "target tokens per source token": spread(ratios),
        "same pair as an earlier one": share(text_statistics.repeated(pairs), count),
        "same text on both sides": share(copies, count),
        "left out: an empty side": share(int(empty.sum()), count),
        f"left out: over max_len={config.model.max_len}": share(int(long.sum()), count),
    }


def _overlap(text: Text, train: Text) -> dict[str, str]:
    count = len(text.source)
    inside = text_statistics.contained(
        text_statistics.digests(text.source), text_statistics.digests(train.source)
    )
    pairs = text_statistics.contained(
        text_statistics.digests(f"{a}\t{b}" for a, b in zip(*text, strict=True)),
        text_statistics.digests(f"{a}\t{b}" for a, b in zip(*train, strict=True)),
    )
    return {
        "source also in the training text": share(inside, count),
        "pair also in the training text": share(pairs, count),
    }


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
