"""The configuration of a language-modelling experiment, and the named ones."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from experiments.harness.runs.shares import share_of
from experiments.harness.runs.source_kinds import has_fields, unread_kind_of
from experiments.harness.training import training_config
from experiments.harness.training.training_config import OptimizerConfig, RunConfig
from jaxformer.config import (
    BERT_BASE,
    GPT2,
    LLAMA3_8B,
    AttentionOptions,
    Checked,
    Count,
    EmbeddingOptions,
    FeedForwardOptions,
    Natural,
    NormOptions,
    Rotary,
    TransformerConfig,
    UnitInterval,
    is_import_name,
)
from jaxformer.decoding import CompletionOptions, SamplingConfig
from jaxformer.errors import ConfigError

OF_DRAWING = ("top_k", "top_p", "min_p")
"""Options of sampling that matter only where a token is drawn."""
GREEDY = "the temperature is 0, which takes the most likely token: give one above 0 to draw"


@dataclass(frozen=True)
class DataConfig(Checked):
    """The text, how it is cut into documents and ids, and how these become batches."""

    corpus: Literal["python_stdlib", "shakespeare", "wikitext2", "files"] = "python_stdlib"
    """The built-in text; files: the ones that you give."""
    train: tuple[str, ...] = ()
    """Files to train on; they replace the whole built-in text. Also .jsonl, .parquet,
    hf:NAME@SPLIT, your own function as package.module:name, and ids that others made: .bin of
    nanoGPT and llm.c, .npy, or a pattern of their names in quotes. With shares, as in a.jsonl=0.7
    b.txt=0.3, each is a text of its own, and batches have these shares of it."""
    validation: tuple[str, ...] = ()
    """Files to validate on; without them the end of the training files is set aside. Where training
    texts have shares, one for each of them in their order."""
    test: tuple[str, ...] = ()
    """Files to measure at the end; none: the test part of the built-in text."""
    split: Literal["file", "line", "blank_line"] = "file"
    """A document is a file, a line, or the text between two blank lines."""
    text_field: str = "text"
    """The field of a record of .jsonl, .parquet and hf: that holds a document."""
    isolate_documents: bool = True
    """A causal model sees no other document than its own."""
    document_id: Natural | None = None
    """The id between two documents where the text comes as ids, such as 50256 in GPT-2's: attention
    stops there. None: all is one document, with isolate_documents false."""
    validation_tokens: Natural = 0
    """Tokens of the validation text that are measured, from its start, where it comes as ids; 0:
    all."""
    tokenizer: str = "bpe"
    """bpe, words or characters: learned from the text; else gpt2, bert-base-uncased, a path (also
    of nanoGPT's meta.pkl), or your own function as package.module:name."""
    batch_size: Count = 32
    """Sequences of a batch."""
    seq_len: Count = 256
    """Tokens of a sequence."""
    mask_prob: UnitInterval = 0.15
    """Share of the tokens that a masked model has to predict."""
    next_sentence: bool = False
    """A masked model also predicts whether the second half of a sequence follows the first."""
    batches: str = ""
    """Your own batches as package.module:name, a function of (config, prepared); empty: none."""


@dataclass(frozen=True)
class TrainingConfig(training_config.TrainingConfig):
    """Settings of a language model's training."""

    average_checkpoints: Count = 1
    """The result is the mean of this many last checkpoints, or the best one if it is better."""


@dataclass(frozen=True)
class LanguageConfig(RunConfig):
    """A run RUNS/language_modelling/NAME."""

    may_change: ClassVar[tuple[str, ...]] = ("sampling", "completion", "prompts")
    common_options: ClassVar[tuple[str, ...]] = (
        "name",
        "runs",
        "init_from",
        "strategy",
        "objective",
        "data.train",
        "data.validation",
        "data.seq_len",
        "data.batch_size",
        *training_config.COMMON_OPTIONS,
        "prompts",
    )

    name: str
    """Name of the run's folder."""
    model: TransformerConfig
    """Sizes of the model."""
    objective: Literal["causal", "masked"] = "causal"
    """Predicts the next token (causal, GPT) or hidden ones (masked, BERT)."""
    data: DataConfig = DataConfig()
    """The text and its batches."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    training: TrainingConfig = TrainingConfig()
    """The training."""
    sampling: SamplingConfig = SamplingConfig()
    """Settings of sampling when the prompts are continued."""
    completion: CompletionOptions = CompletionOptions()
    """Where the continuations end, and their seed."""
    prompts: tuple[str, ...] | None = None
    """Texts that are continued or filled in at the end; None: halves of three lines of the
    validation text, or for a masked model these lines with a word masked."""

    def __post_init__(self):
        super().__post_init__()
        model, data = self.model, self.data
        is_masked = self.objective == "masked"
        wanted, other = ("encoder", "decoder") if is_masked else ("decoder", "encoder")
        layers = {"encoder": model.num_encoder_layers, "decoder": model.num_decoder_layers}
        if layers[wanted] < 1 or layers[other] > 0:
            raise ConfigError(
                f"objective={self.objective!r} needs {wanted} layers and no {other} layers, but "
                f"num_encoder_layers={layers['encoder']} and num_decoder_layers={layers['decoder']}"
            )
        if data.seq_len > model.max_len:
            raise ConfigError(
                f"seq_len={data.seq_len} tokens a row, but the model's positions end at max_len="
                f"{model.max_len}: shorten the rows, or lengthen the model's context"
            )
        can_pair = is_masked and model.pooler != "none" and model.embeddings.num_types > 1
        if data.next_sentence and not can_pair:
            raise ConfigError(
                "next_sentence=True needs objective='masked', a pooler and two token types, but "
                f"objective={self.objective!r}, pooler={model.pooler} and num_token_types="
                f"{model.embeddings.num_types}: give them, or next_sentence=False"
            )

    def without_effect(self) -> dict[str, str]:
        """Reasons why options change nothing with the other settings, by their dotted names."""
        reasons = super().without_effect()
        data = self.data
        if data.train and data.corpus != "files":
            reasons["data.corpus"] = "--data.train replaces the whole built-in text"
        if self.objective == "causal":
            reasons["data.mask_prob"] = "a causal model predicts all tokens"
        else:
            reasons["data.isolate_documents"] = "it is for a causal model"
            fills_in = "a masked model fills in words and continues no text"
            reasons["sampling"] = reasons["completion"] = fills_in
        if self.sampling.temperature == 0:
            reasons |= dict.fromkeys([f"sampling.{name}" for name in OF_DRAWING], GREEDY)
            reasons["completion.seed"] = GREEDY
        files = [share_of(name)[0] for name in (*data.train, *data.validation, *data.test)]
        if not any(map(has_fields, files)):
            reasons["data.text_field"] = "it is for records (.jsonl, .parquet, hf:), not for text"
        if data.train and "text" not in map(unread_kind_of, files):
            reasons["data.split"] = "it cuts files of text, but none was given"
        if data.tokenizer not in ("bpe", "words") and not is_import_name(data.tokenizer):
            reasons["model.vocab_size"] = f"the tokenizer {data.tokenizer} has a size of its own"
        return reasons

    @property
    def isolate_documents(self) -> bool:
        """Whether documents are kept apart by special tokens and segments."""
        return self.data.isolate_documents and self.objective == "causal"


_COSINE = OptimizerConfig(
    schedule="cosine", b2=0.95, eps=1e-8, grad_clip_norm=1.0, weight_decay=0.1
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
        norm=NormOptions("rms", placement="pre"),
        feed_forward=FeedForwardOptions("silu", gated=True),
        embeddings=EmbeddingOptions(tied="none", scale=False),
        positions=Rotary(),
        use_bias=False,
        initializer="scaled_normal",
    ),
    data=DataConfig(batch_size=16, seq_len=128),
    optimizer=replace(
        _COSINE,
        name="muon",
        weight_decay=0.0,
        min_lr_ratio=0.02,
        learning_rate=4e-3,
        warmup_steps=50,
        total_steps=1_000,
    ),
    training=TrainingConfig(log_every=20, save_every=500, evaluate_every=500),
    sampling=SamplingConfig(max_new_tokens=100, temperature=0.7),
    completion=CompletionOptions(overflow="slide"),
)

python_stdlib_masked = replace(
    python_stdlib,
    name="python_stdlib_masked",
    model=replace(python_stdlib.model, num_encoder_layers=4, num_decoder_layers=0),
    objective="masked",
    optimizer=replace(python_stdlib.optimizer, total_steps=1_300),
    training=TrainingConfig(log_every=20, save_every=650, evaluate_every=650),
)

shakespeare_char_cpu = LanguageConfig(
    name="shakespeare_char_cpu",
    model=replace(
        GPT2,
        vocab_size=65,
        d_model=128,
        d_ff=512,
        num_heads=4,
        num_decoder_layers=4,
        max_len=64,
        feed_forward=FeedForwardOptions("gelu"),
        attention=AttentionOptions(dropout_rate=0.0),
        use_bias=False,
        dropout_rate=0.0,
    ),
    data=DataConfig(
        "shakespeare", isolate_documents=False, tokenizer="characters", batch_size=12, seq_len=64
    ),
    optimizer=replace(_COSINE, learning_rate=1e-3, warmup_steps=100, total_steps=2_000, b2=0.99),
    training=TrainingConfig(log_every=50, save_every=500, evaluate_every=500),
    sampling=SamplingConfig(max_new_tokens=500, temperature=0.8),
    completion=CompletionOptions(overflow="slide"),
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
        attention=AttentionOptions(dropout_rate=0.2),
    ),
    data=replace(shakespeare_char_cpu.data, batch_size=64, seq_len=256),
    optimizer=replace(shakespeare_char_cpu.optimizer, total_steps=5_000),
    training=TrainingConfig(log_every=50, save_every=250, evaluate_every=250),
)
"""nanoGPT's `config/train_shakespeare_char.py`."""

wikitext2 = LanguageConfig(
    name="wikitext2",
    model=replace(
        python_stdlib.model,
        vocab_size=4_000,
        d_model=256,
        d_ff=704,
        attention=AttentionOptions(query_key_norm=True, dropout_rate=0.0),
        embeddings=replace(python_stdlib.model.embeddings, tied="output"),
        max_len=256,
        dropout_rate=0.1,
    ),
    data=DataConfig("wikitext2", isolate_documents=False, batch_size=16),
    optimizer=replace(
        _COSINE,
        name="muon",
        min_lr_ratio=0.0,
        learning_rate=3e-3,
        warmup_steps=200,
        total_steps=4_500,
    ),
    training=TrainingConfig(log_every=50, save_every=500, evaluate_every=1_500),
    sampling=SamplingConfig(max_new_tokens=150, temperature=0.8),
    completion=CompletionOptions(overflow="slide"),
    prompts=(" The ", " In 1990 , "),
)

gpt2_124m = LanguageConfig(
    name="gpt2_124m",
    model=replace(
        GPT2, dropout_rate=0.0, attention=AttentionOptions(dropout_rate=0.0), dtype="bfloat16"
    ),
    data=DataConfig("files", tokenizer="gpt2", batch_size=480, seq_len=1_024),
    optimizer=replace(_COSINE, learning_rate=6e-4, warmup_steps=2_000, total_steps=600_000),
    training=TrainingConfig(usual_parts=40, log_every=10, attention_fn="auto"),
    prompts=("Once upon a time", "The meaning of life is"),
)
"""GPT-2's model, with the batch and the schedule of nanoGPT's `config/train_gpt2.py`."""

gpt3_xl = replace(
    gpt2_124m,
    name="gpt3_xl",
    model=replace(
        gpt2_124m.model,
        d_model=2_048,
        d_ff=8_192,
        num_heads=16,
        num_decoder_layers=24,
        max_len=2_048,
        use_bias=False,
        scan_layers=True,
    ),
    data=replace(gpt2_124m.data, batch_size=256, seq_len=2_048),
    optimizer=replace(gpt2_124m.optimizer, learning_rate=2e-4),
    training=replace(
        gpt2_124m.training,
        usual_parts=1,
        gather_at="use",
        remat="all_but_attention",
        loss_chunk=16_384,
    ),
    strategy="sharded",
    mesh="fsdp=16",
)
"""The size of GPT-3 XL (Brown et al. 2020, Table 2.1), with 16 heads of 128, on 16 chips."""

llama3_8b = replace(
    gpt3_xl,
    name="llama3_8b",
    model=LLAMA3_8B,
    data=replace(gpt3_xl.data, tokenizer="bpe", seq_len=8_192),
    optimizer=replace(gpt3_xl.optimizer, learning_rate=3e-4, warmup_steps=8_000),
    training=replace(gpt3_xl.training, loss_chunk=4_096),
    mesh="fsdp=256",
)
"""The model of Llama 3 with 8 billion parameters (Llama Team 2024), on 256 chips."""

_bert_optimizer = replace(
    _COSINE,
    b2=0.999,
    eps=1e-6,
    weight_decay=0.01,
    min_lr_ratio=0.0,
    learning_rate=1e-4,
    warmup_steps=10_000,
    total_steps=1_000_000,
)

bert_base = LanguageConfig(
    name="bert_base",
    model=replace(BERT_BASE, dtype="bfloat16"),
    objective="masked",
    data=DataConfig(
        "files", tokenizer="bert-base-uncased", batch_size=256, seq_len=512, next_sentence=True
    ),
    optimizer=_bert_optimizer,
    training=TrainingConfig(usual_parts=8, log_every=10, attention_fn="auto"),
    prompts=("The capital of France is [MASK].",),
)
"""Devlin et al. 2019, appendix A.2, with a cosine where the paper's rate falls linearly."""

bert_tiny = LanguageConfig(
    name="bert_tiny",
    model=replace(
        BERT_BASE,
        vocab_size=4_000,
        d_model=128,
        d_ff=512,
        num_heads=2,
        num_encoder_layers=2,
        max_len=128,
        embeddings=replace(BERT_BASE.embeddings, num_types=0),
        attention=AttentionOptions(dropout_rate=0.0),
        pooler="none",
        dropout_rate=0.0,
    ),
    objective="masked",
    data=DataConfig("wikitext2", seq_len=128),
    optimizer=replace(
        _bert_optimizer,
        name="muon",
        learning_rate=4e-3,
        b2=0.98,
        warmup_steps=500,
        total_steps=10_000,
    ),
    training=TrainingConfig(log_every=50, evaluate_every=1_000),
    prompts=(" The film was <mask> in the United States .", " He was born in <mask> ."),
)
"""Layers, heads and sizes of the smallest model of Turc et al. 2019."""

_ALL = (
    python_stdlib,
    python_stdlib_masked,
    shakespeare_char_cpu,
    shakespeare_char,
    wikitext2,
    gpt2_124m,
    gpt3_xl,
    llama3_8b,
    bert_base,
    bert_tiny,
)
PRESETS = {preset.name: preset for preset in _ALL}
