"""The parts of a recipe that later papers added: each is a value with defaults."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxformer.config.checks import Checked, Count, Fraction, Natural, NonNegative, Positive, Range
from jaxformer.errors import ConfigError

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
TiedEmbeddings = Literal["none", "output", "inputs", "all"]
NormPlacement = Literal["pre", "post", "output", "sandwich", "parallel"]


@dataclass(frozen=True)
class AttentionOptions(Checked):
    """Choices of attention.

    >>> gemma2 = jf.AttentionOptions(num_kv_heads=4, window=4096, full_every=2, softcap=50.0)
    """

    num_kv_heads: Count | None = None
    """K, the number of key/value heads, each shared by a group of heads; None: the number of heads
    (Ainslie et al. 2023)."""
    window: Count | None = None
    """In causal self-attention, how many tokens a token attends to, itself included; None: all."""
    full_every: Annotated[int, Range(2)] | None = None
    """With `window`, each layer whose number is a multiple of this attends to all tokens (Gemma 2:
    2, every other layer; the first has the number 1); None: no layer does."""
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
    dropout_rate: Fraction = 0.0
    """Dropout on the attention weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full_every is not None and self.window is None:
            raise ConfigError(
                f"full_every={self.full_every} chooses layers without the window, but window=None: "
                "give a window"
            )
        if self.norm_over_heads and not self.query_key_norm:
            raise ConfigError(
                "norm_over_heads=True says how queries and keys are normalised, but "
                "query_key_norm=False: give query_key_norm=True"
            )


@dataclass(frozen=True)
class FeedForwardOptions(Checked):
    """Choices of the feed-forward network.

    >>> swiglu = jf.FeedForwardOptions("silu", gated=True)
    """

    activation: Activation = "relu"
    """The activation of the hidden layer."""
    gated: bool = False
    """The activation of one projection multiplies another (Shazeer 2020)."""
    dropout_rate: Fraction = 0.0
    """Dropout on the hidden layer."""


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
    """The output projection has a bias for each token; None: that of a masked model has one."""
    softcap: Positive | None = None
    """The model's logits x become c tanh(x / c) with this c (Gemma 2: 30); None: they stay."""
