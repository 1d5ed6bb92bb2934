"""The encoder and the decoder: a stack of blocks, one after the other or in one loop."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jaxformer.config import NoPositions, NormOptions, PositionScheme, TransformerConfig
from jaxformer.config.positions import ParamSpecs, Rotation
from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import STACKED, Block
from jaxformer.nn.cache import Cache, LayerCache
from jaxformer.nn.layers import Dropout, Initializer, Norm, tap
from jaxformer.ops.attention import ATTENTION_FNS, AttentionFn, reference
from jaxformer.ops.dropout import DropoutRng, as_dropout_rng
from jaxformer.ops.masks import AnyArray, AttentionMask
from jaxformer.ops.partitioning import divide_positions, gather_positions

_NO_POSITIONS, _POST_NORM = NoPositions(), NormOptions()
_NORMAL = nn.initializers.normal(0.02)


def initializers(config: TransformerConfig) -> tuple[Initializer, Initializer]:
    """The initializer of matrices, and that of tables with a row for each id or bucket."""
    if config.initializer == "xavier":
        return nn.initializers.xavier_uniform(), nn.initializers.normal(config.d_model**-0.5)
    return _NORMAL, _NORMAL


def make_stack(
    config: TransformerConfig,
    num_layers: int,
    cross: bool = False,
    attention_fn: AttentionFn = reference,
    block: Callable[..., nn.Module] = Block,
) -> "Stack":
    """The stack of `config`: the one function that turns a recipe into modules.

    `block` makes each block from the fields of `Block`: `Block`, one of `REMAT`, or your own.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2)
    >>> stack, x = make_stack(config, num_layers=2), jnp.ones((3, 5, 8))
    >>> variables = jax.eval_shape(stack.init, jax.random.key(0), x)
    >>> sorted(variables["params"])
    ['blocks_0', 'blocks_1']
    """
    if not callable(attention_fn):
        raise ConfigError(
            f"attention_fn={attention_fn!r} is not a function: give one of ATTENTION_FNS[...] with "
            f"{', '.join(map(repr, ATTENTION_FNS))}"
        )
    kernel_init, table_init = initializers(config)
    out_init = kernel_init
    if config.initializer == "scaled_normal":  # Radford et al. 2019, section 2.3
        blocks = config.num_encoder_layers + config.num_decoder_layers
        out_init = nn.initializers.normal(0.02 / math.sqrt(2 * blocks))
    attention, window = config.attention, config.attention.window
    if window is not None:  # which is in the stack's mask
        attention = replace(attention, window=None, full_every=None)
    make_block = partial(
        block,
        num_heads=config.num_heads,
        d_ff=config.d_ff,
        cross=cross,
        head_dim=config.head_dim,
        value_head_dim=config.value_head_dim,
        dropout_rate=config.dropout_rate,
        norm_options=config.norm,
        attention_options=attention,
        feed_forward_options=config.feed_forward,
        use_bias=config.use_bias,
        attention_fn=attention_fn,
        kernel_init=kernel_init,
        out_init=out_init,
        dtype=config.dtype,
    )
    return Stack(
        num_layers,
        make_block,
        config.num_heads,
        head_dim=config.head_dim,
        scheme=config.positions,
        max_len=config.max_len,
        table_init=table_init,
        dropout_rate=config.dropout_rate,
        window=window,
        full_every=config.attention.full_every,
        make_norm=partial(Norm, config.norm.kind, config.norm.eps, config.use_bias),
        input_norm=config.embeddings.norm,
        output_norm=config.norm.placement != "post",
        scan=config.scan_layers,
    )


def Encoder(  # noqa: N802  (it makes a module, as a class does)
    num_layers: int,
    num_heads: int,
    d_ff: int,
    positions: PositionScheme = _NO_POSITIONS,
    norm_options: NormOptions = _POST_NORM,
    name: str | None = None,
    **fields: Any,
) -> "Stack":
    """A stack of bidirectional blocks on vectors (Vaswani et al. 2017, figure 1, left).

    `fields` are further ones of `Block`, such as `dropout_rate`.

    >>> encoder = jf.Encoder(num_layers=6, num_heads=8, d_ff=2048, positions=jf.Sinusoidal())
    >>> real = jnp.array([[1] * 7, [1] * 5 + [0] * 2], bool)  # the second text has padding
    >>> x = jnp.ones((2, 7, 512))
    >>> out, variables = jax.eval_shape(encoder.init_with_output, jax.random.key(0), x, real)
    >>> out.shape
    (2, 7, 512)
    """
    return Stack(
        num_layers,
        partial(Block, num_heads, d_ff, norm_options=norm_options, **fields),
        num_heads,
        scheme=positions,
        make_norm=partial(Norm, norm_options.kind, norm_options.eps),
        output_norm=norm_options.placement != "post",
        name=name,
    )


class PositionParams(nn.Module):
    """The parameters of a position scheme by name, from its initializers and shapes."""

    AXES: ClassVar[Mapping[str, str]] = {
        "table": "position -> embed",
        "relative_bias": "bucket -> heads",
    }

    specs: ParamSpecs

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        """The parameters, float32."""
        specs = self.specs.items()
        return {name: self.param(name, init, shape, jnp.float32) for name, (init, shape) in specs}


class Stack(nn.Module):
    """Positions, then `num_layers` blocks one after the other, then a norm.

    >>> stack, x = jf.Stack(2, partial(jf.Block, 2, 12), num_heads=2), jnp.ones((3, 5, 8))
    >>> variables = jax.eval_shape(stack.init, jax.random.key(0), x)
    >>> sorted(variables["params"])
    ['blocks_0', 'blocks_1', 'final_norm']
    """

    num_layers: int
    make_block: Callable[..., nn.Module]
    """make_block(layer=i) -> block i, called as `Block` is; None is that of a scan."""
    num_heads: int
    """N, for the positions, as the fields down to `table_init`."""
    head_dim: int | None = None
    """H; None: D / N."""
    scheme: PositionScheme = NoPositions()
    max_len: int = 512
    table_init: Initializer = _NORMAL
    dropout_rate: float = 0.0
    """Dropout on the input, with its positions."""
    window: int | None = None
    """In causal self-attention, how many tokens a token attends to; None: all."""
    full_every: int | None = None
    """Each layer whose number, from 1, is a multiple of this has no window."""
    make_norm: Callable[[], nn.Module] = Norm
    input_norm: bool = False
    """A norm of the input, with its positions."""
    output_norm: bool = True
    scan: bool = False
    """One loop applies the blocks. Their parameters, caches and encoder keys have a leading layer
    axis; a deep model compiles as fast as a shallow one."""

    def setup(self) -> None:
        count = self.num_layers
        if count < 1:
            field = f"num_{self.name}_layers" if self.name else "num_layers"
            raise ConfigError(
                f"{field}={count}, but this model needs at least 1: give more, or build "
                "a model without it"
            )
        if self.scan:
            self.stacked_blocks: nn.Module = self.make_block(layer=None)
        else:
            self.blocks: list[nn.Module] = [self.make_block(layer=i) for i in range(count)]
        self.dropout: Dropout = Dropout(self.dropout_rate, "input")
        if self.input_norm:
            self.embedding_norm: nn.Module = self.make_norm()
        if self.output_norm:
            self.final_norm: nn.Module = self.make_norm()

    def __call__(
        self,
        x: Float[Array, "R T D"],
        mask: AttentionMask | Bool[AnyArray, "R T"] | None = None,
        *,
        positions: Int[AnyArray, " T"] | Int[AnyArray, "R T"] | None = None,
        encoder_kv: tuple[tuple[Array, Array] | LayerCache, ...] = (),
        encoder_mask: AttentionMask | None = None,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "R T D"]:
        """`x` after the stack; `mask` may be a padding mask, True at real tokens.

        `positions` default to 0, 1, ... Raises `ValueError` for an `x` of another shape, and for a
        dropout key in `rngs` without `dropout_rng`.
        """
        if x.ndim != 3:
            raise ValueError(
                f"x has the shape {x.shape}, but must be [B, T, D]: one example alone is a batch "
                "of one, as in x[None]"
            )
        if not isinstance(mask, AttentionMask):
            mask = AttentionMask(padding_mask=mask)
        return self.run(x, mask, None, positions, encoder_kv, encoder_mask, dropout_rng)[0]

    def decode(self, x: Float[Array, "R T D"], cache: Cache) -> tuple[Float[Array, "R T D"], Cache]:
        """`x` after the stack, and `cache` with its tokens added.

        Raises `ValueError` for more tokens than fit into `cache` (see `Cache.check_room`).
        """
        cache.check_room(x.shape[1])
        encoder_mask = AttentionMask(padding_mask=cache.padding_mask)
        positions = cache.positions(x.shape[1])
        inputs = positions, cache.encoder_kv, encoder_mask, None
        x, layers = self.run(x, cache.mask(), cache, *inputs)
        return x, cache.advance(layers, x.shape[1])

    @nn.compact
    def run(
        self,
        x: Float[Array, "R T D"],
        mask: AttentionMask,
        cache: Cache | None,
        positions: Any,
        encoder_kv: tuple[tuple[Array, Array] | LayerCache, ...],
        encoder_mask: AttentionMask | None,
        dropout_rng: DropoutRng | Array | None,
    ) -> tuple[Float[Array, "R T D"], tuple[LayerCache, ...]]:
        """`x` after positions, blocks and norm, and the new layers of `cache`."""
        length = x.shape[1] if cache is None else cache.max_length
        index = jnp.add.outer(mask.offset, jnp.arange(x.shape[1]))  # of each token among the keys
        distances = jnp.subtract.outer(index, jnp.arange(length))
        if positions is None:
            positions = index
        else:  # the caller's may be any of the recipe's
            positions, length = jnp.asarray(positions), max(length, self.max_len)
        scheme, heads = self.scheme, self.num_heads
        specs = scheme.params(x.shape[-1], heads, self.max_len, self.table_init)
        params = PositionParams(specs, name="positions")() if specs else {}
        head_dim = self.head_dim or x.shape[-1] // heads
        rotation = scheme.rotation(positions, head_dim)
        x = scheme.add(x, positions, length, params)
        bias = scheme.bias(distances, heads, mask.causal, params)
        x = tap(self, "input", self.embedding_norm(x) if self.input_norm else x)
        has_mesh = not jax.sharding.get_abstract_mesh().empty
        x = divide_positions(x) if has_mesh else x
        x = self.dropout(x, dropout_rng) if self.dropout_rate else x

        # The mask and the rotation of the layers with a window, and of the others.
        full = windowed = mask, rotation
        if self.window is not None and mask.causal:
            mask = replace(mask, window=min(self.window, mask.window or self.window))
            local = scheme.in_windows()
            same = local is scheme
            windowed = mask, rotation if same else local.rotation(positions, head_dim)
        layers: tuple[LayerCache, ...] = ()
        if cache is not None:
            count = x.shape[1]
            full, windowed = ((cache.mask_of_beams(m, count), r) for m, r in (full, windowed))
            bias, layers = cache.bias_of_beams(bias), cache.layers

        inputs = {"bias": bias, "encoder_mask": encoder_mask}
        if self.scan:
            layer, kv = (layers or (None,))[0], (encoder_kv or (None,))[0]
            kinds = full, windowed
            x, layers = self._apply_in_scan(x, layer, kv, kinds, inputs, dropout_rng)
        else:
            none, new_layers = (None,) * self.num_layers, []
            is_traced = cache is not None and isinstance(x, Tracer)
            blocks = self._traced_once() if is_traced else self.blocks
            parts = zip(blocks, layers or none, encoder_kv or none, strict=True)
            for i, (block, layer, kv) in enumerate(parts):
                is_full = self.full_every is not None and (i + 1) % self.full_every == 0
                mask, rotation = full if is_full else windowed
                x, layer = block(
                    x,
                    mask,
                    rotation=rotation,
                    encoder_kv=kv.read() if isinstance(kv, LayerCache) else kv,
                    layer_cache=layer,
                    dropout_rng=dropout_rng,
                    **inputs,
                )
                new_layers.append(layer)
            layers = tuple(new_layers)
        x = self.final_norm(x) if self.output_norm else x
        return tap(self, "output", gather_positions(x) if has_mesh else x), layers

    def _traced_once(self) -> Sequence[Callable[..., Any]]:
        """The blocks as functions that JAX traces and lowers once for all, if they are equal.

        Blocks of other people, and those that draw or record something, stay as they are.
        """
        scope: Any = self.scope
        if type(self.blocks[0]) is not Block or scope.rngs or scope.mutable:
            return self.blocks
        equal, *others = (x.clone(parent=None, name=None, layer=None) for x in self.blocks)
        if any(other != equal for other in others):
            return self.blocks
        apply = jax.jit(
            lambda variables, *args, **options: equal.apply(variables, *args, **options)
        )
        return [partial(apply, block.variables) for block in self.blocks]

    def _apply_in_scan(
        self,
        x: Float[Array, "R T D"],
        layer: LayerCache | None,
        kv: tuple[Array, Array] | LayerCache | None,
        kinds: Sequence[tuple[AttentionMask, Rotation | None]],
        inputs: dict[str, Any],
        dropout_rng: DropoutRng | Array | None,
    ) -> tuple[Float[Array, "R T D"], tuple[Any, ...]]:
        """`x` after one scan over the blocks; full and windowed blocks are its two branches."""
        paths = tuple("/".join((*self.path, f"blocks_{i}")) for i in range(self.num_layers))
        path = "/".join((*self.path, STACKED))
        dropout_rng = as_dropout_rng(dropout_rng, len(x))

        def step(block: nn.Module, x: Array, of_layer: Any) -> Any:
            layer, kv, number = of_layer
            rng = None if dropout_rng is None else dropout_rng.in_scan(path, paths, number)
            kv = kv.read() if isinstance(kv, LayerCache) else kv
            more = inputs | {"encoder_kv": kv, "layer_cache": layer, "dropout_rng": rng}

            def full(block: nn.Module, x: Array) -> Any:
                mask, rotation = kinds[0]
                return block(x, mask, rotation=rotation, **more)

            def windowed(block: nn.Module, x: Array) -> Any:
                mask, rotation = kinds[1]
                return block(x, mask, rotation=rotation, **more)

            if self.full_every is None or self.is_initializing():
                return windowed(block, x)
            return nn.cond((number + 1) % self.full_every == 0, full, windowed, block, x)

        scan = nn.scan(step, **_LAYER_AXIS, length=self.num_layers)
        x, layer = scan(self.stacked_blocks, x, (layer, kv, jnp.arange(self.num_layers)))
        return x, (layer,)

    def encoder_keys_values(self, x: Float[Array, "B S D"]) -> tuple[tuple[Array, Array], ...]:
        """Each block's cross-attention keys and values of the encoder's output `x`."""

        def project(block: Any) -> tuple[Array, Array]:
            return block.cross_attention.keys_values(x)

        if not self.scan:
            return tuple(map(project, self.blocks))
        over_layers = nn.vmap(project, **_LAYER_AXIS, axis_size=self.num_layers)
        return (over_layers(self.stacked_blocks),)


_LAYER_AXIS: dict[str, Any] = {
    "variable_axes": {True: 0},  # whatever a block declares or sows has the layer axis
    "split_rngs": {"params": True, "dropout": False},
}
