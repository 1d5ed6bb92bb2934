"""Measure a run: `python -m experiments.language_modelling.evaluate --run RUN [--files F ..]`.

Prints loss, perplexity, word perplexity and bits per byte of the run's test text, or of files;
of a masked run, loss and perplexity of hidden tokens. The last line is the same as JSON.
"""

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.runs.sample_tables import write_table
from experiments.harness.training import held_out_loss, metric_inputs
from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.run_summary import describe_folder
from experiments.language_modelling.corpus import part_of
from experiments.language_modelling.load_run import load_run
from experiments.language_modelling.objectives import objective
from experiments.language_modelling.prepare import (
    Encoded,
    Prepared,
    begun_lines,
    describe_unknown,
    encode_part,
    open_encoded,
    part_names,
    text_digest,
)
from experiments.language_modelling.presets import LanguageConfig
from jaxformer import pipelines
from jaxformer.config import Natural
from jaxformer.distributed import assert_processes_agree
from jaxformer.errors import ConfigError
from jaxformer.pretrained import Loaded
from jaxformer.text.metrics import Likelihood
from jaxformer.text.tokenizers import Tokenizer


def measure(loaded: Loaded, text: Encoded, *, stride: int | None = None) -> Likelihood:
    """The likelihood of the whole of `text`: the sum of `batch_losses`."""
    return total(batch_losses(loaded, text, stride=stride), text)


def batch_losses(
    loaded: Loaded, text: Encoded, *, stride: int | None = None
) -> list[dict[str, float]]:
    """The "loss" in nats and the "tokens" of each batch of `text`, in rows `stride` apart.

    The default stride is the length of a row. Of a causal model every token counts but the first
    of each document (of the whole text, where documents are not separate); of a masked one those
    that are hidden in a fixed way. Raises `ConfigError` for a stride outside 1 to length.
    """
    config, task = loaded.config, objective(loaded.config)
    chunk = config.training.loss_chunk
    apart: int = stride or config.data.seq_len
    batches = task.iterate_once(text.tokens, loaded.tokenizer, config, apart)
    return list(held_out_loss.batch_sums(task.measure, loaded, batches, loss_chunk=chunk))


def total(losses: Sequence[dict[str, float]], text: Encoded) -> Likelihood:
    """The likelihood of `text` from the `losses` of its batches."""
    nats = tokens = 0.0
    for batch in losses:
        nats += batch["loss"]
        tokens += batch["tokens"]
    assert text.amount is not None, "prepare counts the text that is measured"
    return Likelihood(nats, int(tokens), *text.amount)


def together(likelihoods: Iterable[Likelihood]) -> Likelihood:
    """The likelihood of several texts as one."""
    nats, tokens, words, size = map(sum, zip(*likelihoods, strict=True))
    return Likelihood(nats, tokens, words, size)


def validation_texts(data: Prepared) -> dict[str, Encoded]:
    """The validation text of each text of a mixture by its name; the only one has the name ""."""
    return {text.name: text.validation for text in data.mixture} or {"": data.validation}


class Measured(NamedTuple):
    """What is measured of one text, or of several together."""

    likelihood: Likelihood
    losses: list[dict[str, float]]
    """As of `batch_losses`, one text after the other."""
    scores: dict[str, float]
    """As of `scores_of`; the user's metrics, and the loss of each of several texts by its name."""


def measure_texts(
    loaded: Loaded, texts: Mapping[str, Encoded], *, stride: int | None = None
) -> Measured:
    """The scores of all `texts` together, and of each of several by itself."""
    losses = {name: batch_losses(loaded, text, stride=stride) for name, text in texts.items()}
    likelihoods = {name: total(losses[name], text) for name, text in texts.items()}
    whole = together(likelihoods.values())
    scores = scores_of(loaded.config, whole)
    for name, text in texts.items():
        own = user_metrics(loaded, text, likelihoods[name])
        if len(texts) > 1:
            own |= {"loss": likelihoods[name].loss}
            own = {f"{name}.{metric}": value for metric, value in own.items()}
        scores |= own
    return Measured(whole, list(chain.from_iterable(losses.values())), scores)


