"""What a language-modelling experiment is, and the named ones."""

from dataclasses import dataclass, replace
from typing import Literal

from experiments import machines
from experiments.settings import Parallel, TrainingConfig
from jaxformer.config import (
    ConfigError,
    TransformerConfig,
    bert_base,
    check_least,
    check_names,
    check_share,
    gpt2,
)
from jaxformer.generation import SamplingConfig
from jaxformer.optimizer import OptimizerConfig


@dataclass(frozen=True)
class DataConfig:
    """Which text, how it is cut into documents and ids, and how these become batches.

    `corpus` names built-in text; files given for a part replace that part, and `train` given
    replaces all of it. A document is a file, a line, or what stands between blank lines
    (`split`); where they are `separate`, a causal model sees none from another. `tokenizer`:
    "bpe", "words" or "characters" learn at most `model.vocab_size` ids from the training text;
    "gpt2" and "bert-base-uncased" are the published ones; anything else is the path of a saved
    one. A batch is `rows` of `length` tokens. Masked models only: `rate` of the tokens are to be
    filled in, and with `pairs` a row is two pieces that follow each other or do not.
    """

    corpus: Literal["python_stdlib", "shakespeare", "wikitext2", "files"] = "python_stdlib"
    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    split: Literal["file", "line", "blank_line"] = "file"
    separate: bool = True
    tokenizer: str = "bpe"
    rows: int = 32
    length: int = 256
    rate: float = 0.15
    pairs: bool = False

    def __post_init__(self):
        check_names(self)
        check_least(self, 1, "rows", "length")
        check_share(self, "rate")


@dataclass(frozen=True)
class LanguageConfig:
    """A run `RUNS/language_modelling/NAME`: what is learned of which text, and by which model.

    "causal" predicts the next token (GPT), "masked" the hidden ones (BERT). The `prompts` are
    continued, or filled in, when training ends. `init` is the folder of other people's weights, or
    their name on a hub, with which the run begins: its sizes and its tokenizer count then, instead
    of those in `model` and `data`. `profile` traces a few steps into the run's
    folder, for TensorBoard or Perfetto.
    `programs` is the folder in RUNS for compiled programs (empty: none is kept).
    `parallel` and `mesh` are those of `settings.choose_devices`. With `distributed` the cluster
    says which of how many processes this is; otherwise `coordinator`, HOST:PORT of process 0, with
    `processes` and `index` do.
    """

    name: str
    model: TransformerConfig
    objective: Literal["causal", "masked"] = "causal"
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig(average=1)
    sampling: SamplingConfig = SamplingConfig()
    prompts: tuple[str, ...] = ()
    init: str = ""
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
        check_names(self)
        machines.check(self)
        _check_layers(self)
        _check_batch(self)
        model, data = self.model, self.data
        if data.pairs and not (
            self.objective == "masked" and model.pooler and model.num_token_types > 1
        ):
            raise ConfigError(
                "pairs=True needs objective='masked', a pooler and two token types, but objective="
                f"{self.objective!r}, pooler={model.pooler} and num_token_types="
                f"{model.num_token_types}: give them, or pairs=False"
            )

    @property
    def separate(self) -> bool:
        """Whether documents are kept apart by special tokens and segments."""
        return self.data.separate and self.objective == "causal"


def _check_layers(config: LanguageConfig) -> None:
    model = config.model
    layers = model.num_encoder_layers, model.num_decoder_layers
    needed = ("encoder", "decoder") if config.objective == "masked" else ("decoder", "encoder")
    found = layers if config.objective == "masked" else layers[::-1]
    if found[0] < 1 or found[1] > 0:
        raise ConfigError(
            f"objective={config.objective!r} needs {needed[0]} layers and no {needed[1]} layers, "
            f"but num_encoder_layers={layers[0]} and num_decoder_layers={layers[1]}"
        )


def _check_batch(config: LanguageConfig) -> None:
    data, parts = config.data, config.training.accumulation
    if data.length > config.model.max_len:
        raise ConfigError(
            f"length={data.length} tokens a row, but the model's positions end at max_len="
            f"{config.model.max_len}: shorten the rows, or lengthen the model's context"
        )
    if data.rows % parts:
        raise ConfigError(
            f"rows={data.rows} cannot be accumulated in {parts} equal parts: choose a divisor"
        )


python_stdlib = LanguageConfig(
    name="python_stdlib",
    model=TransformerConfig(
        vocab_size=2_048,
        d_model=128,
        d_ff=344,
        num_heads=4,
        num_decoder_layers=4,
        max_len=128,
        positions="rotary",
        norm="rms",
        norm_placement="pre",
        activation="silu",
        gated=True,
        use_bias=False,
        tied_embeddings="none",
        scale_embeddings=False,
        initializer="scaled_normal",
    ),
    data=DataConfig(rows=16, length=128),
    optimizer=OptimizerConfig(
        name="muon",
        schedule="cosine",
        learning_rate=4e-3,
        warmup_steps=50,
        total_steps=1_000,
        final_fraction=0.02,
        b2=0.95,
        eps=1e-8,
        clip_norm=1.0,
    ),
    training=TrainingConfig(log_every=20, save_every=500, evaluate_every=500, average=1),
    sampling=SamplingConfig(length=100, temperature=0.7, overflow="slide"),
    prompts=("def __init__(self", "class", "import"),
)

