"""Learn a task from few texts: `python -m experiments.language_modelling.finetune --run RUN`.

The run's model with the head of `--task` learns from `--num_train` examples, once from the
pretrained weights and once from scratch, for each of `--seeds` seeds, and its score on the test
examples is printed. Without files they are made of the standard library: which of ten packages is
a snippet from (classification)? Does one half follow the other (pairs)? What is assigned to a name
(spans)? What does a function do (chat)? Two presets make them of WikiText-2: which article is a
passage from (`articles`)? Are two words of a sentence swapped (`word_order`)?
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from experiments.harness import cli
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.runs.text_io import write_lines
from experiments.harness.training import build
from experiments.harness.training.adapters import LoraOptions, train_adapters, with_adapters
from experiments.harness.training.finetuning import result_folder
from experiments.harness.training.training_config import OptimizerConfig
from experiments.language_modelling.load_run import LoadedRun, load_run
from experiments.language_modelling.tasks import chat, classification, spans
from experiments.language_modelling.tasks.rows import TaskData
from jaxformer.config import check_at_least
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import EncoderOnly
from jaxformer.pretrained import save_pretrained
from jaxformer.pretrained.saving import check_savable
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training import lora
from jaxformer.training.parameter_groups import freeze, freeze_gradient
from jaxformer.training.train_step import init_train_state, make_train_step, raise_if_diverged


@dataclass(frozen=True)
class FinetuneOptions(LoraOptions, RunOptions):
    """The run, the task with its examples, and how to learn from them."""

    run: str = "runs/language_modelling/python_stdlib"
    """The folder of a run, or of pretrained weights."""
    task: Literal["classification", "pairs", "spans", "chat"] = "classification"
    """What is learned: labels of texts or of pairs, answers in a text, answers of an assistant."""
    train: str = ""
    """A file to learn from; empty: made of the standard library. classification: lines
    label<TAB>text; pairs: label<TAB>premise<TAB>hypothesis, or .jsonl with these fields; spans: the
    JSON of SQuAD; chat: .jsonl with a list of messages in each line."""
    test: str = ""
    """A file of the same form to test with; empty: made of the standard library."""
    examples: Literal["python_stdlib", "articles", "word_order"] = "python_stdlib"
    """What examples are made of without files; all but python_stdlib have classification alone."""
    num_train: int = 200
    """Examples to learn from; each seed chooses others, as evenly over the labels as possible. 0:
    all."""
    seeds: int = 5
    """How many times to choose examples and learn, each with another seed."""
    freeze_backbone: bool = False
    """Trains only the classifier's head."""
    pooling: Literal["own", "mean"] = "own"
    """What a classifier sees of a text (classification, pairs). own: a causal model's vector of the
    last token, an encoder's of the first; mean: the mean of the tokens' vectors."""
    start: Literal["both", "pretrained", "scratch"] = "both"
    """Starts from the pretrained weights, from random ones, or once from each."""
    seq_len: int = 128
    """Longest text in tokens; the rest of a longer one is cut off, or is in another window."""
    doc_stride: int = 32
    """Tokens that neighbouring windows of a long context share (spans)."""
    max_answer_tokens: int = 30
    """Longest answer in tokens (spans)."""
    chat_template: str = ""
    """A file with a chat template in Jinja (chat); empty: that of the run's folder."""
    batch_size: int = 20
    """Rows of a batch."""
    output: str = ""
    """A file that receives what the last model says of the test examples; empty: none. spans: JSON
    of answers by question, as the scripts of SQuAD read it."""
    save: str = ""
    """A new folder that receives the last model, adapters merged, in the format of transformers;
    empty: none."""
    runs: str = "runs"
    """The folder that holds the folders of all experiments."""
    name: str = ""
    """Name of the folder for the result; empty: the run's own, or that of the weights' folder."""
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
        RunOptions.__post_init__(self)
        check_at_least(self, 0, "num_train", "doc_stride")
        check_at_least(self, 1, "seeds", "batch_size", "max_answer_tokens")
        check_at_least(self, 3, "seq_len")
        check_at_least(self.optimizer, 1, "total_steps")
        if bool(self.train) != bool(self.test):
            raise ConfigError(
                f"labelled text needs both files, but train={self.train!r} and "
                f"test={self.test!r} were given"
            )
        made = self.examples != "python_stdlib"
        if made and (self.train or self.task != "classification"):
            raise ConfigError(
                f"examples={self.examples!r} are for task='classification' without files, but "
                f"task={self.task!r} and train={self.train!r}: leave one out"
            )
        if self.freeze_backbone and (self.task == "chat" or self.lora_rank):
            raise ConfigError(
                "freeze_backbone trains the head alone, but task='chat' has none and lora_rank "
                f"trains adapters of the rest (task={self.task!r}, lora_rank={self.lora_rank}): "
                "leave one out"
            )
        if self.lora_rank and self.start != "pretrained":
            raise ConfigError(
                f"lora_rank={self.lora_rank} trains adapters of pretrained weights, but start="
                f"{self.start!r}: give --start pretrained"
            )


