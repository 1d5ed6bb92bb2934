"""The parts of a run: model, attention function, loss, optimizer, schedule, and their sums.

Everything that needs a run's model calls `build_model`, so that a run is validated, scored,
sampled, planned, fine-tuned and exported with what it was trained with.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jaxtyping import Float

from experiments.harness.runs import distributed, run_folder
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.run_folder import RunOptions
from experiments.harness.training.training_config import (
    GatherAt,
    LoraOptions,
    OptimizerConfig,
    TrainingConfig,
)
from jaxformer.config import import_by_name, is_import_name, name_of, with_fields
from jaxformer.distributed import CompiledStep, Strategy, strategy_of
from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import REMAT
from jaxformer.ops.attention import ATTENTION_FNS, AttentionFn, reference
from jaxformer.pretrained import Loaded, is_pretrained, load
from jaxformer.pretrained.hf_folder import locate
from jaxformer.pretrained.model_specs import model_class
from jaxformer.text.data import Batches
from jaxformer.training import lora, optimizer
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import ModelAxes, flatten, freeze, freeze_gradient
from jaxformer.training.train_step import TrainState

C = TypeVar("C")

DEVICE_CHECKS: list[Any] = []
"""The comparisons by `device_check` that this process's run relies on, for env.json."""

VALUES = {
    "model": "training.model",
    "block": "training.block",
    "attention_fn": "training.attention_fn",
    "loss": "training.loss",
    "metrics": "training.metrics",
    "schedule": "optimizer.schedule",
    "optimizer": "optimizer.name",
    "batches": "data.batches",
    "dataset": "data.train",
    "tokenizer": "data.tokenizer",
}
"""The argument of `train` -> the field that names its value."""
_BUILT_IN = ("attention_fn", "schedule", "optimizer")
"""Those that may also be a name of the library's."""


def with_values(config: C, **values: Any) -> C:
    """The run's `config` with the names of `values` (see `VALUES`); None keeps what it says.

    Raises `ConfigError` as `name_of` does, `TypeError` for an unknown argument.
    """
    names: dict[str, Any] = {}
    for argument, value in values.items():
        if argument not in VALUES:
            raise TypeError(f"train() has no argument {argument!r}: give {', '.join(VALUES)}")
        if value is None:
            continue
        field = VALUES[argument]
        several = value if argument == "metrics" else (value,)
        name = tuple(name_of(each, argument) for each in several)
        if argument == "dataset":  # files, or the two sides of a parallel text
            kind = type(attrgetter(field)(config))
            names[field] = name if kind is tuple else kind(*name)
        else:
            names[field] = name if argument == "metrics" else name[0]
    return with_fields(config, names)


def check(config: Any) -> None:
    """Raises `ConfigError` unless each name in the run's `config` leads to a value."""
    for argument, path in {**VALUES, "loggers": "training.loggers"}.items():
        stored = attrgetter(path)(config)
        for name in stored if isinstance(stored, tuple) else (stored,):
            needed = is_import_name(name) if argument in _BUILT_IN else bool(name)
            if needed and argument not in ("dataset", "tokenizer"):
                import_by_name(name, argument)


def build_loggers(
    training: TrainingConfig, folder: Path, loggers: Iterable[Logger]
) -> list[Logger]:
    """`loggers`, and those that `training` names, each called with the run's `folder`.

    Of several processes only the first one has them.
    """
    if not distributed.is_first():
        return []
    return [*loggers, *(import_by_name(name, "loggers")(folder) for name in training.loggers)]


def build_batches(config: Any, prepared: Any) -> Batches:
    """The batches that `config.data` names, made of (config, prepared), or those of `prepared`."""
    name = config.data.batches
    return import_by_name(name, "batches")(config, prepared) if name else prepared.batches


def build_model(config: Any, *, has_head: bool = False) -> Any:
    """The model of `config.model` with attention function and block of `config.training`.

    Its layers decide its class, or a model that `config.training` names. With `has_head` it is the
    one below a head.
    """
    sizes, training = config.model, config.training
    kind: Any = model_class(sizes, has_head=has_head)
    if training.model:
        kind = import_by_name(training.model, "model")
    block = import_by_name(training.block, "block") if training.block else REMAT[training.remat]
    return kind(sizes, build_attention(training), block)


