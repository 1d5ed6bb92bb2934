"""Cases of benchmarks that write texts, and random parameters of their models."""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.timing import Case
from jaxformer.runtime import concurrency, concurrently


def text_case(write: Callable[[], np.ndarray], **metadata: Any) -> Case:
    """`write()` gives tokens [B, T]; the first four of three texts and a checksum are reported."""
    text = write()
    checksum = f"{zlib.crc32(text.astype(np.int32).tobytes()):08x}"
    reported = {"tokens": text.size, "first_tokens": text[:3, :4].tolist(), "checksum": checksum}
    return Case(write, metadata | reported)


def compiled_texts(
    write: Callable[..., jax.Array], params: Any, *rows: np.ndarray, **metadata: Any
) -> Case:
    """`write(params, *rows)`, compiled, which gives the tokens [B, T] of texts with `rows` [B, ..].

    Compiler options are the default ones. The rows are split into as many parts as a pipeline
    computes at the same time.
    """
    compiled, count = jax.jit(write), concurrency(params)
    split = [np.array_split(each, min(count, len(each))) for each in rows]
    runs = [
        lambda part=part: np.asarray(compiled(params, *part)) for part in zip(*split, strict=True)
    ]
    return text_case(
        lambda: np.concatenate(list(concurrently(runs, count))),
        device=jax.devices()[0].device_kind,
        **metadata,
    )


def random_params(model: Any, *inputs: np.ndarray) -> Any:
    """Parameters of `model`: normal numbers with standard deviation d_model^-0.5.

    They are larger than at the start of training, so that each layer changes the next token.
    Biases are 0, and scales 1.
    """
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))["params"]
    rng = np.random.default_rng(0)
    std = np.float32(model.config.d_model**-0.5)

    def random_leaf(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if len(leaf.shape) == 1:
            return np.full(leaf.shape, float(path[-1].key == "scale"), np.float32)
        return rng.standard_normal(leaf.shape, np.float32) * std

    return jax.tree_util.tree_map_with_path(random_leaf, shapes)
