"""What a model makes of texts, as a reader sees it."""

from collections.abc import Sequence

from experiments.language_modelling.trained import Trained
from jaxformer import generation

RULE = "-" * 20
"""The line between two texts."""


def of_prompts(trained: Trained) -> str:
    """The run's own prompts, continued or filled in, with a rule between them."""
    config = trained.config
    if config.objective == "masked":
        texts = filled(trained, config.prompts)
    else:
        found = generation.complete(
            trained.model, trained.params, config.prompts, trained.tokenizer, config.sampling
        )
        texts = [prompt + best.text for prompt, best in zip(config.prompts, found, strict=True)]
    return f"\n{RULE}\n".join(texts)


def filled(trained: Trained, texts: Sequence[str], *, count: int = 5) -> list[str]:
    """Each text, and below it a line for each of its masks: the `count` best tokens in percent."""
    found = generation.fill_mask(
        trained.model, trained.params, texts, trained.tokenizer, count=count
    )
    return [
        "\n".join([text, *(_line(i, best) for i, best in enumerate(masks, start=1))])
        for text, masks in zip(texts, found, strict=True)
    ]


def _line(number: int, candidates: Sequence[generation.Candidate]) -> str:
    found = "  ".join(f"{c.text.strip() or c.token!r} {c.probability:.1%}" for c in candidates)
    return f"  {number}: {found}"
