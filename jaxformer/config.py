"""`TransformerConfig`, the named sizes of the papers, and checks for configuration fields."""

import re
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from jaxformer.errors import ConfigError

Positions = Literal["sinusoidal", "learned", "rotary", "alibi", "relative", "none"]
SinusoidalLayout = Literal["interleaved", "halves"]
RotaryScaling = Literal["none", "linear", "llama3"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
TiedEmbeddings = Literal["none", "output", "inputs", "all"]

_TYPES = {
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "a string"),
    NoneType: (NoneType, "None"),
}


def check_types(config: Any) -> None:
    """Raises `ConfigError` for a field of the dataclass whose value has another type.

    Fields of type int, float, bool, str or None, and unions of these, are checked.
    """
    for field in fields(config):
        types, value = get_args(field.type) or (field.type,), getattr(config, field.name)
        if not all(isinstance(one, type) and one in _TYPES for one in types):
            continue
        accepted = tuple(_TYPES[one][0] for one in types)
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in types):
            allowed = " or ".join(_TYPES[one][1] for one in types)
            raise ConfigError(
                f"{field.name}={value!r} is a {type(value).__name__}, but it must be {allowed}: "
                f"give {allowed}"
            )


def check_choices(config: Any) -> None:
    """Raises `ConfigError` for a field of the dataclass whose `Literal` does not list its value."""
    for field in fields(config):
        choices = get_args(field.type) if get_origin(field.type) is Literal else ()
        value = getattr(config, field.name)
        if choices and value not in choices:
            raise ConfigError(
                f"{field.name}={value!r} is unknown: give one of {', '.join(choices)}"
            )


