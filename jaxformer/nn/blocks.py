"""The residual block (Vaswani et al. 2017, section 3.1), and what its backward pass recomputes.

The parameters of blocks stand apart, or stacked for one loop over them.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer.config.positions import Rotation
from jaxformer.config.transformer import AttentionOptions, FeedForwardOptions, NormOptions
from jaxformer.errors import ConfigError
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.cache import LayerCache
from jaxformer.nn.layers import Dropout, FeedForward, Initializer, Norm, tap
from jaxformer.ops.attention import AttentionFn, reference
from jaxformer.ops.attention.kernel import FLASH_RESIDUALS
from jaxformer.ops.dropout import DropoutRng
from jaxformer.ops.masks import AttentionMask
from jaxformer.ops.partitioning import divide_positions, gather_positions


class Block(nn.Module):
    """Self-attention, cross-attention if `cross`, feed-forward; each with residual and norm.

    Post-norm (Vaswani et al. 2017, section 3.1): x = norm(x + dropout(f(x))). Pre-norm:
    x = x + dropout(f(norm(x))). Sandwich (Ding et al. 2021): x = x + dropout(norm(f(norm(x)))).
    Parallel (Wang & Komatsuzaki 2021): pre-norm, and the feed-forward network reads the block's
    input, as self-attention does.

    >>> block, x = jf.Block(num_heads=2, d_ff=12), jnp.ones((3, 5, 8))  # [B, T, D]
    >>> causal = jf.AttentionMask(causal=True)
    >>> (out, _), variables = block.init_with_output(jax.random.key(0), x, causal)
    >>> out.shape
    (3, 5, 8)
    >>> sorted(variables["params"])
    ['attention', 'attention_norm', 'feed_forward', 'feed_forward_norm']
    """

    num_heads: int
    d_ff: int
    cross: bool = False
    """Whether the block attends to an encoder's keys and values."""
    head_dim: int | None = None
    """H, the size of a head's queries and keys; None: D / N."""
    value_head_dim: int | None = None
    """Hv, the size of a head's values; None: H."""
    dropout_rate: float = 0.0
    """P_drop, on each sub-layer's output."""
    norm_options: NormOptions = NormOptions()
    attention_options: AttentionOptions = AttentionOptions()
    """A window is part of the mask: here it is refused."""
    feed_forward_options: FeedForwardOptions = FeedForwardOptions()
    use_bias: bool = True
    attention_fn: AttentionFn = reference
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    """The initializer of projections into the residual; None: `kernel_init`."""
    dtype: Any = jnp.float32
    layer: int | None = None
    """The number of the block in its stack, from 0; None in a loop over blocks, or alone."""
    make_attention: Callable[..., nn.Module] = MultiHeadAttention
    """Makes its attentions from the fields of `MultiHeadAttention`."""
    make_feed_forward: Callable[..., nn.Module] = FeedForward
    """Makes its feed-forward network from the fields of `FeedForward`."""
    make_norm: Callable[..., nn.Module] = Norm
    """Makes its norms from the fields of `Norm`."""

    def setup(self) -> None:
        if self.attention_options.window is not None:
            raise ConfigError(
                f"attention_options.window={self.attention_options.window}, but a block sees what "
                f"its mask allows: give AttentionMask(causal=True, window="
                f"{self.attention_options.window})"
            )
        norm, shared = self.norm_options, {"use_bias": self.use_bias, "dtype": self.dtype}
        shared |= {"kernel_init": self.kernel_init, "out_init": self.out_init}
        options = dict(vars(self.attention_options))
        for name in ("window", "full_every"):  # they are in the masks of the stack
            options.pop(name)
        make_norm = partial(self.make_norm, kind=norm.kind, eps=norm.eps, use_bias=self.use_bias)
        attention = partial(
            self.make_attention,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            make_norm=make_norm,
            attention_fn=self.attention_fn,
            **options,
            **shared,
        )
        self.attention: nn.Module = attention()
        if self.cross:
            self.cross_attention: nn.Module = attention()
        options = vars(self.feed_forward_options)
        self.feed_forward: nn.Module = self.make_feed_forward(d_ff=self.d_ff, **options, **shared)
        for part in ("attention", *(("cross_attention",) if self.cross else ()), "feed_forward"):
            setattr(self, f"{part}_norm", make_norm())
            if norm.placement == "sandwich":
                setattr(self, f"{part}_post_norm", make_norm())
            setattr(self, f"{part}_dropout", Dropout(self.dropout_rate, f"{part}_norm"))

    def __call__(
        self,
        x: Float[Array, "R T D"],
        mask: AttentionMask | None = None,
        *,
        rotation: Rotation | None = None,
        bias: Float[Array, "_ N Q S"] | None = None,
        encoder_kv: tuple[Array, Array] | Float[Array, "B S E"] | None = None,
        encoder_mask: AttentionMask | None = None,
        layer_cache: LayerCache | None = None,
        dropout_rng: DropoutRng | None = None,
    ) -> tuple[Float[Array, "R T D"], LayerCache | None]:
        """`x` after the block, and `layer_cache` with the keys and values of `x` added.

        Without `layer_cache` the tokens of `x` attend to each other; with it, to all tokens in it,
        and the first token of `x` has the position `mask.offset`. `rotation` and `bias` are those
        of the position scheme, for self-attention. `encoder_kv` (the encoder's output, or its keys
        and values [B, S, K, H]) and `encoder_mask` are for the cross-attention. R is B, or B times
        the number of beams. Raises `ConfigError` where `cross` and `encoder_kv` do not agree.
        """
        if self.cross != (encoder_kv is not None):
            given = "no encoder_kv was" if self.cross else "encoder_kv was"
            raise ConfigError(
                f"cross={self.cross}, but {given} given: a block with cross=True attends to the "
                "encoder's output, or its keys and values (block.cross_attention.keys_values)"
            )
        mask = AttentionMask() if mask is None else mask
        residual_input = x
        h = self.sublayer_input("attention", x)
        kv = None  # those of `h`
        if layer_cache is not None:
            keys, values = self.attention.keys_values(h, rotation)
            layer_cache = layer_cache.write(keys, values, mask.offset)
            kv = layer_cache.read()
        y = self.attention(h, kv, mask, rotation=rotation, bias=bias, dropout_rng=dropout_rng)
        x = self.add_residual("attention", x, y, dropout_rng)
        if self.cross:
            h = self.sublayer_input("cross_attention", x)
            y = self.cross_attention(h, encoder_kv, encoder_mask, dropout_rng=dropout_rng)
            x = self.add_residual("cross_attention", x, y, dropout_rng)
        is_parallel = self.norm_options.placement == "parallel"
        h = self.sublayer_input("feed_forward", residual_input if is_parallel else x)
        x = self.add_residual("feed_forward", x, self.feed_forward(h, dropout_rng), dropout_rng)
        return x, layer_cache

    def sublayer_input(self, part: str, x: jax.Array) -> jax.Array:
        """The input of the sub-layer `part`."""
        is_raw = self.norm_options.placement in ("post", "output")
        x = x if is_raw else getattr(self, f"{part}_norm")(x)
        return x if jax.sharding.get_abstract_mesh().empty else gather_positions(x)

    def add_residual(
        self, part: str, x: jax.Array, y: jax.Array, dropout_rng: DropoutRng | None
    ) -> jax.Array:
        """The residual sum of `x` and the output `y` of the sub-layer `part`."""
        if not jax.sharding.get_abstract_mesh().empty:
            y = divide_positions(y)
        if self.norm_options.placement == "sandwich":
            y = getattr(self, f"{part}_post_norm")(y)
        if self.norm_options.placement == "output":
            y = getattr(self, f"{part}_norm")(y)
        if self.dropout_rate:
            y = getattr(self, f"{part}_dropout")(y, dropout_rng)
        x = x + y
        x = getattr(self, f"{part}_norm")(x) if self.norm_options.placement == "post" else x
        return tap(self, f"after_{part}", x)


