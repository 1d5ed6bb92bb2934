"""A program: kernels on 4 devices against one, `python -m tests.ops.attention.rows_on_mesh`.

Rows are divided along data=2 and heads along tensor=2 outside of a strategy's step, as in scoring
and embedding. It prints a line of JSON for each kernel: the largest difference of results and
gradients, and the number of elements that the devices send each other.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.distributed import make_mesh
from jaxformer.ops.attention import gpu_flash, tpu_decode, tpu_flash
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.masks import AttentionMask
from tests.hlo import collectives

ROWS, LENGTH, HEADS, SIZE = 4, 128, 4, 16


def all_positions(rng):
    """A call with padding and dropout of the shapes [ROWS, LENGTH, HEADS, SIZE]."""
    arrays = [rng.standard_normal((ROWS, LENGTH, HEADS, SIZE)) for _ in range(3)]
    lengths = np.array([LENGTH, 101, 64, 31])
    padding_mask = np.arange(LENGTH)[None] < lengths[:, None]
    seed = jax.random.key_data(jax.random.key(3))

    def attend(kernel, q, k, v, padding_mask, seed):
        dropout = DropoutMask(DropoutRng(seed, jnp.arange(len(q))), "weights", 0.25)
        mask = AttentionMask(causal=True, padding_mask=padding_mask)
        return kernel(q, k, v, mask, scale=0.25, dropout=dropout, interpret=True)

    return attend, arrays, (padding_mask, seed)


def a_step_of_decoding(rng):
    """One query of each row, at a place of its own in a cache with half as many heads of keys."""
    cache = ROWS, LENGTH, HEADS // 2, SIZE
    arrays = [rng.standard_normal(shape) for shape in ((ROWS, 1, HEADS, SIZE), cache, cache)]

    def attend(kernel, q, k, v, offset):
        mask = AttentionMask(causal=True, offset=offset, from_cache=True)
        return kernel(q, k, v, mask, scale=0.25, interpret=True)

    return attend, arrays, (np.array([LENGTH - 1, 0, 64, 31]),)


def compare(kernel, call):
    attend, arrays, others = call(np.random.default_rng(0))
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]

    def loss(q, k, v, *others):
        out = attend(kernel, q, k, v, *others)
        return jnp.sum(jnp.sin(out)), out

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    expected = gradients(*arrays, *others)
    mesh = make_mesh("data=2,tensor=2")
    with jax.set_mesh(mesh):
        divided = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
        placed = [jax.device_put(x, divided) for x in arrays]
        of_rows = jax.device_put(others[0], NamedSharding(mesh, PartitionSpec("data")))
        placed += [of_rows, *others[1:]]
        program = gradients.lower(*placed).compile()
        found = program(*placed)
    ((_, out), slopes), ((_, right), right_slopes) = found, expected
    pairs = zip((out, *slopes), (right, *right_slopes), strict=True)
    largest = max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs)
    # Sums of the gradient over axes of one device are no exchange.
    kinds = "all-gather", "all-to-all", "collective-permute"
    sent = sum(each.size for each in collectives(program) if each.kind in kinds)
    return {"kernel": kernel.name, "difference": float(largest), "sent": sent}


if __name__ == "__main__":
    for kernel in (gpu_flash, tpu_flash):
        print(json.dumps(compare(kernel, all_positions)))
    print(json.dumps(compare(tpu_decode, a_step_of_decoding)))
