"""Learn a label from few texts: `python -m experiments.language_modelling.finetune --run RUN`.

A classifier on the run's model learns from `--labels` texts, once from the pretrained weights and
once from scratch, for each of `--seeds` seeds; printed is how often it names the label of a test
text. Without files: which of ten packages of the standard library is a snippet from?
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from experiments import commands, runs
from experiments.language_modelling.borrowed import is_theirs
from experiments.language_modelling.snippets import Labelled, snippets
from experiments.language_modelling.trained import Trained, load_trained
from experiments.writing import write_lines
from jaxformer.config import ConfigError, check_least, check_names
from jaxformer.data import DataError, read_tab_pairs
from jaxformer.heads import Classifier, MaskedLanguageModel
from jaxformer.losses import Loss, classification_loss
from jaxformer.models import DecoderOnly, EncoderOnly
from jaxformer.optimizer import OptimizerConfig, make_optimizer
from jaxformer.tokenizers import Tokenizer
from jaxformer.training import init_state, make_train_step, require_finite


@dataclass(frozen=True)
class FinetuneOptions:
    """Which run, which labelled texts, and how to learn from them.

    `train` and `test` are files of lines label<TAB>text. For each seed `labels` texts are drawn,
    as evenly over the labels as they allow. `layers` "head" leaves the backbone as it is. Texts
    are cut after `length` ids, or the model's `max_len`. `output` receives the test lines, each
    behind the label that the last classifier trained found. The result is kept in the run's folder,
    or under `runs` in that of `name`; a folder of other people's weights is left as it is, and
    names a new one without `name`.
    """

    run: str = "runs/language_modelling/python_stdlib"
    train: str = ""
    test: str = ""
    labels: int = 200
    seeds: int = 5
    layers: Literal["all", "head"] = "all"
    start: Literal["both", "pretrained", "scratch"] = "both"
    length: int = 128
    rows: int = 20
    output: str = ""
    runs: str = "runs"
    name: str = ""
    optimizer: OptimizerConfig = OptimizerConfig(
        schedule="cosine",
        learning_rate=1e-3,
        warmup_steps=15,
        total_steps=150,
        final_fraction=0.0,
        clip_norm=1.0,
        weight_decay=0.01,
    )

    def __post_init__(self):
        check_names(self)
        check_least(self, 1, "labels", "seeds", "rows")
        check_least(self, 3, "length")
        check_least(self.optimizer, 1, "total_steps")
        if bool(self.train) != bool(self.test):
            raise ConfigError(
                f"labelled text needs both files, but train={self.train!r} and "
                f"test={self.test!r} were given"
            )


_head = replace(FinetuneOptions().optimizer, learning_rate=1e-2, weight_decay=0.0)

PRESETS = {
    "all_layers": FinetuneOptions(),
    "head_alone": FinetuneOptions(layers="head", optimizer=_head),
}


class LabelledBatch(NamedTuple):
    """B texts and the numbers of their labels; the rows that are not `valid` do not count."""

    tokens: np.ndarray  # [B, T] int32
    present: np.ndarray  # [B, T] bool, False at padding
    labels: np.ndarray  # [B] int32
    valid: np.ndarray  # [B] bool
    row: np.ndarray  # [B] int32


class Examples(NamedTuple):
    """N texts as ids, padded at their ends, and the numbers of their labels."""

    tokens: np.ndarray  # [N, T] int32
    present: np.ndarray  # [N, T] bool
    labels: np.ndarray  # [N] int32

    def draw(self, count: int, seed: int) -> np.ndarray:
        """The numbers [count] of texts drawn at random, as evenly over the labels as they allow."""
        order = _order(seed, 0, len(self.labels))
        labels = self.labels[order]
        turn = np.zeros(len(order), np.int64)
        for label in np.unique(labels):
            turn[labels == label] = np.arange(np.sum(labels == label))
        return order[np.argsort(turn, kind="stable")[:count]]

    def batch(self, chosen: np.ndarray, rows: int, seed: int, step: int) -> LabelledBatch:
        """The batch of `step` (0, 1, ..) of the texts numbered `chosen`, given (seed, step).

        An epoch takes each text once, in an order of its own; it may end within a batch.
        """
        epochs, places = np.divmod(step * rows + np.arange(rows), len(chosen))
        orders = {epoch: _order(seed, 1 + epoch, len(chosen)) for epoch in np.unique(epochs)}
        numbers = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        return self._gather(chosen[numbers], rows)

    def cover(self, rows: int) -> Iterator[LabelledBatch]:
        """All texts in order; the last batch is filled up with rows that are not valid."""
        numbers = np.arange(len(self.labels))
        for start in range(0, len(numbers), rows):
            yield self._gather(numbers[start : start + rows], rows)

    def _gather(self, numbers: np.ndarray, rows: int) -> LabelledBatch:
        row = np.arange(rows, dtype=np.int32)
        filled = np.resize(numbers, rows)
        return LabelledBatch(*(leaf[filled] for leaf in self), row < len(numbers), row)


class Task(NamedTuple):
    """What the classifiers of one command share: texts, weights and compiled functions."""

    kinds: list[str]  # what the labels' numbers mean
    train: Examples
    test: Examples
    pretrained: Any  # the backbone's parameters
    optimizer: optax.GradientTransformation
    init: Callable
    step: Callable
    logits: Callable


def main(options: FinetuneOptions) -> None:
    """Prints the accuracies, their means and deviations; keeps them in a finetune.json."""
    folder = result_folder(options)
    train, test = read_texts(options)
    task = make_task(options, load_trained(Path(options.run)), train, test)
    starts = ("scratch", "pretrained") if options.start == "both" else (options.start,)
    found: dict[str, list[float]] = {start: [] for start in starts}
    for seed in range(options.seeds):
        for start in starts:
            params = fine_tune(options, task, seed, pretrained=start == "pretrained")
            predicted = predict(task, params, options.rows)
            found[start].append(float(np.mean(predicted == task.test.labels)))
            print(f"seed {seed}, {start}: {found[start][-1]:.1%} right", flush=True)
    result = summarise(found)
    print(describe(options, result, test))
    _keep(folder / "finetune.json", options, result)
    if options.output:
        rows = zip((task.kinds[number] for number in predicted), *test, strict=True)
        write_lines(Path(options.output), ["\t".join(row) for row in rows])


def result_folder(options: FinetuneOptions) -> Path:
    """Where the result is kept; `ConfigError` for a name that no folder can have."""
    given = Path(options.run)
    if not options.name and not is_theirs(given):
        return given
    return runs.folder_of(options.runs, "language_modelling", options.name or given.resolve().name)


def read_texts(options: FinetuneOptions) -> tuple[Labelled, Labelled]:
    """The texts to learn from and to test with.

    Raises `DataError` for a file that cannot be used or a test label that is not learned,
    `ConfigError` for more `labels` than there are texts, or fewer than there are kinds.
    """
    if options.train:
        train, test = read_labelled(options.train), read_labelled(options.test)
    else:
        train, test = snippets("train"), snippets("test")
    kinds = sorted(set(train.labels))
    for number, label in enumerate(test.labels, start=1):
        if label not in kinds:
            raise DataError(f"{options.test}:{number}: no line of {options.train} is {label!r}")
    if len(kinds) < 2:
        raise DataError(f"{options.train}: all lines are {kinds[0]!r}: two labels are needed")
    if not len(kinds) <= options.labels <= len(train.texts):
        raise ConfigError(
            f"labels={options.labels}, but there are {len(train.texts)} texts of {len(kinds)} "
            "kinds to learn from: give a number between these"
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


def make_task(options: FinetuneOptions, trained: Trained, train: Labelled, test: Labelled) -> Task:
    """The classifier on the run's backbone, the texts as ids, and the steps to be compiled."""
    backbone, pretrained = find_backbone(trained.model, trained.params)
    kinds = sorted(set(train.labels))
    model = Classifier(backbone, len(kinds))
    loss, optimizer = classification_loss(model), make_optimizer(options.optimizer)
    if options.layers == "head":
        loss, optimizer = head_alone(loss, optimizer)
    length, frame = min(options.length, backbone.config.max_len), frame_of(trained)
    return Task(
        kinds,
        *(encode(part, kinds, trained.tokenizer, length, frame) for part in (train, test)),
        pretrained,
        optimizer,
        jax.jit(lambda *inputs: model.init(*inputs)["params"]),
        jax.jit(make_train_step(loss, optimizer), donate_argnums=0),
        jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs)),
    )


