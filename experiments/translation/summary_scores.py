"""ROUGE of summaries, as the package `rouge-score` computes it."""

from collections.abc import Sequence

from jaxformer import optional_dependencies
from jaxformer.errors import DataError

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def score_summaries(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L (0 to 100): the mean F1 over the texts, of stemmed words.

    `rougeL` takes a text as one sequence of words, `rougeLsum` each of its lines. Needs the package
    `rouge-score` (extra finetuning). Raises `DataError` for different numbers of texts, or none.
    Lin 2004.
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(
            f"{len(hypotheses)} summaries and {len(references)} references: give one reference for "
            "each summary, and at least one"
        )
    scorer = optional_dependencies.load("rouge_score.rouge_scorer").RougeScorer(
        ROUGE, use_stemmer=True
    )
    pairs = zip(references, hypotheses, strict=True)
    scores = [scorer.score(reference, hypothesis) for reference, hypothesis in pairs]
    return {
        name: 100.0 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE
    }
