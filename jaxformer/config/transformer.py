"""`TransformerConfig`: the sizes and choices that define a model."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from jaxformer.config.checks import check_at_least, check_choices, check_fraction, check_types
from jaxformer.errors import ConfigError

Positions = Literal["sinusoidal", "learned", "rotary", "alibi", "relative", "none"]
SinusoidalLayout = Literal["interleaved", "halves"]
RotaryScaling = Literal["none", "linear", "llama3", "yarn"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
TiedEmbeddings = Literal["none", "output", "inputs", "all"]


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes and choices that define the parameters and the function of a Transformer.

    The letters are those of Vaswani et al. 2017.

    >>> config = jf.TransformerConfig(vocab_size=11, d_model=8, d_ff=12, num_heads=2)
    >>> config.key_size  # d_model / num_heads
    4
    """

    vocab_size: int
    """V, the number of token ids (of the target, where source and target differ)."""
    d_model: int
    """D, the size of each token's vector."""
    d_ff: int
    """F, the size of the feed-forward network's hidden layer."""
    num_heads: int
    """h, the number of attention heads."""
    num_encoder_layers: int = 0
    """N, the number of encoder blocks."""
    num_decoder_layers: int = 0
    """N, the number of decoder blocks."""
    max_len: int = 512
    """The longest sequence in tokens; learned positions end there."""
    source_vocab_size: int | None = None
    """The number of source ids; None: `vocab_size`."""
    num_kv_heads: int | None = None
    """The number of key/value heads, each shared by a group of heads; None: `num_heads`."""
    num_encoder_heads: int | None = None
    """h of the encoder, where it is another one than that of the decoder; None: `num_heads`."""
    encoder_d_ff: int | None = None
    """F of the encoder, where it is another one than that of the decoder; None: `d_ff`."""
    head_dim: int | None = None
    """d_k, the size of a head's queries and keys; None: `d_model` / `num_heads`."""
    value_head_dim: int | None = None
    """d_v, the size of a head's values; None: `head_dim`."""
    attention_window: int | None = None
    """In causal self-attention, how many tokens a token attends to, itself included; None: all."""
    full_attention_interval: int | None = None
    """With `attention_window`, each layer whose number is a multiple of this attends to all tokens
    (Gemma 2: 2, every other layer; the first has the number 1); None: no layer does."""
    query_pre_attn_scalar: float | None = None
    """Products of queries and keys are divided by the square root of this; None: `head_dim`."""
    attention_softcap: float | None = None
    """Attention logits x become c tanh(x / c) with this c (Gemma 2: 50); None: they stay."""
    query_key_norm: bool = False
    """A norm over each head's queries and keys, before positions."""
    qkv_bias: bool | None = None
    """Projections to queries, keys and values have biases; None: as `use_bias` says."""
    positions: Positions = "sinusoidal"
    """How the model knows the order of tokens."""
    sinusoidal_layout: SinusoidalLayout = "interleaved"
    """Order of the columns: sines and cosines alternate, or all sines come first ("halves")."""
    sinusoidal_endpoint: bool = False
    """The wavelengths end at 10000 x 2 pi exactly, as in tensor2tensor and fairseq; the formula of
    the paper ends one step before."""
    sinusoidal_offset: int = 0
    """The position of a text's first token in the table of sinusoidal positions (fairseq: 2)."""
    rotary_base: float = 10_000.0
    """The base of the rotary frequencies (theta)."""
    rotary_fraction: float = 1.0
    """The part of each head's numbers that is rotated, from the first on (GPT-NeoX: 0.25)."""
    rotary_scaling: RotaryScaling = "none"
    """Rotary frequencies for longer texts than in training: "linear" divides all of them by
    `rotary_factor`, "llama3" and "yarn" only the low ones."""
    rotary_factor: float = 1.0
    """How much longer texts may be with `rotary_scaling`."""
    rotary_low_freq_factor: float = 1.0
    """"llama3" divides frequencies of fewer turns than this in `rotary_original_len` tokens."""
    rotary_high_freq_factor: float = 4.0
    """"llama3" keeps frequencies of more turns than this; those between are interpolated."""
    rotary_original_len: int = 8192
    """The length of texts in the training before "llama3" or "yarn" scaling."""
    rotary_beta_fast: float = 32.0
    """"yarn" keeps frequencies of more turns than this in `rotary_original_len` tokens."""
    rotary_beta_slow: float = 1.0
    """"yarn" divides frequencies of fewer turns than this; those between are interpolated."""
    rotary_attention_factor: float | None = None
    """"yarn" multiplies rotated queries and keys by this; None: 0.1 ln(`rotary_factor`) + 1."""
    relative_buckets: int = 32
    """The number of distance buckets of relative positions."""
    relative_max_distance: int = 128
    """All distances from this one on share the last bucket."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm."""
    norm_placement: Literal["pre", "post", "sandwich"] = "post"
    """The norm is before each sub-layer ("pre"), after the residual sum ("post"), or before and
    after each sub-layer ("sandwich")."""
    parallel_residual: bool = False
    """The feed-forward network reads what self-attention reads, not its result (GPT-NeoX); needs
    `norm_placement` "pre"."""
    norm_eps: float = 1e-6
    """Added to the variance in each norm."""
    activation: Activation = "relu"
    """The activation of the feed-forward network."""
    gated: bool = False
    """The activation of one projection multiplies another (a gated linear unit)."""
    use_bias: bool = True
    """Dense layers and layer norms have biases."""
    tied_embeddings: TiedEmbeddings = "all"
    """Which tables are one: "output" (target embedding and output projection), "inputs" (source
    and target embedding), "all" or "none". "inputs" and "all" need one vocabulary."""
    output_bias: bool = False
    """The output projection has a bias for each token."""
    logits_softcap: float | None = None
    """The model's logits x become c tanh(x / c) with this c (Gemma 2: 30); None: they stay."""
    scale_embeddings: bool = True
    """Embeddings are multiplied by the square root of `d_model`."""
    zero_embedding_id: int | None = None
    """The token whose embedding is zero, such as the start token of Marian; None: none."""
    embedding_norm: bool = False
    """A norm follows the sum of embeddings and positions."""
    num_token_types: int = 0
    """The number of token types (BERT's two sentences); 0: no type embedding."""
    pooler: bool = False
    """An encoder-only model has a dense layer with an activation on its first token."""
    pooler_activation: Literal["tanh", "relu"] = "tanh"
    """The activation of the pooler (BERT: tanh, the classifier of DistilBERT: relu)."""
    dropout_rate: float = 0.0
    """P_drop, on each sub-layer's output and on the sum of embeddings and positions."""
    attention_dropout_rate: float = 0.0
    """Dropout on the attention weights."""
    activation_dropout_rate: float = 0.0
    """Dropout on the hidden layer of the feed-forward network."""
    word_dropout_rate: float = 0.0
    """Dropout of the whole embeddings of source and target tokens (Sennrich et al. 2016, WMT16)."""
    initializer: Literal["xavier", "normal", "scaled_normal"] = "xavier"
    """Matrices start Glorot-uniform, normal with deviation 0.02, or normal with the projections
    into the residual divided by the square root of their number (GPT-2)."""
    scan_layers: bool = False
    """The parameters of a stack's blocks are stacked, and one loop applies them: a deep model
    compiles as fast as a shallow one. The function is the same."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of activations; parameters, norms and softmax stay float32."""

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        _check_sizes(self)
        _check_positions(self)
        _ = self.encoder  # checks its sizes
        check_fraction(self, "dropout_rate", "attention_dropout_rate", "activation_dropout_rate")
        check_fraction(self, "word_dropout_rate")
        if self.ties_inputs and self.source_vocab_size not in (None, self.vocab_size):
            raise ConfigError(
                f"tied_embeddings={self.tied_embeddings!r} needs one vocabulary, but "
                f"source_vocab_size={self.source_vocab_size} and vocab_size={self.vocab_size}: "
                "make them equal or tie 'output' only"
            )

    @property
    def encoder(self) -> "TransformerConfig":
        """The config of the encoder's stack."""
        if self.num_encoder_heads is None and self.encoder_d_ff is None:
            return self
        heads, d_ff = self.num_encoder_heads or self.num_heads, self.encoder_d_ff or self.d_ff
        return replace(self, num_heads=heads, d_ff=d_ff, num_encoder_heads=None, encoder_d_ff=None)

    @property
    def ties_inputs(self) -> bool:
        """Whether source and target have one embedding."""
        return self.tied_embeddings in ("inputs", "all")

    @property
    def ties_output(self) -> bool:
        """Whether the output projection is the target embedding's transpose."""
        return self.tied_embeddings in ("output", "all")

    @property
    def key_size(self) -> int:
        """d_k, the size of a head's queries and keys."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def value_size(self) -> int:
        """d_v, the size of a head's values."""
        return self.value_head_dim or self.key_size

    @property
    def rotary_size(self) -> int:
        """How many numbers of each head rotary positions rotate."""
        return int(self.key_size * self.rotary_fraction)

    @property
    def query_divisor(self) -> float:
        """Products of queries and keys are divided by the square root of this."""
        return self.query_pre_attn_scalar or self.key_size

    @property
    def attention_scale(self) -> float:
        """The factor of products of queries and keys."""
        return 1.0 / math.sqrt(self.query_divisor)

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def has_qkv_bias(self) -> bool:
        """Whether projections to queries, keys and values have biases."""
        return self.use_bias if self.qkv_bias is None else self.qkv_bias


