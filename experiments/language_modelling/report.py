"""One page of a run: `python -m experiments.language_modelling.report --run RUN`.

The page is one file that needs no network: scores, curves, samples, an attention view, settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.harness import cli
from experiments.harness.results.report import Sentence, page
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.language_modelling.attend import attend, has_mask
from experiments.language_modelling.evaluate import answer_prompts, split_samples
from experiments.language_modelling.load_run import LoadedRun, load_run
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderOnly
from jaxformer.pretrained import is_pretrained, load_eos

_NEW_TOKENS = 50
"""How many tokens a text is continued by, where the run has no samples."""


@dataclass(frozen=True)
class ReportOptions(RunOptions):
    """Which run, and where the page goes."""

    run: str = "runs/language_modelling/python_stdlib"
    """Folder of a run, or of a language model of transformers."""
    output: str = ""
    """File of the page; empty: report.html in the run's folder."""
    text: tuple[str, ...] = ()
    """Texts to continue or to fill in, whose attention is shown; without them the run's prompts."""


def main(options: ReportOptions) -> None:
    """Writes the page."""
    folder = Path(options.run)
    loaded = load_run(folder, options)
    texts = options.text or loaded.config.prompts
    if not texts and is_pretrained(folder):
        raise ConfigError(f"{folder} is a folder of transformers, without prompts: give --text")
    sentences = [Sentence(text, [attend(loaded, text)]) for text in texts if text.strip()]
    path = folder / "samples" / "prompts.txt"
    if path.is_file():
        samples = _samples(path, loaded.config.prompts)
    else:
        samples = _answers(folder, loaded, texts)
    output = Path(options.output or folder / "report.html")
    output.write_text(page(folder, loaded.params, sentences, samples, {}), encoding="utf-8")
    print(f"see {output} ({output.stat().st_size:,} bytes)")


def _answers(folder: Path, loaded: LoadedRun, texts: Sequence[str]) -> dict[str, Sequence[str]]:
    """The columns of what the model makes of `texts`; none without a head or a mask to fill."""
    sampling = replace(loaded.config.sampling, max_new_tokens=_NEW_TOKENS)
    completion = replace(loaded.config.completion, overflow="slide")
    if is_pretrained(folder):
        completion = replace(completion, eos=load_eos(folder))
    if loaded.config.objective == "masked":
        texts = [text for text in texts if has_mask(text, loaded.tokenizer)]
    if not texts or isinstance(loaded.model, EncoderOnly):
        return {}
    config = replace(loaded.config, prompts=tuple(texts), sampling=sampling, completion=completion)
    return {"prompt": texts, "what follows": answer_prompts(loaded._replace(config=config))}


def _samples(path: Path, prompts: Sequence[str]) -> dict[str, Sequence[str]]:
    """The columns of the run's samples; one, if they were made of other prompts."""
    text = path.read_text(encoding="utf-8")
    answers = split_samples(text, prompts)
    if answers is None:
        return {"prompts and what follows": [text]}
    return {"prompt": prompts, "what follows": answers}


if __name__ == "__main__":
    cli.start(main, {"default": ReportOptions()}, __doc__)
