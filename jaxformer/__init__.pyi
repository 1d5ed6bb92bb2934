# The public names by purpose, for type checkers and for `__init__.py`, which reads them here.
# A text is the title of a group.

__version__: str
__all__: list[str]

"""Models, and the modules that they are made of"""
from jaxformer.nn.models import (
    DecoderOnly as DecoderOnly,
    EncoderDecoder as EncoderDecoder,
    EncoderOnly as EncoderOnly,
)
from jaxformer.nn.heads import (
    MaskedLanguageModel as MaskedLanguageModel,
    Classifier as Classifier,
    TokenClassifier as TokenClassifier,
    SpanPredictor as SpanPredictor,
)
from jaxformer.nn.stack import Stack as Stack, Encoder as Encoder
from jaxformer.nn.blocks import Block as Block
from jaxformer.nn.attention import MultiHeadAttention as MultiHeadAttention
from jaxformer.nn.feed_forward import FeedForward as FeedForward
from jaxformer.nn.experts import Experts as Experts
from jaxformer.nn.norm import Norm as Norm
from jaxformer.nn.embeddings import Embedding as Embedding
from jaxformer.nn.cache import (
    Cache as Cache,
    LayerCache as LayerCache,
    LayerState as LayerState,
)
from jaxformer.nn.nnx_model import (
    to_nnx as to_nnx,
    from_nnx as from_nnx,
    NNXModel as NNXModel,
)
from jaxformer.ops.masks import AttentionMask as AttentionMask
from jaxformer.ops.dropout import DropoutRng as DropoutRng
from jaxformer.ops.attention import auto_attention as auto_attention
from jaxformer.ops.cross_entropy import cross_entropy as cross_entropy

"""The recipe of a model, position schemes and published sizes"""
from jaxformer.config import (
    TransformerConfig as TransformerConfig,
    AttentionOptions as AttentionOptions,
    WindowOptions as WindowOptions,
    FeedForwardOptions as FeedForwardOptions,
    ExpertOptions as ExpertOptions,
    NormOptions as NormOptions,
    EmbeddingOptions as EmbeddingOptions,
    OutputOptions as OutputOptions,
)
from jaxformer.config import (
    PositionScheme as PositionScheme,
    Sinusoidal as Sinusoidal,
    Learned as Learned,
    Rotary as Rotary,
    Relative as Relative,
    Alibi as Alibi,
    NoPositions as NoPositions,
    Linear as Linear,
    Llama3 as Llama3,
    Yarn as Yarn,
    positional_encoding as positional_encoding,
)
from jaxformer.config import (
    TRANSFORMER_BASE as TRANSFORMER_BASE,
    TRANSFORMER_BIG as TRANSFORMER_BIG,
    GPT2 as GPT2,
    BERT_BASE as BERT_BASE,
    LLAMA3_8B as LLAMA3_8B,
)

"""Weights in, text in, text out"""
from jaxformer.pretrained import (
    load as load,
    open_folder as open_folder,
    Loaded as Loaded,
    load_pretrained as load_pretrained,
    save_pretrained as save_pretrained,
)
from jaxformer.pipelines import (
    complete as complete,
    complete_with_details as complete_with_details,
    stream as stream,
    translate as translate,
    translate_with_details as translate_with_details,
    score as score,
    score_with_details as score_with_details,
    score_tokens as score_tokens,
    score_continuations as score_continuations,
    score_pairs as score_pairs,
    fill_mask as fill_mask,
    fill_mask_with_details as fill_mask_with_details,
    embed as embed,
    embed_with_details as embed_with_details,
)
from jaxformer.pipelines import make_step_fn as make_step_fn
from jaxformer.pipelines.ensemble import Ensemble as Ensemble, stack_members as stack_members
from jaxformer.decoding import (
    CompletionOptions as CompletionOptions,
    TranslationOptions as TranslationOptions,
    SamplingConfig as SamplingConfig,
    SearchConfig as SearchConfig,
    sample as sample,
    beam_search as beam_search,
)

"""Text, tokens and batches"""
from jaxformer.text.tokenizers import (
    Tokenizer as Tokenizer,
    train_bpe as train_bpe,
    train_words as train_words,
    train_characters as train_characters,
    BOS as BOS,
    EOS as EOS,
    PAD as PAD,
)
from jaxformer.text.data import (
    Tokens as Tokens,
    Stream as Stream,
    MaskedStream as MaskedStream,
    Mixture as Mixture,
    bucket_pairs as bucket_pairs,
    StreamBatch as StreamBatch,
    MaskedBatch as MaskedBatch,
    PairBatch as PairBatch,
)
from jaxformer.text.metrics import score_translations as score_translations

"""Training"""
from jaxformer.training import (
    causal_loss as causal_loss,
    seq2seq_loss as seq2seq_loss,
    masked_loss as masked_loss,
    Loss as Loss,
    OptimizerConfig as OptimizerConfig,
    make_optimizer as make_optimizer,
)
from jaxformer.training import (
    TrainState as TrainState,
    init_train_state as init_train_state,
    make_train_step as make_train_step,
    with_learning_rate as with_learning_rate,
)
from jaxformer.training.whole_batch import (
    gather_rows as gather_rows,
    row_numbers as row_numbers,
    check_loss as check_loss,
)
from jaxformer.training.lora import (
    add_adapters as add_adapters,
    merge_adapters as merge_adapters,
    adapter_loss as adapter_loss,
)

"""Devices and checkpoints"""
from jaxformer.distributed import (
    single as single,
    replicated as replicated,
    sharded as sharded,
    make_mesh as make_mesh,
)
from jaxformer.checkpoint import Checkpoints as Checkpoints

"""Looking inside a model"""
from jaxformer.nn.taps import tap as tap
from jaxformer.nn.inspection import (
    tap_names as tap_names,
    read_taps as read_taps,
    Patched as Patched,
    with_attention_weights as with_attention_weights,
)
from jaxformer.nn.axes import parameter_axes as parameter_axes
from jaxformer.nn.stacked_blocks import (
    stack_blocks as stack_blocks,
    unstack_blocks as unstack_blocks,
)

"""Errors"""
from jaxformer.errors import (
    ConfigError as ConfigError,
    DataError as DataError,
    CheckpointError as CheckpointError,
    Diverged as Diverged,
    MissingExtra as MissingExtra,
)
