"""Learn a task from few texts: `python -m experiments.language_modelling.finetune --run RUN`.

The run's model with the head of `--task` learns from `--num_train` examples, once from the
pretrained weights and once from scratch, for each of `--seeds` seeds, and its score on the test
examples is printed. Without files, classification asks which of ten packages a snippet of the
standard library is from.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
from jax.tree_util import Partial

from experiments.harness import cli
from experiments.harness.runs import distributed
from experiments.harness.runs.run_files import write_lines
from experiments.harness.training import build, finetuning
from experiments.harness.training.finetuning import Trainer, make_trainer, result_folder
from experiments.harness.training.training_config import OptimizerConfig
from experiments.language_modelling.load_run import LoadedRun, load_run
from experiments.language_modelling.tasks import TASKS, Task, predict
from jaxformer.config import Count, Natural, Range
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import EncoderOnly
from jaxformer.pretrained import save_pretrained
from jaxformer.pretrained.saving import check_savable
from jaxformer.training import lora


@dataclass(frozen=True)
class FinetuneOptions(finetuning.FinetuneOptions):
    """The run, the task with its examples, and how to learn from them."""

    run: str = "runs/language_modelling/python_stdlib"
    """The folder of a run, or of pretrained weights."""
    task: Literal["classification", "pairs", "spans", "chat"] = "classification"
    """The task: labels of texts or of pairs, answers in a text, answers of an assistant."""
    train: str = ""
    """A file to learn from; empty: snippets of the standard library. classification: lines
    label<TAB>text; pairs: label<TAB>premise<TAB>hypothesis; or .jsonl with these fields; spans: the
    JSON of SQuAD; chat: .jsonl with a list of messages in each line."""
    test: str = ""
    """A file of the same form to test with."""
    num_train: Natural = 200
    """Examples to learn from; each seed chooses others, as evenly over the labels as possible. 0:
    all."""
    batch_size: Count = 20
    """Rows of a batch."""
    seeds: Count = 5
    """Number of times to choose examples and learn, each with another seed."""
    freeze_backbone: bool = False
    """Trains only the classifier's head."""
    pooling: Literal["own", "mean"] = "own"
    """The vector that a classifier sees (classification, pairs). own: a causal model's of the last
    token, an encoder's of the first; mean: the mean of the tokens' vectors."""
    start: Literal["both", "pretrained", "scratch"] = "both"
    """Starts from the pretrained weights, from random ones, or once from each."""
    seq_len: Annotated[int, Range(3)] = 128
    """Longest text in tokens; the rest of a longer one is cut off, or is in another window."""
    doc_stride: Natural = 32
    """Tokens that neighbouring windows of a long context share (spans)."""
    max_answer_tokens: Count = 30
    """Longest answer in tokens (spans)."""
    chat_template: str = ""
    """A file with a chat template in Jinja (chat); empty: that of the run's folder."""
    optimizer: OptimizerConfig = OptimizerConfig(
        schedule="cosine",
        learning_rate=1e-3,
        warmup_steps=15,
        total_steps=150,
        min_lr_ratio=0.0,
        grad_clip_norm=1.0,
        weight_decay=0.01,
    )
    """The optimizer, and how many steps it takes."""

    def __post_init__(self):
        super().__post_init__()
        if bool(self.train) != bool(self.test):
            raise ConfigError(
                f"labelled text needs both files, but train={self.train!r} and "
                f"test={self.test!r} were given"
            )
        if self.freeze_backbone and (self.task == "chat" or self.lora_rank):
            raise ConfigError(
                "freeze_backbone trains the head alone, but task='chat' has none and lora_rank "
                f"trains adapters of the backbone (task={self.task!r}, lora_rank={self.lora_rank}):"
                " leave one out"
            )
        if self.lora_rank and self.start != "pretrained":
            raise ConfigError(
                f"lora_rank={self.lora_rank} trains adapters of pretrained weights, but start="
                f"{self.start!r}: give --start pretrained"
            )


_head = replace(FinetuneOptions().optimizer, learning_rate=1e-2, weight_decay=0.0)
_MASKED = "runs/language_modelling/python_stdlib_masked"

PRESETS = {
    "all_layers": FinetuneOptions(),
    "frozen_backbone": FinetuneOptions(freeze_backbone=True, optimizer=_head),
    "pairs": FinetuneOptions(task="pairs", run=_MASKED, num_train=0, seeds=1),
    "spans": FinetuneOptions(task="spans", run=_MASKED, num_train=0, seeds=1),
    "chat": FinetuneOptions(task="chat", num_train=0, seeds=1, start="pretrained"),
}


class Learner(NamedTuple):
    """A task, the weights that it may start from, and its compiled functions."""

    task: Task
    pretrained: Any
    """The parameters of the model, or of its backbone."""
    init: Callable
    trainer: Trainer


