"""Prompts of a run and what the model makes of them."""

import re
from collections.abc import Sequence

import numpy as np

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.training.open_run import OpenRun
from experiments.language_modelling.prepare import (
    Prepared,
)
from experiments.language_modelling.presets import LanguageConfig
from jaxformer import pipelines
from jaxformer.pretrained import Loaded
from jaxformer.text.tokenizers import Tokenizer

_WINDOW = 64
"""Tokens among which a line is looked for that begins a prompt."""
_PLACES = 12
"""Places for each prompt where such lines are looked for."""


def continued_prompts(loaded: Loaded, prompts: Sequence[str]) -> list[str]:
    """Each of `prompts` with its continuation by the run's settings, or its masks filled in."""
    config = loaded.config
    if not prompts:
        return []
    if config.objective == "masked":
        return filled_texts(loaded, prompts)
    completions = pipelines.complete(loaded, prompts, config.sampling, config.completion)
    return [prompt + text for prompt, text in zip(prompts, completions, strict=True)]


def begun_lines(prepared: Prepared, config: LanguageConfig, count: int = 3) -> tuple[str, ...]:
    """The first halves of `count` lines that stand apart in the validation text.

    A masked model gets whole lines, in which a word of the middle is masked.
    """
    tokenizer, ids = prepared.tokenizer, prepared.validation.tokens.ids
    window = min(_WINDOW, config.data.seq_len // 2)
    texts = [
        tokenizer.decode(ids[place : place + window].tolist())
        for place in np.linspace(0, len(ids), _PLACES * count, endpoint=False, dtype=int)
    ]
    lines = [line for text in texts for line in text.split("\n")[1:] if len(line.split()) > 3]
    lines = (lines or texts)[:: max(len(lines or texts) // count, 1)][:count]
    mask = tokenizer.special.mask
    prompts = []
    for words in (re.findall(r"\s*\S+", line) for line in lines):
        half = len(words) // 2
        if config.objective == "causal":
            prompts.append("".join(words[:half]))
        elif mask is not None and words:
            hidden = re.sub(r"\S+", lambda _: tokenizer.token(mask), words[half])
            prompts.append("".join([*words[:half], hidden, *words[half + 1 :]]))
    return tuple(dict.fromkeys(filter(None, prompts)))


def show_prompts(run: OpenRun, loaded: Loaded, data: Prepared) -> None:
    """Prints each of the run's prompts with what follows it, and keeps them in its folder.

    Where the run names none, config.json gets the beginnings of lines that are continued instead.
    """
    prompts = run.config.prompts
    if prompts is None:
        prompts = begun_lines(data, run.config)
        run.record_settings(prompts=prompts)
    rule = f"\n{display.RULE}\n"
    with display.phase("continuing the prompts"):
        texts = continued_prompts(loaded, prompts)
    if texts and distributed.is_first():
        (run.folder / "samples").mkdir(exist_ok=True)
        path = run.folder / "samples" / "prompts.txt"
        path.write_text(rule.join(texts), encoding="utf-8")
        shown = (display.bold(x) + text[len(x) :] for x, text in zip(prompts, texts, strict=True))
        display.say(rule.join(shown))
        run.log.log_text(run.config.optimizer.total_steps, "samples", rule.join(texts).split("\n"))


def filled_texts(loaded: Loaded, texts: Sequence[str], *, count: int = 5) -> list[str]:
    """Each text, and below it a line for each of its masks: the `count` best tokens in percent."""
    filled = pipelines.fill_mask_with_details(loaded, texts, count=count)
    return [
        "\n".join([text, *(_mask_line(i, best, loaded) for i, best in enumerate(masks, start=1))])
        for text, masks in zip(texts, filled, strict=True)
    ]


def _mask_line(number: int, candidates: Sequence[pipelines.MaskPrediction], loaded: Loaded) -> str:
    shares = (
        f"{token_text(candidate.token, loaded.require_tokenizer())!r} {candidate.probability:.1%}"
        for candidate in candidates
    )
    return f"  {number}: " + "  ".join(shares)


def token_text(token: str, tokenizer: Tokenizer) -> str:
    """The token's text, or its name where it is not text, such as a part of a character."""
    index = tokenizer.id_of(token)
    text = "" if index is None else tokenizer.decode([index])
    if token[0] in "Ġ▁" and text != token:  # decoding drops the space before the first word
        text = " " + text.removeprefix(" ")
    return token if text == "" or "\ufffd" in text else text
