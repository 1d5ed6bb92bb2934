"""The encoder and the decoder: a stack of blocks, one after the other or in one loop."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import Block, MakeBlock
from jaxformer.nn.cache import Cache
from jaxformer.nn.layers import Norm
from jaxformer.nn.positions import POSITION_SCHEMES, MakePositionScheme, PositionScheme, Rotation
from jaxformer.nn.stacking import STACKED
from jaxformer.nn.taps import INTERMEDIATES, REPLACEMENTS, tap
from jaxformer.ops.attention import AttentionFn, check_attention_fn, reference
from jaxformer.ops.beam_cache import KeyValue, LayerCache, read
from jaxformer.ops.dropout import Dropout, DropoutRng
from jaxformer.ops.masks import AnyArray, AttentionMask

_LAYER_AXIS: dict[str, Any] = {
    "variable_axes": {"params": 0, INTERMEDIATES: 0, REPLACEMENTS: 0},
    "split_rngs": {"params": True},
}


def _nth(values: tuple[Any, ...], index: int) -> Any:
    """One of `values`, or None where there are none."""
    return values[index] if values else None


class Stack(nn.Module):
    """Positions, then `num_layers` blocks, then a norm unless the blocks are post-norm.

    `block` makes each block; it is one of `REMAT` or your own, which is called as `Block` is.
    `position_scheme` makes your own scheme, with `config.positions` "none"; None means the scheme
    that `config.positions` names. Values to read and replace: `input` [R, T, D], embeddings with
    positions, and `output` [R, T, D].

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, norm_placement="pre")
    >>> stack, x = jf.Stack(config, num_layers=2), jnp.ones((3, 5, 8))
    >>> variables = jax.eval_shape(lambda: stack.init(jax.random.key(0), x, jf.AttentionMask()))
    >>> sorted(variables["params"])
    ['blocks_0', 'blocks_1', 'final_norm']
    """

    config: TransformerConfig
    num_layers: int
    cross: bool = False
    attention_fn: AttentionFn = reference
    block: MakeBlock = Block
    position_scheme: MakePositionScheme | None = None

    def setup(self) -> None:
        config = self.config
        check_attention_fn(self.attention_fn)
        if self.num_layers < 1:
            raise ConfigError(
                f"the {self.name} has num_{self.name}_layers={self.num_layers}, but this model "
                "needs at least 1: give more, or build a model without it"
            )
        if self.position_scheme is not None and config.positions != "none":
            raise ConfigError(
                f"a position_scheme and positions={config.positions!r} were given, but a model has "
                "one scheme: give positions='none', or no position_scheme"
            )
        make_scheme = self.position_scheme or POSITION_SCHEMES[config.positions]
        self.positions: PositionScheme = make_scheme(config)
        make = partial(self.block, config, self.cross, self.attention_fn)
        if config.scan_layers:
            self.stacked_blocks: nn.Module = make()
        else:
            self.blocks: list[nn.Module] = [make() for _ in range(self.num_layers)]
        if config.embedding_norm:
            self.embedding_norm: Norm = Norm(config)
        if config.norm_placement != "post":
            self.final_norm: Norm = Norm(config)

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
        elif dropout_rng is None:
            self._check_rngs()
        length = x.shape[1] if cache is None else cache.max_length
        x, rotation, bias = self._with_positions(x, mask, positions, length)
        x = tap(self, "input", x)
        x = Dropout(dropout_rng, "/".join((*self.path, "input")), self.config.dropout_rate)(x)

        def apply_block(
            block: nn.Module,
            x: Array,
            inputs: tuple[LayerCache | None, Any, DropoutRng | None],
            is_full: bool,
        ) -> tuple[Array, LayerCache | None]:
            layer_cache, kv, dropout_rng = inputs
            if cache is not None and layer_cache is not None:
                layer_cache = cache.with_beams(layer_cache)
            x, layer_cache = block(
                x,
                mask if is_full else self._with_window(mask),
                rotation=rotation,
                bias=bias,
                encoder_kv=read(kv) if isinstance(kv, LayerCache) else kv,
                encoder_mask=encoder_mask,
                layer_cache=layer_cache,
                dropout_rng=dropout_rng,
            )
            return x, None if layer_cache is None else layer_cache.replace(beam_ancestors=None)

        x, layers = self._apply_blocks(
            apply_block, x, () if cache is None else cache.layers, encoder_kv, dropout_rng
        )
        if self.config.norm_placement != "post":
            x = self.final_norm(x)
        x = tap(self, "output", x)
        return x, None if cache is None else cache.advance(layers, x.shape[1])

    def _with_window(self, mask: AttentionMask) -> AttentionMask:
        """`mask` of a layer with `config.attention_window`."""
        window = self.config.attention_window
        if window is None or not mask.causal:
            return mask
        return mask & AttentionMask(causal=True, offset=mask.offset, window=window)

    def _is_full(self, number: Any) -> Any:
        """Whether block `number`, counted from 0, attends to all tokens in spite of a window."""
        interval = self.config.full_attention_interval
        return False if interval is None else (number + 1) % interval == 0

    def encoder_keys_values(self, x: Float[Array, "B S D"]) -> tuple[KeyValue, ...]:
        """Each block's cross-attention keys and values of the encoder's output `x`.

        With `config.scan_layers` they are one `KeyValue` with a leading layer axis.
        """

        def project(block: Any) -> KeyValue:
            return block.cross_attention.keys_values(x)

        if not self.config.scan_layers:
            return tuple(map(project, self.blocks))
        over_layers = nn.vmap(project, **_LAYER_AXIS, axis_size=self.num_layers)
        return (over_layers(self.stacked_blocks),)

    def _with_positions(
        self, x: Array, mask: AttentionMask, positions: AnyArray | None, length: int
    ) -> tuple[Array, Rotation | None, Array | None]:
        """`x` with positions, normalised if asked, and the rotation and bias for the blocks."""
        queries = mask.offset + jnp.arange(x.shape[1])
        positions = queries if positions is None else jnp.asarray(positions)
        rotation = self.positions.rotation(positions)
        bias = self.positions.bias(queries, jnp.arange(length), mask.causal)
        x = self.positions.add(x, positions, length)
        return self.embedding_norm(x) if self.config.embedding_norm else x, rotation, bias

    def _apply_blocks(
        self,
        apply_block: Callable[..., tuple[Array, LayerCache | None]],
        x: Array,
        layers: tuple[LayerCache, ...],
        encoder_kv: tuple[KeyValue | LayerCache, ...],
        dropout_rng: DropoutRng | None,
    ) -> tuple[Array, tuple[Any, ...]]:
        """`x` after all blocks, and the new `layers`.

        With `config.scan_layers` the inputs of all blocks have a leading layer axis, and the blocks
        are applied by one `jax.lax.scan`; blocks with and without a window are its two branches.
        """
        if not self.config.scan_layers:
            found = []
            for i, block in enumerate(self.blocks):
                given = _nth(layers, i), _nth(encoder_kv, i), dropout_rng
                x, layer = apply_block(block, x, given, self._is_full(i))
                found.append(layer)
            return x, tuple(found)
        paths = tuple("/".join((*self.path, f"blocks_{i}")) for i in range(self.num_layers))
        place = "/".join((*self.path, STACKED))

        def apply_numbered(block: nn.Module, x: Array, inputs: Any) -> Any:
            layer, kv, number = inputs
            rng = None if dropout_rng is None else dropout_rng.in_scan(place, paths, number)
            full, windowed = (
                partial(apply_block, inputs=(layer, kv, rng), is_full=x) for x in (True, False)
            )
            is_full = self._is_full(number)
            if is_full is False or self.is_initializing():
                return windowed(block, x)
            return nn.cond(is_full, full, windowed, block, x)

        scan = nn.scan(apply_numbered, **_LAYER_AXIS, length=self.num_layers)
        inputs = _nth(layers, 0), _nth(encoder_kv, 0), jnp.arange(self.num_layers)
        x, layer = scan(self.stacked_blocks, x, inputs)
        return x, (layer,)

    def _check_rngs(self) -> None:
        config = self.config
        rates = config.dropout_rate, config.attention_dropout_rate, config.activation_dropout_rate
        if (
            any((*rates, config.word_dropout_rate))
            and self.has_rng("dropout")
            and not self.is_initializing()
        ):
            raise ValueError(
                'rngs={"dropout": key} was given, but these modules take the argument dropout_rng: '
                "give dropout_rng=DropoutRng.create(key, example_ids), or a config whose dropout "
                "rates are 0"
            )
