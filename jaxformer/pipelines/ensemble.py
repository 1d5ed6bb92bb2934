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

# The members share what only the sentences decide.
_CACHE_AXES = Cache(0, None, 0, None, None)  # type: ignore[arg-type]


def stack_members(members: Sequence[Any]) -> Any:
    """The parameters of several models as one tree, whose leaves have a leading member axis.

    Raises `ConfigError`, naming the first difference, for members of different shapes, or none.

    >>> stack_members([{"scale": jnp.zeros(3)}, {"scale": jnp.ones(3)}])["scale"]
    Array([[0., 0., 0.],
           [1., 1., 1.]], dtype=float32)
    """
    if not members:
        raise ConfigError("an ensemble was given no member: give the parameters of at least one")
    first, *others = map(_shapes, members)
    for number, other in enumerate(others, start=2):
        for path in sorted(first | other):
            one, two = first.get(path, "absent"), other.get(path, "absent")
            if one != two:
                raise ConfigError(
                    f"members of an ensemble must have the same shapes, but {path} is {one} in "
                    f"member 1 and {two} in member {number}: give models of one size"
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
            members = jax.vmap(lambda params: of_one(params, *args), out_axes=_CACHE_AXES)(params)
            return EnsembleCache(members)
        if method == "decode_step":
            tokens, cache = args
            step = jax.vmap(of_one, (0, None, _CACHE_AXES), (0, _CACHE_AXES))
            logits, members = step(params, tokens, cache.members)
            return self._average(logits), EnsembleCache(members)
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
        reorder: Callable[[Cache], Cache] = jax.vmap(
            lambda cache: cache.reorder_beams(parents), (_CACHE_AXES,), _CACHE_AXES
        )
        return EnsembleCache(reorder(self.members))

    def truncate(self, lengths: Int[Array, " B"] | Int[Array, ""]) -> "EnsembleCache":
        """The cache with the first `lengths` tokens of each sentence."""
        return EnsembleCache(self.members.truncate(lengths))


def _shapes(params: Any) -> dict[str, str]:
    """ "path/of/leaf" -> "float32[3, 5]"."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
