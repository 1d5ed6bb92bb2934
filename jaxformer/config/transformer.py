"""`TransformerConfig`, the recipe of a model, its parts, and the named sizes of the papers.

Each addition of later papers is a part: a value with defaults.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from jax import Array

from jaxformer.config.checks import (
    Checked,
    Count,
    Natural,
    NonNegative,
    Positive,
    Range,
    UnitInterval,
)
from jaxformer.config.positions import (
    AnyPositions,
    Learned,
    PositionScheme,
    Rotary,
    Sinusoidal,
)
from jaxformer.errors import ConfigError

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
TiedEmbeddings = Literal["none", "output", "inputs", "all"]
Dispatch = Literal["auto", "dense", "ragged"]
NormPlacement = Literal["pre", "post", "output", "sandwich", "parallel"]


def check_kv_heads(num_heads: int, num_kv_heads: int | None) -> None:
    """Raises `ConfigError` unless each key/value head serves as many query heads as the others."""
    if num_heads % (num_kv_heads or num_heads):
        raise ConfigError(
            f"num_heads={num_heads} is not divisible by num_kv_heads={num_kv_heads}: "
            "each key/value head serves a whole group of query heads"
        )


def check_norm_over_heads(norm_over_heads: bool, query_key_norm: bool) -> None:
    """Raises `ConfigError` for the option of a norm that is not there."""
    if norm_over_heads and not query_key_norm:
        raise ConfigError(
            "norm_over_heads=True says how queries and keys are normalised, but "
            "query_key_norm=False: give query_key_norm=True"
        )


def check_experts(
    num_experts: int, top_k: int, capacity_factor: float | None, dispatch: str
) -> None:
    """Raises `ConfigError` for choices of experts that contradict each other."""
    if top_k > num_experts:
        raise ConfigError(
            f"top_k={top_k}, but num_experts={num_experts}: a token cannot have more experts than "
            "there are"
        )
    if capacity_factor is not None and dispatch != "auto":
        raise ConfigError(
            f"capacity_factor={capacity_factor} gives each expert slots in training, but "
            f"dispatch={dispatch!r} computes without: leave one of the two out"
        )


def check_zero_id(zero_id: int | None, vocab_size: int) -> None:
    """Raises `ConfigError` for an id without a row in the table of embeddings."""
    if zero_id is not None and zero_id >= vocab_size:
        raise ConfigError(f"zero_id={zero_id}, but vocab_size={vocab_size}: give an id below it")


@dataclass(frozen=True)
class AttentionOptions(Checked):
    """Choices of attention.

    >>> gemma2 = jf.AttentionOptions(num_kv_heads=4, softcap=50.0)
    """

    num_kv_heads: Count | None = None
    """K, the number of key/value heads, each shared by a group of heads; None: the number of heads
    (Ainslie et al. 2023)."""
    query_scalar: Positive | None = None
    """Products of queries and keys are divided by the square root of this; None: the head size."""
    softcap: Positive | None = None
    """Attention logits x become c tanh(x / c) with this c (Gemma 2: 50); None: they stay."""
    query_key_norm: bool = False
    """A norm over each head's queries and keys, before positions."""
    norm_over_heads: bool = False
    """The norm of queries and keys is one over the numbers of all heads (OLMo 2)."""
    qkv_bias: bool | None = None
    """Projections to queries, keys and values have biases; None: as all other dense layers."""
    dropout_rate: UnitInterval = 0.0
    """Dropout on the attention weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm_over_heads(self.norm_over_heads, self.query_key_norm)


@dataclass(frozen=True)
class WindowOptions(Checked):
    """The window of causal self-attention in a stack of blocks.

    >>> gemma2 = jf.WindowOptions(size=4096, full_every=2)
    """

    size: Count | None = None
    """In causal self-attention, how many tokens a token attends to, itself included; None: all."""
    full_every: Annotated[int, Range(2)] | None = None
    """With `size`, each layer whose number is a multiple of this attends to all tokens (Gemma 2:
    2, every other layer; the first has the number 1); None: no layer does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full_every is not None and self.size is None:
            raise ConfigError(
                f"full_every={self.full_every} chooses layers without the window, but size=None: "
                "give the size of the window"
            )

    def is_full(self, layer: int) -> bool:
        """Whether the layer with this number, from 0, has no window."""
        if self.size is None:
            return True
        return self.full_every is not None and (layer + 1) % self.full_every == 0


