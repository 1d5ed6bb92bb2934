"""What defines a Transformer as a function: sizes, norms, positions, dropouts, dtype."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

Positions = Literal["sinusoidal", "learned", "rotary", "alibi", "relative", "none"]
SinusoidalLayout = Literal["interleaved", "halves"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
TiedEmbeddings = Literal["none", "output", "inputs", "all"]


class ConfigError(ValueError):
    """Settings that contradict each other or name something unknown."""


def check_names(config: Any) -> None:
    """Raises `ConfigError` for a field of the dataclass whose `Literal` does not list its value."""
    for field in fields(config):
        names = get_args(field.type) if get_origin(field.type) is Literal else ()
        value = getattr(config, field.name)
        if names and value not in names:
            raise ConfigError(f"{field.name}={value!r} is unknown: give one of {', '.join(names)}")


def check_least(config: Any, least: int, *names: str) -> None:
    """Raises `ConfigError` for one of the fields `names` below `least`; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}, but it must be at least {least}")


def check_share(config: Any, *names: str) -> None:
    """Raises `ConfigError` for one of the fields `names` outside 0 <= share < 1."""
    for name in names:
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ConfigError(f"{name}={getattr(config, name)}, but it lies in 0 <= {name} < 1")


@dataclass(frozen=True)
class TransformerConfig:
    """Everything that shapes the weights and the function, and nothing about how to run it.

    The letters of Vaswani et al. 2017: `d_model`, `d_ff`, h = `num_heads`, d_k = `head_dim`,
    d_v = `value_head_dim`, N = `num_encoder_layers` = `num_decoder_layers`, P_drop =
    `dropout_rate` (on each sub-layer's output and on the sum of embeddings and positions).
    `num_kv_heads` below `num_heads` shares keys and values among groups of heads.

    `tied_embeddings`: "none"; "output" (target embedding = output projection); "inputs" (source
    embedding = target embedding); "all" (both). The last two need one vocabulary.
    `source_vocab_size` None means `vocab_size`. `output_bias` adds a number to each token's logit.

    `sinusoidal_layout`: sines and cosines take turns, or sines fill the first half of the columns.
    `relative_buckets` and `relative_max_distance` are those of `positions.relative_buckets`.
    `initializer`: matrices start Glorot-uniform ("xavier"), with deviation 0.02 ("normal"), or so
    with those that end a sub-layer divided by the root of their number ("scaled_normal", GPT-2).
    """

    vocab_size: int
    d_model: int
    d_ff: int
    num_heads: int
    num_encoder_layers: int = 0
    num_decoder_layers: int = 0
    max_len: int = 512
    source_vocab_size: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    positions: Positions = "sinusoidal"
    sinusoidal_layout: SinusoidalLayout = "interleaved"
    rotary_base: float = 10_000.0
    relative_buckets: int = 32
    relative_max_distance: int = 128
    norm: Literal["layer", "rms"] = "layer"
    norm_placement: Literal["pre", "post"] = "post"
    norm_eps: float = 1e-6
    activation: Activation = "relu"
    gated: bool = False
    use_bias: bool = True
    tied_embeddings: TiedEmbeddings = "all"
    output_bias: bool = False
    scale_embeddings: bool = True
    normalize_embeddings: bool = False
    num_token_types: int = 0
    pooler: bool = False
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    activation_dropout_rate: float = 0.0
    initializer: Literal["xavier", "normal", "scaled_normal"] = "xavier"
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        check_names(self)
        _check_sizes(self)
        check_share(self, "dropout_rate", "attention_dropout_rate", "activation_dropout_rate")
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


def _check_sizes(config: TransformerConfig) -> None:
    check_least(config, 1, "vocab_size", "d_model", "d_ff", "num_heads", "max_len")
    check_least(config, 1, "source_vocab_size", "num_kv_heads", "head_dim", "value_head_dim")
    check_least(config, 0, "num_encoder_layers", "num_decoder_layers", "num_token_types")
    check_least(config, 4, "relative_buckets")
    if config.relative_max_distance <= config.relative_buckets // 2:
        raise ConfigError(
            f"relative_max_distance={config.relative_max_distance} lies among the distances that "
            f"have one of relative_buckets={config.relative_buckets} each: give more than "
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
            f"rotary positions turn pairs of numbers, but head_dim={config.key_size} is odd: "
            "give an even head_dim"
        )


transformer_base = TransformerConfig(
    vocab_size=37_000,
    d_model=512,
    d_ff=2048,
    num_heads=8,
    num_encoder_layers=6,
    num_decoder_layers=6,
    dropout_rate=0.1,
)
"""Vaswani et al. 2017, Table 3 "base": 63,082,496 parameters (the paper prints 65 million)."""

transformer_big = TransformerConfig(
    vocab_size=37_000,
    d_model=1024,
    d_ff=4096,
    num_heads=16,
    num_encoder_layers=6,
    num_decoder_layers=6,
    dropout_rate=0.3,
)
"""Vaswani et al. 2017, Table 3 "big": 214,245,376 parameters (the paper prints 213 million)."""

gpt2 = TransformerConfig(
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

bert_base = TransformerConfig(
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
    normalize_embeddings=True,
    num_token_types=2,
    pooler=True,
    dropout_rate=0.1,
    attention_dropout_rate=0.1,
    initializer="normal",
)
"""Devlin et al. 2019, the base model: 109,482,240 parameters with its pooler."""