def _remat(
    policy: Callable[..., bool] | None, *, layer: int | None = None, **fields: Any
) -> nn.Module:
    """A `Block` that recomputes what `policy` does not save; None saves nothing."""
    # In a loop XLA cannot merge the two computations, so nothing has to prevent it.
    in_scan = layer is None
    return nn.remat(Block, policy=policy, prevent_cse=not in_scan)(layer=layer, **fields)


def _recompute_attention(*, attention_fn: AttentionFn, **fields: Any) -> nn.Module:
    """A `Block` that keeps only the inputs and outputs of its attention functions."""

    def recomputed(q, k, v, mask, *, scale, bias=None, dropout=None, **options):
        def attend(q, k, v, bias):
            return attention_fn(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, **options)

        return jax.checkpoint(attend)(q, k, v, bias)

    return Block(attention_fn=recomputed, **fields)


def _is_matmul_with_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether the product has at most one batch dimension.

    Attention's own products have two, rows and heads. Those with weights have none, or one where
    each group of a mesh has a copy of the weights.
    """
    if primitive is not jax.lax.dot_general_p:
        return False
    _, (batch, _) = params["dimension_numbers"]
    return len(batch) <= 1


REMAT: dict[str, Callable[..., nn.Module]] = {
    "none": Block,
    "attention": _recompute_attention,
    "matmuls": partial(_remat, _is_matmul_with_weights),
    "all_but_attention": partial(
        _remat, jax.checkpoint_policies.save_only_these_names(FLASH_RESIDUALS)
    ),
    "blocks": partial(_remat, None),
}
"""Blocks by what the backward pass recomputes (Chen et al. 2016); the gradient is the same.

