"""The products of a feed-forward network of experts: all of them, sorted by expert, or in slots.

The three ways compute one function. "dense" multiplies each token with the matrices of all experts
and adds up what it has chosen. "ragged" sorts the choices by expert, so that the rows of an expert
are neighbours (Gale et al. 2022), and multiplies them by `grouped_product`. "slots" gives each
expert a fixed number of slots for the tokens of a row of the batch (Lepikhin et al. 2020).

Where the mesh axis "tensor" divides the number of experts, each of its devices computes its own
experts for all tokens, and the results are added up.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from jaxformer.ops.grouped_product import grouped_product
from jaxformer.ops.manual_axes import check_differentiable
from jaxformer.ops.partitioning import axis_that_divides, partitioned

EXPERT_PRODUCTS = "expert_products"
"""The name of the products of rows that are sorted by expert, for policies of `jax.checkpoint`."""

_NUMBERS_PER_CHOICE = 2**20
"""Numbers of matrices that a token is multiplied with in the time in which a choice is sorted.

Compiled for a v5e, sorting a choice and its gradient takes about 270 cycles whatever the width,
and the products with matrices of 2^20 numbers about 240 (three of them, with their gradients)."""


class ExpertLayer(NamedTuple):
    """The matrices of one dense layer of all experts, and their biases."""

    kernel: Float[Array, "E I O"]
    bias: Float[Array, "E O"] | None


Layers = Mapping[str, ExpertLayer]
"""The layers of the experts by name."""

Multiply = Callable[[Array, str], Array]
"""multiply(rows, name): each of `rows` [..., I] through the layer `name` of its expert [..., O]."""

Network = Callable[[Array, Array | None, Multiply], Array]
"""network(rows, keep, multiply): the outputs of `rows` of tokens, each by its own expert.

