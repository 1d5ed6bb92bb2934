"""The configuration of a fine-tuning, and the named ones."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from experiments.harness.training.training_config import OptimizerConfig
from experiments.language_modelling.presets import (
    DataConfig,
    LanguageConfig,
    TrainingConfig,
    python_stdlib,
)
from jaxformer.config import Checked, Count, Natural, Positive
from jaxformer.errors import ConfigError

FACTS = "labels.json"
"""The file of a run with the labels that it has learned."""


@dataclass(frozen=True)
class TaskOptions(Checked):
    """The task, and how its examples become rows."""

    kind: Literal["classification", "pairs", "spans", "chat", "preference"] = "classification"
    """Labels of texts or of pairs of texts, answers in a text, answers of an assistant, the better
    one of two answers. Files are lines label<TAB>text; label<TAB>premise<TAB>hypothesis (or .jsonl
    with these fields); the JSON of SQuAD; .jsonl with a list of messages in each line, or with a
    prompt, a chosen and a rejected answer."""
    num_examples: Natural = 0
    """Rows to learn from, chosen by the seed, as evenly over the labels as possible; 0: all."""
    from_scratch: bool = False
    """Learns from random weights, with the sizes and the tokenizer of --init_from."""
    pooling: Literal["token", "mean"] = "token"
    """The vector that a classifier sees. token: a causal model's of the last token, an encoder's of
    the first; mean: the mean of the tokens' vectors."""
    doc_stride: Natural = 32
    """Tokens that neighbouring windows of a long context share (spans)."""
    max_answer_tokens: Count = 30
    """Longest answer in tokens (spans)."""
    chat_template: str = ""
    """A file with a chat template in Jinja (chat, preference); empty: the template of its start."""
    beta: Positive = 0.1
    """Weight of the preference against staying near the weights that it starts from (preference);
    less goes further away."""


@dataclass(frozen=True)
class FinetuneConfig(LanguageConfig):
    """A run RUNS/finetuning/NAME; model and tokenizer come from --init_from."""

    may_change: ClassVar[tuple[str, ...]] = LanguageConfig.may_change
    from_start: ClassVar[tuple[str, ...]] = (
        "sampling",
        "completion",
        "objective",
        "data.isolate_documents",
    )
    common_options: ClassVar[tuple[str, ...]] = (
        "name",
        "runs",
        "init_from",
        "strategy",
        "task",
        "data.train",
        "data.validation",
        "data.test",
        "data.seq_len",
        "data.batch_size",
        "optimizer.learning_rate",
        "optimizer.total_steps",
        "optimizer.freeze",
        "training.seed",
        "training.lora_rank",
        "training.save_every",
        "training.evaluate_every",
    )

    task: TaskOptions = TaskOptions()
    """The task."""

    def __post_init__(self):
        super().__post_init__()
        for name in _OF_PLAIN_TEXT:
            value = getattr(self.data, name)
            if value != getattr(DataConfig, name):
                raise ConfigError(
                    f"data.{name}={value!r} is for documents, but fine-tuning reads examples: "
                    "leave it out"
                )
        if self.training.metrics:
            raise ConfigError(
                f"training.metrics={self.training.metrics!r} are computed for language models and "
                "translators, not in fine-tuning: leave it out"
            )
        if self.task.from_scratch and self.task.kind == "preference":
            raise ConfigError(
                "task.kind='preference' compares with the weights that the run starts from, but "
                "from_scratch=True starts from random ones: leave it out"
            )
        if self.task.from_scratch and self.training.lora_rank:
            raise ConfigError(
                f"lora_rank={self.training.lora_rank} trains adapters of the weights that the run "
                "starts from, but from_scratch=True starts from random ones: give one of them"
            )

    def without_effect(self) -> dict[str, str]:
        """Reasons why options change nothing with the other settings, by their dotted names."""
        reasons = super().without_effect()
        for option, kinds in _OF_KINDS.items():
            if self.task.kind not in kinds:
                named = " and ".join(kinds)
                reasons[f"task.{option}"] = f"it is for {named}, but the task is {self.task.kind}"
        if self.task.kind not in _CONTINUES:
            why = f"a model that learns {self.task.kind} continues no text"
            reasons |= dict.fromkeys(("sampling", "completion", "prompts"), why)
        return reasons


_CONTINUES = ("chat", "preference")
"""The kinds of tasks whose models write text."""
_OF_KINDS = {
    "pooling": ("classification", "pairs"),
    "doc_stride": ("spans",),
    "max_answer_tokens": ("spans",),
    "chat_template": _CONTINUES,
    "beta": ("preference",),
}
"""The kinds of tasks that read an option."""
_OF_PLAIN_TEXT = (
    "corpus",
    "split",
    "text_field",
    "document_id",
    "validation_tokens",
    "mask_prob",
    "next_sentence",
    "batches",
)
"""Options of a text of documents, which examples of a task are not."""

_RUN = "runs/language_modelling/python_stdlib"

classification = FinetuneConfig(
    name="classification",
    model=replace(python_stdlib.model, max_len=8_192),  # until --init_from is read
    data=DataConfig(seq_len=128, batch_size=20),
    optimizer=OptimizerConfig(
        schedule="cosine",
        learning_rate=1e-3,
        warmup_steps=15,
        total_steps=150,
        min_lr_ratio=0.0,
        grad_clip_norm=1.0,
        weight_decay=0.01,
    ),
    training=TrainingConfig(log_every=10, save_every=50, evaluate_every=50),
    init_from=_RUN,
    task=TaskOptions(num_examples=200),
)
frozen_backbone = replace(
    classification,
    name="frozen_backbone",
    optimizer=replace(
        classification.optimizer, learning_rate=1e-2, weight_decay=0.0, freeze="^backbone/"
    ),
)
pairs = replace(
    classification, name="pairs", init_from=f"{_RUN}_masked", task=TaskOptions(kind="pairs")
)
spans = replace(pairs, name="spans", task=TaskOptions(kind="spans"))
chat = replace(classification, name="chat", task=TaskOptions(kind="chat"))
preference = replace(
    chat,
    name="preference",
    init_from="runs/finetuning/chat",
    optimizer=replace(chat.optimizer, learning_rate=1e-4),
    task=TaskOptions(kind="preference"),
)

_ALL = (classification, frozen_backbone, pairs, spans, chat, preference)
PRESETS = {preset.name: preset for preset in _ALL}