def build_attention(training: TrainingConfig) -> AttentionFn:
    """The attention function that `training` names."""
    name = training.attention_fn
    if name == "auto":
        from experiments.harness.training.device_check import AutoAttention  # for these alone

        return AutoAttention()
    return ATTENTION_FNS[name] if name in ATTENTION_FNS else import_by_name(name, "attention_fn")


def load_run(
    folder: Path, options: RunOptions, *kinds: type, devices: Strategy | None = None
) -> Loaded:
    """What `jf.load` gives of `folder`, with the run's settings as one of `kinds`.

    The weights are those that `options` name, on `devices` or theirs. Raises what
    `run_folder.load_config` and `jf.load` do.
    """
    asked: Any = {"checkpoint": options.checkpoint, "step": options.step}
    asked["strategy"] = devices or options.strategy
    if is_pretrained(locate(folder)):
        return load(folder, **asked)
    config: Any = run_folder.load_config(folder, *kinds)
    loaded = load(folder, attention_fn=build_attention(config.training), **asked)
    return replace(loaded, config=config)


def init_params(model: nn.Module, rng: jax.Array, *inputs: Any) -> Any:
    """The first parameters of `model`; attention is chosen for the step only."""
    if hasattr(getattr(model, "attention_fn", None), "calls"):  # an `AutoAttention`
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


def with_params(
    state: TrainState, training: TrainingConfig, fresh: Callable[[], Any]
) -> TrainState:
    """`state` with the parameters fresh(), also as moving average, and the adapters that it has."""
    ema = lora.replace_base(state.ema, fresh()) if training.ema_decay else None
    return state.replace(params=lora.replace_base(state.params, fresh()), ema=ema)


def result_params(state: TrainState, training: TrainingConfig) -> Any:
    """The parameters of `state` that are evaluated: those of `training.result_tree`, merged."""
    return lora.merge_adapters(getattr(state, training.result_tree))


def build_loss(training: TrainingConfig, default: Callable[..., Loss]) -> Callable[..., Loss]:
    """The function that makes the loss of a model: the one that `training` names, or `default`.

    It gets `z_loss` where that is not 0. Raises `ConfigError` for one that takes no such argument.
    """
    make_loss = import_by_name(training.loss, "loss") if training.loss else default
    options = {"z_loss": training.z_loss} if training.z_loss else {}
    if options and "z_loss" not in inspect.signature(make_loss).parameters:
        name = getattr(make_loss, "func", make_loss).__name__  # of a partial
        raise ConfigError(
            f"z_loss={training.z_loss} was given, but the loss {name} has no argument z_loss: "
            "leave out --training.z_loss, or use another loss"
        )
    return partial(make_loss, **options)


def build_trained(
    rates: OptimizerConfig, adapters: LoraOptions, loss: Loss, axes: ModelAxes | None
) -> tuple[Loss, optax.GradientTransformation]:
    """The loss and the optimizer of the parameters that `rates.freeze` does not match.

    With `adapters`, and without `rates.freeze`, they are those of the adapters alone.
    """
    if adapters.lora_rank:
        rates = replace(rates, freeze=rates.freeze or lora.FROZEN)
        loss = lora.adapter_loss(loss, rates.freeze)
    elif rates.freeze:
        loss = freeze_gradient(loss, rates.freeze)
    return loss, build_optimizer(rates, axes=axes)


def build_optimizer(
    config: OptimizerConfig, *, axes: ModelAxes | None = None
) -> optax.GradientTransformation:
    """The optimizer of parameters with `axes`, and the schedule that `config` names."""
    if is_import_name(config.name):
        rule = import_by_name(config.name, "optimizer")(config, build_schedule(config))
        return freeze(rule, config.freeze) if config.freeze else rule
    return optimizer.make_optimizer(config, _custom_schedule(config), axes=axes)