def write_losses(folder: Path, name: str, losses: Sequence[dict[str, float]]) -> None:
    """Writes samples/NAME-losses.tsv in the run's `folder`: nats and tokens of each batch."""
    columns = {"nats": "loss", "tokens": "tokens"}
    table = {title: [repr(batch[key]) for batch in losses] for title, key in columns.items()}
    write_table(folder / "samples" / f"{name}-losses.tsv", table)


def user_loss_metrics(loaded: Loaded, text: Encoded, likelihood: Likelihood) -> dict[str, float]:
    """The user's loss and metrics of the validation `text`.

    The loss is computed in rows as those of the training (see `metric_inputs.user_loss_metrics`).
    """
    config, task = loaded.config, objective(loaded.config)
    batches = task.iterate_labelled(text.tokens, loaded.tokenizer, config, config.data.seq_len)
    chunk = config.training.loss_chunk
    of_loss = metric_inputs.user_loss_metrics(loaded, batches, loss_chunk=chunk)
    metrics = user_metrics(loaded, text, likelihood)
    return of_loss | {f"validation_{name}": value for name, value in metrics.items()}


def user_metrics(loaded: Loaded, text: Encoded, likelihood: Likelihood) -> dict[str, float]:
    """`metric_inputs.user_metrics` of `text`."""
    evaluation = metric_inputs.MetricInputs(loaded, text, scores_of(loaded.config, likelihood))
    return metric_inputs.user_metrics(loaded.config.training, evaluation)


def scores_of(config: LanguageConfig, likelihood: Likelihood) -> dict[str, float]:
    """The sums and their quotients; of a masked model without words and bytes."""
    names = ["nats", "tokens", "loss", "perplexity"]
    if config.objective == "causal":
        names += ["words", "bytes", "word_perplexity", "bits_per_byte"]
    return {name: getattr(likelihood, name) for name in names}


def describe_scores(
    name: str,
    config: LanguageConfig,
    likelihood: Likelihood,
    losses: Sequence[dict[str, float]],
) -> str:
    """The scores, a line each, with what they are divided by.

    From ten batches on, `losses` give half of the 95 % bootstrap interval of the loss.
    """
    from experiments.harness.runs.bootstrap import item_half_width, ratio
    from experiments.harness.runs.rounding import plus_minus

    items = np.array([(batch["loss"], batch["tokens"]) for batch in losses])
    interval = item_half_width(items, ratio) if len(items) >= 10 else math.nan
    unit = "hidden tokens" if config.objective == "masked" else "tokens"
    lines = [
        f"{name}: {likelihood.tokens:,} {unit}",
        f"  loss {likelihood.loss:.4f}{plus_minus(interval, '.4f')} nats a token, perplexity "
        f"{likelihood.perplexity:.2f}",
    ]
    if config.objective == "causal":
        bits = plus_minus(interval * likelihood.bits_per_byte / likelihood.loss, ".4f")
        lines += [
            f"  word perplexity {likelihood.word_perplexity:.2f} (nats / {likelihood.words:,} "
            "words, the end of each line one of them)",
            f"  bits per byte {likelihood.bits_per_byte:.4f}{bits} ({likelihood.bytes:,} bytes)",
        ]
    if not math.isnan(interval):
        lines.append("  ±: 95 % over other text (bootstrap over batches)")
    return "\n".join(lines)


def describe_run(folder: Path) -> str:
    """The files of the run in `folder`, and what to do next."""
    files = {"samples/prompts.txt": "the prompts and what the model makes of them"}
    commands = [(f"language_modelling.{name}",) for name in ("generate", "evaluate")]
    return describe_folder(folder, files, commands)


def continued_prompts(loaded: Loaded) -> list[str]:
    """Each of the run's own prompts with its continuation, or with what fills its masks."""
    config, prompts = loaded.config, loaded.config.prompts
    if not prompts:
        return []
    if config.objective == "masked":
        return filled_texts(loaded, prompts)
    completions = pipelines.complete(loaded, prompts, config.sampling, config.completion)
    return [prompt + text for prompt, text in zip(prompts, completions, strict=True)]


