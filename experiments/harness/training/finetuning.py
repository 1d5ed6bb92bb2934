"""Fine-tuning: its options, rows of ids and their batches, and the loop on them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.tree_util import Partial

from experiments.harness.runs import run_files, run_folder
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.training import build
from experiments.harness.training.build import with_adapters
from experiments.harness.training.training_config import LoraOptions, OptimizerConfig
from jaxformer.config import Count, Natural
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.pretrained import is_pretrained
from jaxformer.storage import to_local_path
from jaxformer.training import lora
from jaxformer.training.losses import Loss
from jaxformer.training.train_step import TrainState, init_train_state, raise_if_diverged


@dataclass(frozen=True)
class FinetuneOptions(LoraOptions, RunOptions):
    """The options that all fine-tuning shares."""

    _: KW_ONLY
    num_train: Natural = 0
    """Examples to learn from, chosen by the seed, as evenly over the labels as possible; 0: all."""
    batch_size: Count = 16
    """Rows of a batch."""
    output: str = ""
    """A file that receives what the last model says of the test examples; empty: none."""
    save: str = ""
    """A new folder that receives the last model, adapters merged, in the format of transformers;
    empty: none."""
    runs: str = "runs"
    """The folder that holds the folders of all experiments."""
    name: str = ""
    """Name of the folder for the result; empty: the run's own, or that of the weights' folder."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer, and how many steps it takes."""

    def __post_init__(self):
        super().__post_init__()


def result_folder(options: FinetuneOptions, experiment: str, *inputs: str) -> Path:
    """The folder for the result of `options.run`: the run's, or a new one for pretrained weights.

    Raises `ConfigError` for a name that no folder can have, where `options.save` exists, and where
    `options.output` is one of the files `inputs`.
    """
    run_files.check_output(options.output, *inputs)
    if options.save and to_local_path(options.save).exists():
        raise ConfigError(f"save={options.save!r} exists already: give the name of a new folder")
    run = options.folder
    if not options.name and not is_pretrained(run):
        return run
    return run_folder.folder_of(options.runs, experiment, options.name or run.resolve().name)


def check_count(options: FinetuneOptions, count: int, kind: str) -> None:
    """Raises `ConfigError` where `options.num_train` is more than the `count` examples."""
    if options.num_train > count:
        raise ConfigError(
            f"num_train={options.num_train}, but there are {count} {kind} to learn from: give at "
            "most as many, or 0 for all"
        )


class LabelledBatch(NamedTuple):
    """B texts and their labels (see `Examples`); rows outside `loss_mask` do not count."""

    tokens: np.ndarray  # [B, T] int32
    padding_mask: np.ndarray  # [B, T] bool, False at padding
    labels: np.ndarray
    loss_mask: np.ndarray  # [B] bool
    example_ids: np.ndarray  # [B] int32
    token_type_ids: np.ndarray | None = None  # [B, T] int32


class Examples(NamedTuple):
    """N texts as ids, padded at their ends, and what is to be learned of each.

    `labels` are the numbers of classes [N], the first and the last token of an answer [N, 2], the
    tokens that belong to an answer [N, T] bool, or the ids of a target [N, L].
    """

    tokens: np.ndarray  # [N, T] int32
    padding_mask: np.ndarray  # [N, T] bool, False at padding
    labels: np.ndarray
    token_type_ids: np.ndarray | None = None  # [N, T] int32, which text of a pair

    def select(self, count: int, seed: int) -> np.ndarray:
        """The numbers [count] of random texts, as evenly over the classes as possible; 0: all."""
        order = _order(seed, 0, len(self.labels))
        labels = self.labels[order] if self.labels.ndim == 1 else np.zeros(len(order), np.int32)
        turn = np.zeros(len(order), np.int64)
        for label in np.unique(labels):
            turn[labels == label] = np.arange(np.sum(labels == label))
        return order[np.argsort(turn, kind="stable")[: count or None]]

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
        tokens, present, labels = (leaf[filled] for leaf in self[:3])
        types = None if self.token_type_ids is None else self.token_type_ids[filled]
        return LabelledBatch(tokens, present, labels, row < len(numbers), row, types)


def padded(
    rows: Sequence[list[int]],
    labels: np.ndarray,
    pad: int | None,
    length: int,
    types: Sequence[list[int]] | None = None,
) -> Examples:
    """The rows of at most `length` ids as arrays, padded at their ends."""
    tokens = np.full((len(rows), length), pad or 0, np.int32)
    present = np.zeros(tokens.shape, bool)
    kinds = None if types is None else np.zeros(tokens.shape, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], present[i, : len(row)] = row, True
        if types is not None and kinds is not None:
            kinds[i, : len(row)] = types[i]
    return Examples(tokens, present, labels, kinds)


class Trainer(NamedTuple):
    """The compiled step of a fine-tuning, which serves all its seeds."""

    options: FinetuneOptions
    devices: Strategy
    """Where the parameters are and a step is computed."""
    first_state: Callable[..., TrainState]
    """first_state(params, rng of adapters, rng of dropout): the state before the first step."""
    step: Any

    def train(self, params: Any, examples: Examples, seed: int, rng: jax.Array) -> Any:
        """The parameters after the last step on `examples`, adapters merged.

        `seed` decides the examples and the order of the batches; the first half of `rng` the
        adapters, the second the dropout. Raises `Diverged` as `fit` does.
        """
        options, devices = self.options, self.devices
        chosen = examples.select(options.num_train, seed)
        state = devices.init(Partial(self.first_state, params, *jax.random.split(rng)))

        for number in range(options.optimizer.total_steps):
            batch = examples.batch(chosen, options.batch_size, seed, number)
            state, metrics = self.step(state, devices.divide(batch))
            raise_if_diverged(number + 1, metrics)
        params = state.params
        return devices.init(Partial(lora.merge_adapters, params)) if options.lora_rank else params


def make_trainer(
    options: FinetuneOptions, loss: Loss, model: nn.Module, frozen: str = ""
) -> Trainer:
    """The step that minimises `loss` of the parameters of `model`; what `frozen` matches stays.

    With `options.lora_rank` only adapters are trained, and what `frozen` does not match.
    """
    devices = options.strategy.for_model(model)
    frozen = frozen or (lora.FROZEN if options.lora_rank else "")
    freeze = "|".join(filter(None, (frozen, options.optimizer.freeze)))
    rates = replace(options.optimizer, freeze=freeze)
    loss, optimizer = build.build_trained(rates, options, loss, devices.axes)

    def first_state(params: Any, adapter_rng: jax.Array, rng: jax.Array) -> TrainState:
        params = jax.tree.map(jnp.copy, params)  # a step donates its state's buffers
        params = with_adapters(params, adapter_rng, options, devices.axes)
        return init_train_state(params, optimizer, rng)

    return Trainer(options, devices, first_state, devices.step(loss, optimizer))


def _order(seed: int, number: int, size: int) -> np.ndarray:
    """0 .. size - 1 in a random order, which depends on (seed, number) and on no version."""
    bits = np.random.Philox(key=np.array([seed, number], np.uint64))
    return np.argsort(bits.random_raw(size), kind="stable")