_BACKBONE = "^backbone/"
_head = replace(FinetuneOptions().optimizer, learning_rate=1e-2, weight_decay=0.0)
_MASKED = "runs/language_modelling/python_stdlib_masked"
_BERT = "runs/language_modelling/bert_tiny"

PRESETS = {
    "all_layers": FinetuneOptions(),
    "frozen_backbone": FinetuneOptions(freeze_backbone=True, optimizer=_head),
    "articles": FinetuneOptions(examples="articles", run=_BERT, pooling="mean"),
    "word_order": FinetuneOptions(
        examples="word_order",
        run=_BERT,
        pooling="mean",
        num_train=0,
        optimizer=replace(FinetuneOptions().optimizer, total_steps=450),
    ),
    "pairs": FinetuneOptions(task="pairs", run=_MASKED, num_train=0, seeds=1),
    "spans": FinetuneOptions(task="spans", run=_MASKED, num_train=0, seeds=1),
    "chat": FinetuneOptions(task="chat", num_train=0, seeds=1, start="pretrained"),
}

_READ = {
    "classification": classification.read,
    "pairs": classification.read,
    "spans": spans.read,
    "chat": chat.read,
}
_MAKE = {
    "classification": classification.make_classification,
    "pairs": classification.make_classification,
    "spans": spans.make_spans,
    "chat": chat.make_chat,
}


class Task(NamedTuple):
    """What all models of one command share: examples, weights and compiled functions."""

    data: TaskData
    pretrained: Any  # the backbone's parameters
    optimizer: optax.GradientTransformation
    init: Callable
    step: Callable
    outputs: Callable


def main(options: FinetuneOptions) -> None:
    """Prints the scores, their means and deviations, and writes them to finetune.json."""
    folder = result_folder(options, "language_modelling")
    texts = _READ[options.task](options)
    loaded = load_run(Path(options.run), options, without_head=True)
    task = make_task(options, loaded, *texts)
    if options.save:
        check_new_folder(options.save, task)
    starts = ("scratch", "pretrained") if options.start == "both" else (options.start,)
    found: dict[str, list[dict[str, float]]] = {start: [] for start in starts}
    for seed in range(options.seeds):
        for start in starts:
            params = fine_tune(options, task, seed, pretrained=start == "pretrained")
            scored = task.data.score(predict(task, params, options.batch_size))
            found[start].append(scored.metrics)
            print(f"seed {seed}, {start}: {_say(scored.metrics)}", flush=True)
    first = next(iter(scored.metrics))
    result = summarise({start: [x[first] for x in each] for start, each in found.items()})
    print(describe(options, result, task.data.title))
    _keep(folder / "finetune.json", options, result, found)
    if options.output:
        write_lines(Path(options.output), scored.lines)
    if options.save:
        save(options, task, params, loaded.tokenizer)


def make_task(options: FinetuneOptions, loaded: LoadedRun, train: Any, test: Any) -> Task:
    """The model on the run's backbone, the examples as ids, and the steps to be compiled."""
    backbone, pretrained = find_backbone(loaded.model, loaded.params)
    data = _MAKE[options.task](options, loaded, backbone, train, test)
    loss, optimizer = data.loss, build.build_optimizer(options.optimizer)
    known = _BACKBONE if "pooler" in pretrained else f"{_BACKBONE}(?!pooler/)"  # may be new
    if options.lora_rank:
        frozen = lora.FROZEN if data.model is backbone else f"{known}(?!.*{lora.ADAPTER})"
        loss, optimizer = train_adapters(loss, optimizer, frozen)
    elif options.freeze_backbone:
        loss, optimizer = freeze_gradient(loss, known), freeze(optimizer, known)
    elif options.optimizer.freeze:
        loss = freeze_gradient(loss, options.optimizer.freeze)
    return Task(
        data,
        pretrained,
        optimizer,
        jax.jit(lambda rng, *inputs: build.init_params(data.model, rng, *inputs)),
        jax.jit(make_train_step(loss, optimizer), donate_argnums=0),
        jax.jit(data.outputs),
    )


def find_backbone(model: nn.Module, params: Any) -> tuple[nn.Module, Any]:
    """A run's model without its pretraining heads, and its parameters."""
    if isinstance(model, MaskedLanguageModel):
        parts = model.attention_fn, model.block
        return EncoderOnly(model.config, *parts), params["encoder"]
    return model, params


