"""The configuration of fine-tuning an encoder-decoder, and the named ones."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from experiments.harness.training.training_config import OptimizerConfig
from experiments.translation.presets import (
    DataConfig,
    TrainingConfig,
    TranslationConfig,
    grammar,
)
from jaxformer.config import Checked, Natural, Range


@dataclass(frozen=True)
class TaskOptions(Checked):
    """How the pairs are learned and scored."""

    metric: Literal["rouge", "bleu"] = "rouge"
    """rouge: ROUGE-1, -2 and -L of summaries. bleu: cased BLEU and chrF of translations."""
    prefix: str = ""
    """Written before each source, such as the "summarize: " of T5."""
    source_len: Annotated[int, Range(3)] = 128
    """Longest source in tokens; the rest of a longer one is cut off."""
    target_len: Annotated[int, Range(3)] = 64
    """Longest target in tokens; the rest of a longer one is cut off."""
    batch_size: Annotated[int, Range(1)] = 16
    """Pairs of a batch."""
    num_examples: Natural = 0
    """Pairs to learn from, chosen by the seed; 0: all."""
    num_scored: Natural = 0
    """Pairs to validate and to test with, the first ones; 0: all."""
    beam_size: Natural = 0
    """Beam size of the scores; 0: that of the run or folder."""


@dataclass(frozen=True)
class FinetuneConfig(TranslationConfig):
    """A run RUNS/finetuning/NAME; model, tokenizers and search are those of --init_from."""

    common_options: ClassVar = (
        *("name", "runs", "init_from", "strategy", "task"),
        *("data.train.source", "data.test.source", "optimizer.learning_rate"),
        *("optimizer.total_steps", "training.seed", "training.lora_rank"),
        *("training.save_every", "training.evaluate_every"),
    )

    task: TaskOptions = TaskOptions()
    """The pairs."""


summaries = FinetuneConfig(
    name="summaries",
    model=grammar.model,
    data=DataConfig("files"),
    optimizer=OptimizerConfig(
        schedule="linear",
        learning_rate=3e-4,
        warmup_steps=20,
        total_steps=300,
        min_lr_ratio=0.0,
        grad_clip_norm=1.0,
        weight_decay=0.01,
    ),
    training=TrainingConfig(
        label_smoothing=0.0, log_every=10, save_every=100, evaluate_every=100, average_checkpoints=1
    ),
    init_from="runs/translation/grammar",
)
translations = replace(
    summaries, name="translations", data=DataConfig("grammar"), task=TaskOptions(metric="bleu")
)

PRESETS = {preset.name: preset for preset in (summaries, translations)}
