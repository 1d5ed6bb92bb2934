"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, one matrix for query, key and value."""

from collections.abc import Mapping
from typing import Any

from jaxformer.pretrained.family import Family
from jaxformer.pretrained.settings import ACTIVATIONS, Copied, Fixed, Named
from jaxformer.pretrained.subjects import Subject
from jaxformer.pretrained.table import Row, dense, norm, one, zero
from jaxformer.pretrained.transforms import FLAT, conv1d, linear


def table(subject: Subject, theirs: Mapping[str, Any]) -> list[Row]:
    """The rows of a GPT-2 with its output or a classifier on it."""
    ours, config = subject.body, subject.config
    embedding, output = "transformer.wte.weight", "lm_head.weight"
    rows = [one(f"{ours}decoder/positions/table", "transformer.wpe.weight")]
    if subject.kind == "decoder_classifier":
        rows += [one(f"{ours}embedding/table", embedding)]
        rows += [one("head/kernel", "score.weight", linear()), zero("head/bias")]
    elif not config.ties_output:
        rows += [one(f"{ours}embedding/table", embedding), one("output/kernel", output, linear())]
    else:
        rows += [Row((f"{ours}embedding/table",), (embedding, output))]
    for i in range(config.num_decoder_layers):
        rows += _block(f"{ours}decoder/blocks_{i}", f"transformer.h.{i}")
    return [*rows, *norm(f"{ours}decoder/final_norm", "transformer.ln_f")]


def _block(ours: str, theirs: str) -> list[Row]:
    parts = [f"{ours}/attention/{name}" for name in ("query", "key", "value")]
    kernels = tuple(f"{part}/kernel" for part in parts)
    biases = tuple(f"{part}/bias" for part in parts)
    return [
        *norm(f"{ours}/attention_norm", f"{theirs}.ln_1"),
        Row(kernels, (f"{theirs}.attn.c_attn.weight",), conv1d()),
        Row(biases, (f"{theirs}.attn.c_attn.bias",), FLAT),
        *dense(f"{ours}/attention/out", f"{theirs}.attn.c_proj", kernel=conv1d(inputs=2)),
        *norm(f"{ours}/feed_forward_norm", f"{theirs}.ln_2"),
        *dense(f"{ours}/feed_forward/up", f"{theirs}.mlp.c_fc", kernel=conv1d()),
        *dense(f"{ours}/feed_forward/down", f"{theirs}.mlp.c_proj", kernel=conv1d()),
    ]


FAMILY = Family(
    model_type="gpt2",
    architectures={
        "GPT2LMHeadModel": "decoder",
        "GPT2Model": "bare_decoder",
        "GPT2ForSequenceClassification": "decoder_classifier",
    },
    constants={
        "positions": "learned",
        "norm_placement": "pre",
        "scale_embeddings": False,
        "initializer": "scaled_normal",
    },
    settings=(
        Copied("vocab_size", "vocab_size", 50_257),
        Copied("n_positions", "max_len", 1024),
        Copied("n_embd", "d_model", 768),
        Copied("n_layer", "num_decoder_layers", 12),
        Copied("n_head", "num_heads", 12),
        Copied("n_inner", "d_ff", lambda ours: 4 * ours["d_model"]),
        Named("activation_function", "activation", "gelu_new", ACTIVATIONS),
        Named("tie_word_embeddings", "tied_embeddings", True, {True: "output", False: "none"}),
        Copied("layer_norm_epsilon", "norm_eps", 1e-5),
        Copied("resid_pdrop", "dropout_rate", 0.1),
        Copied("attn_pdrop", "attention_dropout_rate", 0.1),
        Fixed("scale_attn_weights", True),
        Fixed("scale_attn_by_inverse_layer_idx", False),
        Fixed("add_cross_attention", False),
    ),
    table=table,
    prefix="transformer.",
    heads=("lm_head.", "score."),
    ignored=r"\.attn\.(masked_)?bias$",
    free=frozenset(
        """n_ctx embd_pdrop reorder_and_upcast_attn summary_activation summary_first_dropout
        summary_proj_to_labels summary_type summary_use_proj""".split()
    ),
    head="score.weight",
)
"""The dropout of embeddings (`embd_pdrop`) is that of sub-layers here."""