@distributed.joins
def main(options: FinetuneOptions) -> None:
    """Prints the scores, their means and deviations, and writes them to finetune.json."""
    folder = result_folder(options, "language_modelling", options.train, options.test)
    if options.task != "classification" and not options.train:
        raise ConfigError(f"task={options.task!r} needs files: give --train FILE and --test FILE")
    rows = TASKS[options.task].read(options)
    loaded = without_heads(load_run(options.folder, options, without_head=True))
    learner = make_learner(options, loaded, *rows)
    task = learner.task
    if options.save:
        check_savable(task.model)
    starts = ("scratch", "pretrained") if options.start == "both" else (options.start,)
    metrics: dict[str, list[dict[str, float]]] = {start: [] for start in starts}
    for seed in range(options.seeds):
        for start in starts:
            params = fine_tune(learner, seed, pretrained=start == "pretrained")
            scored = task.score(predict(task, params, options.batch_size))
            metrics[start].append(scored.metrics)
            said = "  ".join(f"{name} {value:.4f}" for name, value in scored.metrics.items())
            print(f"seed {seed}, {start}: {said}", flush=True)
    first = next(iter(scored.metrics))
    result = summarise({start: [x[first] for x in each] for start, each in metrics.items()})
    print(describe(options, result, task.title))
    if options.save:
        save_pretrained(options.save, task.model, params, loaded.tokenizer, labels=task.labels)
    if not distributed.is_first():
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "finetune.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results[setting(options)] = {"options": asdict(options), **result, "metrics": metrics}
    path.write_text(json.dumps(results, indent=2) + "\n")
    if options.output:
        write_lines(options.output, scored.lines)
    for name, text in task.files.items() if options.save else ():
        (Path(options.save) / name).write_text(text, encoding="utf-8")


def without_heads(loaded: LoadedRun) -> LoadedRun:
    """The run with the `DecoderOnly` or `EncoderOnly` below its pretraining heads."""
    model = loaded.model
    if not isinstance(model, MaskedLanguageModel):
        return loaded
    encoder = EncoderOnly(model.config, model.attention_fn, model.block)
    return replace(loaded, model=encoder, params=loaded.params["encoder"])


def make_learner(options: FinetuneOptions, loaded: LoadedRun, train: Any, test: Any) -> Learner:
    """The task of `options` on a run `without_heads`, for rows as its `read` returns them."""
    task = TASKS[options.task].make(options, loaded, train, test)
    # Layers that the pretrained weights lack are new, and are trained like a head.
    backbone = "^backbone/" if "pooler" in loaded.params else "^backbone/(?!pooler/)"
    frozen = backbone if options.freeze_backbone else ""
    if options.lora_rank and hasattr(task.model, "backbone"):
        frozen = f"{backbone}(?!.*{lora.ADAPTER})"
    init = jax.jit(partial(build.init_params, task.model))
    trainer = make_trainer(options, task.loss, task.model, frozen)
    return Learner(task, loaded.params, init, trainer)


def fine_tune(learner: Learner, seed: int, *, pretrained: bool) -> Any:
    """The model's parameters after the last step, adapters merged.

    `seed` decides the examples, the order of the batches, the first weights and the dropout. Raises
    `Diverged` when the last steps were not finite.
    """
    rng = jax.random.key(seed)
    params = first_params(learner, jax.random.split(rng)[0], pretrained=pretrained)
    return learner.trainer.train(params, learner.task.train, seed, rng)


def first_params(learner: Learner, rng: jax.Array, *, pretrained: bool) -> Any:
    """The parameters before the first step; of pretrained ones only the head's are new."""
    train, has_head = learner.task.train, hasattr(learner.task.model, "backbone")
    if pretrained and not has_head:
        return learner.pretrained
    inputs = (train.padding_mask[:2],) if has_head else ()
    init = Partial(learner.init, rng, train.tokens[:2], *inputs)
    params = learner.trainer.devices.init(init)
    if not pretrained:
        return params
    known = {x: learner.pretrained.get(x, leaf) for x, leaf in params["backbone"].items()}
    return {**params, "backbone": known}


def summarise(scores: dict[str, list[float]]) -> dict[str, dict]:
    """Scores by start with mean and sample deviation; with both also the margin by seed."""
    if len(scores) == 2:
        margin = [a - b for a, b in zip(scores["pretrained"], scores["scratch"], strict=True)]
        scores = {**scores, "margin": margin}
    return {
        name: {
            "by_seed": values,
            "mean": statistics.fmean(values),
            "deviation": statistics.stdev(values) if len(values) > 1 else None,
        }
        for name, values in scores.items()
    }


def describe(options: FinetuneOptions, result: dict[str, dict], title: str) -> str:
    """The means and deviations in a few lines; `title` says of what."""
    lines = [f"{setting(options)}; {options.num_train or 'all'} examples; {title}"]
    for name, each in result.items():
        deviation = "" if each["deviation"] is None else f" ± {100 * each['deviation']:.1f}"
        lines.append(f"  {name:<10} {100 * each['mean']:5.1f}{deviation} % ({options.seeds} seeds)")
    return "\n".join(lines)


def setting(options: FinetuneOptions) -> str:
    """The task and the layers that learn it, by which finetune.json names a result."""
    layers = "head" if options.freeze_backbone else "all"
    if options.lora_rank:
        layers = f"adapters of rank {options.lora_rank}"
    pooling = ", mean of the tokens" if options.pooling == "mean" else ""
    return f"{options.task}, {layers}{pooling}"


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
