"""The public names for type checkers; `__init__.py` imports each when it is first used."""

from jaxformer.checkpoint import (
    Checkpoints,
)
from jaxformer.config import (
    BERT_BASE,
    GPT2,
    LLAMA3_8B,
    TRANSFORMER_BASE,
    TRANSFORMER_BIG,
    Alibi,
    AttentionOptions,
    EmbeddingOptions,
    FeedForwardOptions,
    Learned,
    Llama3,
    NoPositions,
    NormOptions,
    OutputOptions,
    PositionScheme,
    Relative,
    Rotary,
    Sinusoidal,
    TransformerConfig,
    WindowOptions,
    Yarn,
    positional_encoding,
)
from jaxformer.decoding import (
    CompletionOptions,
    SamplingConfig,
    SearchConfig,
    TranslationOptions,
    beam_search,
    sample,
)
from jaxformer.distributed import (
    replicated,
    sharded,
    single,
)
from jaxformer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Diverged,
    MissingExtra,
)
from jaxformer.nn.attention import (
    MultiHeadAttention,
)
from jaxformer.nn.axes import (
    Axes,
    parameter_axes,
)
from jaxformer.nn.blocks import (
    Block,
)
from jaxformer.nn.cache import (
    Cache,
)
from jaxformer.nn.embeddings import (
    Embedding,
)
from jaxformer.nn.feed_forward import (
    FeedForward,
)
from jaxformer.nn.heads import (
    Classifier,
    MaskedLanguageModel,
)
from jaxformer.nn.inspection import (
    Patched,
    read_taps,
    tap_names,
    with_attention_weights,
)
from jaxformer.nn.models import (
    DecoderOnly,
    EncoderDecoder,
    EncoderOnly,
)
from jaxformer.nn.norm import (
    Norm,
)
from jaxformer.nn.stack import (
    Encoder,
    Stack,
)
from jaxformer.nn.stacked_blocks import (
    stack_blocks,
    unstack_blocks,
)
from jaxformer.nn.taps import (
    tap,
)
from jaxformer.ops.attention import (
    auto_attention,
)
from jaxformer.ops.cross_entropy import (
    cross_entropy,
)
from jaxformer.ops.dropout import (
    DropoutRng,
)
from jaxformer.ops.masks import (
    AttentionMask,
)
from jaxformer.pipelines import (
    complete,
    embed,
    make_step_fn,
    score,
    translate,
)
from jaxformer.pipelines.ensemble import (
    Ensemble,
    stack_members,
)
from jaxformer.pipelines.fill_mask import (
    fill_mask,
)
from jaxformer.pretrained import (
    load_pretrained,
    save_pretrained,
)
from jaxformer.pretrained.loaded import (
    Loaded,
)
from jaxformer.pretrained.loading import (
    load,
    open_folder,
)
from jaxformer.text.data import (
    MaskedBatch,
    MaskedStream,
    PairBatch,
    Stream,
    StreamBatch,
    bucket_pairs,
)
from jaxformer.text.metrics import (
    score_translations,
)
from jaxformer.text.tokenizers import (
    BOS,
    EOS,
    PAD,
    Tokenizer,
    train_bpe,
)
from jaxformer.training import (
    OptimizerConfig,
    TrainState,
    causal_loss,
    init_train_state,
    make_optimizer,
    make_train_step,
    masked_loss,
    seq2seq_loss,
    with_learning_rate,
)

__version__: str

__all__ = [
    "Alibi",
    "AttentionMask",
    "AttentionOptions",
    "Axes",
    "BERT_BASE",
    "BOS",
    "Block",
    "Cache",
    "CheckpointError",
    "Checkpoints",
    "Classifier",
    "CompletionOptions",
    "ConfigError",
    "DataError",
    "DecoderOnly",
    "Diverged",
    "DropoutRng",
    "EOS",
    "Embedding",
    "EmbeddingOptions",
    "Encoder",
    "EncoderDecoder",
    "EncoderOnly",
    "Ensemble",
    "FeedForward",
    "FeedForwardOptions",
    "GPT2",
    "LLAMA3_8B",
    "Learned",
    "Llama3",
    "Loaded",
    "MaskedBatch",
    "MaskedLanguageModel",
    "MaskedStream",
    "MissingExtra",
    "MultiHeadAttention",
    "NoPositions",
    "Norm",
    "NormOptions",
    "OptimizerConfig",
    "OutputOptions",
    "PAD",
    "PairBatch",
    "Patched",
    "PositionScheme",
    "Relative",
    "Rotary",
    "SamplingConfig",
    "SearchConfig",
    "Sinusoidal",
    "Stack",
    "Stream",
    "StreamBatch",
    "TRANSFORMER_BASE",
    "TRANSFORMER_BIG",
    "Tokenizer",
    "TrainState",
    "TransformerConfig",
    "TranslationOptions",
    "WindowOptions",
    "Yarn",
    "__version__",
    "auto_attention",
    "beam_search",
    "bucket_pairs",
    "causal_loss",
    "complete",
    "cross_entropy",
    "embed",
    "fill_mask",
    "init_train_state",
    "load",
    "load_pretrained",
    "make_optimizer",
    "make_step_fn",
    "make_train_step",
    "masked_loss",
    "open_folder",
    "parameter_axes",
    "positional_encoding",
    "read_taps",
    "replicated",
    "sample",
    "save_pretrained",
    "score",
    "score_translations",
    "seq2seq_loss",
    "sharded",
    "single",
    "stack_blocks",
    "stack_members",
    "tap",
    "tap_names",
    "train_bpe",
    "translate",
    "unstack_blocks",
    "with_attention_weights",
    "with_learning_rate",
]
