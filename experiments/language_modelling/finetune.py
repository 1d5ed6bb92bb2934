"""Learn a label from few texts: `python -m experiments.language_modelling.finetune --run RUN`.

A classifier on the run's model learns from `--num_train` texts, once from the pretrained weights
and once from scratch, for each of `--seeds` seeds, and its accuracy on the test texts is printed.
Without files the task is: which of ten packages of the standard library is a snippet from?
"""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from experiments.harness import build, cli, run_folder
from experiments.harness.checkpoint_selection import RunOptions
from experiments.harness.text_io import write_lines
from experiments.harness.training_config import OptimizerConfig
from experiments.language_modelling.load_run import LoadedRun, load_run
from experiments.language_modelling.stdlib_classification import Labelled, snippets
from jaxformer.config import check_at_least
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.heads import Classifier, MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.pretrained import is_pretrained
from jaxformer.text.data import read_tab_pairs
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.losses import classification_loss
from jaxformer.training.parameter_groups import freeze, freeze_gradient
from jaxformer.training.train_step import init_train_state, make_train_step, raise_if_diverged


@dataclass(frozen=True)
class FinetuneOptions(RunOptions):
    """The run, the labelled texts, and how to learn from them."""

    run: str = "runs/language_modelling/python_stdlib"
    """The folder of a run, or of pretrained weights."""
    train: str = ""
    """A file of lines label<TAB>text to learn from; empty: snippets of the standard library."""
    test: str = ""
    """A file of such lines to test with; empty: snippets of the standard library."""
    num_train: int = 200
    """Texts to learn from: each seed chooses others, as evenly over the labels as possible."""
    seeds: int = 5
    """How many times to choose texts and learn, each with another seed."""
    freeze_backbone: bool = False
    """Trains only the classifier's head."""
    start: Literal["both", "pretrained", "scratch"] = "both"
    """Starts from the pretrained weights, from random ones, or once from each."""
    seq_len: int = 128
    """Longest text in tokens; the rest of a longer one is cut off."""
    batch_size: int = 20
    """Texts of a batch."""
    output: str = ""
    """A file that receives the test lines with the labels of the last classifier; empty: none."""
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
        check_at_least(self, 1, "num_train", "seeds", "batch_size")
        check_at_least(self, 3, "seq_len")
        check_at_least(self.optimizer, 1, "total_steps")
        if bool(self.train) != bool(self.test):
            raise ConfigError(
                f"labelled text needs both files, but train={self.train!r} and "
                f"test={self.test!r} were given"
            )


_BACKBONE = "^backbone/"
_head = replace(FinetuneOptions().optimizer, learning_rate=1e-2, weight_decay=0.0)

PRESETS = {
    "all_layers": FinetuneOptions(),
    "frozen_backbone": FinetuneOptions(freeze_backbone=True, optimizer=_head),
}


class LabelledBatch(NamedTuple):
    """B texts and the numbers of their labels; rows outside `loss_mask` do not count."""

    tokens: np.ndarray  # [B, T] int32
    padding_mask: np.ndarray  # [B, T] bool, False at padding
    labels: np.ndarray  # [B] int32
    loss_mask: np.ndarray  # [B] bool
    example_ids: np.ndarray  # [B] int32


class Examples(NamedTuple):
    """N texts as ids, padded at their ends, and the numbers of their labels."""

    tokens: np.ndarray  # [N, T] int32
    padding_mask: np.ndarray  # [N, T] bool, False at padding
    labels: np.ndarray  # [N] int32

    def select(self, count: int, seed: int) -> np.ndarray:
        """The numbers [count] of random texts, as evenly over the labels as possible."""
        order = _order(seed, 0, len(self.labels))
        labels = self.labels[order]
        turn = np.zeros(len(order), np.int64)
        for label in np.unique(labels):
            turn[labels == label] = np.arange(np.sum(labels == label))
        return order[np.argsort(turn, kind="stable")[:count]]

    def batch(self, chosen: np.ndarray, rows: int, seed: int, step: int) -> LabelledBatch:
        """The batch of `step` (0, 1, ..) of the texts numbered `chosen`.

        An epoch takes each text once, in a new order; it may end within a batch.
        """
        epochs, places = np.divmod(step * rows + np.arange(rows), len(chosen))
        orders = {epoch: _order(seed, 1 + epoch, len(chosen)) for epoch in np.unique(epochs)}
        numbers = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        return self._gather(chosen[numbers], rows)

    def iterate_once(self, rows: int) -> Iterator[LabelledBatch]:
        """All texts in order; the last batch is filled up with rows that do not count."""
        numbers = np.arange(len(self.labels))
        for start in range(0, len(numbers), rows):
            yield self._gather(numbers[start : start + rows], rows)

    def _gather(self, numbers: np.ndarray, rows: int) -> LabelledBatch:
        row = np.arange(rows, dtype=np.int32)
        filled = np.resize(numbers, rows)
        tokens, present, labels = (leaf[filled] for leaf in self)
        return LabelledBatch(tokens, present, labels, row < len(numbers), row)