def learning_rates(config: OptimizerConfig) -> Float[np.ndarray, " updates"]:
    """The learning rate of each of the `total_steps` updates."""
    return np.asarray(jax.vmap(build_schedule(config))(jnp.arange(config.total_steps)))


def build_schedule(config: OptimizerConfig) -> optax.Schedule:
    """The schedule that `config` names."""
    return _custom_schedule(config) or optimizer.make_schedule(config)


def _custom_schedule(config: OptimizerConfig) -> optax.Schedule | None:
    if not is_import_name(config.schedule):
        return None
    return import_by_name(config.schedule, "schedule")(config)


def loss_sums(
    make_loss: Callable[..., Loss], loaded: Loaded, batches: Iterable[Any], **options: Any
) -> dict[str, float]:
    """The results of `batch_sums`, added up over `batches`."""
    sums = {"loss": 0.0, "tokens": 0.0}
    for metrics in batch_sums(make_loss, loaded, batches, **options):
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def batch_sums(
    make_loss: Callable[..., Loss], loaded: Loaded, batches: Iterable[Any], **options: Any
) -> Iterator[dict[str, float]]:
    """The metrics of `Strategy.evaluate` of each of `batches`, on the devices of `loaded.params`.

    The loss is `make_loss(loaded.model, **options)`. Every process gives all rows of a batch, of
    which each device computes its part. A program is compiled once for each shape of batch, also
    when this function is called again.
    """
    config, devices = loaded.config, strategy_of(loaded.params)
    gathered = config.training.gather_at, config.model.dtype
    evaluate = _evaluation(devices, make_loss, loaded.model, *gathered, **options)
    for batch in batches:
        metrics = evaluate(loaded.params, devices.divide(batch))
        yield {name: float(value) for name, value in metrics.items()}


@lru_cache(maxsize=8)
def _evaluation(
    devices: Strategy,
    make_loss: Callable[..., Loss],
    model: nn.Module,
    gather_at: GatherAt,
    gather_dtype: str,
    **options: Any,
) -> CompiledStep:
    loss = make_loss(model, **options)
    return devices.evaluate(loss, gather_at=gather_at, gather_dtype=gather_dtype)


class MetricInputs(NamedTuple):
    """The input of a metric of your own."""

    loaded: Loaded
    """The run: config, model, params and tokenizers."""
    text: Any
    """The text as the experiment has it: `Text` of translation, `Encoded` of language modelling."""
    scores: Mapping[str, float]
    """The experiment's own scores of the text."""
    hypotheses: Sequence[str] = ()
    """The translations of the text."""


def user_metrics(training: TrainingConfig, evaluation: MetricInputs) -> dict[str, float]:
    """The results of the metrics that `training` names: a dict of numbers each.

    Raises `TypeError` for anything else, `ConfigError` for a name that is taken.
    """
    found: dict[str, float] = {}
    for name in training.metrics:
        given = import_by_name(name, "metrics")(evaluation)
        if not isinstance(given, Mapping):
            raise TypeError(
                f"the metric {name} returned a {type(given).__name__}, but it must return a dict "
                "of numbers"
            )
        taken = given.keys() & (found.keys() | evaluation.scores.keys())
        if taken:
            raise ConfigError(f"the metric {name} returned {min(taken)!r}: this name is taken")
        found |= {key: float(value) for key, value in given.items()}
    return found


def user_loss_metrics(loaded: Loaded, batches: Iterable[Any], **options: Any) -> dict[str, float]:
    """Your own loss of held-out `batches`, per token; {} for the experiment's own loss.

    `validation_custom_loss`, and `validation_NAME` for each auxiliary sum NAME.
    """
    name = loaded.config.training.loss
    if not name:
        return {}
    sums = loss_sums(import_by_name(name, "loss"), loaded, batches, **options)
    tokens = max(sums.pop("tokens"), 1.0)
    sums["custom_loss"] = sums.pop("loss")
    return {f"validation_{name}": value / tokens for name, value in sums.items()}
