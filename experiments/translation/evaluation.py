"""How good a translation model is: scores on held-out text, and which weights to keep."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments import commands, machines, weights
from experiments.runs import Run
from experiments.standing import Standing
from experiments.translation.corpus import Text
from experiments.translation.prepare import Prepared
from experiments.translation.presets import TranslationConfig
from experiments.translation.trained import Trained, Translator, with_weights
from experiments.writing import write_lines
from jaxformer import extras, metrics
from jaxformer.checkpoint import Checkpoints
from jaxformer.generation import OWN, BeamConfig, Manner, too_long, translate
from jaxformer.models import EncoderDecoder
from jaxformer.parallel import Devices
from jaxformer.training import TrainState


class Result(NamedTuple):
    """A translated text and its scores: BLEU, chrF, signatures, share exactly right."""

    scores: dict
    hypotheses: list[str]


def evaluate(trained: Trained, text: Text, search: BeamConfig, *, lowercased: bool) -> Result:
    """The best translation of each source line of `text`, scored against its raw target lines.

    With `lowercased` also after lower-casing, punctuation normalisation and Moses tokenisation.
    A line of more than `max_len` tokens gets an empty translation, and a warning on stderr.
    """
    lines, blanked = without_too_long(trained, text.source)
    if blanked:
        print(f"warning: {describe_too_long(trained.model, blanked)}", file=sys.stderr)
    found = translate(*trained[1:3], lines, *trained[3:], search)
    hypotheses = [best[0].text for best in found]
    scores = metrics.score_translations(hypotheses, text.target)._asdict()
    scores["exact"] = metrics.exact_match(hypotheses, text.target)
    if lowercased:
        language = trained.config.data.target_language
        lower = metrics.score_lowercased(hypotheses, text.target, language)
        scores["lowercased"] = lower._asdict()
    return Result(scores, hypotheses)


def without_too_long(
    trained: Trained | Translator, lines: list[str], manner: Manner = OWN
) -> tuple[list[str], list[int]]:
    """`lines` with those that the model cannot take made blank, and the numbers of these."""
    long = set(too_long(trained.model, lines, trained.source_tokenizer, manner))
    return ["" if i in long else line for i, line in enumerate(lines)], [i + 1 for i in long]


def describe_too_long(model: EncoderDecoder, numbers: list[int]) -> str:
    """A sentence about the lines `numbers`, which were made blank."""
    numbers = sorted(numbers)
    named = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    limit = model.config.max_len
    return (
        f"{len(numbers)} of the lines have more than the model's max_len={limit} tokens and were "
        f"given empty translations (line {named}): split them"
    )


def check_extras(config: TranslationConfig) -> None:
    """Raises `MissingExtra` now for what scoring needs at the end."""
    for name in ["sacrebleu"] + ["sacremoses"] * (config.data.corpus == "multi30k"):
        extras.load(name)


def validate(
    config: TranslationConfig,
    prepared: Prepared,
    devices: Devices,
    state: TrainState,
    standing: Standing,
    run: Run,
) -> Standing:
    """The standing after scoring the validation text with the weights of now."""
    params = machines.local(devices, state.params if state.ema is None else state.ema)
    trained = with_weights(config, prepared, params)
    search = replace(config.search, width=config.training.validation_width)
    result = evaluate(trained, prepared.validation, search, lowercased=False)
    step, scores = int(state.step), result.scores
    run.log(step, validation_bleu=scores["bleu"], validation_chrf=scores["chrf"])
    standing = standing.after(machines.agreed(-scores["bleu"]), step)
    commands.say(
        f"step {step}  validation BLEU {scores['bleu']:.2f} (best {-standing.best:.2f})  "
        f"chrF {scores['chrf']:.2f}  {scores['exact']:.1%} exact  {scores['bleu_signature']}"
    )
    if machines.is_first():
        with run.surviving("samples"):
            write_lines(run.folder / "samples" / f"validation-{step}.txt", result.hypotheses)
    return standing


def finish(
    config: TranslationConfig, prepared: Prepared, checkpoints: Checkpoints, folder: Path
) -> None:
    """Chooses the weights, scores them on the test text and writes scores.json."""
    trained = _choose_weights(config, prepared, checkpoints, folder)
    name = "test" if prepared.test.source else "validation"
    text = prepared.test if prepared.test.source else prepared.validation
    lowercased = config.data.corpus == "multi30k"
    result = evaluate(trained, text, config.search, lowercased=lowercased)
    note = {"text": name, "search": asdict(config.search), **result.scores}
    if machines.is_first():
        write_lines(folder / "samples" / f"{name}.txt", result.hypotheses)
        (folder / "scores.json").write_text(json.dumps(note, indent=2) + "\n")
    for i in range(0, len(text.source), max(len(text.source) // 5, 1)):
        print(f"  {text.source[i]}\n    = {result.hypotheses[i]}\n    ~ {text.target[i]}")
    print(describe_scores(name, result.scores))


def describe_scores(name: str, scores: dict) -> str:
    """The scores with their signatures, a line each."""
    lines = [
        f"{name}: {scores['sentences']} sentences, {scores['exact']:.1%} exactly right",
        f"  BLEU {scores['bleu']:.2f}  {scores['bleu_signature']}",
        f"  chrF {scores['chrf']:.2f}  {scores['chrf_signature']}",
    ]
    if "lowercased" in scores:
        lower = scores["lowercased"]
        lines.append(f"  BLEU {lower['bleu']:.2f}  {lower['bleu_signature']}")
    return "\n".join(lines)


def _choose_weights(
    config: TranslationConfig, prepared: Prepared, checkpoints: Checkpoints, folder: Path
) -> Trained:
    def metric(params: Any, steps: list[int]) -> float:
        trained = with_weights(config, prepared, params)
        result = evaluate(trained, prepared.validation, config.search, lowercased=False)
        print(f"steps {', '.join(map(str, steps))}: validation BLEU {result.scores['bleu']:.2f}")
        return -result.scores["bleu"]

    chosen = weights.choose(checkpoints, config.training, metric)
    if machines.is_first():
        weights.note(folder, chosen.steps, validation_bleu=-chosen.metric)
    return with_weights(config, prepared, chosen.params)
