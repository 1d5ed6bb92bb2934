"""The configuration of a translation experiment, and the named ones."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from experiments.harness.runs.source_kinds import has_fields
from experiments.harness.training import training_config
from experiments.harness.training.training_config import OptimizerConfig, RunConfig
from jaxformer.config import (
    TRANSFORMER_BASE,
    TRANSFORMER_BIG,
    Checked,
    Count,
    Natural,
    NormOptions,
    OutputOptions,
    Rotary,
    Sinusoidal,
    TransformerConfig,
    UnitInterval,
)
from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.errors import ConfigError
from jaxformer.text.tokenizers import BOS, PAD
from jaxformer.training.optimizer import noam_peak_learning_rate


@dataclass(frozen=True)
class Files(Checked):
    """Your own parallel text (.gz too)."""

    source: str = ""
    """A file with a text on each line; or, of both sides, .tsv, .jsonl, .parquet, hf:NAME@SPLIT or
    your own function as package.module:name; empty: none."""
    target: str = ""
    """A file whose line i translates line i of the source file; empty where source holds both."""
    source_field: str = "source"
    """The field of a record that holds the source text, such as translation.en."""
    target_field: str = "target"
    """The field of a record that holds the target text."""


@dataclass(frozen=True)
class DataConfig(Checked):
    """The text, its tokenizer, and how pairs become batches."""

    corpus: Literal["grammar", "multi30k", "tatoeba", "files"] = "grammar"
    """The built-in text; files: the ones that you give."""
    train: Files = Files()
    """Files to train on; they replace the whole built-in text."""
    validation: Files = Files()
    """Files to validate on; without them a part of the training files is set aside."""
    test: Files = Files()
    """Files to score at the end."""
    target_language: str = "de"
    """Language code of the target text; it chooses the words that BLEU counts."""
    tokenizer: str = "bpe"
    """bpe, words, characters, or your own as package.module:name; source and target share one
    vocabulary unless --model.source_vocab_size is given."""
    lowercase: bool = False
    """All text is read and written in lower case: smaller vocabulary, scores without case."""
    batch_tokens: Count = 4_096
    """Target positions of a batch, padding included."""
    buckets: Count = 6
    """The most shapes of batch; XLA compiles one program for each."""
    pad_to_multiple: Count = 4
    """Lengths are padded to a multiple of this."""
    batch_size_multiple: Count = 8
    """The number of pairs in a batch is a multiple of this, so that devices can share it."""
    batches: str = ""
    """Your own batches as package.module:name, a function of (config, prepared); empty: none."""
    source_len: Natural = 0
    """Longest source in tokens; the rest of a longer one is cut off. 0: pairs of more tokens than
    the model reads are left out."""
    target_len: Natural = 0
    """Longest target in tokens; the rest of a longer one is cut off. 0: as source_len."""

    def __post_init__(self):
        super().__post_init__()
        training_config.check_name(self, "tokenizer", ("bpe", "words", "characters"))
        if self.lowercase and self.tokenizer != "bpe":
            raise ConfigError(
                f"lowercase=True is for tokenizer='bpe', got tokenizer={self.tokenizer!r}: give "
                "--data.tokenizer bpe, or files in lower case"
            )


@dataclass(frozen=True)
class TrainingConfig(training_config.TrainingConfig):
    """Settings of a translation's training."""

    label_smoothing: UnitInterval = 0.1
    """Share of each label's probability that is spread over the vocabulary."""
    eval_beam_size: Count = 1
    """Beam size of the evaluations during training; 1 is greedy."""