"none" keeps everything. "attention" recomputes the attention's scores and weights. "matmuls" keeps
only the products with weights (JAX's `dots_with_no_batch_dims_saveable`), "blocks" only each
block's input (`nothing_saveable`). "all_but_attention" also keeps the result of attention, where a
flash attention function computes it.
"""

STACKED = "stacked_blocks"
"""The name of the subtree of parameters whose leaves have a leading layer axis."""


def stack_blocks(params: Any) -> Any:
    """`params` of a model without `scan_layers` in the layout of the same model with it.

    The subtrees blocks_0, blocks_1, ... of each stack become one, `stacked_blocks`.

    >>> blocks = {"blocks_0": {"scale": jnp.zeros(3)}, "blocks_1": {"scale": jnp.ones(3)}}
    >>> jf.stack_blocks({"decoder": blocks})["decoder"]["stacked_blocks"]["scale"]
    Array([[0., 0., 0.],
           [1., 1., 1.]], dtype=float32)
    """
    if not isinstance(params, Mapping):
        return params
    names = [name for name in params if re.fullmatch(r"blocks_\d+", name)]
    rest = {name: stack_blocks(tree) for name, tree in params.items() if name not in names}
    if not names:
        return rest
    blocks = (params[f"blocks_{i}"] for i in range(len(names)))

    def stack(*leaves: Any) -> Any:  # parameters that were loaded stay in numpy
        return (np if isinstance(leaves[0], np.ndarray) else jnp).stack(leaves)

    return rest | {STACKED: jax.tree.map(stack, *blocks)}


def unstack_blocks(params: Any) -> Any:
    """The inverse of `stack_blocks`, also for the intermediates that such a model returns.

    >>> blocks = jf.unstack_blocks({"stacked_blocks": {"scale": jnp.array([[1.0], [2.0]])}})
    >>> blocks["blocks_1"]["scale"]
    Array([2.], dtype=float32)
    """
    if not isinstance(params, Mapping):
        return params
    unstacked = {name: unstack_blocks(tree) for name, tree in params.items() if name != STACKED}
    if STACKED in params:
        count = len(jax.tree.leaves(params[STACKED])[0])
        for i in range(count):
            unstacked[f"blocks_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], params[STACKED])
    return unstacked
