"""Several models of one shape that decode as one, with the mean of their probabilities."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.cache import Cache
from jaxformer.ops.masks import AnyArray


def stack_members(members: Sequence[Any]) -> Any:
    """The parameters of several models as one tree, whose leaves have a leading member axis.

    Raises `ConfigError`, naming the first difference, for members of different shapes, or none.

    >>> stack_members([{"scale": jnp.zeros(3)}, {"scale": jnp.ones(3)}])["scale"]
    Array([[0., 0., 0.],
           [1., 1., 1.]], dtype=float32)
    """
    if not members:
        raise ConfigError("an ensemble was given no member: give the parameters of at least one")
    expected = _shapes(members[0])
    for number, member in enumerate(members[1:], start=2):
        shapes = _shapes(member)
        for path in sorted(expected | shapes):
            of_first, of_member = expected.get(path, "absent"), shapes.get(path, "absent")
            if of_first != of_member:
                raise ConfigError(
                    f"members of an ensemble must have the same shapes, but {path} is {of_first} "
                    f"in member 1 and {of_member} in member {number}: give models of one size"
                )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)


@dataclass(frozen=True)
class Ensemble:
    """`model` with the parameters of `stack_members`, for decoding and for scoring.

    It takes the place of the model in `translate`, `complete` and `score_pairs`. All members
    compute in one program. Its logits are the logarithm of the members' mean probability.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> both = jf.Ensemble(jf.DecoderOnly(config))
    >>> # jf.complete(jf.Loaded(both, jf.stack_members([params_1, params_2]), tokenizer), "a text")
    """

    model: Any

    @property
    def config(self) -> TransformerConfig:
        """The config of the members."""
        return self.model.config

    def apply(self, variables: Any, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
        """`model.apply` of every member; `ConfigError` for a method that does not decode."""

        def of_one(params: Any, *args: Any) -> Any:
            return self.model.apply({"params": params}, *args, method=method, **kwargs)

        params = variables["params"]
        if method == "init_cache":
            init = jax.vmap(lambda params: _divide(of_one(params, *args)), out_axes=(0, None))
            return EnsembleCache(_join(*init(params)))
        if method == "decode_step":
            tokens, cache = args
            divided, shared = _divide(cache.members)

            def step(params: Any, divided: Any) -> Any:
                logits, cache = of_one(params, tokens, _join(divided, shared))
                return logits, *_divide(cache)

            logits, *members = jax.vmap(step, out_axes=(0, 0, None))(params, divided)
            return self._average(logits), EnsembleCache(_join(*members))
        if method == "__call__":
            return self._average(jax.vmap(lambda params: of_one(params, *args))(params))
        raise ConfigError(
            f"an ensemble has no method {method!r}: give __call__, init_cache or decode_step"
        )

    def _average(self, logits: Float[Array, "M *B V"]) -> Float[Array, "*B V"]:
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        return jax.nn.logsumexp(log_probs, axis=0) - math.log(len(logits))


class EnsembleCache(struct.PyTreeNode):
    """The caches of an ensemble: in `members`, keys and values have a leading member axis."""

    members: Cache

    @property
    def can_truncate(self) -> bool:
        """As in `Cache`."""
        return self.members.can_truncate

    @property
    def num_beams(self) -> int:
        """W."""
        return self.members.num_beams

    def reorder_beams(self, parents: Int[Array, "B W2"]) -> "EnsembleCache":
        """The cache in which beam w of each member continues beam `parents[b, w]`."""
        return self._change(lambda cache: cache.reorder_beams(parents))

    def take_rows(self, rows: Int[AnyArray, " K"]) -> "EnsembleCache":
        """The cache of the K sentences `rows`."""
        return self._change(lambda cache: cache.take_rows(rows))

    def put_rows(self, rows: Int[AnyArray, " K"], new: "EnsembleCache") -> "EnsembleCache":
        """The cache with the K sentences of `new` in `rows`."""
        return self._change(lambda cache, other: cache.put_rows(rows, other), new)

    def _change(self, change: Callable[..., Cache], *others: "EnsembleCache") -> "EnsembleCache":
        """The cache with `change` of each member's, and of the same member's in `others`."""
        divided, shared = zip(*(_divide(cache.members) for cache in (self, *others)), strict=True)

        def change_one(*divided: Any) -> Any:
            return _divide(change(*map(_join, divided, shared)))

        return EnsembleCache(_join(*jax.vmap(change_one, out_axes=(0, None))(*divided)))

    def truncate(self, lengths: Int[Array, " B"] | Int[Array, ""]) -> "EnsembleCache":
        """The cache with the first `lengths` tokens of each sentence."""
        return EnsembleCache(self.members.truncate(lengths))


def _divide(cache: Cache) -> tuple[Any, Cache]:
    """The parts of a cache that each member of an ensemble has, and the part that all share."""
    return (cache.layers, cache.encoder_kv), cache.replace(layers=(), encoder_kv=())


def _join(divided: Any, shared: Cache) -> Cache:
    """The inverse of `_divide`."""
    layers, encoder_kv = divided
    return shared.replace(layers=layers, encoder_kv=encoder_kv)


def _shapes(params: Any) -> dict[str, str]:
    """ "path/of/leaf" -> "float32[3, 5]"."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
