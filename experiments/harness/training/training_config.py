"""The options that all experiments share: where a run is made, how it trains, its optimizer."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, get_args

from experiments.harness.runs.distributed import ProcessOptions
from experiments.harness.runs.text_cache import TextCache
from experiments.harness.training.experiment_config import ExperimentConfig
from jaxformer import storage
from jaxformer.config import (
    Checked,
    Count,
    Natural,
    NonNegative,
    Regex,
    Seed,
    UnitInterval,
    is_import_name,
)
from jaxformer.distributed import Strategy, parse_mesh
from jaxformer.errors import ConfigError
from jaxformer.ops.attention import ATTENTION_FNS
from jaxformer.training import optimizer

StrategyName = Literal["auto", "single", "replicated", "sharded"]
Remat = Literal["none", "attention", "matmuls", "all_but_attention", "blocks"]
GatherAt = Literal["step", "use"]
COMMON_OPTIONS = (
    "model.vocab_size",
    "model.d_model",
    "model.d_ff",
    "model.num_heads",
    "model.num_encoder_layers",
    "model.num_decoder_layers",
    "model.positions",
    "model.dropout_rate",
    "optimizer.name",
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "optimizer.total_steps",
    "training.seed",
    "training.save_every",
    "training.evaluate_every",
    "training.grad_accumulation",
)
"""The options of models, optimizers and trainings in the short help of each experiment."""


@dataclass(frozen=True, kw_only=True)
class LoraOptions(Checked):
    """Low-rank adapters (LoRA) that are trained in place of the weights that a run starts from."""

    lora_rank: Natural = 0
    """Rank of the adapters; 0 trains all weights."""
    lora_alpha: NonNegative = 16.0
    """The adapters' product is multiplied by lora_alpha / lora_rank."""
    lora_targets: Regex = "blocks.*/kernel$"
    """Regular expression; matrices in whose path it is found get an adapter. Default: all of the
    blocks; (query|value)/kernel$ is the paper's choice."""