@dataclass(frozen=True)
class ExpertOptions(Checked):
    """Choices of a feed-forward network of experts.

    >>> mixtral = jf.FeedForwardOptions("silu", gated=True, experts=jf.ExpertOptions(8, top_k=2))
    """

    num_experts: Count = 8
    """E, the number of experts, each a feed-forward network."""
    top_k: Count = 2
    """k, the number of experts of a token."""
    normalize: bool = True
    """The weights of a token's experts add up to 1 (Mixtral); else they are shares of a softmax
    over all experts."""
    shared_d_ff: Count | None = None
    """The size of the hidden layer of a shared expert, which all tokens have; None: no such
    expert."""
    jitter: UnitInterval = 0.0
    """In training the router's logits are multiplied by random numbers from 1 - jitter to
    1 + jitter."""
    capacity_factor: Positive | None = None
    """In training an expert takes at most T k / E times this of a row's T tokens, the first ones;
    it adds nothing to the others (Fedus et al. 2022). None: it takes all."""
    dispatch: Dispatch = "auto"
    """How tokens reach their experts: "dense" computes all experts of each token, "ragged" sorts
    the tokens by expert, and "auto" chooses by the number and size of the experts and the device.
    The function is the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_experts, self.top_k, self.capacity_factor, self.dispatch)


@dataclass(frozen=True)
class FeedForwardOptions(Checked):
    """Choices of the feed-forward network.

    >>> swiglu = jf.FeedForwardOptions("silu", gated=True)
    """

    activation: Activation | Callable[[Array], Array] = "relu"
    """The activation of the hidden layer: a name, or your own function."""
    gated: bool = False
    """The activation of one projection multiplies another (Shazeer 2020)."""
    dropout_rate: UnitInterval = 0.0
    """Dropout on the hidden layer."""
    experts: ExpertOptions | None = None
    """The network is several experts, among which a router chooses for each token; None: one
    network for all tokens."""


@dataclass(frozen=True)
class NormOptions(Checked):
    """Choices of the norms.

    >>> llama = jf.NormOptions("rms", placement="pre", eps=1e-5)
    """

    kind: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm."""
    placement: NormPlacement = "post"
    """The norm is before each sub-layer ("pre"), after the residual sum ("post"), of each
    sub-layer's output, before the sum ("output", OLMo 2), or before and after each sub-layer
    ("sandwich"). With "parallel" it is before each sub-layer, and the feed-forward network reads
    what self-attention reads, not its result (GPT-NeoX)."""
    eps: NonNegative = 1e-6
    """Added to the variance."""


@dataclass(frozen=True)
class EmbeddingOptions(Checked):
    """Choices of the embeddings.

    >>> gpt = jf.EmbeddingOptions(tied="output", scale=False)
    """

    tied: TiedEmbeddings = "all"
    """The tables that are one: "output" (target embedding and output projection), "inputs" (source
    and target embedding), "all" or "none". "inputs" and "all" need one vocabulary."""
    scale: bool = True
    """Embeddings are multiplied by the square root of `d_model`."""
    norm: bool = False
    """A norm follows the sum of embeddings and positions."""
    zero_id: Natural | None = None
    """The token whose embedding is zero, such as the start token of Marian; None: none."""
    num_types: Natural = 0
    """The number of token types (BERT's two sentences); 0: no type embedding."""


@dataclass(frozen=True)
class OutputOptions(Checked):
    """Choices of the output layer, which gives the logits.

    >>> gemma2 = jf.OutputOptions(softcap=30.0)
    """

    bias: bool | None = None
    """The output projection has a bias for each token; None: a masked model's has one."""
    softcap: Positive | None = None
    """The model's logits x become c tanh(x / c) with this c (Gemma 2: 30); None: they stay."""


