"""The scores of a translator in words, and the last lines of a training."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness.runs.bootstrap import item_half_width
from experiments.harness.runs.quantities import quantity
from experiments.harness.runs.rounding import plus_minus
from experiments.harness.runs.translation_items import translation_items
from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.run_summary import describe_folder
from experiments.translation.corpus import Text
from experiments.translation.known_words import read_known_words
from experiments.translation.scoring import ROUGE
from experiments.translation.telling_scores import why_silent

_LEARNED = {"bleu": (10.0, 30.0), "chrf": (25.0, 50.0), "exact": (0.1, 0.5)}
"""Scores below which a model has not learned to translate, and has learned it in part."""


def describe_scores(
    name: str,
    scores: Mapping[str, Any],
    hypotheses: list[str],
    references: Sequence[str],
    language: str = "",
    tokenize: str | None = None,
) -> str:
    """The scores, a line each, with signatures and 95 % intervals."""
    halves = {}
    for metric, form in (("exact", ".1%"), ("bleu", ".2f"), ("chrf", ".2f")):
        if metric not in scores:
            continue
        items = translation_items(metric, hypotheses, references, language, tokenize)
        halves[metric] = plus_minus(item_half_width(*items), form) if items else ""
    lines = [
        f"{name}: {scores['sentences']:,} sentences, {scores['exact']:.1%}{halves['exact']} "
        "exactly right"
    ]
    for metric in ("bleu", "chrf"):
        if metric in scores:
            number = f"{quantity(metric).label} {scores[metric]:.2f}{halves[metric]}"
            lines.append(f"  {number}  {scores[f'{metric}_signature']}")
    if "bleu" not in scores:
        lines.append(f"  no BLEU: {why_silent(tuple(scores))}")
    lines.append("  ±: 95 % over other sentences (bootstrap)")
    lower = scores.get("lowercased", {})
    if "bleu" in lower:
        lines.append(f"  BLEU {lower['bleu']:.2f}  {lower['bleu_signature']}")
    if "rouge1" in scores:
        means = ", ".join(f"{x.replace('rouge', 'ROUGE-')} {scores[x]:.2f}" for x in ROUGE)
        lines.append(f"  {means}")
    return "\n".join(lines)


def describe_run(
    run: OpenRun, name: str, text: Text, scores: Mapping[str, Any], hypotheses: list[str]
) -> str:
    """The last lines of a training: the `scores` of the text `name`, and what to do next."""
    words = read_known_words(run.folder)
    limits = (
        f"Its training text has {len(words):,} words in the source language. Sentences with other "
        "words, or of another kind, may be translated less well."
    )
    abilities = "The model has learned to translate sentences like the three above. " + limits
    judged = next(metric for metric in _LEARNED if metric in scores)
    not_yet, in_part = _LEARNED[judged]
    if scores[judged] < not_yet:
        abilities = "The model has not learned to translate yet: give it more steps or more text."
    elif scores[judged] < in_part:
        abilities = "The model translates in part: more steps or more text would help. " + limits
    if run.config.init_from:
        abilities = ""  # other text taught the model more
    files = {f"samples/{name}.tsv": "source, model and reference of each sentence"}
    commands = [("translation.translate",)]
    language = run.config.data.target_language
    described = describe_scores(name, scores, hypotheses, text.target, language)
    folder_and_next = describe_folder(run.folder, files, commands)
    paragraphs = described, textwrap.fill(abilities, width=80), folder_and_next
    return "\n\n".join(filter(None, paragraphs))