class Task(NamedTuple):
    """What all classifiers of one command share: texts, weights and compiled functions."""

    kinds: list[str]  # the label of each number
    train: Examples
    test: Examples
    pretrained: Any  # the backbone's parameters
    optimizer: optax.GradientTransformation
    init: Callable
    step: Callable
    logits: Callable


def main(options: FinetuneOptions) -> None:
    """Prints the accuracies, their means and deviations, and writes them to finetune.json."""
    folder = result_folder(options)
    train, test = read_texts(options)
    task = make_task(options, load_run(Path(options.run), options), train, test)
    starts = ("scratch", "pretrained") if options.start == "both" else (options.start,)
    found: dict[str, list[float]] = {start: [] for start in starts}
    for seed in range(options.seeds):
        for start in starts:
            params = fine_tune(options, task, seed, pretrained=start == "pretrained")
            predicted = predict(task, params, options.batch_size)
            found[start].append(float(np.mean(predicted == task.test.labels)))
            print(f"seed {seed}, {start}: {found[start][-1]:.1%} right", flush=True)
    result = summarise(found)
    print(describe(options, result, test))
    _keep(folder / "finetune.json", options, result)
    if options.output:
        rows = zip((task.kinds[number] for number in predicted), *test, strict=True)
        write_lines(Path(options.output), ["\t".join(row) for row in rows])


def result_folder(options: FinetuneOptions) -> Path:
    """The folder for the result; `ConfigError` for a name that no folder can have."""
    given = Path(options.run)
    if not options.name and not is_pretrained(given):
        return given
    return run_folder.folder_of(
        options.runs, "language_modelling", options.name or given.resolve().name
    )


def read_texts(options: FinetuneOptions) -> tuple[Labelled, Labelled]:
    """The texts to learn from and to test with.

    Raises `DataError` for a file that cannot be used or a test label that is not learned,
    `ConfigError` for a higher `num_train` than there are texts, or fewer than there are kinds.
    """
    if options.train:
        train, test = read_labelled(options.train), read_labelled(options.test)
    else:
        train, test = snippets("train"), snippets("test")
    kinds = sorted(set(train.labels))
    for number, label in enumerate(test.labels, start=1):
        if label not in kinds:
            raise DataError(
                f"{options.test}:{number}: no line of {options.train} has the label {label!r}"
            )
    if len(kinds) < 2:
        raise DataError(
            f"{options.train}: all lines have the label {kinds[0]!r}: two labels are needed"
        )
    if not len(kinds) <= options.num_train <= len(train.texts):
        raise ConfigError(
            f"num_train={options.num_train}, but there are {len(train.texts)} texts of "
            f"{len(kinds)} kinds to learn from: give a number between these"
        )
    return train, test


def read_labelled(path: str) -> Labelled:
    """The lines label<TAB>text of a file; a further tab ends the text.

    Raises `DataError` naming the first line without a label or a text, and as `read_lines` does.
    """
    found = Labelled(*read_tab_pairs(path))
    for number, (label, text) in enumerate(zip(*found, strict=True), start=1):
        if not label.strip() or not text.strip():
            raise DataError(f"{path}:{number}: needed label<TAB>text, got {label!r} and {text!r}")
    return found


def make_task(options: FinetuneOptions, loaded: LoadedRun, train: Labelled, test: Labelled) -> Task:
    """The classifier on the run's backbone, the texts as ids, and the steps to be compiled."""
    backbone, pretrained = find_backbone(loaded.model, loaded.params)
    kinds = sorted(set(train.labels))
    model = Classifier(backbone, len(kinds))
    loss, optimizer = classification_loss(model), build.build_optimizer(options.optimizer)
    if options.freeze_backbone:
        loss, optimizer = freeze_gradient(loss, _BACKBONE), freeze(optimizer, _BACKBONE)
    elif options.optimizer.freeze:
        loss = freeze_gradient(loss, options.optimizer.freeze)
    length, frame = min(options.seq_len, backbone.config.max_len), frame_of(loaded)
    return Task(
        kinds,
        encode(train, kinds, loaded.tokenizer, length, frame),
        encode(test, kinds, loaded.tokenizer, length, frame),
        pretrained,
        optimizer,
        jax.jit(lambda *inputs: model.init(*inputs)["params"]),
        jax.jit(make_train_step(loss, optimizer), donate_argnums=0),
        jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs)),
    )


