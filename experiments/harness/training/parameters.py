"""Parameters of a run: the first ones, with adapters, and the ones to evaluate."""

import re
from typing import Any

import jax
from flax import linen as nn

from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.task import Task
from experiments.harness.training.training_config import LoraOptions, TrainingConfig
from jaxformer.ops.attention import reference
from jaxformer.training import lora
from jaxformer.training.parameters import ModelAxes, flatten
from jaxformer.training.train_step import TrainState


def init_params(model: nn.Module, rng: jax.Array, *inputs: Any) -> Any:
    """The first parameters of `model`, which do not depend on how attention is computed."""
    if "attention_fn" in getattr(model, "__dataclass_fields__", {}):
        model = model.clone(attention_fn=reference)
    return model.init(rng, *inputs)["params"]


def with_adapters(params: Any, rng: jax.Array, options: LoraOptions, axes: ModelAxes | None) -> Any:
    """`params` with the adapters that `options` ask for, if any."""
    if not options.lora_rank:
        return params
    return lora.add_adapters(
        params,
        jax.random.fold_in(rng, 1),
        rank=options.lora_rank,
        alpha=options.lora_alpha,
        targets=options.lora_targets,
        axes=axes,
    )


def describe_size(params: Any) -> str:
    """The number of parameters, and how many of them are trained in adapters."""
    sizes = {path: leaf.size for path, leaf in flatten(params).items()}
    trained = sum(size for path, size in sizes.items() if re.search(lora.ADAPTER, path))
    total = f"{sum(sizes.values()):,} parameters"
    return f"{total}, {trained:,} of them trained in adapters" if trained else total


def evaluated_params(params: Any, run: OpenRun, task: Task) -> Any:
    """`params` as the `task` of `run` evaluates them: adapters in their matrices, or merged."""
    if task.evaluates_adapters and run.devices.axes is not None:
        return lora.attach_adapters(params, run.devices.axes)
    return lora.merge_adapters(params)


def result_tree(state: TrainState, training: TrainingConfig) -> Any:
    """The tree of `state` that is evaluated and becomes the result, perhaps with adapters."""
    return state.params if training.result_tree == "params" else state.ema
