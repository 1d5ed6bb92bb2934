"""What a run is built of: attention function, block, position scheme, loss, schedule, by name.

Everything that needs a run's model calls `build_model`, so that a run is validated, scored,
sampled, planned, fine-tuned and exported with what it was trained with.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jaxtyping import Float

from experiments.harness.cli import import_by_name, is_import_name, name_of
from experiments.harness.runs import distributed
from experiments.harness.runs.loggers import Logger, Loggers
from experiments.harness.training.adapters import with_adapters, with_lora
from experiments.harness.training.training_config import OptimizerConfig, TrainingConfig
from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.recipe import REMAT, MakeBlock
from jaxformer.ops.attention import ATTENTION_FNS, AttentionFn, AutoAttention, Selection, reference
from jaxformer.text.data import Batches
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training import lora, optimizer
from jaxformer.training.losses import Loss
from jaxformer.training.parameter_groups import freeze, freeze_gradient
from jaxformer.training.train_step import Metrics, TrainState, init_train_state, make_eval_step

MakeOptimizer = Callable[[OptimizerConfig, optax.Schedule], optax.GradientTransformation]
"""An optimizer of your own: a function of its settings and the learning rate's schedule."""
M = TypeVar("M", bound=nn.Module)
C = TypeVar("C")


class Evaluation(NamedTuple):
    """What a metric of your own is computed of."""

    loaded: Any
    """The experiment's `LoadedRun`: config, model, params and tokenizers."""
    text: Any
    """The text as the experiment has it: `Text` of translation, `Encoded` of language modelling."""
    scores: Mapping[str, float]
    """The experiment's own scores of the text."""
    hypotheses: Sequence[str] = ()
    """The translations of the text."""


def with_values(
    config: C,
    *,
    model: Callable[..., nn.Module] | None = None,
    block: MakeBlock | None = None,
    attention_fn: AttentionFn | None = None,
    loss: Callable[..., Loss] | None = None,
    schedule: Callable[[OptimizerConfig], optax.Schedule] | None = None,
    optimizer: MakeOptimizer | None = None,
    metrics: Sequence[Callable[[Evaluation], Mapping[str, float]]] | None = None,
    batches: Callable[..., Batches] | None = None,
    dataset: Callable[[], Iterable[Any]] | None = None,
    tokenizer: Callable[[Iterable[str], int], Tokenizer] | None = None,
) -> C:
    """The run's `config` with the names of the values given; None keeps what it says.

    Raises `ConfigError` as `name_of` does.
    """
    run: Any = config  # the configs of the experiments share these fields, but no class
    given = {"model": model, "block": block, "attention_fn": attention_fn, "loss": loss}
    names: dict[str, Any] = {
        kind: name_of(value, kind) for kind, value in given.items() if value is not None
    }
    if metrics is not None:
        names["metrics"] = tuple(name_of(metric, "metrics") for metric in metrics)
    rates = {"schedule": schedule, "name": optimizer}
    named = {kind: name_of(value, kind) for kind, value in rates.items() if value is not None}
    training, rule = replace(run.training, **names), replace(run.optimizer, **named)
    data = replace(run.data, **_data_names(run.data, batches, dataset, tokenizer))
    return replace(run, training=training, optimizer=rule, data=data)


def _data_names(
    data: Any,
    batches: Callable[..., Batches] | None,
    dataset: Callable[[], Iterable[Any]] | None,
    tokenizer: Callable[[Iterable[str], int], Tokenizer] | None,
) -> dict[str, Any]:
    given = {"batches": batches, "tokenizer": tokenizer}
    names: dict[str, Any] = {
        kind: name_of(value, kind) for kind, value in given.items() if value is not None
    }
    if dataset is not None:
        name = name_of(dataset, "dataset")
        names["train"] = (name,) if isinstance(data.train, tuple) else type(data.train)(name)
    return names


def build_model(kind: Callable[..., M], sizes: TransformerConfig, training: TrainingConfig) -> M:
    """The model of the class `kind` with attention function and block of `training`.

    A model that `training` names takes the place of `kind`, and is called as it is.
    """
    if training.model:
        kind = import_by_name(training.model, "model")
    block = import_by_name(training.block, "block") if training.block else REMAT[training.remat]
    return kind(sizes, build_attention(training), block)


