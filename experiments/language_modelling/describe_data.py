"""What a corpus is like before training: `python -m experiments.language_modelling.describe_data`.

It takes the options of `train`, prepares the text as `train` does, and prints counts, lengths,
duplicates, and how much of the held-out text is in the training text. Lengths are percentiles
1 / 50 / 90 / 99 / 100. A line counts as repeated or contained from 20 characters on.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from experiments.harness import cli
from experiments.harness.results import text_statistics
from experiments.harness.results.text_statistics import share, spread
from experiments.harness.training.training_config import text_cache
from experiments.language_modelling.corpus import Part, load_corpus
from experiments.language_modelling.init_from_pretrained import with_pretrained_sizes
from experiments.language_modelling.prepare import Encoded, prepare
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from jaxformer.text.tokenizers import Tokenizer

_LEAST = 20
"""Characters of a line that others repeat by more than chance."""


def main(config: LanguageConfig) -> None:
    """Prints the report."""
    config = with_pretrained_sizes(config)
    parts = load_corpus(config.data, text_cache(config))
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(config, Path(folder))
        trained = text_statistics.digests(_lines(parts.train))
        for name, part in parts._asdict().items():
            if part is not None:
                encoded = getattr(prepared, name)
                rows[name] = _rows(config, part, encoded, prepared.tokenizer)
                if name != "train":
                    rows[name] |= _overlap(part, trained)
        rows["train"]["repeated lines"] = share(text_statistics.repeated(trained), len(trained))
        print(text_statistics.report(rows))


def _rows(
    config: LanguageConfig, part: Part, encoded: Encoded, tokenizer: Tokenizer
) -> dict[str, str]:
    tokens, words, size = encoded.tokens, *encoded.amount
    count, lengths = len(tokens.ids), tokens.lengths
    documents = text_statistics.digests("".join(document) for document in part.documents())
    long = int(np.sum(lengths > config.data.seq_len))
    unknown = text_statistics.count_id(tokens, tokenizer.special.unk)
    return {
        "documents": f"{len(documents):,}",
        "words, line ends included": f"{words:,}",
        "bytes": f"{size:,}",
        "tokens": f"{count:,}",
        "tokens a word": f"{count / max(words, 1):.2f}",
        "bytes a token": f"{size / max(count, 1):.2f}",
        "tokens a document": spread(lengths),
        "tokens unknown": share(unknown, count),
        "same document as an earlier one": share(
            text_statistics.repeated(documents), len(documents)
        ),
        f"documents cut, over seq_len={config.data.seq_len}": share(long, len(lengths)),
    }


def _overlap(part: Part, trained: np.ndarray) -> dict[str, str]:
    lines = text_statistics.digests(_lines(part))
    inside = text_statistics.contained(lines, trained)
    return {"lines also in the training text": share(inside, len(lines))}


def _lines(part: Part) -> Iterator[str]:
    """The lines of the documents of `part`, without those that are short."""
    for document in part.documents():
        for line in "".join(document).split("\n"):
            if len(line.strip()) >= _LEAST:
                yield line.strip()


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
