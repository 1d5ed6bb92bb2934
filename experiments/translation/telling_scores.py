"""The scores that can tell a good translation of a text from a bad one."""

from collections.abc import Sequence

from experiments.harness.runs.quantities import quantity
from experiments.translation.corpus import Text
from experiments.translation.presets import TranslationConfig
from jaxformer.errors import ConfigError
from jaxformer.text import metrics

_TOO_SHORT = "no target line has four words, without which BLEU is 0 for every translation"


def telling_scores(
    references: Sequence[str], language: str = "", tokenize: str | None = None
) -> tuple[str, ...]:
    """The scores of bleu, chrf and exact that can tell a good translation of a text from a bad one.

    BLEU needs a line of `references` with four words, as `score_translations` counts them: it is 0,
    or a smoothed number that favours long lines, for every translation of a text without one. chrF
    needs a line that is not blank.
    """
    bleu = metrics.make_bleu(language, tokenize)
    bleu.effective_order = True  # or sacreBLEU advises it; it does not change the counts
    telling = ["exact"]
    if any(line.strip() for line in references):
        telling.insert(0, "chrf")
    if any(bleu.sentence_score(line, [line]).totals[-1] for line in references):
        telling.insert(0, "bleu")
    return tuple(telling)


def validation_scores(config: TranslationConfig, text: Text) -> tuple[str, ...]:
    """The names of the scores of an evaluation of the validation `text`, the most telling first.

    Raises `ConfigError` where early stopping is to go by another one.
    """
    telling = telling_scores(text.target, config.data.target_language)
    named = config.training.early_stopping_metric.removeprefix("validation_")
    if named in ("bleu", "chrf") and named not in telling:
        raise ConfigError(
            f"early_stopping_metric={config.training.early_stopping_metric!r} says nothing of this "
            f"validation text: {why_silent(telling)}. Give validation_{telling[0]}, or a text "
            "with longer lines"
        )
    return *(f"validation_{name}" for name in telling), "validation_loss"


def describe_silent(text: Text, language: str) -> str:
    """The reason why a score says nothing of the validation `text`, and what chooses; else ""."""
    telling = telling_scores(text.target, language)
    if "bleu" in telling:
        return ""
    return f"{why_silent(telling)}: {quantity(telling[0]).label} chooses the weights"


def why_silent(telling: Sequence[str]) -> str:
    """The reason why BLEU or chrF is not among the `telling` scores."""
    return _TOO_SHORT if "chrf" in telling else "all target lines are blank"
