"""What a translation experiment is, and the named ones."""

from dataclasses import dataclass, replace
from typing import Literal

from experiments import machines, settings
from experiments.settings import Parallel
from jaxformer.config import (
    TransformerConfig,
    check_least,
    check_share,
    transformer_base,
    transformer_big,
)
from jaxformer.generation import BeamConfig
from jaxformer.optimizer import OptimizerConfig, paper_learning_rate


@dataclass(frozen=True)
class Files:
    """One's own parallel text: line i of `target` translates line i of `source` (.gz too)."""

    source: str = ""
    target: str = ""


@dataclass(frozen=True)
class DataConfig:
    """Which text, how it is cut into ids, and how pairs become batches.

    `corpus` names built-in text; files given for a part replace that part, and `train` given
    replaces all of it. Joint vocabulary: `model.source_vocab_size` None. A batch is `tokens`
    target positions, padding included, in at most `buckets` shapes, each a multiple of
    `rows_multiple` rows for each part of an accumulation, so that devices can share them.
    """

    corpus: Literal["grammar", "multi30k", "tatoeba", "files"] = "grammar"
    train: Files = Files()
    validation: Files = Files()
    test: Files = Files()
    source_language: str = "en"
    target_language: str = "de"
    tokenizer: Literal["bpe", "words", "characters"] = "bpe"
    tokens: int = 4_096
    buckets: int = 6
    multiple: int = 4
    rows_multiple: int = 8


@dataclass(frozen=True)
class TrainingConfig(settings.TrainingConfig):
    """Those of every experiment, label smoothing, and the beam width of validation."""

    smoothing: float = 0.1
    validation_width: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_least(self, 1, "validation_width")
        check_share(self, "smoothing")


@dataclass(frozen=True)
class TranslationConfig:
    """A run `RUNS/translation/NAME`: text, model, optimizer, training and search.

    `profile` traces a few steps into the run's folder, for TensorBoard or Perfetto.
    `programs` is the folder in RUNS for compiled programs (empty: none is kept).
    `parallel` and `mesh` are those of `settings.choose_devices`. With `distributed` the cluster
    says which of how many processes this is; otherwise `coordinator`, HOST:PORT of process 0, with
    `processes` and `index` do.
    """

    name: str
    model: TransformerConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    search: BeamConfig = BeamConfig()
    parallel: Parallel = "one"
    mesh: str = ""
    distributed: bool = False
    coordinator: str = ""
    processes: int | None = None
    index: int | None = None
    runs: str = "runs"
    programs: str = "programs"
    profile: bool = False

    def __post_init__(self):
        machines.check(self)


grammar = TranslationConfig(
    name="grammar",
    model=TransformerConfig(
        vocab_size=2_000,
        d_model=128,
        d_ff=256,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        max_len=64,
        positions="rotary",
        norm_placement="pre",
    ),
    data=DataConfig(corpus="grammar", tokens=2_048, buckets=4, multiple=2),
    optimizer=OptimizerConfig(
        schedule="cosine",
        learning_rate=3e-3,
        warmup_steps=100,
        total_steps=1_800,
        final_fraction=0.02,
        clip_norm=1.0,
    ),
    training=TrainingConfig(
        smoothing=0.0, log_every=50, save_every=300, evaluate_every=600, average=1
    ),
)

multi30k_tiny = TranslationConfig(
    name="multi30k_tiny",
    model=TransformerConfig(
        vocab_size=10_000,
        d_model=128,
        d_ff=256,
        num_heads=4,
        num_encoder_layers=4,
        num_decoder_layers=4,
        max_len=128,
        norm_placement="pre",
        dropout_rate=0.3,
    ),
    data=DataConfig(corpus="multi30k"),
    optimizer=OptimizerConfig(
        schedule="cosine",
        learning_rate=4e-3,
        warmup_steps=400,
        total_steps=4_000,
        final_fraction=0.02,
        clip_norm=1.0,
    ),
    training=TrainingConfig(save_every=100, evaluate_every=500, average=5),
    search=BeamConfig(width=5, alpha=1.0),
)

multi30k_base = replace(
    multi30k_tiny,
    name="multi30k_base",
    model=replace(
        transformer_base, vocab_size=10_000, max_len=128, norm_placement="pre", dropout_rate=0.3
    ),
    optimizer=OptimizerConfig(learning_rate=7e-4, warmup_steps=2_000, total_steps=8_000),
)

tatoeba = replace(
    multi30k_tiny,
    name="tatoeba",
    model=replace(
        multi30k_tiny.model,
        d_model=256,
        d_ff=1_024,
        num_encoder_layers=3,
        num_decoder_layers=3,
        dropout_rate=0.1,
    ),
    data=DataConfig(corpus="tatoeba"),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=1_000, total_steps=10_000),
    search=BeamConfig(),
)

wmt14_base = TranslationConfig(
    name="wmt14_base",
    model=transformer_base,
    data=DataConfig(corpus="files", tokens=25_000, buckets=8, multiple=8),
    optimizer=OptimizerConfig(learning_rate=paper_learning_rate(512, 4_000), warmup_steps=4_000),
)

wmt14_big = replace(
    wmt14_base,
    name="wmt14_big",
    model=transformer_big,
    optimizer=OptimizerConfig(
        learning_rate=paper_learning_rate(1_024, 4_000), warmup_steps=4_000, total_steps=300_000
    ),
    training=TrainingConfig(average=20),
)

PRESETS = {
    preset.name: preset
    for preset in (grammar, multi30k_tiny, multi30k_base, tatoeba, wmt14_base, wmt14_big)
}
