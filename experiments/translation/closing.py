"""What a finished translation run tells: its scores, what the model can, and what is next."""

import textwrap
from pathlib import Path

from experiments.harness.training.session import describe_folder
from experiments.translation import known_words
from experiments.translation.corpus import Text
from experiments.translation.evaluation import describe_each


def describe_run(
    folder: Path, name: str, text: Text, scores: dict, halves: dict[str, float]
) -> str:
    """The last lines of a training whose `scores` are those of `text`, called `name`.

    `halves` are those of their 95 % intervals.
    """
    told = [f"{name}: {scores['sentences']:,} sentences", *describe_each(scores, halves)]
    told[-1] += " (±: 95 % over other sentences)"
    if "lowercased" in scores:
        told.append(f"lower-cased and tokenised BLEU {scores['lowercased']['bleu']:.2f}")
    files = {f"samples/{name}.tsv": "source, model and reference of each sentence"}
    sentence = min(text.source, key=lambda line: abs(len(line) - 40))
    commands = [
        ("translation.translate",),
        ("translation.attend", "--text", sentence),
        ("translation.report",),
    ]
    abilities = _abilities(known_words.load(folder))
    return "\n\n".join(
        [
            textwrap.fill(", ".join(told), width=80),
            abilities,
            describe_folder(folder, files, commands),
        ]
    )


def _abilities(words: list[str]) -> str:
    longer = [word for word in words if len(word) > 3]
    some = ", ".join(longer[10 : 10 + 40 * 6 : 40])
    return textwrap.fill(
        "The model translates sentences like those of its training text, such as the three above. "
        f"It knows the {len(words):,} words of that text ({some}, ...). A sentence with other "
        "words, or built in another way, comes out as nonsense.",
        width=80,
    )