def check_window_positions(positions: PositionScheme, window: WindowOptions) -> None:
    """Raises `ConfigError` for positions that differ in a window where there is none."""
    if window.size is None and positions.in_windows() is not positions:
        raise ConfigError(
            f"positions={positions} differ in layers with a window, but window.size=None: give a "
            "window, or leave window_base out"
        )


@dataclass(frozen=True)
class TransformerConfig(Checked):
    """The recipe of a whole model: the sizes of Vaswani et al. 2017, table 3, and parts.

    Each addition of later papers is a part with a default. The letters are the paper's.

    >>> long = jf.Rotary(base=5e5, scaling=jf.Llama3(factor=8.0))
    >>> pre = jf.NormOptions("rms", placement="pre")
    >>> llama = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, positions=long, norm=pre)
    """

    vocab_size: Count
    """V, the number of token ids (of the target, where source and target differ)."""
    d_model: Count
    """D, the size of each token's vector."""
    d_ff: Count
    """F, the size of the feed-forward network's hidden layer."""
    num_heads: Count
    """h, the number of attention heads."""
    num_encoder_layers: Natural = 0
    """N, the number of encoder blocks."""
    num_decoder_layers: Natural = 0
    """N, the number of decoder blocks."""
    max_len: Count = 512
    """The longest sequence in tokens; learned positions end there."""
    head_dim: Count | None = None
    """d_k, the size of a head's queries and keys; None: `d_model` / `num_heads`."""
    value_head_dim: Count | None = None
    """d_v, the size of a head's values; None: `head_dim`."""
    dropout_rate: UnitInterval = 0.0
    """P_drop, on each sub-layer's output and on the sum of embeddings and positions."""
    source_vocab_size: Count | None = None
    """The number of source ids; None: `vocab_size`."""
    positions: AnyPositions | PositionScheme = Sinusoidal()
    """The source of the order of tokens."""
    norm: NormOptions = NormOptions()
    """Norms: their kind and their place."""
    attention: AttentionOptions = AttentionOptions()
    """Attention: shared heads, norms, soft caps."""
    window: WindowOptions = WindowOptions()
    """The window of causal self-attention, and the layers without it."""
    feed_forward: FeedForwardOptions = FeedForwardOptions()
    """The feed-forward network: its activation and gate, and its experts."""
    embeddings: EmbeddingOptions = EmbeddingOptions()
    """Embeddings: which are tied, and how they are scaled."""
    output: OutputOptions = OutputOptions()
    """The output layer: bias and soft cap of the logits."""
    pooler: Literal["none", "tanh", "relu"] = "none"
    """The activation of a dense layer on an encoder's first token (BERT: tanh, the classifier of
    DistilBERT: relu)."""
    use_bias: bool = True
    """Dense layers and layer norms have biases."""
    initializer: Literal["xavier", "normal", "scaled_normal"] = "xavier"
    """Matrices start Glorot-uniform, normal with deviation 0.02, or normal with the projections
    into the residual divided by the square root of their number (GPT-2)."""
    scan_layers: bool = False
    """The parameters of a stack's blocks are stacked, and one loop applies them: a deep model
    compiles as fast as a shallow one. The function is the same."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of activations; parameters, norms and softmax stay float32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_head_size(self)
        check_kv_heads(self.num_heads, self.attention.num_kv_heads)
        _check_vocabulary(self)
        self.positions.check(self.d_model, self.key_size)
        check_window_positions(self.positions, self.window)

    @property
    def ties_inputs(self) -> bool:
        """Whether source and target have one embedding."""
        return self.embeddings.tied in ("inputs", "all")

    @property
    def ties_output(self) -> bool:
        """Whether the output projection is the target embedding's transpose."""
        return self.embeddings.tied in ("output", "all")

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
        """K, the number of key/value heads."""
        return self.attention.num_kv_heads or self.num_heads

    @property
    def qkv_bias(self) -> bool:
        """Whether projections to queries, keys and values have biases."""
        return self.use_bias if self.attention.qkv_bias is None else self.attention.qkv_bias