def _check_sizes(config: TransformerConfig) -> None:
    check_at_least(config, 1, "vocab_size", "d_model", "d_ff", "num_heads", "max_len")
    check_at_least(config, 1, "source_vocab_size", "num_kv_heads", "head_dim", "value_head_dim")
    check_at_least(config, 1, "num_encoder_heads", "encoder_d_ff")
    check_at_least(config, 1, "attention_window", "rotary_factor", "rotary_original_len")
    check_at_least(config, 2, "full_attention_interval")
    check_at_least(config, 1e-6, "query_pre_attn_scalar", "attention_softcap", "logits_softcap")
    check_at_least(config, 0, "num_encoder_layers", "num_decoder_layers", "num_token_types")
    check_at_least(config, 0, "sinusoidal_offset", "rotary_attention_factor")
    check_at_least(config, 4, "relative_buckets")
    check_at_least(config, 0, "zero_embedding_id")
    if (config.zero_embedding_id or 0) >= config.vocab_size:
        raise ConfigError(
            f"zero_embedding_id={config.zero_embedding_id}, but vocab_size={config.vocab_size}: "
            "give an id below it"
        )
    if config.relative_max_distance <= config.relative_buckets // 2:
        raise ConfigError(
            f"relative_max_distance={config.relative_max_distance} is too small for "
            f"relative_buckets={config.relative_buckets}: give more than "
            f"{config.relative_buckets // 2}"
        )
    if config.head_dim is None and config.d_model % config.num_heads:
        raise ConfigError(
            f"d_model={config.d_model} is not divisible by num_heads={config.num_heads}: choose "
            "a divisor, or give head_dim"
        )
    if config.num_heads % config.kv_heads:
        raise ConfigError(
            f"num_heads={config.num_heads} is not divisible by num_kv_heads="
            f"{config.num_kv_heads}: each key/value head serves a whole group of query heads"
        )
    if config.parallel_residual and config.norm_placement != "pre":
        raise ConfigError(
            f"parallel_residual=True and norm_placement={config.norm_placement!r} were given, but "
            "two sub-layers can read the same vectors only with norm_placement='pre': set it"
        )