shakespeare_char_cpu = LanguageConfig(
    name="shakespeare_char_cpu",
    model=TransformerConfig(
        vocab_size=65,
        d_model=128,
        d_ff=512,
        num_heads=4,
        num_decoder_layers=4,
        max_len=64,
        positions="learned",
        norm_placement="pre",
        norm_eps=1e-5,
        activation="gelu",
        use_bias=False,
        tied_embeddings="output",
        scale_embeddings=False,
        initializer="scaled_normal",
    ),
    data=DataConfig(
        corpus="shakespeare", separate=False, tokenizer="characters", rows=12, length=64
    ),
    optimizer=OptimizerConfig(
        schedule="cosine",
        learning_rate=1e-3,
        warmup_steps=100,
        total_steps=2_000,
        final_fraction=0.1,
        b2=0.99,
        eps=1e-8,
        clip_norm=1.0,
        weight_decay=0.1,
    ),
    training=TrainingConfig(log_every=50, save_every=500, evaluate_every=500, average=1),
    sampling=SamplingConfig(length=500, temperature=0.8, overflow="slide"),
    prompts=("\n",),
)
"""nanoGPT's `config/train_shakespeare_char.py` with the options of its README for a CPU."""

shakespeare_char = replace(
    shakespeare_char_cpu,
    name="shakespeare_char",
    model=replace(
        shakespeare_char_cpu.model,
        d_model=384,
        d_ff=1_536,
        num_heads=6,
        num_decoder_layers=6,
        max_len=256,
        dropout_rate=0.2,
        attention_dropout_rate=0.2,
    ),
    data=replace(shakespeare_char_cpu.data, rows=64, length=256),
    optimizer=replace(shakespeare_char_cpu.optimizer, total_steps=5_000),
    training=TrainingConfig(log_every=50, save_every=250, evaluate_every=250, average=1),
)
"""nanoGPT's `config/train_shakespeare_char.py`."""

wikitext2 = LanguageConfig(
    name="wikitext2",
    model=replace(
        python_stdlib.model,
        vocab_size=8_000,
        d_model=256,
        d_ff=704,
        num_heads=8,
        num_decoder_layers=6,
        tied_embeddings="output",
        max_len=256,
        dropout_rate=0.2,
        attention_dropout_rate=0.1,
    ),
    data=DataConfig(corpus="wikitext2", separate=False, rows=32, length=256),
    optimizer=OptimizerConfig(
        schedule="cosine",
        learning_rate=1e-3,
        warmup_steps=200,
        total_steps=6_000,
        final_fraction=0.05,
        b2=0.95,
        eps=1e-8,
        clip_norm=1.0,
        weight_decay=0.1,
    ),
    training=TrainingConfig(log_every=50, save_every=500, evaluate_every=500, average=1),
    sampling=SamplingConfig(length=150, temperature=0.8, overflow="slide"),
    prompts=(" The ", " In 1990 , "),
)

gpt2_124m = LanguageConfig(
    name="gpt2_124m",
    model=replace(gpt2, dropout_rate=0.0, attention_dropout_rate=0.0, dtype="bfloat16"),
    data=DataConfig(corpus="files", tokenizer="gpt2", rows=480, length=1_024),
    optimizer=OptimizerConfig(
        schedule="cosine",
        learning_rate=6e-4,
        warmup_steps=2_000,
        total_steps=600_000,
        final_fraction=0.1,
        b2=0.95,
        eps=1e-8,
        clip_norm=1.0,
        weight_decay=0.1,
    ),
    training=TrainingConfig(accumulation=40, log_every=10, average=1),
    prompts=("Once upon a time", "The meaning of life is"),
)
"""GPT-2's model, with the batch and the schedule of nanoGPT's `config/train_gpt2.py`."""

_bert_optimizer = OptimizerConfig(
    schedule="cosine",
    learning_rate=1e-4,
    warmup_steps=10_000,
    total_steps=1_000_000,
    final_fraction=0.0,
    b2=0.999,
    eps=1e-6,
    clip_norm=1.0,
    weight_decay=0.01,
)

bert_base = LanguageConfig(
    name="bert_base",
    model=replace(bert_base, dtype="bfloat16"),
    objective="masked",
    data=DataConfig(
        corpus="files", tokenizer="bert-base-uncased", rows=256, length=512, pairs=True
    ),
    optimizer=_bert_optimizer,
    training=TrainingConfig(accumulation=8, log_every=10, average=1),
    prompts=("The capital of France is [MASK].",),
)
"""Devlin et al. 2019, appendix A.2, with a cosine where the paper's rate falls linearly."""

bert_tiny = LanguageConfig(
    name="bert_tiny",
    model=replace(
        bert_base.model,
        vocab_size=4_000,
        d_model=128,
        d_ff=512,
        num_heads=2,
        num_encoder_layers=2,
        max_len=128,
        num_token_types=0,
        pooler=False,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
        dtype="float32",
    ),
    objective="masked",
    data=DataConfig(corpus="wikitext2", rows=32, length=128),
    optimizer=replace(
        _bert_optimizer, learning_rate=2e-3, warmup_steps=500, total_steps=10_000, b2=0.98
    ),
    training=TrainingConfig(log_every=50, evaluate_every=1_000, average=1),
    prompts=(" The film was <mask> in the United States .", " He was born in <mask> ."),
)
"""As many layers, heads and numbers as the smallest model of Turc et al. 2019."""

PRESETS = {
    preset.name: preset
    for preset in (
        python_stdlib,
        shakespeare_char_cpu,
        shakespeare_char,
        wikitext2,
        gpt2_124m,
        bert_base,
        bert_tiny,
    )
}