@dataclass(frozen=True)
class TranslationConfig(RunConfig):
    """A run RUNS/translation/NAME."""

    may_change: ClassVar[tuple[str, ...]] = ("search", "translation", "training.eval_beam_size")
    from_start: ClassVar[tuple[str, ...]] = ("search", "translation")
    common_options: ClassVar[tuple[str, ...]] = (
        "name",
        "runs",
        "init_from",
        "strategy",
        "data.corpus",
        "data.train.source",
        "data.train.target",
        "data.batch_tokens",
        *training_config.COMMON_OPTIONS,
        "search.beam_size",
    )

    name: str
    """Name of the run's folder."""
    model: TransformerConfig
    """Sizes of the model."""
    data: DataConfig = DataConfig()
    """The text and its batches."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    training: TrainingConfig = TrainingConfig()
    """The training."""
    search: SearchConfig = SearchConfig()
    """The search for translations after training. A run that starts from another model has that
    one's search, with what differs here from the defaults."""
    translation: TranslationOptions = TranslationOptions()
    """The batches, lengths, prefix and ids of these translations; as for the search."""

    def without_effect(self) -> dict[str, str]:
        """Reasons why options change nothing with the other settings, by their dotted names."""
        reasons = super().without_effect()
        if self.data.train != Files() and self.data.corpus not in ("files", "multi30k"):
            reasons["data.corpus"] = "--data.train replaces the whole built-in text"
        if not self.training.evaluate_every:
            reasons["training.eval_beam_size"] = "--training.evaluate_every 0 makes no evaluation"
        parts = {"train": self.data.train, "validation": self.data.validation}
        for part, files in {**parts, "test": self.data.test}.items():
            unread = _fields_without_effect(files)
            reasons |= {f"data.{part}.{field}": reason for field, reason in unread.items()}
        if self.data.tokenizer == "characters":
            reasons["model.vocab_size"] = "the vocabulary is all characters of the text"
        return reasons


def _fields_without_effect(files: Files) -> dict[str, str]:
    """Reasons why the names of fields are not read, by the option: the text has no fields."""
    reasons = {}
    for side, name in {"source": files.source, "target": files.target or files.source}.items():
        if not name:
            reasons[f"{side}_field"] = "no file was given"
        elif not has_fields(name):
            reasons[f"{side}_field"] = f"it is for records (.jsonl, .parquet, hf:), not for {name}"
    return reasons


_COSINE = OptimizerConfig(schedule="cosine", min_lr_ratio=0.02, grad_clip_norm=1.0)
_TINY = TransformerConfig(
    vocab_size=10_000,
    d_model=128,
    d_ff=256,
    num_heads=4,
    num_encoder_layers=4,
    num_decoder_layers=4,
    max_len=128,
    norm=NormOptions(placement="pre"),
    dropout_rate=0.3,
)

grammar = TranslationConfig(
    name="grammar",
    model=replace(
        _TINY,
        vocab_size=2_000,
        num_encoder_layers=2,
        num_decoder_layers=2,
        max_len=64,
        positions=Rotary(),
        dropout_rate=0.0,
    ),
    data=DataConfig("grammar", batch_tokens=2_048, buckets=4, pad_to_multiple=2),
    optimizer=replace(
        _COSINE, name="muon", learning_rate=0.01, momentum=0.9, warmup_steps=50, total_steps=800
    ),
    training=TrainingConfig(
        label_smoothing=0.0, log_every=50, save_every=400, evaluate_every=400, average_checkpoints=1
    ),
)

multi30k_tiny = TranslationConfig(
    name="multi30k_tiny",
    model=_TINY,
    data=DataConfig("multi30k"),
    optimizer=replace(_COSINE, learning_rate=4e-3, warmup_steps=400, total_steps=4_000),
    training=TrainingConfig(save_every=100, evaluate_every=500, average_checkpoints=5),
    search=SearchConfig(beam_size=5, length_penalty=1.0),
)

multi30k_lower = replace(
    multi30k_tiny,
    name="multi30k_lower",
    model=replace(
        _TINY,
        vocab_size=8_000,
        norm=replace(_TINY.norm, kind="rms"),
        positions=Rotary(),
        use_bias=False,
    ),
    data=DataConfig("multi30k", lowercase=True, batch_tokens=2_048),
    optimizer=replace(multi30k_tiny.optimizer, name="muon", total_steps=10_000),
    training=replace(multi30k_tiny.training, save_every=200, evaluate_every=1_000, loss_chunk=256),
)