def find_backbone(model: nn.Module, params: Any) -> tuple[nn.Module, Any]:
    """A run's model without its pretraining heads, and its parameters."""
    if isinstance(model, MaskedLanguageModel):
        parts = model.attention_fn, model.block, model.position_scheme
        return EncoderOnly(model.config, *parts), params["encoder"]
    return model, params


def frame_of(loaded: LoadedRun) -> tuple[list[int], list[int]]:
    """The ids that the run's model reads before and after a text."""
    special = loaded.tokenizer.special
    begin = [] if special.bos is None else [special.bos]
    end = [] if special.eos is None else [special.eos]
    if not isinstance(loaded.model, DecoderOnly):
        return begin, end
    # A causal model has never read the end token, and a text's vector is that of its last token.
    return (begin, []) if loaded.config.data.isolate_documents else ([], [])


def encode(
    labelled: Labelled,
    kinds: list[str],
    tokenizer: Tokenizer,
    length: int,
    frame: tuple[list[int], list[int]],
) -> Examples:
    """The texts as ids between the two lists of `frame`, cut to `length` ids in all."""
    room = length - sum(map(len, frame))
    tokens = np.full((len(labelled.texts), length), tokenizer.special.pad or 0, np.int32)
    present = np.zeros(tokens.shape, bool)
    for i, ids in enumerate(tokenizer.encode_batch(labelled.texts)):
        row = [*frame[0], *ids[:room], *frame[1]]
        tokens[i, : len(row)], present[i, : len(row)] = row, True
    labels = [kinds.index(label) for label in labelled.labels]
    return Examples(tokens, present, np.array(labels, np.int32))


def fine_tune(options: FinetuneOptions, task: Task, seed: int, *, pretrained: bool) -> Any:
    """The classifier's parameters after the last step.

    `seed` decides the texts, the order of the batches, the first weights and the dropout. Raises
    `Diverged` when the last steps were not finite.
    """
    init_rng, rng = jax.random.split(jax.random.key(seed))
    chosen = task.train.select(options.num_train, seed)
    params = task.init(init_rng, task.train.tokens[:2], task.train.padding_mask[:2])
    if pretrained:
        # Copies, because a step donates its state's buffers. Only the head's are new.
        known = {name: task.pretrained[name] for name in params["backbone"]}
        params = {**params, "backbone": jax.tree.map(jnp.array, known)}
    state = init_train_state(params, task.optimizer, rng)
    for number in range(options.optimizer.total_steps):
        batch = task.train.batch(chosen, options.batch_size, seed, number)
        state, metrics = task.step(state, batch)
    raise_if_diverged(options.optimizer.total_steps, metrics)
    return state.params


def predict(task: Task, params: Any, rows: int) -> np.ndarray:
    """The number of the likeliest label of each test text [N]."""
    found = []
    for batch in task.test.iterate_once(rows):
        logits = task.logits(params, batch.tokens, batch.padding_mask)
        found.append(np.argmax(logits, axis=-1)[batch.loss_mask])
    return np.concatenate(found)


def summarise(found: dict[str, list[float]]) -> dict[str, dict]:
    """Accuracies by start with mean and sample deviation; with both also the margin by seed."""
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


def describe(options: FinetuneOptions, result: dict[str, dict], test: Labelled) -> str:
    """The means and deviations in a few lines, with the share of the commonest label."""
    commonest = max(map(test.labels.count, set(test.labels))) / len(test.labels)
    lines = [
        f"{options.num_train} labelled texts, {options.seeds} seeds, layers {_layers(options)}; "
        f"share of {len(test.labels)} test texts right (the commonest label: {commonest:.1%})"
    ]
    for name, found in result.items():
        deviation = found["deviation"]
        spread = "" if deviation is None else f", deviation {100 * deviation:.1f}"
        lines.append(f"  {name:<10} {100 * found['mean']:5.1f} %{spread}")
    return "\n".join(lines)


def _keep(path: Path, options: FinetuneOptions, result: dict[str, dict]) -> None:
    """Writes the result beside that of the other layers, if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    known[_layers(options)] = {"options": asdict(options), **result}
    path.write_text(json.dumps(known, indent=2) + "\n")


def _layers(options: FinetuneOptions) -> str:
    return "head" if options.freeze_backbone else "all"


def _order(seed: int, number: int, size: int) -> np.ndarray:
    """0 .. size - 1 in a random order, which depends on (seed, number) and on no version."""
    bits = np.random.Philox(key=np.array([seed, number], np.uint64))
    return np.argsort(bits.random_raw(size), kind="stable")


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