`keep` is what the hidden layer of each row is multiplied by, or None.
"""


class Choice(NamedTuple):
    """The experts that each token has chosen."""

    experts: Int[Array, "B T k"]
    """Their numbers."""
    weights: Float[Array, "B T k"]
    """The weight of each in the sum."""


def mix_experts(
    network: Network,
    layers: Layers,
    x: Float[Array, "B T D"],
    choice: Choice,
    *,
    keep: Float[Array, "B T F"] | None = None,
    dispatch: str = "auto",
    slots: int | None = None,
) -> Float[Array, "B T D"]:
    """The weighted sum of `network` of the chosen experts, for each token of `x`.

    `dispatch` is as in `ExpertOptions`. With `slots` an expert takes no more tokens of a row of
    the batch, the first ones; it adds nothing to the others.

    >>> doubled = ExpertLayer(jnp.stack([2.0 * jnp.eye(3), 5.0 * jnp.eye(3)]), None)
    >>> choice = Choice(jnp.array([[[0], [1]]]), jnp.ones((1, 2, 1)))
    >>> network = lambda rows, keep, multiply: multiply(rows, "only")
    >>> mix_experts(network, {"only": doubled}, jnp.ones((1, 2, 3)), choice)[0]
    Array([[2., 2., 2.],
           [5., 5., 5.]], dtype=float32)
    """
    chosen = choice.experts.shape[-1]
    if slots is not None:
        compute = partial(_in_slots, network, slots, _num_experts(layers))
        return _on_mesh(compute, layers, x, choice, keep, divides_positions=False)
    compute_all = partial(_on_mesh, partial(_dense, network))
    sort = partial(_on_mesh, partial(_sorted, network))
    if dispatch == "dense" or (dispatch == "auto" and _is_dense_cheaper(layers, chosen)):
        return compute_all(layers, x, choice, keep)
    if dispatch == "ragged":
        return sort(layers, x, choice, keep)
    # CPUs and GPUs have no ragged product: XLA multiplies each of the k rows of a token with the
    # matrices of all experts.
    return jax.lax.platform_dependent(layers, x, choice, keep, tpu=sort, default=compute_all)


def _is_dense_cheaper(layers: Layers, chosen: int) -> bool:
    """Whether a device multiplies with all its experts in less time than it sorts `chosen` ones."""
    experts = _num_experts(layers)
    if experts <= 2 * chosen:
        return True
    axis = axis_that_divides("tensor", experts)
    if axis is not None:
        experts //= partitioned((axis,))[axis]
    largest = max(math.prod(layer.kernel.shape[1:]) for layer in layers.values())
    return experts * largest <= chosen * _NUMBERS_PER_CHOICE


def _num_experts(layers: Layers) -> int:
    return len(next(iter(layers.values())).kernel)


def _dense(
    network: Network,
    layers: Layers,
    x: Array,
    choice: Choice,
    keep: Array | None,
    first: Array | int,
) -> Float[Array, "B T D"]:
    """The experts from number `first` on of each token; of others than its own the weight is 0."""

    def multiply(rows: Array, name: str) -> Array:
        kernel, bias = layers[name]
        product = "btd,edf->ebtf" if rows.ndim == 3 else "ebtd,edf->ebtf"
        out = jnp.einsum(product, rows, kernel)
        return out if bias is None else out + bias[:, None, None]

    out = network(x, None if keep is None else keep[None], multiply)
    is_chosen = jax.nn.one_hot(choice.experts - first, _num_experts(layers), dtype=x.dtype)
    weights = jnp.einsum("btk,btke->bte", choice.weights.astype(x.dtype), is_chosen)
    return jnp.einsum("ebtd,bte->btd", out, weights)


def _sorted(
    network: Network,
    layers: Layers,
    x: Array,
    choice: Choice,
    keep: Array | None,
    first: Array | int,
) -> Float[Array, "B T D"]:
    """The outputs of the experts from number `first` on, whose rows are neighbours."""
    num_experts, chosen = _num_experts(layers), choice.experts.shape[-1]
    # All first choices, then all second ones: a TPU fills up arrays with a choice in each token.
    expert = choice.experts.reshape(-1, chosen).T.reshape(-1) - first
    is_here = (expert >= 0) & (expert < num_experts)
    expert = jnp.where(is_here, expert, num_experts)  # they come last
    order = jnp.argsort(expert)
    places = jnp.argsort(order)  # of each choice among the sorted rows
    expert, is_here = expert[order], is_here[order][:, None]
    sizes = jnp.bincount(expert, length=num_experts)

    def multiply(rows: Array, name: str) -> Array:
        kernel, bias = layers[name]
        out = checkpoint_name(grouped_product(rows, kernel, sizes), EXPERT_PRODUCTS)
        # The last row takes the gradient of choices of other devices' experts.
        return out if bias is None else out + jnp.pad(bias, ((0, 1), (0, 0)))[expert]

    def rows_of(tokens: Array) -> Array:
        return _sort_rows(tokens.reshape(-1, tokens.shape[-1]), order, places, chosen)

    rows = jnp.where(is_here, rows_of(x), 0)
    out = network(rows, None if keep is None else rows_of(keep), multiply)
    out = jnp.where(is_here, out, 0)  # a product leaves rows of no group undefined
    weights = choice.weights.astype(x.dtype).reshape(-1, chosen).T.reshape(-1, 1)
    out = _permute(out, places, order) * weights
    return out.reshape(chosen, *x.shape[:2], -1).sum(0)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sort_rows(tokens: Array, order: Array, places: Array, chosen: int) -> Array:
    """The token of each choice, in `order`; the gradient has no scatter."""
    return tokens[order % len(tokens)]


def _sort_rows_forward(tokens, order, places, chosen):
    return tokens[order % len(tokens)], places


def _sort_rows_backward(chosen, places, gradient):
    return gradient[places].reshape(chosen, -1, gradient.shape[-1]).sum(0), None, None


_sort_rows.defvjp(_sort_rows_forward, _sort_rows_backward)


@jax.custom_vjp
def _permute(rows: Array, order: Array, places: Array) -> Array:
    """`rows` in `order`, whose inverse is `places`; the gradient has no scatter."""
    return rows[order]


_permute.defvjp(
    lambda rows, order, places: (rows[order], places),
    lambda places, gradient: (gradient[places], None, None),
)


def _in_slots(
    network: Network,
    slots: int,
    total: int,
    layers: Layers,
    x: Array,
    choice: Choice,
    keep: Array | None,
    first: Array | int,
) -> Float[Array, "B T D"]:
    """The outputs of the experts from number `first` on, of all `total` ones, in their slots."""
    num_experts, (rows, length, chosen) = _num_experts(layers), choice.experts.shape
    expert = choice.experts.reshape(rows, -1)  # in the order of tokens
    order = jnp.argsort(expert, axis=1)
    counts = jax.vmap(partial(jnp.bincount, length=total))(expert)
    starts = jnp.cumsum(counts, 1) - counts
    slot = jnp.arange(slots)[None, None]
    is_taken = slot < counts[..., None]
    in_order = jnp.where(is_taken, starts[..., None] + slot, 0)
    taken_by = jnp.take_along_axis(order, in_order.reshape(rows, -1), 1).reshape(in_order.shape)
    token, is_taken = (
        jax.lax.dynamic_slice_in_dim(table, first, num_experts, 1)
        for table in (taken_by // chosen, is_taken)
    )

    def rows_of(tokens: Array) -> Float[Array, "B E C F"]:
        taken = jnp.take_along_axis(tokens, token.reshape(rows, -1, 1), 1)
        return jnp.where(is_taken[..., None], taken.reshape(*token.shape, -1), 0)

    def multiply(rows: Array, name: str) -> Array:
        kernel, bias = layers[name]
        out = jnp.einsum("becd,edf->becf", rows, kernel)
        return out if bias is None else out + bias[None, :, None]

    out = network(rows_of(x), None if keep is None else rows_of(keep), multiply)
    place = jnp.argsort(order, axis=1) - jnp.take_along_axis(starts, expert, 1)
    expert = expert - first
    has_slot = (place < slots) & (expert >= 0) & (expert < num_experts)
    index = jnp.where(has_slot, expert * slots + place, 0)[..., None]
    out = jnp.take_along_axis(out.reshape(rows, num_experts * slots, -1), index, 1)
    weights = jnp.where(has_slot, choice.weights.reshape(rows, -1), 0).astype(x.dtype)
    return (out * weights[..., None]).reshape(rows, length, chosen, -1).sum(2)


def _on_mesh(
    compute: Callable[..., Array],
    layers: Layers,
    x: Array,
    choice: Choice,
    keep: Array | None,
    divides_positions: bool = True,
) -> Float[Array, "B T D"]:
    """`compute` on the devices of the current mesh, each with its own experts.

    XLA divides no ragged product, and gathers what a choice of experts indexes, so `jax.shard_map`
    divides them. The mesh axis "data" divides the rows, and "sequence" the positions if
    `divides_positions`. A device has the whole matrices of all experts where "tensor" does not
    divide their number.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if math.prod(mesh.shape[axis] for axis in mesh.auto_axes) == 1:
        return compute(layers, x, choice, keep, 0)
    check_differentiable((layers, x))
    batch, length, _ = x.shape
    rows = axis_that_divides("data", batch)
    positions = axis_that_divides("sequence", length) if divides_positions else None
    own_experts = axis_that_divides("tensor", _num_experts(layers))

    def compute_part(layers: Layers, x: Array, choice: Choice, keep: Array | None) -> Array:
        if own_experts is None:
            return compute(layers, x, choice, keep, 0)
        first = jax.lax.axis_index(own_experts) * _num_experts(layers)
        return jax.lax.psum(compute(layers, x, choice, keep, first), own_experts)

    of_tokens = PartitionSpec(rows, positions)
    return jax.shard_map(
        compute_part,
        in_specs=(PartitionSpec(own_experts), of_tokens, of_tokens, of_tokens),
        out_specs=of_tokens,
        axis_names={*mesh.auto_axes},
        check_vma=False,
    )(dict(layers), x, choice, keep)