def show_prompts(run: OpenRun, loaded: Loaded, data: Prepared) -> None:
    """Prints each of the run's prompts with what follows it, and keeps them in its folder."""
    if run.config.prompts is None:
        run = run.settled(prompts=begun_lines(data, run.config))
    loaded, log = replace(loaded, config=run.config), run.log
    prompts, rule = loaded.config.prompts, f"\n{display.RULE}\n"
    with display.phase("continuing the prompts"):
        texts = continued_prompts(loaded)
    if texts and distributed.is_first():
        (log.folder / "samples").mkdir(exist_ok=True)
        path = log.folder / "samples" / "prompts.txt"
        path.write_text(rule.join(texts), encoding="utf-8")
        shown = (display.bold(x) + text[len(x) :] for x, text in zip(prompts, texts, strict=True))
        display.say(rule.join(shown))
        log.log_text(loaded.config.optimizer.total_steps, "samples", rule.join(texts).split("\n"))


def filled_texts(loaded: Loaded, texts: Sequence[str], *, count: int = 5) -> list[str]:
    """Each text, and below it a line for each of its masks: the `count` best tokens in percent."""
    filled = pipelines.fill_mask(loaded, texts, count=count, details=True)
    return [
        "\n".join([text, *(_mask_line(i, best, loaded) for i, best in enumerate(masks, start=1))])
        for text, masks in zip(texts, filled, strict=True)
    ]


def _mask_line(number: int, candidates: Sequence[pipelines.MaskPrediction], loaded: Loaded) -> str:
    shares = (
        f"{token_text(candidate.token, loaded.tokenizer)!r} {candidate.probability:.1%}"
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


@dataclass(frozen=True)
class EvaluateOptions(RunOptions):
    """The run and the text."""

    run: str = "runs/language_modelling/python_stdlib"
    """The folder of the run."""
    files: tuple[str, ...] = ()
    """Files to measure; none: a part of the run's own text."""
    part: Literal["test", "validation", "train"] = "test"
    """The part of the run's own text to measure, without --files."""
    stride: Natural = 0
    """Tokens between the starts of two sequences; 0: a whole sequence. A smaller stride gives each
    token more context and takes longer."""


@distributed.joins
def main(options: EvaluateOptions) -> None:
    """Prints the scores, and as JSON on the last line."""
    loaded = load_run(options.folder, options)
    config = loaded.config
    if config.objective == "masked" and options.stride:
        raise ConfigError("a masked model sees both sides of a token: leave out --stride")
    name = options.part if not options.files else ", ".join(options.files)
    stride = options.stride or config.data.seq_len
    with tempfile.TemporaryDirectory() as folder:
        if options.files:
            with distributed.together():
                part = part_of(options.files, config.data)
                assert part is not None  # there are files
                text = encode_part(config, part, loaded.tokenizer, Path(folder) / "text.tokens")
            assert_processes_agree({f"the file {name}": text.tokens.fingerprint})
            texts = {"": text}
        elif task := getattr(config, "task", None):
            raise ConfigError(
                f"{options.run} learned a task from examples ({task.kind}), and its scores are "
                "in its scores.json: give --files to measure the likelihood of their text"
            )
        else:
            texts = {
                part_name: open_encoded(options.folder, part_name, loaded.tokenizer)
                for part_name in part_names(config.data, options.part)
            }
        texts = {name: text.counted(loaded.tokenizer) for name, text in texts.items()}
        measured = measure_texts(loaded, texts, stride=stride)
        unknown = [describe_unknown(text, loaded.tokenizer) for text in texts.values()]
    print(describe_scores(name, config, measured.likelihood, measured.losses))
    for line in filter(None, unknown):
        print(f"  {line}")
    metadata = {"run": options.run, "text": name, "stride": stride}
    if not options.files:
        names = part_names(config.data, options.part)
        metadata["text_sha256"] = text_digest(options.folder, names)
    print(json.dumps(metadata | measured.scores))


if __name__ == "__main__":
    cli.start(main, {"default": EvaluateOptions()}, __doc__)