multi30k_base = replace(
    multi30k_tiny,
    name="multi30k_base",
    model=replace(
        TRANSFORMER_BASE,
        vocab_size=10_000,
        max_len=128,
        norm=NormOptions(placement="pre"),
        dropout_rate=0.3,
    ),
    optimizer=OptimizerConfig(learning_rate=7e-4, warmup_steps=2_000, total_steps=8_000),
    training=replace(multi30k_tiny.training, attention_fn="auto"),
)

tatoeba = replace(
    multi30k_lower,
    name="tatoeba",
    model=replace(multi30k_lower.model, dropout_rate=0.1),
    data=DataConfig("tatoeba", batch_tokens=2_048),
    optimizer=replace(multi30k_lower.optimizer, total_steps=5_500),
)

wmt14_base = TranslationConfig(
    name="wmt14_base",
    model=TRANSFORMER_BASE,
    data=DataConfig("files", batch_tokens=25_000, buckets=8, pad_to_multiple=8),
    optimizer=OptimizerConfig(
        learning_rate=noam_peak_learning_rate(512, 4_000), warmup_steps=4_000
    ),
    training=TrainingConfig(attention_fn="auto"),
)

wmt14_big = replace(
    wmt14_base,
    name="wmt14_big",
    model=TRANSFORMER_BIG,
    optimizer=OptimizerConfig(
        learning_rate=noam_peak_learning_rate(1_024, 4_000), warmup_steps=4_000, total_steps=300_000
    ),
    training=TrainingConfig(average_checkpoints=20, attention_fn="auto"),
)


def _marian(config: TranslationConfig) -> TranslationConfig:
    """`config` with Marian's model and the search of CTranslate2; `export` writes such a run."""
    model = replace(
        config.model,
        norm=replace(config.model.norm, placement="post", eps=1e-5),
        output=OutputOptions(bias=True),
        embeddings=replace(config.model.embeddings, zero_id=BOS),
        positions=Sinusoidal(layout="halves"),
    )
    search = replace(
        config.search,
        length_penalty=1.0,
        length_penalty_kind="power",
        early_stopping="beam_full",
        at_max_length="cut",
        max_new_tokens=config.model.max_len - 1,
        min_new_tokens=1,
        extra_candidates=1,
        suppress_tokens=(PAD, BOS),
        renormalize_logits=True,
    )
    return replace(config, name=f"{config.name}_marian", model=model, search=search)


grammar_marian = _marian(grammar)
grammar_marian = replace(
    grammar_marian,
    optimizer=replace(_COSINE, learning_rate=1.5e-3, warmup_steps=200, total_steps=1_800),
)
wmt14_base_marian = _marian(wmt14_base)

summaries = TranslationConfig(
    name="summaries",
    model=grammar.model,
    data=DataConfig("files", batch_tokens=1_024, buckets=1, source_len=128, target_len=64),
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
        label_smoothing=0.0,
        log_every=10,
        save_every=100,
        evaluate_every=100,
        average_checkpoints=1,
        metrics=("experiments.translation.evaluate:rouge",),
        early_stopping_metric="validation_rougeLsum",
    ),
    init_from="runs/translation/grammar",
)
translations = replace(
    summaries,
    name="translations",
    data=replace(summaries.data, corpus="grammar"),
    training=replace(summaries.training, metrics=(), early_stopping_metric=""),
)

_ALL = (
    grammar,
    grammar_marian,
    multi30k_tiny,
    multi30k_lower,
    multi30k_base,
    tatoeba,
    wmt14_base,
    wmt14_base_marian,
    wmt14_big,
    summaries,
    translations,
)
PRESETS = {preset.name: preset for preset in _ALL}