C = TypeVar("C")


def with_fields(config: C, changes: Mapping[str, Any]) -> C:
    """`config` with other values of fields; a field of a part has a dotted name.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2)
    >>> with_fields(config, {"d_ff": 16, "norm.eps": 1e-5}).norm
    NormOptions(kind='layer', placement='post', eps=1e-05)
    """
    values: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in changes.items():
        part, dot, field = name.partition(".")
        if dot:
            parts[part][field] = value
        else:
            values[name] = value
    for part, fields_of_part in parts.items():
        old = values[part] if part in values else getattr(config, part)
        values[part] = with_fields(old, fields_of_part)
    return replace(config, **values)  # type: ignore[type-var]


def dotted_fields(config: TransformerConfig) -> dict[str, Any]:
    """All fields by name, the fields of parts by dotted name; `positions` is one value.

    >>> dotted_fields(jf.GPT2)["norm.eps"]
    1e-05
    """
    dotted: dict[str, Any] = {}
    for name, value in vars(config).items():
        if is_dataclass(value) and name != "positions":
            dotted |= {f"{name}.{field}": x for field, x in vars(value).items()}
        else:
            dotted[name] = value
    return dotted


def _check_head_size(config: TransformerConfig) -> None:
    if config.head_dim is None and config.d_model % config.num_heads:
        raise ConfigError(
            f"d_model={config.d_model} is not divisible by num_heads={config.num_heads}: choose "
            "a divisor, or give head_dim"
        )


def _check_vocabulary(config: TransformerConfig) -> None:
    check_zero_id(config.embeddings.zero_id, config.vocab_size)
    if config.ties_inputs and config.source_vocab_size not in (None, config.vocab_size):
        raise ConfigError(
            f"tied={config.embeddings.tied!r} needs one vocabulary, but source_vocab_size="
            f"{config.source_vocab_size} and vocab_size={config.vocab_size}: make them equal or "
            "tie 'output' only"
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
    dropout_rate=0.1,
    positions=Learned(),
    norm=NormOptions(placement="pre", eps=1e-5),
    attention=AttentionOptions(dropout_rate=0.1),
    feed_forward=FeedForwardOptions("gelu_tanh"),
    embeddings=EmbeddingOptions(tied="output", scale=False),
    initializer="scaled_normal",
)
"""Radford et al. 2019, the smallest model: 124,439,808 parameters."""

BERT_BASE = TransformerConfig(
    vocab_size=30_522,
    d_model=768,
    d_ff=3072,
    num_heads=12,
    num_encoder_layers=12,
    dropout_rate=0.1,
    positions=Learned(),
    norm=NormOptions(eps=1e-12),
    attention=AttentionOptions(dropout_rate=0.1),
    feed_forward=FeedForwardOptions("gelu"),
    embeddings=EmbeddingOptions(tied="output", scale=False, norm=True, num_types=2),
    pooler="tanh",
    initializer="normal",
)
"""Devlin et al. 2019, the base model: 109,482,240 parameters with its pooler."""

LLAMA3_8B = TransformerConfig(
    vocab_size=128_256,
    d_model=4096,
    d_ff=14_336,
    num_heads=32,
    num_decoder_layers=32,
    max_len=8192,
    positions=Rotary(base=500_000.0),
    norm=NormOptions("rms", placement="pre", eps=1e-5),
    attention=AttentionOptions(num_kv_heads=8),
    feed_forward=FeedForwardOptions("silu", gated=True),
    embeddings=EmbeddingOptions(tied="none", scale=False),
    use_bias=False,
    initializer="normal",
    scan_layers=True,
    dtype="bfloat16",
)
"""Llama Team 2024, Table 3, the model of 8 billion: 8,030,261,248 parameters."""