def build_attention(training: TrainingConfig) -> AttentionFn:
    """The attention function that `training` names."""
    name = training.attention_fn
    if name == "auto":
        return AutoAttention(on_select=_print_selection)
    return ATTENTION_FNS[name] if name in ATTENTION_FNS else import_by_name(name, "attention_fn")


def init_params(model: nn.Module, rng: jax.Array, *inputs: Any) -> Any:
    """The first parameters of `model`; attention that is selected is selected for the step only."""
    if isinstance(getattr(model, "attention_fn", None), AutoAttention):
        model = model.clone(attention_fn=reference)
    return model.init(rng, *inputs)["params"]


def make_first_state(
    model: nn.Module, training: TrainingConfig, rates: OptimizerConfig
) -> Callable[..., TrainState]:
    """f(init_rng, rng, learning_rate, *inputs of the model) -> the state before the first step."""

    def first_state(
        init_rng: jax.Array, rng: jax.Array, learning_rate: jax.Array, *inputs: jax.Array
    ) -> TrainState:
        params = with_adapters(init_params(model, init_rng, *inputs), init_rng, training)
        at_rate = build_optimizer(
            with_lora(rates, training), learning_rate, schedule_free=training.schedule_free
        )
        decays = training.ema_decays
        ema = decays if isinstance(decays, tuple) else decays > 0
        return init_train_state(params, at_rate, rng, ema=ema)

    return first_state


def with_params(
    state: TrainState, training: TrainingConfig, fresh: Callable[[], Any]
) -> TrainState:
    """`state` with the parameters fresh(), also as moving averages, and the adapters that it has.

    Raises `ConfigError` for a schedule-free optimizer, whose state depends on the parameters.
    """
    if training.schedule_free:
        raise ConfigError("schedule_free starts from new parameters only: leave out --init_from")
    ema: Any = state.ema
    if isinstance(training.ema_decays, tuple):
        ema = {name: lora.replace_base(tree, fresh()) for name, tree in ema.items()}
    elif training.ema_decays:
        ema = lora.replace_base(ema, fresh())
    return state.replace(params=lora.replace_base(state.params, fresh()), ema=ema)


def result_params(state: TrainState, training: TrainingConfig) -> Any:
    """The parameters of `state` that are evaluated: those of `training.result_tree`, merged."""
    field, _, decay = training.result_tree.partition("/")
    found = getattr(state, field)
    return lora.merge_adapters(found[decay] if decay else found)


def build_loss(
    training: TrainingConfig, default: Callable[..., Loss], freeze: str = ""
) -> Callable[..., Loss]:
    """What makes the loss of a model: the function that `training` names, or `default`.

    It gets `z_loss` and `r_drop` where they are not 0, and adapters merged; parameters that
    `freeze` matches get no gradient. Raises `ConfigError` for a loss that takes no such argument.
    """
    make_loss = import_by_name(training.loss, "loss") if training.loss else default
    options = {name: getattr(training, name) for name in ("z_loss", "r_drop")}
    options = {name: value for name, value in options.items() if value}
    parameters = inspect.signature(make_loss).parameters
    loss = getattr(make_loss, "func", make_loss)  # of a partial
    for name, value in options.items():
        if name not in parameters:
            raise ConfigError(
                f"{name}={value} was given, but the loss {loss.__name__} has no argument "
                f"{name}: leave out --training.{name}, or use another loss"
            )
    if training.lora_rank or freeze:
        wrap = lora.adapter_loss if training.lora_rank else partial(freeze_gradient, pattern=freeze)
        return lambda *args, **rest: wrap(make_loss(*args, **options, **rest))
    return partial(make_loss, **options) if options else make_loss


def loss_sums(
    make_loss: Callable[..., Loss],
    model: nn.Module,
    params: Any,
    batches: Iterable[Any],
    **options: Any,
) -> dict[str, float]:
    """What `batch_sums` gives, added up over `batches`."""
    sums = {"loss": 0.0, "tokens": 0.0}
    for metrics in batch_sums(make_loss, model, params, batches, **options):
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def batch_sums(
    make_loss: Callable[..., Loss],
    model: nn.Module,
    params: Any,
    batches: Iterable[Any],
    **options: Any,
) -> Iterator[dict[str, float]]:
    """The metrics of `make_eval_step` of each of `batches`.

    The loss is `make_loss(model, **options)`. It is compiled once for each shape of batch, also
    when this function is called again.
    """
    key = tuple(sorted(options.items()))
    for batch in batches:
        metrics = _eval_step(params, batch, make_loss=make_loss, model=model, options=key)
        yield {name: float(value) for name, value in metrics.items()}