def fine_tune(options: FinetuneOptions, task: Task, seed: int, *, pretrained: bool) -> Any:
    """The model's parameters after the last step, adapters merged.

    `seed` decides the examples, the order of the batches, the first weights and the dropout. Raises
    `Diverged` when the last steps were not finite.
    """
    init_rng, rng = jax.random.split(jax.random.key(seed))
    train = task.data.train
    chosen = train.select(options.num_train, seed)
    params = first_params(task, init_rng, pretrained=pretrained)
    params = with_adapters(params, init_rng, options)
    state = init_train_state(params, task.optimizer, rng)
    for number in range(options.optimizer.total_steps):
        batch = train.batch(chosen, options.batch_size, seed, number)
        state, metrics = task.step(state, batch)
    raise_if_diverged(options.optimizer.total_steps, metrics)
    return lora.merge_adapters(state.params)


def first_params(task: Task, rng: jax.Array, *, pretrained: bool) -> Any:
    """The parameters before the first step; of pretrained ones only the head's are new."""
    model, train = task.data.model, task.data.train
    if pretrained and not hasattr(model, "backbone"):
        return jax.tree.map(jnp.array, task.pretrained)
    inputs = (train.padding_mask[:2],) if hasattr(model, "backbone") else ()
    params = task.init(rng, train.tokens[:2], *inputs)
    if not pretrained:
        return params
    # Copies, because a step donates its state's buffers.
    known = {name: task.pretrained.get(name, leaf) for name, leaf in params["backbone"].items()}
    return {**params, "backbone": jax.tree.map(jnp.array, known)}


def predict(task: Task, params: Any, rows: int) -> np.ndarray:
    """What the model puts out for each test row [N, ...], in order."""
    found = []
    for batch in task.data.test.iterate_once(rows):
        found.append(np.asarray(task.outputs(params, batch))[batch.loss_mask])
    return np.concatenate(found)


def check_new_folder(folder: str, task: Task) -> None:
    """Raises `ConfigError` for a folder that is there, and for a model that cannot be saved."""
    if Path(folder).exists():
        raise ConfigError(f"save={folder!r} is there already: give the name of a new folder")
    check_savable(task.data.model)


def save(options: FinetuneOptions, task: Task, params: Any, tokenizer: Tokenizer) -> None:
    """Writes the model as a folder of transformers."""
    data = task.data
    save_pretrained(options.save, data.model, params, tokenizer, labels=data.labels)
    for name, text in data.files.items():
        (Path(options.save) / name).write_text(text, encoding="utf-8")


def summarise(found: dict[str, list[float]]) -> dict[str, dict]:
    """Scores by start with mean and sample deviation; with both also the margin by seed."""
    if len(found) == 2:
        margin = [a - b for a, b in zip(found["pretrained"], found["scratch"], strict=True)]
        found = {**found, "margin": margin}
    return {
        name: {
            "by_seed": values,
            "mean": statistics.fmean(values),
            "deviation": statistics.stdev(values) if len(values) > 1 else None,
        }
        for name, values in found.items()
    }


def describe(options: FinetuneOptions, result: dict[str, dict], title: str) -> str:
    """The means and deviations in a few lines; `title` says of what."""
    texts = "labelled texts" if options.task == "classification" else "examples"
    lines = [
        f"{options.num_train or 'all'} {texts}, {options.seeds} seeds, "
        f"layers {_layers(options)}; {title}"
    ]
    for name, found in result.items():
        deviation = found["deviation"]
        spread = "" if deviation is None else f", deviation {100 * deviation:.1f}"
        lines.append(f"  {name:<10} {100 * found['mean']:5.1f} %{spread}")
    return "\n".join(lines)


def _say(metrics: dict[str, float]) -> str:
    """The scores of one model: a share of right texts, or each with its name."""
    if list(metrics) == ["accuracy"]:
        return f"{metrics['accuracy']:.1%} right"
    shares = {"loss": "{:.4f}"}
    return "  ".join(f"{x} {shares.get(x, '{:.1%}').format(y)}" for x, y in metrics.items())


def _keep(
    path: Path,
    options: FinetuneOptions,
    result: dict[str, dict],
    found: dict[str, list[dict[str, float]]],
) -> None:
    """Writes the result beside those of other tasks and layers, if there are any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    layers, task = _layers(options), options.task
    name = layers if task == "classification" else f"{task}, {layers}"
    known[name] = {"options": asdict(options), **result}
    if len(next(iter(found.values()))[0]) > 1:
        known[name]["metrics"] = found
    path.write_text(json.dumps(known, indent=2) + "\n")


def _layers(options: FinetuneOptions) -> str:
    layers = "head" if options.freeze_backbone else "all"
    if options.lora_rank:
        layers = f"adapters of rank {options.lora_rank}"
    return f"{layers}, mean of the tokens" if options.pooling == "mean" else layers


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