def check_at_least(config: Any, least: float, *names: str) -> None:
    """Raises `ConfigError` for one of the fields `names` below `least`; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}, but it must be at least {least}")


def check_fraction(config: Any, *names: str) -> None:
    """Raises `ConfigError` for one of the fields `names` below 0, or not below 1."""
    for name in names:
        value = getattr(config, name)
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{name}={value}, but it lies in 0 <= {name} < 1")


def check_pattern(config: Any, name: str) -> None:
    """Raises `ConfigError` unless the field `name` is a regular expression."""
    pattern = getattr(config, name)
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name}={pattern!r} is not a regular expression: {error}") from error


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes and choices that define the parameters and the function of a Transformer.

    The letters are those of Vaswani et al. 2017.

    >>> import jaxformer as jf
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
    head_dim: int | None = None
    """d_k, the size of a head's queries and keys; None: `d_model` / `num_heads`."""
    value_head_dim: int | None = None
    """d_v, the size of a head's values; None: `head_dim`."""
    attention_window: int | None = None
    """In causal self-attention, how many tokens a token attends to, itself included; None: all."""
    query_key_norm: bool = False
    """A norm over each head's queries and keys, before positions."""
    qkv_bias: bool | None = None
    """Projections to queries, keys and values have biases; None: as `use_bias` says."""
    positions: Positions = "sinusoidal"
    """How the model knows the order of tokens."""
    sinusoidal_layout: SinusoidalLayout = "interleaved"
    """Order of the columns: sines and cosines alternate, or all sines come first ("halves")."""
    rotary_base: float = 10_000.0
    """The base of the rotary frequencies (theta)."""
    rotary_scaling: RotaryScaling = "none"
    """Rotary frequencies for longer texts than in training: "linear" divides all of them by
    `rotary_factor`, "llama3" only the low ones."""
    rotary_factor: float = 1.0
    """How much longer texts may be with `rotary_scaling`."""
    rotary_low_freq_factor: float = 1.0
    """"llama3" divides frequencies of fewer turns than this in `rotary_original_len` tokens."""
    rotary_high_freq_factor: float = 4.0
    """"llama3" keeps frequencies of more turns than this; those between are interpolated."""
    rotary_original_len: int = 8192
    """The length of texts in the training before "llama3" scaling."""
    relative_buckets: int = 32
    """The number of distance buckets of relative positions."""
    relative_max_distance: int = 128
    """All distances from this one on share the last bucket."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm."""
    norm_placement: Literal["pre", "post"] = "post"
    """The norm is before each sub-layer ("pre") or after the residual sum ("post")."""
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
    scale_embeddings: bool = True
    """Embeddings are multiplied by the square root of `d_model`."""
    embedding_norm: bool = False
    """A norm follows the sum of embeddings and positions."""
    num_token_types: int = 0
    """The number of token types (BERT's two sentences); 0: no type embedding."""
    pooler: bool = False
    """An encoder-only model has a dense layer with tanh on its first token."""
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
        check_fraction(self, "dropout_rate", "attention_dropout_rate", "activation_dropout_rate")
        check_fraction(self, "word_dropout_rate")
        if self.ties_inputs and self.source_vocab_size not in (None, self.vocab_size):
            raise ConfigError(
                f"tied_embeddings={self.tied_embeddings!r} needs one vocabulary, but "
                f"source_vocab_size={self.source_vocab_size} and vocab_size={self.vocab_size}: "
                "make them equal or tie 'output' only"
            )

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
    check_at_least(config, 1, "attention_window", "rotary_factor", "rotary_original_len")
    check_at_least(config, 0, "num_encoder_layers", "num_decoder_layers", "num_token_types")
    check_at_least(config, 4, "relative_buckets")
    if not 0 < config.rotary_low_freq_factor < config.rotary_high_freq_factor:
        raise ConfigError(
            f"rotary_low_freq_factor={config.rotary_low_freq_factor} and rotary_high_freq_factor="
            f"{config.rotary_high_freq_factor}, but it must be 0 < low < high"
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
    if config.positions == "rotary" and config.key_size % 2:
        raise ConfigError(
            f"rotary positions rotate pairs of numbers, but head_dim={config.key_size} is odd: "
            "give an even head_dim"
        )


TRANSFORMER_BASE = TransformerConfig(
    vocab_size=37_000,
    d_model=512,
    d_ff=2048,
    num_heads=8,
    num_encoder_layers=6,
    num_decoder_layers=6,
    dropout_rate=0.1,
)
"""Vaswani et al. 2017, Table 3 "base": 63,082,496 parameters (the paper prints 65 million)."""

TRANSFORMER_BIG = TransformerConfig(
    vocab_size=37_000,
    d_model=1024,
    d_ff=4096,
    num_heads=16,
    num_encoder_layers=6,
    num_decoder_layers=6,
    dropout_rate=0.3,
)
"""Vaswani et al. 2017, Table 3 "big": 214,245,376 parameters (the paper prints 213 million)."""

GPT2 = TransformerConfig(
    vocab_size=50_257,
    d_model=768,
    d_ff=3072,
    num_heads=12,
    num_decoder_layers=12,
    max_len=1024,
    positions="learned",
    norm_placement="pre",
    norm_eps=1e-5,
    activation="gelu_tanh",
    tied_embeddings="output",
    scale_embeddings=False,
    dropout_rate=0.1,
    attention_dropout_rate=0.1,
    initializer="scaled_normal",
)
"""Radford et al. 2019, the smallest model: 124,439,808 parameters."""

BERT_BASE = TransformerConfig(
    vocab_size=30_522,
    d_model=768,
    d_ff=3072,
    num_heads=12,
    num_encoder_layers=12,
    positions="learned",
    norm_eps=1e-12,
    activation="gelu",
    tied_embeddings="output",
    scale_embeddings=False,
    embedding_norm=True,
    num_token_types=2,
    pooler=True,
    dropout_rate=0.1,
    attention_dropout_rate=0.1,
    initializer="normal",
)
"""Devlin et al. 2019, the base model: 109,482,240 parameters with its pooler."""

LLAMA3_8B = TransformerConfig(
    vocab_size=128_256,
    d_model=4096,
    d_ff=14_336,
    num_heads=32,
    num_kv_heads=8,
    num_decoder_layers=32,
    max_len=8192,
    positions="rotary",
    rotary_base=500_000.0,
    norm="rms",
    norm_placement="pre",
    norm_eps=1e-5,
    activation="silu",
    gated=True,
    use_bias=False,
    tied_embeddings="none",
    scale_embeddings=False,
    initializer="normal",
    scan_layers=True,
    dtype="bfloat16",
)
"""Llama Team 2024, Table 3, the model of 8 billion: 8,030,261,248 parameters."""