@partial(jax.jit, static_argnames=("make_loss", "model", "options"))
def _eval_step(
    params: Any,
    batch: Any,
    *,
    make_loss: Callable[..., Loss],
    model: nn.Module,
    options: tuple[tuple[str, Any], ...],
) -> Metrics:
    return make_eval_step(make_loss(model, **dict(options)))(params, batch)


def own_metrics(training: TrainingConfig, evaluation: Evaluation) -> dict[str, float]:
    """What the metrics that `training` names return: a dict of numbers each.

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


def build_loggers(training: TrainingConfig, folder: Path, given: Iterable[Logger]) -> Loggers:
    """The `given` loggers, and those that `training` names, each called with the run's `folder`.

    Of several processes only the first one has them.
    """
    if not distributed.is_first():
        return Loggers()
    named = (import_by_name(name, "loggers")(folder) for name in training.loggers)
    return Loggers([*given, *named])


def custom_metrics(
    training: TrainingConfig, model: nn.Module, params: Any, batches: Iterable[Any], **options: Any
) -> dict[str, float]:
    """What your own loss says of held-out `batches`, per token; {} for the experiment's own loss.

    `validation_custom_loss`, and `validation_NAME` for each auxiliary sum NAME.
    """
    if not training.loss:
        return {}
    sums = loss_sums(import_by_name(training.loss, "loss"), model, params, batches, **options)
    tokens = max(sums.pop("tokens"), 1.0)
    sums["custom_loss"] = sums.pop("loss")
    return {f"validation_{name}": value / tokens for name, value in sums.items()}


def build_batches(config: Any, prepared: Any) -> Batches:
    """The batches that `config.data` names, made of (config, prepared), or those of `prepared`."""
    name = config.data.batches
    return import_by_name(name, "batches")(config, prepared) if name else prepared.batches


def build_optimizer(
    config: OptimizerConfig,
    learning_rate: Float[jax.Array, ""] | None = None,
    *,
    schedule_free: bool = False,
) -> optax.GradientTransformation:
    """The optimizer, with the schedule that `config` names.

    `learning_rate` takes the place of the peak in `config`, unless the schedule or the optimizer is
    your own.
    """
    if is_import_name(config.name):
        rule = import_by_name(config.name, "optimizer")(config, build_schedule(config))
        return freeze(rule, config.freeze) if config.freeze else rule
    own = _custom_schedule(config)
    return optimizer.make_optimizer(config, own, learning_rate, schedule_free=schedule_free)


def learning_rates(config: OptimizerConfig) -> Float[np.ndarray, " updates"]:
    """The learning rate of each of the `total_steps` updates."""
    return np.asarray(jax.vmap(build_schedule(config))(jnp.arange(config.total_steps)))


def build_schedule(config: OptimizerConfig) -> optax.Schedule:
    """The schedule that `config` names."""
    return _custom_schedule(config) or optimizer.make_schedule(config)


def _custom_schedule(config: OptimizerConfig) -> optax.Schedule | None:
    return (
        import_by_name(config.schedule, "schedule")(config)
        if is_import_name(config.schedule)
        else None
    )


def check(config: Any) -> None:
    """Raises `ConfigError` unless each name in the run's `config` leads to a value."""
    training = config.training
    if training.schedule_free:
        optimizer.check_schedule_free(config.optimizer)
    given = {"block": training.block, "loss": training.loss, "batches": config.data.batches}
    given |= {"model": training.model}
    built_in = {"attention_fn": training.attention_fn, "schedule": config.optimizer.schedule}
    built_in |= {"optimizer": config.optimizer.name}
    given |= {kind: name for kind, name in built_in.items() if is_import_name(name)}
    several = (("metrics", name) for name in training.metrics)
    more = (("loggers", name) for name in training.loggers)
    for kind, name in (*given.items(), *several, *more):
        if name:
            import_by_name(name, kind)


def _print_selection(selection: Selection) -> None:
    """Prints why an attention function was selected; of several processes the first does."""
    if distributed.is_first():
        print(selection, flush=True)
