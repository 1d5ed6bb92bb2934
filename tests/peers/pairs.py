"""Models of `transformers`, and all that they and ours say of a text, with its slope."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.nn.blocks import Block
from jaxformer.nn.heads import SpanPredictor
from jaxformer.nn.stack import Stack

V = 13
T5 = {
    "vocab_size": V,
    "d_model": 12,
    "d_kv": 4,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 8,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": False,
}
MARIAN = {
    "vocab_size": V,
    "d_model": 12,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 16,
    "activation_function": "swish",
    "scale_embedding": True,
    "pad_token_id": V - 1,
    "decoder_start_token_id": V - 1,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
}
MBART = {key: value for key, value in MARIAN.items() if key != "scale_embedding"}
M2M100 = MARIAN | {"pad_token_id": 1, "decoder_start_token_id": 2}
M2M100 |= {"eos_token_id": 2, "forced_eos_token_id": 2}
SIZES = {"Marian": MARIAN, "Bart": MBART, "MBart": MBART, "M2M100": M2M100, "T5": T5, "MT5": T5}
"""A small one of each family that translates."""


def build(torch: Any, transformers: Any, kind: str, **changes: Any) -> Any:
    """A model of theirs that translates."""
    config = getattr(transformers, f"{kind}Config")(**SIZES[kind] | changes)
    ending = "MTModel" if kind == "Marian" else "ForConditionalGeneration"
    model = getattr(transformers, kind + ending)(config)
    if kind == "MT5" or (kind == "T5" and not config.scale_decoder_outputs):
        # Today's versions tie whatever the config says.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    return model


def weigh_theirs(torch: Any, parts: list) -> list[np.ndarray]:
    """Random weights of the outputs `parts`; their parameters have the gradient of the sum."""
    rng = np.random.default_rng(7)
    weights = [rng.standard_normal(part.shape).astype(np.float32) for part in parts]
    pairs = zip(parts, weights, strict=True)
    sum((part * torch.tensor(weight)).sum() for part, weight in pairs).backward()
    return weights


def weigh_ours(
    model: Any, params: Any, weights: list[np.ndarray], *inputs: Any, method: str | None = None
) -> tuple[Any, list, dict]:
    """The gradient of the sum, our outputs, and the vectors and attention weights on the way."""

    def weigh(params: Any) -> Any:
        found, state = model.apply(
            {"params": params},
            *inputs,
            method=method,
            mutable=["intermediates"],
            capture_intermediates=lambda module, method: (
                isinstance(module, Block | Stack) and method == "__call__"
            ),
        )
        found = jax.tree.leaves(found)
        if isinstance(model, SpanPredictor):
            found = jnp.unstack(found[0], axis=1)  # of starts and of ends
        weighed = (jnp.vdot(part, weight) for part, weight in zip(found, weights, strict=True))
        return sum(weighed), (found, state["intermediates"])

    grads, (found, state) = jax.jit(jax.grad(weigh, has_aux=True))(params)
    return grads, found, state