def _check_positions(config: TransformerConfig) -> None:
    for low, high in (
        ("rotary_low_freq_factor", "rotary_high_freq_factor"),
        ("rotary_beta_slow", "rotary_beta_fast"),
    ):
        if not 0 < getattr(config, low) < getattr(config, high):
            raise ConfigError(
                f"{low}={getattr(config, low)} and {high}={getattr(config, high)}, but it must be "
                f"0 < {low} < {high}"
            )
    if not 0 < config.rotary_fraction <= 1:
        raise ConfigError(
            f"rotary_fraction={config.rotary_fraction}, but it lies in 0 < rotary_fraction <= 1"
        )
    if config.positions == "rotary" and (config.rotary_size % 2 or config.rotary_size < 2):
        fraction = config.rotary_fraction
        part = "" if fraction == 1 else f" with rotary_fraction={fraction}: {config.rotary_size}"
        raise ConfigError(
            f"rotary positions rotate pairs of numbers, but head_dim={config.key_size}{part} is "
            "odd or too small: give an even head_dim, and a rotary_fraction of it that is even"
        )
    if config.sinusoidal_endpoint and (config.d_model % 2 or config.d_model < 4):
        raise ConfigError(
            f"sinusoidal_endpoint=True needs an even d_model of at least 4, but d_model="
            f"{config.d_model} was given: change one of them"
        )