@dataclass(frozen=True)
class TrainingConfig(LoraOptions):
    """Settings of a training. Intervals are in steps; 0 switches one off."""

    grad_accumulation: Count | None = None
    """Parts of a batch whose gradients are summed one after the other before each update, on one
    device; N devices, which share the rows, take N times fewer. None: usual_parts, but on a GPU the
    fewest that its memory holds, which config.json keeps."""
    usual_parts: Count = 1
    """The parts where grad_accumulation gives none, made for a chip with 16 GB."""
    ema_decay: UnitInterval = 0.0
    """Decay of the moving average of the parameters, which then becomes the result; 0: none. After
    n steps it is at most (1 + n) / (10 + n), so that a short training forgets its beginning."""
    seed: Seed = 0
    """Seed of the initial parameters, the order of the data and dropout."""
    log_every: Natural = 100
    """Steps between two lines of metrics; 0 logs the last step only."""
    save_every: Natural = 1_000
    """Steps between two checkpoints; 0 saves the last step only."""
    evaluate_every: Natural = 1_000
    """Steps between two evaluations on the validation text; 0: none before the end."""
    patience: Natural = 0
    """Evaluations in a row without a better result after which training ends; 0: never."""
    early_stopping_metric: str = ""
    """Validation score that patience and --checkpoint best go by; empty: BLEU (chrF of a text
    whose lines are shorter than four words), or the loss."""
    early_stopping_mode: Literal["auto", "min", "max"] = "auto"
    """Whether a smaller or a larger score is better; auto: known by its name, such as _loss."""
    average_checkpoints: Count = 5
    """The result is the mean of this many last checkpoints, or the best one if it is better."""
    attention_fn: str = "reference"
    """Function of attention: reference, blockwise, cudnn, gpu_flash, tpu_flash,
    auto (by shape), or your own as package.module:name."""
    model: str = ""
    """Your own model as package.module:name, made and called as the experiment's is; empty: that
    of the experiment."""
    block: str = ""
    """Your own block of the model as package.module:name; empty: the library's."""
    loss: str = ""
    """Your own loss to train with as package.module:name; empty: the experiment's own."""
    z_loss: NonNegative = 0.0
    """Weight of log(Z)^2 of each token's softmax in the loss (PaLM: 1e-4); 0 disables it."""
    balance: NonNegative = 0.0
    """Weight of the balance of experts in the loss (Switch: 0.01); 0 disables it. The metric
    balance is 1 where all experts are used equally, and their number where one is."""
    metrics: tuple[str, ...] = ()
    """Your own metrics of each evaluation, as package.module:name."""
    loggers: tuple[str, ...] = ()
    """Your own loggers of all metrics, as package.module:name; each is called with the folder."""
    remat: Remat = "none"
    """The part that the backward pass computes again to save memory; blocks saves the most."""
    gather_at: GatherAt = "step"
    """When parameters divided by fsdp are gathered: once a step, or at each use to save memory."""
    loss_chunk: Natural = 0
    """Tokens per logits chunk on each device; 0 disables chunking."""
    prefetch: Natural = 2
    """Batches that a thread reads and copies to the devices ahead of the steps; 0: none."""

    def __post_init__(self):
        super().__post_init__()
        if self.patience and not self.evaluate_every:
            raise ConfigError(
                f"patience={self.patience} counts evaluations, but evaluate_every=0 makes none: "
                "give --training.evaluate_every"
            )
        check_name(self, "attention_fn", tuple(ATTENTION_FNS))
        if self.block and self.remat != "none":
            raise ConfigError(
                f"remat={self.remat!r} needs the library's own block, but block={self.block!r} was "
                "given: leave out --training.remat, and use flax.linen.remat in your module"
            )

    def parts_on(self, devices: Strategy) -> int:
        """The parts into which each of `devices` divides its rows."""
        return -(-self.parts // devices.num_shards)

    @property
    def parts(self) -> int:
        """The parts into which one device divides a batch."""
        return self.grad_accumulation or self.usual_parts

    @property
    def result_tree(self) -> str:
        """The part of a state that is evaluated and becomes the result: "params" or "ema"."""
        return "ema" if self.ema_decay else "params"


@dataclass(frozen=True)
class OptimizerConfig(optimizer.OptimizerConfig):
    """The library's optimizer; the schedule and the whole optimizer may be your own."""

    name: str = "adam"  # type: ignore[assignment]  # wider: also your own
    """The update rule: adam (AdamW, where weight_decay is above 0), muon, lion, or your own
    optimizer as package.module:name, which decides on clipping and weight decay itself."""
    schedule: str = "inverse_square_root"  # type: ignore[assignment]  # wider: also your own
    """inverse_square_root, cosine, constant, linear, wsd (warm-up, stable, decay), step, or your
    own as package.module:name."""

    def __post_init__(self):
        super().__post_init__()
        check_name(self, "schedule", get_args(optimizer.ScheduleName))
        check_name(self, "name", get_args(optimizer.OptimizerName))

    def without_effect(self) -> dict[str, str]:
        """Reasons why fields change nothing with the other ones, by their names.

        An optimizer or a schedule of your own may read them all.
        """
        if is_import_name(self.name):
            return {}
        reasons = {}
        if self.name != "muon":
            reasons["momentum"] = f"it is for muon, but the optimizer is {self.name}"
        if self.name == "lion":
            reasons["eps"] = "it is for adam and muon, but the optimizer is lion"
        if self.schedule in ("inverse_square_root", "constant"):
            reasons["min_lr_ratio"] = f"the schedule {self.schedule} has no final rate"
        if self.schedule != "wsd" and not is_import_name(self.schedule):
            reasons["decay_fraction"] = f"it is for wsd, but the schedule is {self.schedule}"
        return reasons


@dataclass(frozen=True, kw_only=True)
class DeviceChoice(ProcessOptions):
    """The devices and the processes that compute the steps of a training."""

    strategy: StrategyName = "auto"
    """single: one device; replicated: a copy of the state on each device; sharded: parts of it on
    a mesh of devices; auto: replicated where there is more than one device, else single."""
    mesh: str = ""
    """The mesh of --strategy sharded, such as data=2,fsdp=2,tensor=2; empty: all along data."""

    def __post_init__(self):
        super().__post_init__()
        if self.asks_for_several and self.strategy == "single":
            raise ConfigError(
                "strategy='single' trains in one process, but several were asked for: give "
                "--strategy replicated or --strategy sharded"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig(DeviceChoice):
    """Where a run is kept, what it starts from, and where its steps are computed.

    All but `init_from` and `continue_from` may change on resuming.
    """

    may_change: ClassVar[tuple[str, ...]] = ()
    """Dotted names of further fields that do not alter the steps already done."""
    from_start: ClassVar[tuple[str, ...]] = ()
    """Dotted names of settings and of parts whose defaults stand for the values of `init_from`."""

    runs: str = "runs"
    """The folder that holds the folders of all experiments; also gs://BUCKET/PATH."""
    init_from: str = ""
    """The source of this run's first weights, sizes and tokenizers: RUN, RUN@STEP or RUN@best,
    a folder of transformers or hf:owner/model. Empty: none."""
    continue_from: str = ""
    """Run that this one continues under a name of its own, as RUN or RUN@STEP: weights, optimizer
    state and step are taken over, the schedule follows these options. Empty: none."""
    text_cache_dir: str = "texts"
    """Folder in `runs` that keeps tokenizers and ids for other runs; empty: none are kept."""
    sweep: str = ""
    """The sweep that the run is a cell of; `experiments.sweep` writes it."""
    verbose: bool = False
    """Prints compiler options, the formula of mfu and signatures; env.json always has them."""
    profile: bool = False
    """Writes a trace of a few steps into the run's folder, for TensorBoard or Perfetto."""

    def __post_init__(self):
        super().__post_init__()
        storage.to_path(self.runs)  # refuses other addresses
        if self.init_from and self.continue_from:
            raise ConfigError(
                f"init_from={self.init_from!r} and continue_from={self.continue_from!r} both say "
                "where the weights come from: give one"
            )
        check_adapters(cast("ExperimentConfig", self))  # its subclasses have all fields

    def free_fields(self: ExperimentConfig) -> list[str]:
        """Dotted names of the fields that may differ when the run is resumed."""
        training = ["log_every", "save_every", "evaluate_every", "patience", "average_checkpoints"]
        training += ["attention_fn", "remat", "loss_chunk", "gather_at", "prefetch"]
        training += ["metrics", "loggers"]
        places = set(RunConfig.__dataclass_fields__) - {"init_from", "continue_from"}
        names = ["name", *sorted(places), *self.may_change]
        names += ["data.validation", "data.validation_tokens", "data.test"]
        names += [f"training.{name}" for name in training]
        endless = self.optimizer.schedule in ("inverse_square_root", "constant")
        endless &= not is_import_name(self.optimizer.name)
        return [*names, "optimizer.total_steps"] if endless else names

    def without_effect(self: ExperimentConfig) -> dict[str, str]:
        """Reasons why options change nothing with the other settings, by their dotted names."""
        unread = self.optimizer.without_effect()
        reasons = {f"optimizer.{name}": reason for name, reason in unread.items()}
        if not self.training.lora_rank:
            adapters = "without --training.lora_rank there are no adapters"
            reasons["training.lora_alpha"] = reasons["training.lora_targets"] = adapters
        if self.training.grad_accumulation:
            given = f"--training.grad_accumulation gives {self.training.grad_accumulation} parts"
            reasons["training.usual_parts"] = given
        if not _divides_parameters(self):
            reasons["training.gather_at"] = (
                "parameters are gathered only where --strategy sharded and a --mesh such as "
                "fsdp=2 divide them"
            )
        return reasons


def _divides_parameters(config: ExperimentConfig) -> bool:
    """Whether an axis of the mesh divides parameters."""
    sizes = parse_mesh(config.mesh) if config.strategy == "sharded" else {}
    return any(size > 1 for axis, size in sizes.items() if axis != "data")


def check_adapters(config: ExperimentConfig) -> None:
    """Raises `ConfigError` for adapters of random weights, and with `optimizer.freeze`."""
    rank = config.training.lora_rank
    if rank and not (config.init_from or config.continue_from):
        raise ConfigError(
            f"lora_rank={rank} trains adapters of weights that are there: give --init_from"
        )
    if rank and config.optimizer.freeze:
        raise ConfigError(
            f"lora_rank={rank} freezes all weights, but freeze={config.optimizer.freeze!r} was "
            "given too: choose the matrices with adapters by --training.lora_targets"
        )


def text_cache(config: RunConfig) -> TextCache:
    """Where the runs of `config.runs` keep what they make of text."""
    name = config.text_cache_dir
    return TextCache(storage.to_path(os.path.join(config.runs, name)) if name else None)


def check_name(config: Any, field: str, known: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless `field` is one of `known` or the name of a value of your own."""
    name = getattr(config, field)
    if name not in known and not is_import_name(name):
        raise ConfigError(
            f"{field}={name!r} is unknown: give one of {', '.join(known)}, or your own as "
            "package.module:name"
        )
