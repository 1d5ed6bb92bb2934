"""The encoder and the decoder: a stack of blocks, one after the other or in one loop."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jaxformer.config import (
    AttentionOptions,
    FeedForwardOptions,
    NoPositions,
    NormOptions,
    PositionScheme,
    WindowOptions,
)
from jaxformer.config.checks import Count, Natural, UnitInterval
from jaxformer.config.positions import Rotation
from jaxformer.config.transformer import check_window_positions
from jaxformer.errors import ConfigError
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.blocks import Block
from jaxformer.nn.cache import Cache, LayerCache
from jaxformer.nn.checked_module import CheckedModule
from jaxformer.nn.dense import Initializer
from jaxformer.nn.dropout import Dropout
from jaxformer.nn.feed_forward import FeedForward
from jaxformer.nn.norm import Norm
from jaxformer.nn.positions import PositionParams
from jaxformer.nn.stacked_blocks import STACKED
from jaxformer.nn.taps import tap
from jaxformer.ops.attention import AttentionFn, reference
from jaxformer.ops.dropout import DropoutRng, as_dropout_rng
from jaxformer.ops.masks import AnyArray, AttentionMask, as_attention_mask
from jaxformer.ops.partitioning import divide_positions, gather_positions
from jaxformer.ops.traced_once import traced_once

NORMAL = nn.initializers.normal(0.02)

_XAVIER = nn.initializers.xavier_uniform()
_NO_POSITIONS, _POST_NORM = NoPositions(), NormOptions()
_ATTENTION, _FEED_FORWARD = AttentionOptions(), FeedForwardOptions()

_LAYER_AXIS: dict[str, Any] = {
    "variable_axes": {True: 0},  # whatever a block declares or sows has the layer axis
    "split_rngs": {True: True},  # each layer draws from each stream of random numbers anew
}
"""Options of `nn.scan` and `nn.vmap` over stacked blocks."""


class BlockInputs(NamedTuple):
    """The inputs that blocks of one kind share."""

    mask: AttentionMask
    rotation: Rotation | None
    bias: Float[Array, "_ N T S"] | None
    encoder_mask: AttentionMask | None

    def of_beams(self, cache: Cache, count: int) -> "BlockInputs":
        """The inputs for the beams of `cache` with `count` new tokens each."""
        mask = cache.mask_of_beams(self.mask, count)
        return self._replace(mask=mask, bias=cache.bias_of_beams(self.bias))


class InputsByKind(NamedTuple):
    """The inputs of blocks that attend to all tokens, and of blocks with a window."""

    full: BlockInputs
    windowed: BlockInputs


class Stack(CheckedModule):
    """Positions, then `num_layers` blocks one after the other, then a norm.

    >>> stack, x = jf.Stack(2, partial(jf.Block, 2, 12)), jnp.ones((3, 5, 8))
    >>> variables = jax.eval_shape(stack.init, jax.random.key(0), x)
    >>> sorted(variables["params"])
    ['blocks_0', 'blocks_1', 'final_norm']
    """

    num_layers: Natural
    make_block: Callable[..., nn.Module]
    """make_block(layer=i) -> block i, called as `Block` is; i is None in a scan.

    A scheme that acts on heads reads `num_heads` and `head_dim` of the blocks."""
    scheme: PositionScheme = NoPositions()
    max_len: Count = 512
    """The longest sequence; learned positions end there."""
    table_init: Initializer = NORMAL
    """The initializer of a position scheme's tables."""
    dropout_rate: UnitInterval = 0.0
    """Dropout on the input, with its positions."""
    window: WindowOptions = WindowOptions()
    """The window of causal self-attention, and the layers without it."""
    make_norm: Callable[[], nn.Module] | None = None
    """Makes its norms; None: the blocks' `make_norm` with `norm_options` and `use_bias`, or `Norm`
    where they have none."""
    norm_options: NormOptions = NormOptions()
    use_bias: bool = True
    """Its norms have biases."""
    input_norm: bool = False
    """A norm of the input, with its positions."""
    output_norm: bool = True
    scan: bool = False
    """One loop applies the blocks. Their parameters, caches and encoder keys have a leading layer
    axis; a deep model compiles as fast as a shallow one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window_positions(self.scheme, self.window)

    def setup(self) -> None:
        if self.num_layers < 1:
            field = f"num_{self.name}_layers" if self.name else "num_layers"
            raise ConfigError(
                f"{field}={self.num_layers}, but this model needs at least 1: give more, or build "
                "a model without it"
            )
        self.positions: PositionParams = PositionParams()
        self.dropout: Dropout = Dropout(self.dropout_rate, "input")
        if self.scan:
            self.stacked_blocks: nn.Module = self.make_block(layer=None)
        else:
            self.blocks: list[nn.Module] = [
                self.make_block(layer=i) for i in range(self.num_layers)
            ]
        first_block = _block_modules(self)[0]
        make_norm = self.make_norm or _norm_maker(first_block, self.norm_options, self.use_bias)
        if self.input_norm:
            self.embedding_norm: nn.Module = make_norm()
        if self.output_norm:
            self.final_norm: nn.Module = make_norm()

    def __call__(
        self,
        x: Float[Array, "R T D"],
        mask: AttentionMask | Bool[AnyArray, "R T"] | None = None,
        *,
        positions: Int[AnyArray, " T"] | Int[AnyArray, "R T"] | None = None,
        encoder_kv: tuple[tuple[Array, Array], ...] = (),
        encoder_mask: AttentionMask | None = None,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "R T D"]:
        """`x` after the stack; `mask` may be a padding mask, True at real tokens.

        `positions` default to 0, 1, ... Raises `ValueError` for an `x` of another shape.
        """
        if x.ndim != 3:
            raise ValueError(
                f"x has the shape {x.shape}, but must be [B, T, D]: one example alone is a batch "
                "of one, as in x[None]"
            )
        mask = as_attention_mask(mask)
        x, inputs = self.enter(x, mask, positions, x.shape[1], encoder_mask, dropout_rng)
        return self.leave(self.apply_blocks(x, inputs, encoder_kv, dropout_rng))

    def decode(self, x: Float[Array, "R T D"], cache: Cache) -> tuple[Float[Array, "R T D"], Cache]:
        """`x` after the stack, and `cache` with its tokens added.

        Raises `ValueError` for more tokens than fit into `cache` (see `Cache.check_room`).
        """
        count = x.shape[1]
        cache.check_room(count)
        encoder_mask = AttentionMask(padding_mask=cache.padding_mask)
        positions = cache.positions(count)
        x, inputs = self.enter(x, cache.mask(), positions, cache.max_length, encoder_mask, None)
        inputs = InputsByKind(*(each.of_beams(cache, count) for each in inputs))
        x, layers = self.decode_blocks(x, inputs, cache)
        return self.leave(x), cache.advance(layers, count)

    def init_layers(
        self,
        make_default: Callable[[], LayerCache],
        batch_size: int,
        num_beams: int,
        max_length: int,
        d_model: int,
    ) -> tuple[Any, ...]:
        """The part of each layer in an empty `Cache`: the result of its block's `init_cache`.

        A block without such a method keeps keys and values, which `make_default` makes.
        """

        def init_layer(block: Any) -> Any:
            if hasattr(block, "init_cache"):
                return block.init_cache(batch_size, num_beams, max_length, d_model)
            return make_default()

        if not self.scan:
            return tuple(map(init_layer, self.blocks))
        # Each layer with its own parameters: a state may begin with some of them.
        of_layers = nn.vmap(
            lambda block, layer: init_layer(_with_number(block, layer)),
            **_LAYER_AXIS,
            axis_size=self.num_layers,
        )
        return (of_layers(self.stacked_blocks, jnp.arange(self.num_layers)),)

    def encoder_keys_values(self, x: Float[Array, "B S D"]) -> tuple[tuple[Array, Array], ...]:
        """Each block's cross-attention keys and values of the encoder's output `x`."""

        def project(block: Any) -> tuple[Array, Array]:
            return block.cross_attention.keys_values(x)

        if not self.scan:
            return tuple(map(project, self.blocks))

        def project_layer(block: Any, layer: Array) -> tuple[Array, Array]:
            return project(_with_number(block, layer))

        over_layers = nn.vmap(project_layer, **_LAYER_AXIS, axis_size=self.num_layers)
        return (over_layers(self.stacked_blocks, jnp.arange(self.num_layers)),)

    def enter(
        self,
        x: Float[Array, "R T D"],
        mask: AttentionMask,
        positions: Int[AnyArray, " T"] | Int[AnyArray, "R T"] | None,
        length: int,
        encoder_mask: AttentionMask | None,
        dropout_rng: DropoutRng | Array | None,
    ) -> tuple[Float[Array, "R T D"], InputsByKind]:
        """The input of the first block, with positions, and the inputs that blocks share.

        The tokens of `x` attend to `length` keys. `positions` may be any up to `max_len`; by
        default they are the indices of the tokens among the keys.
        """
        index = jnp.add.outer(mask.offset, jnp.arange(x.shape[1]))  # of each token among the keys
        distances = jnp.subtract.outer(index, jnp.arange(length))
        if positions is None:
            positions = index
        else:
            positions = jnp.asarray(positions)
            length = max(length, self.max_len)
        scheme = self.scheme
        width = x.shape[-1]
        num_heads, head_dim = self.heads_of_blocks(width)
        scheme.check(width, head_dim)
        params = self.positions(scheme.params(width, num_heads, self.max_len, self.table_init))
        rotation = scheme.rotation(positions, head_dim)
        x = scheme.add(x, positions, length, params)
        bias = scheme.bias(distances, num_heads, mask.causal, params)
        if self.input_norm:
            x = self.embedding_norm(x)
        x = divide_positions(tap(self, "input", x))
        x = self.dropout(x, dropout_rng)

        full = windowed = BlockInputs(mask, rotation, bias, encoder_mask)
        if self.window.size is not None and mask.causal:
            size = min(self.window.size, mask.window or self.window.size)
            windowed = full._replace(mask=replace(mask, window=size))
            local = scheme.in_windows()
            if local is not scheme:
                windowed = windowed._replace(rotation=local.rotation(positions, head_dim))
        return x, InputsByKind(full, windowed)

    def apply_blocks(
        self,
        x: Float[Array, "R T D"],
        inputs: InputsByKind,
        encoder_kv: tuple[tuple[Array, Array], ...],
        dropout_rng: DropoutRng | Array | None,
    ) -> Float[Array, "R T D"]:
        """`x` after all blocks."""
        if self.scan:
            return self.scan_blocks(x, inputs, encoder_kv, dropout_rng)
        pairs = encoder_kv or (None,) * self.num_layers
        for layer, (block, kv) in enumerate(zip(self.blocks, pairs, strict=True)):
            mask, rotation, bias, encoder_mask = self.choose_inputs(inputs, layer)
            x = block(
                x,
                mask,
                rotation=rotation,
                bias=bias,
                encoder_kv=kv,
                encoder_mask=encoder_mask,
                dropout_rng=dropout_rng,
            )
        return x

    def decode_blocks(
        self, x: Float[Array, "R T D"], inputs: InputsByKind, cache: Cache
    ) -> tuple[Float[Array, "R T D"], tuple[Any, ...]]:
        """`x` after all blocks, and their layers of `cache` with its tokens added."""
        for block in _block_modules(self):
            _check_decode(type(block))
        if self.scan:
            return self.scan_decoding_blocks(x, inputs, cache)
        decode = [block.decode for block in self.blocks]
        if all(type(block) is Block for block in self.blocks) and isinstance(x, Tracer):
            decode = traced_once(self.blocks, "decode")
        layers = []
        pairs = cache.encoder_kv or (None,) * self.num_layers
        for layer, (kept, kv) in enumerate(zip(cache.layers, pairs, strict=True)):
            mask, rotation, bias, encoder_mask = self.choose_inputs(inputs, layer)
            x, kept = decode[layer](
                x,
                kept,
                mask,
                rotation=rotation,
                bias=bias,
                encoder_kv=None if kv is None else kv.read(),
                encoder_mask=encoder_mask,
            )
            layers.append(kept)
        return x, tuple(layers)

    def scan_blocks(
        self,
        x: Float[Array, "R T D"],
        inputs: InputsByKind,
        encoder_kv: tuple[tuple[Array, Array], ...],
        dropout_rng: DropoutRng | Array | None,
    ) -> Float[Array, "R T D"]:
        """`apply_blocks` as one loop."""
        paths = tuple("/".join((*self.path, f"blocks_{i}")) for i in range(self.num_layers))
        path = "/".join((*self.path, STACKED))
        dropout_rng = as_dropout_rng(dropout_rng, x)

        def step(block: nn.Module, x: Array, of_layer: Any) -> tuple[Array, None]:
            kv, layer = of_layer
            rng = None if dropout_rng is None else dropout_rng.in_scan(path, paths, layer)

            def apply(block: nn.Module, x: Array, shared: BlockInputs) -> Array:
                mask, rotation, bias, encoder_mask = shared
                return block(
                    x,
                    mask,
                    rotation=rotation,
                    bias=bias,
                    encoder_kv=kv,
                    encoder_mask=encoder_mask,
                    dropout_rng=rng,
                )

            block = _with_number(block, layer)
            return _choose_in_scan(self, apply, block, x, inputs, layer), None

        (kv,) = encoder_kv or (None,)
        layers = kv, jnp.arange(self.num_layers)
        x, _ = nn.scan(step, **_LAYER_AXIS, length=self.num_layers)(self.stacked_blocks, x, layers)
        return x

    def scan_decoding_blocks(
        self, x: Float[Array, "R T D"], inputs: InputsByKind, cache: Cache
    ) -> tuple[Float[Array, "R T D"], tuple[Any, ...]]:
        """`decode_blocks` as one loop; the arrays of the only layer of `cache` are stacked."""

        def step(block: nn.Module, x: Array, of_layer: Any) -> tuple[Array, Any]:
            kept, kv, layer = of_layer
            kv = None if kv is None else kv.read()

            def decode(block: Any, x: Array, shared: BlockInputs) -> tuple[Array, Any]:
                mask, rotation, bias, encoder_mask = shared
                return block.decode(
                    x,
                    kept,
                    mask,
                    rotation=rotation,
                    bias=bias,
                    encoder_kv=kv,
                    encoder_mask=encoder_mask,
                )

            block = _with_number(block, layer)
            return _choose_in_scan(self, decode, block, x, inputs, layer)

        (kept,) = cache.layers
        (kv,) = cache.encoder_kv or (None,)
        layers = kept, kv, jnp.arange(self.num_layers)
        scan = nn.scan(step, **_LAYER_AXIS, length=self.num_layers)
        x, kept = scan(self.stacked_blocks, x, layers)
        return x, (kept,)

    def choose_inputs(self, inputs: InputsByKind, layer: int) -> BlockInputs:
        """The inputs of block `layer`, from 0."""
        return inputs.full if self.window.is_full(layer) else inputs.windowed

    def leave(self, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        """The stack's output, from its last block's."""
        if self.output_norm:
            x = self.final_norm(x)
        return tap(self, "output", gather_positions(x))

    def heads_of_blocks(self, width: int) -> tuple[int, int]:
        """N and H of the blocks, whose vectors have `width` numbers.

        Raises `ConfigError` for a scheme that acts on heads if a block does not tell them, or if
        they differ from block to block.
        """
        blocks = _block_modules(self)
        sizes = {_heads_of(block, width) for block in blocks}
        if len(sizes) == 1:
            (of_all,) = sizes
            if of_all is not None:
                return of_all
        kind = type(self.scheme)
        acts_on_heads = not (
            kind.rotation is PositionScheme.rotation and kind.bias is PositionScheme.bias
        )
        if acts_on_heads:
            raise ConfigError(
                f"{self.scheme} acts on the heads of all blocks, but blocks of the classes "
                f"{', '.join(sorted({type(block).__name__ for block in blocks}))} have different "
                "ones or do not tell them: give each block the same fields num_heads and head_dim"
            )
        return 1, width  # no scheme reads them


def _block_modules(stack: Stack) -> Sequence[Any]:
    """The modules of the blocks of `stack`: one of all layers in a scan."""
    return [stack.stacked_blocks] if stack.scan else stack.blocks


def _with_number(block: nn.Module, layer: Int[Array, ""]) -> nn.Module:
    """`block` of a scan with the traced number of its `layer`, if it has such a field."""
    if "layer" not in {field.name for field in fields(block)}:
        return block
    number = layer if isinstance(layer, Tracer) else int(layer)  # known under jax.disable_jit
    scope: Any = block.scope
    return block.clone(parent=scope.rewound(), layer=number)  # its modules are made anew


def _choose_in_scan(
    stack: Stack,
    apply: Callable[[nn.Module, Array, BlockInputs], Any],
    block: nn.Module,
    x: Float[Array, "R T D"],
    inputs: InputsByKind,
    layer: Int[Array, ""],
) -> Any:
    """`apply(block, x, inputs)` with the inputs of block `layer`, whose number is traced."""
    if stack.window.full_every is None or stack.is_initializing():
        return apply(block, x, inputs.windowed)

    def apply_full(block: nn.Module, x: Array) -> Any:
        return apply(block, x, inputs.full)

    def apply_windowed(block: nn.Module, x: Array) -> Any:
        return apply(block, x, inputs.windowed)

    is_full = (layer + 1) % stack.window.full_every == 0
    return nn.cond(is_full, apply_full, apply_windowed, block, x)


def _norm_maker(block: nn.Module, options: NormOptions, use_bias: bool) -> Callable[[], nn.Module]:
    """The function that makes norms as `block` makes its norms, where it tells."""
    make_norm = getattr(block, "make_norm", Norm)
    return partial(make_norm, kind=options.kind, eps=options.eps, use_bias=use_bias)


def _check_decode(kind: type) -> None:
    """Raises `ConfigError` for a class of blocks that would decode by another function.

    `nn.remat(Block)` makes a class that has a `__call__` of its own, which computes what `Block`'s
    does: the classes of Flax's transforms are passed over.
    """
    bases = [base for base in kind.__mro__ if base.__module__ != nn.transforms.__name__]

    def place(method: str) -> int:
        places = (i for i, base in enumerate(bases) if method in vars(base))
        return next(places, len(bases))

    if place("decode") > place("__call__"):
        raise ConfigError(
            f"{kind.__name__} has a __call__ of its own but no decode, so it would decode by "
            "another function: define decode too, or change what both of them call, such as "
            "Block.after_attention"
        )


def _heads_of(block: Any, width: int) -> tuple[int, int] | None:
    """N and H of `block`; None where it does not tell them."""
    num_heads = getattr(block, "num_heads", None)
    if num_heads is None:
        return None
    return num_heads, getattr(block, "head_dim", None) or width // num_heads


def Encoder(  # noqa: N802  (it makes a module, as a class does)
    num_layers: int,
    num_heads: int,
    d_ff: int,
    positions: PositionScheme = _NO_POSITIONS,
    norm_options: NormOptions = _POST_NORM,
    name: str | None = None,
    *,
    max_len: int = 512,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    dropout_rate: float = 0.0,
    attention_options: AttentionOptions = _ATTENTION,
    feed_forward_options: FeedForwardOptions = _FEED_FORWARD,
    use_bias: bool = True,
    attention_fn: AttentionFn = reference,
    kernel_init: Initializer = _XAVIER,
    out_init: Initializer | None = None,
    dtype: Any = jnp.float32,
    make_attention: Callable[..., nn.Module] = MultiHeadAttention,
    make_feed_forward: Callable[..., nn.Module] = FeedForward,
    make_norm: Callable[..., nn.Module] = Norm,
) -> Stack:
    """A stack of bidirectional blocks on vectors (Vaswani et al. 2017, figure 1, left).

    The arguments are the fields of `Block` and of `Stack`.

    >>> encoder = jf.Encoder(num_layers=6, num_heads=8, d_ff=2048, positions=jf.Sinusoidal())
    >>> real = jnp.array([[1] * 7, [1] * 5 + [0] * 2], bool)  # the second text has padding
    >>> x = jnp.ones((2, 7, 512))
    >>> out, variables = jax.eval_shape(encoder.init_with_output, jax.random.key(0), x, real)
    >>> out.shape
    (2, 7, 512)
    """
    make_block = partial(
        Block,
        num_heads=num_heads,
        d_ff=d_ff,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        dropout_rate=dropout_rate,
        norm_options=norm_options,
        attention_options=attention_options,
        feed_forward_options=feed_forward_options,
        use_bias=use_bias,
        attention_fn=attention_fn,
        kernel_init=kernel_init,
        out_init=out_init,
        dtype=dtype,
        make_attention=make_attention,
        make_feed_forward=make_feed_forward,
        make_norm=make_norm,
    )
    return Stack(
        num_layers,
        make_block,
        scheme=positions,
        max_len=max_len,
        dropout_rate=dropout_rate,
        norm_options=norm_options,
        use_bias=use_bias,
        output_norm=norm_options.placement != "post",
        name=name,
    )
