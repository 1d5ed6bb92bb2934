"""One page of a run: `python -m experiments.language_modelling.report --run RUN`.

The page is one file that needs no network: scores, curves, samples, an attention view, settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.harness import cli
from experiments.harness.attention_views import AttentionView, label, read_weights
from experiments.harness.checkpoint_selection import RunOptions
from experiments.harness.report import Sentence, page
from experiments.language_modelling.evaluation import split_samples
from experiments.language_modelling.load_run import LoadedRun, load_run
from jaxformer.pipelines.batching import add_special_tokens
from jaxformer.pipelines.fill_mask import encode_masked


@dataclass(frozen=True)
class ReportOptions(RunOptions):
    """Which run, and where the page goes."""

    run: str = "runs/language_modelling/python_stdlib"
    """Folder of a run."""
    output: str = ""
    """File of the page; empty: report.html in the run's folder."""
    text: tuple[str, ...] = ()
    """Texts whose attention is shown; without them the run's prompts."""


def main(options: ReportOptions) -> None:
    """Writes the page."""
    folder = Path(options.run)
    loaded = load_run(folder, options)
    texts = options.text or loaded.config.prompts
    sentences = [Sentence(text, [attend(loaded, text)]) for text in texts if text.strip()]
    path = folder / "samples" / "prompts.txt"
    told = path.read_text(encoding="utf-8") if path.is_file() else ""
    samples = _samples(told, loaded.config.prompts) if told else {}
    output = Path(options.output or folder / "report.html")
    output.write_text(page(folder, sentences, samples, {}), encoding="utf-8")
    print(f"see {output} ({output.stat().st_size:,} bytes)")


def _samples(text: str, prompts: Sequence[str]) -> dict[str, Sequence[str]]:
    """The columns of the samples; one, if `text` was made of other prompts than the run's."""
    answers = split_samples(text, prompts)
    if answers is None:
        return {"prompts and what follows": [text]}
    return {"prompt": prompts, "what follows": answers}


def attend(loaded: LoadedRun, text: str) -> AttentionView:
    """The self-attention of the model in `text`, which is cut at the model's context."""
    tokenizer, masked = loaded.tokenizer, loaded.config.objective == "masked"
    ids = _masked_ids(text, loaded) if masked else tokenizer.encode(text)
    ids = ids[: loaded.model.config.max_len]
    (weights,) = read_weights(loaded.model, loaded.params, np.array([ids])).values()
    tokens = [label(tokenizer, index) for index in ids]
    return AttentionView("self-attention", tokens, tokens, weights)


def _masked_ids(text: str, loaded: LoadedRun) -> list[int]:
    """The ids of a text, in which masks may stand, between BOS and EOS."""
    tokenizer = loaded.tokenizer
    mask = tokenizer.special.mask
    has_mask = mask is not None and tokenizer.token(mask) in text
    ids = encode_masked(text, 0, tokenizer) if has_mask else tokenizer.encode(text)
    return add_special_tokens(ids, tokenizer)


if __name__ == "__main__":
    cli.start(main, {"default": ReportOptions()}, __doc__)
