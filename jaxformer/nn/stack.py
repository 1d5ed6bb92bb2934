"""The encoder and the decoder: a stack of blocks, one after the other or in one loop."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxformer.config import Places, PositionScheme, Rotation, TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import Block, MakeBlock, Remat
from jaxformer.nn.cache import Cache, FoldBeams, KeyValue, LayerCache
from jaxformer.nn.layers import Dropout, Initializer, Norm
from jaxformer.ops.attention import ATTENTION_FNS, AttentionFn, reference
from jaxformer.ops.dropout import DropoutRng, as_dropout_rng
from jaxformer.ops.masks import AnyArray, AttentionMask
from jaxformer.ops.partitioning import divide_positions, gather_positions

STACKED = "stacked_blocks"
"""The name of the subtree of parameters whose leaves have a leading layer axis."""
INTERMEDIATES = "intermediates"
"""The collection in which values are recorded if it is mutable."""
REPLACEMENTS = "replacements"
"""The collection that holds a function for each value to replace."""


def make_norm(config: TransformerConfig) -> Norm:
    """A norm of the model of `config`."""
    return Norm(config.norm.kind, config.norm.eps, config.use_bias)


def make_block(
    config: TransformerConfig, cross: bool, attention_fn: AttentionFn, block: MakeBlock = Block
) -> nn.Module:
    """A `block` of the stack of `config`, with cross-attention if `cross`."""
    if isinstance(block, Remat):
        block = partial(block, in_scan=config.scan_layers)
    return block(
        num_heads=config.num_heads,
        d_ff=config.d_ff,
        cross=cross,
        head_dim=config.head_dim,
        value_head_dim=config.value_head_dim,
        dropout_rate=config.dropout_rate,
        norm_options=config.norm,
        attention_options=replace(config.attention, window=None, full_every=None),
        feed_forward_options=config.feed_forward,
        use_bias=config.use_bias,
        attention_fn=FoldBeams(attention_fn),
        kernel_init=config.dense_init,
        out_init=config.residual_init,
        dtype=config.dtype,
    )


class Positions(nn.Module):
    """The parameters of a position scheme, and what it gives a stack.

    >>> x = jnp.zeros((2, 3, 8))
    >>> positions = Positions(jf.Rotary(), head_dim=4)
    >>> y, rotation, bias = positions.apply({}, x, jf.Places(jnp.arange(3), jnp.arange(3), 3))
    >>> rotation.sin.shape, bias  # [1, T, 1, H/2]
    ((1, 3, 1, 2), None)
    """

    AXES: ClassVar[Mapping[str, str]] = {
        "table": "position -> embed",
        "relative_bias": "bucket -> heads",
    }

    scheme: PositionScheme
    head_dim: int
    max_len: int = 512
    table_init: Initializer = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(
        self, x: Float[Array, "R T D"], at: Places
    ) -> tuple[Float[Array, "R T D"], Rotation | None, Float[Array, "_ N T S"] | None]:
        """`x` with positions, the rotation of queries and keys, and the bias of the logits."""
        params = {}
        specs = self.scheme.params(x.shape[-1], at.num_heads, self.max_len, self.table_init)
        for name, (init, shape) in specs.items():
            params[name] = self.param(name, init, shape, jnp.float32)
        rotation = self.scheme.rotation(at.positions, self.head_dim)
        return self.scheme.add(x, at, params), rotation, self.scheme.bias(at, params)


class Stack(nn.Module):
    """Positions, then `num_layers` blocks one after the other, then a norm unless post-norm.

    `block` makes each block from the fields of `Block`: `Block`, one of `REMAT`, or your own.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2)
    >>> stack, x = jf.Stack(config, num_layers=2), jnp.ones((3, 5, 8))
    >>> variables = jax.eval_shape(lambda: stack.init(jax.random.key(0), x, jf.AttentionMask()))
    >>> sorted(variables["params"])
    ['blocks_0', 'blocks_1']
    """

    TAPS: ClassVar[dict[str, Any]] = {
        "add_positions": ("input", None, None),
        "__call__": ("output", None),
    }

    config: TransformerConfig
    num_layers: int
    cross: bool = False
    attention_fn: AttentionFn = reference
    block: MakeBlock = Block

    def setup(self) -> None:
        config = self.config
        if not callable(self.attention_fn):
            raise ConfigError(
                f"attention_fn={self.attention_fn!r} is not a function: give one of "
                f"ATTENTION_FNS[...] with {', '.join(map(repr, ATTENTION_FNS))}"
            )
        if self.num_layers < 1:
            field = f"num_{self.name}_layers" if self.name else "num_layers"
            raise ConfigError(
                f"{field}={self.num_layers}, but this model needs at least 1: give more, or build "
                "a model without it"
            )
        self.set_blocks(partial(make_block, config, self.cross, self.attention_fn, self.block))
        sizes = config.key_size, config.max_len
        self.positions: Positions = Positions(config.positions, *sizes, config.table_init)
        self.dropout: Dropout = Dropout(config.dropout_rate, "input")
        if config.embeddings.norm:
            self.embedding_norm: Norm = make_norm(config)
        if config.norm.placement != "post":
            self.final_norm: Norm = make_norm(config)

    @nn.nowrap
    def set_blocks(self, make: Callable[[], nn.Module]) -> None:
        """Sets the blocks, each made by `make`."""
        self.blocks: list[nn.Module] = [make() for _ in range(self.num_layers)]

    def __call__(
        self,
        x: Float[Array, "R T D"],
        mask: AttentionMask,
        *,
        positions: Int[AnyArray, " T"] | Int[AnyArray, "R T"] | None = None,
        cache: Cache | None = None,
        encoder_kv: tuple[KeyValue | LayerCache, ...] = (),
        encoder_mask: AttentionMask | None = None,
        dropout_rng: DropoutRng | None = None,
    ) -> tuple[Float[Array, "R T D"], Cache | Any]:
        """`x` (embeddings) after the stack, and `cache` with its tokens added (or None).

        `positions` default to 0, 1, ... after the tokens already in `cache`. Raises `ValueError`
        for more tokens than fit into `cache` (see `Cache.check_room`), and for a dropout key in
        `rngs` without `dropout_rng`.
        """
        if cache is not None:
            cache.check_room(x.shape[1])
        dropout_rng = as_dropout_rng(dropout_rng, len(x))
        length = x.shape[1] if cache is None else cache.max_length
        x, rotation, bias = self.add_positions(x, mask, positions, length)
        x = self.dropout(divide_positions(x), dropout_rng)
        full, windowed = mask, self._with_window(mask)
        layers: tuple[LayerCache, ...] = ()
        if cache is not None:
            full, windowed = (cache.mask_of_beams(one, x.shape[1]) for one in (full, windowed))
            bias, layers = cache.bias_of_beams(bias), cache.layers

        def apply(block, x, layer, kv, dropout_rng, is_full):
            return block(
                x,
                full if is_full else windowed,
                rotation=rotation,
                bias=bias,
                encoder_kv=kv.read() if isinstance(kv, LayerCache) else kv,
                encoder_mask=encoder_mask,
                layer_cache=layer,
                dropout_rng=dropout_rng,
            )

        x, layers = self.apply_blocks(apply, x, layers, encoder_kv, dropout_rng)
        x = self.final_norm(x) if self.config.norm.placement != "post" else x
        x = gather_positions(x)
        return x, None if cache is None else cache.advance(layers, x.shape[1])

    def add_positions(
        self,
        x: Float[Array, "R T D"],
        mask: AttentionMask,
        positions: Int[AnyArray, " T"] | Int[AnyArray, "R T"] | None,
        length: int,
    ) -> tuple[Float[Array, "R T D"], Rotation | None, Float[Array, "_ N T S"] | None]:
        """`x` with positions, normalised if asked, and the rotation and bias for the blocks."""
        queries = mask.query_positions(x.shape[1])
        # Positions of the caller's may be any of the recipe's.
        max_len = None if positions is None else max(length, self.config.max_len)
        positions = queries if positions is None else jnp.asarray(positions)
        places = Places(
            positions,
            queries,
            length,
            self.config.num_heads,
            mask.causal,
            max_len,
        )
        x, rotation, bias = self.positions(x, places)
        return self.embedding_norm(x) if self.config.embeddings.norm else x, rotation, bias

    def apply_blocks(
        self,
        apply: Callable[..., tuple[Array, LayerCache | None]],
        x: Float[Array, "R T D"],
        layers: tuple[LayerCache, ...],
        encoder_kv: tuple[KeyValue | LayerCache, ...],
        dropout_rng: DropoutRng | None,
    ) -> tuple[Float[Array, "R T D"], tuple[Any, ...]]:
        """`x` after all blocks, and the new `layers`."""
        none, new_layers = (None,) * self.num_layers, []
        parts = zip(self.blocks, layers or none, encoder_kv or none, strict=True)
        for i, (block, layer, kv) in enumerate(parts):
            x, layer = apply(block, x, layer, kv, dropout_rng, self.is_full(i))
            new_layers.append(layer)
        return x, tuple(new_layers)

    def encoder_keys_values(self, x: Float[Array, "B S D"]) -> tuple[KeyValue, ...]:
        """Each block's cross-attention keys and values of the encoder's output `x`."""
        return tuple(block.cross_attention.keys_values(x) for block in self.blocks)

    def is_full(self, number: Any) -> Any:
        """Whether block `number`, counted from 0, attends to all tokens in spite of a window."""
        every = self.config.attention.full_every
        return False if every is None else (number + 1) % every == 0

    def _with_window(self, mask: AttentionMask) -> AttentionMask:
        """`mask` of a layer with a window."""
        window = self.config.attention.window
        if window is None or not mask.causal:
            return mask
        return replace(mask, window=min(window, mask.window or window))


class ScannedStack(Stack):
    """A stack whose blocks are one loop: their parameters have a leading layer axis.

    A deep model compiles as fast as a shallow one. Caches and encoder keys have the layer axis too.
    """

    @nn.nowrap
    def set_blocks(self, make: Callable[[], nn.Module]) -> None:
        """Sets the one block of the loop."""
        self.stacked_blocks: nn.Module = make()

    def apply_blocks(
        self,
        apply: Callable[..., tuple[Array, LayerCache | None]],
        x: Float[Array, "R T D"],
        layers: tuple[LayerCache, ...],
        encoder_kv: tuple[KeyValue | LayerCache, ...],
        dropout_rng: DropoutRng | None,
    ) -> tuple[Float[Array, "R T D"], tuple[Any, ...]]:
        """`x` after one scan over the blocks; full and windowed blocks are its two branches."""
        paths = tuple("/".join((*self.path, f"blocks_{i}")) for i in range(self.num_layers))
        path = "/".join((*self.path, STACKED))

        def step(block: nn.Module, x: Array, inputs: Any) -> Any:
            layer, kv, number = inputs
            rng = None if dropout_rng is None else dropout_rng.in_scan(path, paths, number)

            def full(block: nn.Module, x: Array) -> Any:
                return apply(block, x, layer, kv, rng, is_full=True)

            def windowed(block: nn.Module, x: Array) -> Any:
                return apply(block, x, layer, kv, rng, is_full=False)

            is_full = self.is_full(number)
            if is_full is False or self.is_initializing():
                return windowed(block, x)
            return nn.cond(is_full, full, windowed, block, x)

        scan, none = nn.scan(step, **_LAYER_AXIS, length=self.num_layers), (None,)
        inputs = (layers or none)[0], (encoder_kv or none)[0], jnp.arange(self.num_layers)
        x, layer = scan(self.stacked_blocks, x, inputs)
        return x, (layer,)

    def encoder_keys_values(self, x: Float[Array, "B S D"]) -> tuple[KeyValue, ...]:
        """The blocks' cross-attention keys and values of `x`, with a leading layer axis."""

        def project(block: Any) -> KeyValue:
            return block.cross_attention.keys_values(x)

        over_layers = nn.vmap(project, **_LAYER_AXIS, axis_size=self.num_layers)
        return (over_layers(self.stacked_blocks),)


_LAYER_AXIS: dict[str, Any] = {
    "variable_axes": {True: 0},  # whatever a block declares or sows has the layer axis
    "split_rngs": {"params": True, "dropout": False},
}


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
