"""T5 (Raffel et al. 2020) and T5 1.1: pre-norm, RMSNorm, relative positions, no biases."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxformer.config import ConfigError, TransformerConfig
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.settings import ACTIVATIONS, Copied, Fixed, number
from jaxformer.pretrained.subjects import Subject
from jaxformer.pretrained.table import Row, dense, norm, one
from jaxformer.pretrained.transforms import SAME, linear, scaled

_OUTPUT = "lm_head.weight"
_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def table(subject: Subject, theirs: Mapping[str, Any]) -> list[Row]:
    """The rows of a T5, or of its encoder alone.

    Theirs divides no attention logit by sqrt(d_k), and where the output is the embedding's
    transpose, multiplies what it is applied to by d_model^-0.5: here the queries' kernels and the
    decoder's last norm hold these factors.
    """
    config = subject.config
    tied = subject.kind == "encoder_decoder" and config.ties_output
    rows = [Row(("embedding/table",), (*_EMBEDDINGS, *((_OUTPUT,) if tied else ())))]
    rows += _stack(config, "encoder", config.num_encoder_layers)
    if subject.kind == "encoder_decoder":
        rows += _stack(config, "decoder", config.num_decoder_layers)
        factor = config.d_model**-0.5 if tied and _is_scaled(theirs) else 1.0
        last = "decoder/final_norm/scale", "decoder.final_layer_norm.weight"
        rows += [one(*last, scaled(SAME, factor))]
        rows += [] if tied else [one("output/kernel", _OUTPUT, linear())]
    return [*rows, *norm("encoder/final_norm", "encoder.final_layer_norm", bias=False)]


def _stack(config: TransformerConfig, stack: str, layers: int) -> list[Row]:
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    rows = [one(f"{stack}/relative_bias/table", bias)]
    parts = {"attention": "SelfAttention", "feed_forward": "DenseReluDense"}
    if stack == "decoder":
        parts = {
            "attention": "SelfAttention",
            "cross_attention": "EncDecAttention",
            "feed_forward": "DenseReluDense",
        }
    for i in range(layers):
        for j, (part, name) in enumerate(parts.items()):
            ours, theirs = f"{stack}/blocks_{i}/{part}", f"{stack}.block.{i}.layer.{j}"
            rows += norm(f"{ours}_norm", f"{theirs}.layer_norm", bias=False)
            make = _feed_forward if part == "feed_forward" else _attention
            rows += make(config, ours, f"{theirs}.{name}")
    return rows


def _attention(config: TransformerConfig, ours: str, theirs: str) -> list[Row]:
    query = scaled(linear(), math.sqrt(config.key_size))
    return [
        *dense(f"{ours}/query", f"{theirs}.q", False, kernel=query),
        *dense(f"{ours}/key", f"{theirs}.k", False),
        *dense(f"{ours}/value", f"{theirs}.v", False),
        *dense(f"{ours}/out", f"{theirs}.o", False, kernel=linear(inputs=2)),
    ]


def _feed_forward(config: TransformerConfig, ours: str, theirs: str) -> list[Row]:
    names = {"gate": "wi_0", "up": "wi_1"} if config.gated else {"up": "wi"}
    pairs = (names | {"down": "wo"}).items()
    return [row for a, b in pairs for row in dense(f"{ours}/{a}", f"{theirs}.{b}", False)]


class _HeadSize(NamedTuple):
    """The size of a head, which here may follow from the width."""

    keys: Sequence[str] = ("d_kv",)

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """The field."""
        return {"head_dim": number("d_kv", theirs.get("d_kv", 64), int)}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """The key."""
        return {"d_kv": config.key_size}


class _Projection(NamedTuple):
    """The activation, and whether it gates; two older keys repeat what the first says."""

    keys: Sequence[str] = ("feed_forward_proj", "dense_act_fn", "is_gated_act")

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """The fields; `ConfigError` for an activation that is not there or said in two ways."""
        given = theirs.get("feed_forward_proj", "relu")
        gate, _, name = given.rpartition("-") if isinstance(given, str) else ("", "", "")
        # What T5 1.1 calls gelu is the approximation by tanh.
        name = "gelu_new" if given == "gated-gelu" else name
        said = theirs.get("dense_act_fn", name), theirs.get("is_gated_act", gate == "gated")
        if name not in ACTIVATIONS or gate not in ("", "gated") or said != (name, gate == "gated"):
            raise ConfigError(
                f"feed_forward_proj={given!r} with dense_act_fn={said[0]!r} and is_gated_act="
                f"{said[1]!r} cannot be said here: only one of {', '.join(ACTIVATIONS)}, or "
                "gated- before it, in all three"
            )
        return {"activation": ACTIVATIONS[name], "gated": bool(gate)}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """The first key."""
        if config.gated and config.activation == "gelu_tanh":
            return {"feed_forward_proj": "gated-gelu"}
        if config.gated and config.activation == "gelu":
            raise ConfigError("a gate with activation='gelu' means 'gelu_tanh' there")
        name = next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)
        return {"feed_forward_proj": f"gated-{name}" if config.gated else name}


class _Dropout(NamedTuple):
    """One rate for all places."""

    keys: Sequence[str] = ("dropout_rate",)

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """The three fields."""
        rate = number("dropout_rate", theirs.get("dropout_rate", 0.1), float)
        names = ("dropout_rate", "attention_dropout_rate", "activation_dropout_rate")
        return dict.fromkeys(names, rate)

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """The rate of sub-layers."""
        return {"dropout_rate": config.dropout_rate}


class _Tying(NamedTuple):
    """Whether the output is the embedding's transpose: in T5, and no longer in T5 1.1."""

    keys: Sequence[str] = ("tie_word_embeddings", "scale_decoder_outputs")

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """The field; source and target always have one embedding."""
        return {"tied_embeddings": "all" if _is_scaled(theirs) else "inputs"}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """The key that all versions read."""
        return {"tie_word_embeddings": config.ties_output}