def find_backbone(model: nn.Module, params: Any) -> tuple[nn.Module, Any]:
    """What a classifier stands on in a run's model, with its parameters: no pretraining heads."""
    if isinstance(model, MaskedLanguageModel):
        return EncoderOnly(model.config, model.kernel, model.block), params["encoder"]
    return model, params


def frame_of(trained: Trained) -> tuple[list[int], list[int]]:
    """The ids between which the run's model reads a text."""
    special = trained.tokenizer.special
    begin = [] if special.bos is None else [special.bos]
    end = [] if special.eos is None else [special.eos]
    if not isinstance(trained.model, DecoderOnly):
        return begin, end
    # A causal model has never read what ends a text, and the last token stands for all of it.
    return (begin, []) if trained.config.data.separate else ([], [])


def encode(
    labelled: Labelled,
    kinds: list[str],
    tokenizer: Tokenizer,
    length: int,
    frame: tuple[list[int], list[int]],
) -> Examples:
    """The texts as ids within their `frame`, cut so that both fit into `length`."""
    room = length - sum(map(len, frame))
    tokens = np.full((len(labelled.texts), length), tokenizer.special.pad or 0, np.int32)
    present = np.zeros(tokens.shape, bool)
    for i, ids in enumerate(tokenizer.encode_batch(labelled.texts)):
        row = [*frame[0], *ids[:room], *frame[1]]
        tokens[i, : len(row)], present[i, : len(row)] = row, True
    labels = [kinds.index(label) for label in labelled.labels]
    return Examples(tokens, present, np.array(labels, np.int32))


