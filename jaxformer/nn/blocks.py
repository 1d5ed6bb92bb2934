"""The residual block (Vaswani et al. 2017, section 3.1)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from jaxformer.config.checks import Count, Natural, UnitInterval
from jaxformer.config.positions import Rotation
from jaxformer.config.transformer import AttentionOptions, FeedForwardOptions, NormOptions
from jaxformer.errors import ConfigError
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.cache import LayerCache, LayerState
from jaxformer.nn.checked_module import CheckedModule
from jaxformer.nn.dense import Initializer
from jaxformer.nn.dropout import Dropout
from jaxformer.nn.experts import Experts
from jaxformer.nn.feed_forward import FeedForward
from jaxformer.nn.norm import Norm
from jaxformer.nn.taps import tap
from jaxformer.ops.attention import AttentionFn, reference
from jaxformer.ops.dropout import DropoutRng
from jaxformer.ops.masks import AnyArray, AttentionMask, as_attention_mask
from jaxformer.ops.partitioning import divide_positions, gather_positions

KeysValues = tuple[Array, Array] | Float[Array, "B S E"]
"""Vectors, or their keys [B, S, K, H] and values [B, S, K, Hv]."""


class Block(CheckedModule):
    """Self-attention, cross-attention if `cross`, feed-forward; each with residual and norm.

    Post-norm (Vaswani et al. 2017, section 3.1): x = norm(x + dropout(f(x))). Pre-norm:
    x = x + dropout(f(norm(x))). Sandwich (Ding et al. 2021): x = x + dropout(norm(f(norm(x)))).
    Parallel (Wang & Komatsuzaki 2021): pre-norm, and the feed-forward network reads the block's
    input, as self-attention does.

    >>> block, x = jf.Block(num_heads=2, d_ff=12), jnp.ones((3, 5, 8))  # [B, T, D]
    >>> causal = jf.AttentionMask(causal=True)
    >>> out, variables = block.init_with_output(jax.random.key(0), x, causal)
    >>> out.shape
    (3, 5, 8)
    >>> sorted(variables["params"])
    ['attention', 'attention_norm', 'feed_forward', 'feed_forward_norm']
    """

    num_heads: Count
    d_ff: Count
    cross: bool = False
    """Whether the block attends to an encoder's keys and values."""
    head_dim: Count | None = None
    """H, the size of a head's queries and keys; None: D / N."""
    value_head_dim: Count | None = None
    """Hv, the size of a head's values; None: H."""
    dropout_rate: UnitInterval = 0.0
    """P_drop, on each sub-layer's output."""
    norm_options: NormOptions = NormOptions()
    attention_options: AttentionOptions = AttentionOptions()
    feed_forward_options: FeedForwardOptions = FeedForwardOptions()
    use_bias: bool = True
    attention_fn: AttentionFn = reference
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    """The initializer of projections into the residual; None: `kernel_init`."""
    dtype: Any = jnp.float32
    layer: Natural | None = None
    """The number of the block in its stack, from 0; None for a block alone.

    In a loop over blocks (`scan_layers`) `make_block` gets None, and the block's methods see a
    traced number: compute with it by `jnp`."""
    make_attention: Callable[..., nn.Module] = MultiHeadAttention
    """Makes its attentions from the fields of `MultiHeadAttention`.

    One is called as that is; to decode it needs the methods `init_cache` and `decode`."""
    make_feed_forward: Callable[..., nn.Module] = FeedForward
    """Makes its feed-forward network from the fields of `FeedForward`."""
    make_norm: Callable[..., nn.Module] = Norm
    """Makes its norms from the fields of `Norm`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        experts = self.feed_forward_options.experts
        if experts is not None and self.make_feed_forward is not FeedForward:
            raise ConfigError(
                f"experts={experts} makes the feed-forward network, and so does make_feed_forward="
                f"{self.make_feed_forward}: leave one of the two out, or give "
                "make_feed_forward=partial(Experts, ...)"
            )

    def setup(self) -> None:
        make_norm = partial(
            self.make_norm,
            kind=self.norm_options.kind,
            eps=self.norm_options.eps,
            use_bias=self.use_bias,
        )
        make_attention = partial(
            self.make_attention,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            **vars(self.attention_options),
            use_bias=self.use_bias,
            make_norm=make_norm,
            attention_fn=self.attention_fn,
            kernel_init=self.kernel_init,
            out_init=self.out_init,
            dtype=self.dtype,
        )
        has_post_norm = self.norm_options.placement == "sandwich"

        # The places of dropout are parts of the hash of its masks: other names draw other masks.
        self.attention: nn.Module = make_attention()
        self.attention_norm: nn.Module = make_norm()
        self.attention_post_norm: nn.Module | None = make_norm() if has_post_norm else None
        self.attention_dropout: Dropout = Dropout(self.dropout_rate, "attention_norm")
        if self.cross:
            self.cross_attention: nn.Module = make_attention()
            self.cross_attention_norm: nn.Module = make_norm()
            self.cross_attention_post_norm: nn.Module | None = (
                make_norm() if has_post_norm else None
            )
            self.cross_attention_dropout: Dropout = Dropout(
                self.dropout_rate, "cross_attention_norm"
            )
        options = self.feed_forward_options
        make_feed_forward = self.make_feed_forward
        if options.experts is not None:
            make_feed_forward = partial(Experts, **vars(options.experts))
        self.feed_forward: nn.Module = make_feed_forward(
            d_ff=self.d_ff,
            activation=options.activation,
            gated=options.gated,
            dropout_rate=options.dropout_rate,
            use_bias=self.use_bias,
            kernel_init=self.kernel_init,
            out_init=self.out_init,
            dtype=self.dtype,
        )
        self.feed_forward_norm: nn.Module = make_norm()
        self.feed_forward_post_norm: nn.Module | None = make_norm() if has_post_norm else None
        self.feed_forward_dropout: Dropout = Dropout(self.dropout_rate, "feed_forward_norm")

    def __call__(
        self,
        x: Float[Array, "R T D"],
        mask: AttentionMask | Bool[AnyArray, "R T"] | None = None,
        *,
        rotation: Rotation | None = None,
        bias: Float[Array, "_ N T T"] | None = None,
        encoder_kv: KeysValues | None = None,
        encoder_mask: AttentionMask | None = None,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "R T D"]:
        """`x` after the block, whose tokens attend to each other.

        `mask` may be a padding mask, True at real tokens. `rotation` and `bias` come from the
        position scheme, for self-attention. `encoder_kv` (the encoder's output, or its keys and
        values) and `encoder_mask` are for the cross-attention. Raises `ConfigError` where `cross`
        and `encoder_kv` do not agree.
        """
        mask = as_attention_mask(mask)
        h = sublayer_input(x, self.attention_norm, self.norm_options)
        y = self.attention(h, None, mask, rotation=rotation, bias=bias, dropout_rng=dropout_rng)
        return self.after_attention(x, y, encoder_kv, encoder_mask, dropout_rng)

    def init_cache(
        self, batch_size: int, num_beams: int, max_length: int, d_model: int
    ) -> LayerCache | LayerState | Any:
        """The cache of `decode` before the first token: its attention's `init_cache`.

        It is for `num_beams` beams of `batch_size` sentences, of up to `max_length` tokens each.
        """
        if not hasattr(self.attention, "init_cache"):
            raise ConfigError(
                f"the attention {type(self.attention).__name__} has no init_cache, so it does not "
                "decode with a cache: give it the methods init_cache and decode, as "
                "MultiHeadAttention has them"
            )
        return self.attention.init_cache(batch_size, num_beams, max_length, d_model)

    def decode(
        self,
        x: Float[Array, "R T D"],
        layer_cache: LayerCache | LayerState | Any,
        mask: AttentionMask,
        *,
        rotation: Rotation | None = None,
        bias: Float[Array, "_ N Q S"] | None = None,
        encoder_kv: KeysValues | None = None,
        encoder_mask: AttentionMask | None = None,
    ) -> tuple[Float[Array, "R T D"], LayerCache | LayerState | Any]:
        """`x` after the block, and `layer_cache` with the tokens of `x` added.

        They attend to all tokens in it; the first of them has the position `mask.offset`. R is B
        times the number of beams. Other arguments are as in a call.
        """
        h = sublayer_input(x, self.attention_norm, self.norm_options)
        y, layer_cache = self.attention.decode(h, layer_cache, mask, rotation=rotation, bias=bias)
        return self.after_attention(x, y, encoder_kv, encoder_mask, None), layer_cache

    def after_attention(
        self,
        x: Float[Array, "R T D"],
        y: Float[Array, "R T D"],
        encoder_kv: KeysValues | None,
        encoder_mask: AttentionMask | None,
        dropout_rng: DropoutRng | Array | None,
    ) -> Float[Array, "R T D"]:
        """The block's output, from its input `x` and the output `y` of its self-attention."""
        self._check_encoder(encoder_kv)
        block_input = x
        x = residual_sum(
            x,
            y,
            self.attention_norm,
            self.attention_post_norm,
            self.attention_dropout,
            self.norm_options,
            dropout_rng,
        )
        x = tap(self, "after_attention", x)
        if self.cross:
            h = sublayer_input(x, self.cross_attention_norm, self.norm_options)
            y = self.cross_attention(h, encoder_kv, encoder_mask, dropout_rng=dropout_rng)
            x = residual_sum(
                x,
                y,
                self.cross_attention_norm,
                self.cross_attention_post_norm,
                self.cross_attention_dropout,
                self.norm_options,
                dropout_rng,
            )
            x = tap(self, "after_cross_attention", x)
        is_parallel = self.norm_options.placement == "parallel"
        feed_forward_input = block_input if is_parallel else x
        h = sublayer_input(feed_forward_input, self.feed_forward_norm, self.norm_options)
        y = self.feed_forward(h, dropout_rng)
        x = residual_sum(
            x,
            y,
            self.feed_forward_norm,
            self.feed_forward_post_norm,
            self.feed_forward_dropout,
            self.norm_options,
            dropout_rng,
        )
        return tap(self, "after_feed_forward", x)

    def _check_encoder(self, encoder_kv: KeysValues | None) -> None:
        if self.cross != (encoder_kv is not None):
            given = "no encoder_kv was" if self.cross else "encoder_kv was"
            raise ConfigError(
                f"cross={self.cross}, but {given} given: a block with cross=True attends to the "
                "encoder's output, or its keys and values (block.cross_attention.keys_values)"
            )


# Functions, not methods: Flax tabulates the arguments of methods, which should be arrays.
def sublayer_input(
    x: Float[Array, "R T D"], norm: nn.Module, options: NormOptions
) -> Float[Array, "R T D"]:
    """The input of a sub-layer: `x`, normalised where the norm comes before the sub-layer."""
    if options.placement in ("pre", "sandwich", "parallel"):
        x = norm(x)
    return gather_positions(x)


def residual_sum(
    x: Float[Array, "R T D"],
    y: Float[Array, "R T D"],
    norm: nn.Module,
    post_norm: nn.Module | None,
    dropout: Dropout,
    options: NormOptions,
    dropout_rng: DropoutRng | Array | None,
) -> Float[Array, "R T D"]:
    """`x` + dropout(`y`) for the output `y` of a sub-layer, normalised where it is asked."""
    y = divide_positions(y)
    if post_norm is not None:
        y = post_norm(y)
    if options.placement == "output":
        y = norm(y)
    x = x + dropout(y, dropout_rng)
    return norm(x) if options.placement == "post" else x