def _is_scaled(theirs: Mapping[str, Any]) -> bool:
    """Whether outputs are multiplied by d_model^-0.5; `tie_word_embeddings` implies it."""
    implied = theirs.get("tie_word_embeddings", True)
    return number("scale_decoder_outputs", theirs.get("scale_decoder_outputs", implied), bool)


def adapt(subject: Subject, names: Collection[str]) -> Subject:
    """Without an output of its own the embedding's transpose is one, scaled or not."""
    if _OUTPUT in names or subject.kind != "encoder_decoder":
        return subject
    return subject._replace(config=replace(subject.config, tied_embeddings="all"))


FAMILY = Family(
    model_type="t5",
    architectures={
        "T5ForConditionalGeneration": "encoder_decoder",
        "T5WithLMHeadModel": "encoder_decoder",
        "T5EncoderModel": "encoder",
    },
    constants={
        "positions": "relative",
        "norm": "rms",
        "norm_placement": "pre",
        "use_bias": False,
        "scale_embeddings": False,
    },
    settings=(
        Copied("vocab_size", "vocab_size", 32_128),
        Copied("n_positions", "max_len", 512),
        Copied("d_model", "d_model", 512),
        _HeadSize(),
        Copied("d_ff", "d_ff", 2048),
        Copied("num_layers", "num_encoder_layers", 6),
        Copied("num_decoder_layers", "num_decoder_layers", lambda ours: ours["num_encoder_layers"]),
        Copied("num_heads", "num_heads", 8),
        Copied("relative_attention_num_buckets", "relative_buckets", 32),
        Copied("relative_attention_max_distance", "relative_max_distance", 128),
        Copied("layer_norm_epsilon", "norm_eps", 1e-6),
        _Projection(),
        _Dropout(),
        _Tying(),
        Fixed("is_decoder", False),
    ),
    table=table,
    prefix="",
    heads=(),
    adapt=adapt,
    # Written by early versions; no attention to the source ever used it.
    ignored=r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
    free=frozenset(["is_encoder_decoder", "initializer_factor", "classifier_dropout"]),
)
"""`n_positions` ends no T5: positions are relative; it is what it was trained on."""