def head_alone(
    loss: Loss, optimizer: optax.GradientTransformation
) -> tuple[Loss, optax.GradientTransformation]:
    """A classifier's loss and optimizer that leave its backbone as it is, to the bit."""

    def loss_of_head(params, batch, rng):  # without the gradient that nobody needs
        frozen = jax.lax.stop_gradient(params["backbone"])
        return loss({**params, "backbone": frozen}, batch, rng)

    rules = {"head": optimizer, "backbone": optax.set_to_zero()}
    return loss_of_head, optax.partition(rules, {name: name for name in rules})


def fine_tune(options: FinetuneOptions, task: Task, seed: int, *, pretrained: bool) -> Any:
    """The classifier's parameters after all steps: the last ones, so nothing is chosen.

    The texts drawn, the order of batches, the fresh weights and the dropout are of `seed`.
    Raises `Diverged` when the last steps were not finite.
    """
    init_rng, rng = jax.random.split(jax.random.key(seed))
    chosen = task.train.draw(options.labels, seed)
    params = task.init(init_rng, task.train.tokens[:2], task.train.present[:2])
    if pretrained:
        # Copies, because a step gives its state's memory away; fresh are only the head's.
        known = {name: task.pretrained[name] for name in params["backbone"]}
        params = {**params, "backbone": jax.tree.map(jnp.array, known)}
    state = init_state(params, task.optimizer, rng)
    for number in range(options.optimizer.total_steps):
        batch = task.train.batch(chosen, options.rows, seed, number)
        state, metrics = task.step(state, batch)
    require_finite(options.optimizer.total_steps, metrics)
    return state.params


def predict(task: Task, params: Any, rows: int) -> np.ndarray:
    """The number of the likeliest label of each test text [N]."""
    found = []
    for batch in task.test.cover(rows):
        logits = task.logits(params, batch.tokens, batch.present)
        found.append(np.argmax(logits, axis=-1)[batch.valid])
    return np.concatenate(found)


def summarise(found: dict[str, list[float]]) -> dict[str, dict]:
    """Shares right by start, with their mean and sample deviation; the margin by seed, if both."""
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
    """The means and deviations in a few lines, with what naming one label always would give."""
    commonest = max(map(test.labels.count, set(test.labels))) / len(test.labels)
    lines = [
        f"{options.labels} labelled texts, {options.seeds} seeds, layers {options.layers}; share "
        f"of {len(test.labels)} test texts right (the commonest label: {commonest:.1%})"
    ]
    for name, found in result.items():
        deviation = found["deviation"]
        spread = "" if deviation is None else f", deviation {100 * deviation:.1f}"
        lines.append(f"  {name:<10} {100 * found['mean']:5.1f} %{spread}")
    return "\n".join(lines)


def _keep(path: Path, options: FinetuneOptions, result: dict[str, dict]) -> None:
    """Writes the result beside that of the other `layers`, if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    known[options.layers] = {"options": asdict(options), **result}
    path.write_text(json.dumps(known, indent=2) + "\n")


def _order(seed: int, number: int, size: int) -> np.ndarray:
    """0 .. size - 1 in a random order of (seed, number), by raw bits, the same in all versions."""
    bits = np.random.Philox(key=np.array([seed, number], np.uint64))
    return np.argsort(bits.random_raw(size), kind="stable")


if __name__ == "__main__":
    sys.exit(commands.run(lambda: main(commands.parse(PRESETS, description=__doc__))))
