"""One page of a run: `python -m experiments.translation.report --run RUN --output report.html`.

The page is one file that needs no network: scores, curves, samples, an attention view, settings.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.harness import cli
from experiments.harness.results.report import Sentence, page
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.translation.attend import attend
from experiments.translation.evaluate import read_samples
from experiments.translation.load_run import load_translator
from jaxformer.errors import ConfigError
from jaxformer.pretrained import is_pretrained
from jaxformer.text.metrics import bleu_interval


@dataclass(frozen=True)
class ReportOptions(RunOptions):
    """Which run, and where the page goes."""

    run: str = "runs/translation/grammar"
    """Folder of a translation run, or of an encoder-decoder of transformers."""
    output: str = ""
    """File of the page; empty: report.html in the run's folder."""
    text: tuple[str, ...] = ()
    """Sentences to translate, whose attention is shown; without them the first samples."""
    sentences: int = 5
    """How many samples are shown with their attention."""


def main(options: ReportOptions) -> None:
    """Writes the page."""
    folder = Path(options.run)
    translator = load_translator(folder, options=options)
    samples, intervals = read_samples(folder), {}
    if samples:
        intervals["bleu"] = bleu_interval(samples["model"], samples["reference"])
    texts = options.text or tuple(samples.get("source", ()))[: options.sentences]
    if not texts and is_pretrained(folder):
        raise ConfigError(f"{folder} is a folder of transformers, without samples: give --text")
    found = [(text, *attend(translator, text)) for text in texts if text.strip()]
    sentences = [Sentence(f"{text} = {best}", list(views.values())) for text, best, views in found]
    shown = {name: column[:12] for name, column in samples.items()}
    if not shown:
        shown = {"source": [text for text, *_ in found], "model": [best for _, best, _ in found]}
    output = Path(options.output or folder / "report.html")
    text = page(folder, translator.params, sentences, shown, intervals)
    output.write_text(text, encoding="utf-8")
    print(f"see {output} ({output.stat().st_size:,} bytes)")


if __name__ == "__main__":
    cli.start(main, {"default": ReportOptions()}, __doc__)
