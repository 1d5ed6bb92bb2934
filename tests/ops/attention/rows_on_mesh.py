"""A program: kernels on 4 devices against one, `python -m tests.ops.attention.rows_on_mesh`.

Rows are divided along data=2 and heads along tensor=2 outside of a strategy's step, as in scoring
and embedding. It prints a line of JSON for each kernel: the largest difference of results and
gradients, and the number of elements that the devices send each other.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.distributed import make_mesh
from jaxformer.ops.attention import gpu_flash, tpu_flash
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.masks import AttentionMask
from tests.hlo import collectives

ROWS, LENGTH, HEADS, SIZE = 4, 128, 4, 16


def loss(kernel, q, k, v, padding_mask, seed):
    dropout = DropoutMask(DropoutRng(seed, jnp.arange(len(q))), "weights", 0.25)
    mask = AttentionMask(causal=True, padding_mask=padding_mask)
    out = kernel(q, k, v, mask, scale=0.25, dropout=dropout, interpret=True)
    return jnp.sum(jnp.sin(out)), out


def compare(kernel):
    rng = np.random.default_rng(0)
    shape = ROWS, LENGTH, HEADS, SIZE
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(3)]
    lengths = np.array([LENGTH, 101, 64, 31])
    padding_mask = np.arange(LENGTH)[None] < lengths[:, None]
    seed = jax.random.key_data(jax.random.key(3))
    gradients = jax.jit(jax.value_and_grad(partial(loss, kernel), (0, 1, 2), has_aux=True))
    expected = gradients(*arrays, padding_mask, seed)
    mesh = make_mesh("data=2,tensor=2")
    with jax.set_mesh(mesh):
        divided = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
        placed = [jax.device_put(x, divided) for x in arrays]
        rows = jax.device_put(padding_mask, NamedSharding(mesh, PartitionSpec("data")))
        program = gradients.lower(*placed, rows, seed).compile()
        found = program(*placed, rows, seed)
    (_, out), slopes = found
    (_, right), others = expected
    pairs = zip((out, *slopes), (right, *others), strict=True)
    largest = max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs)
    # Sums of the gradient over axes of one device are no exchange.
    kinds = "all-gather", "all-to-all", "collective-permute"
    sent = sum(each.size for each in collectives(program) if each.kind in kinds)
    return {"kernel": kernel.name, "difference": float(largest), "sent": sent}


if __name__ == "__main__":
    for kernel in (gpu_flash, tpu_flash):
        print(json.dumps(compare(kernel)))
