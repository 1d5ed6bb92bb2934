"""Marian (Junczys-Dowmunt et al. 2018): the Transformer of 2017 with a bias on its logits."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxformer.config import ConfigError, TransformerConfig
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.settings import ACTIVATIONS, Copied, Fixed, Named, number
from jaxformer.pretrained.subjects import Subject
from jaxformer.pretrained.table import Row, attention, dense, norm, one
from jaxformer.pretrained.transforms import Transform, linear

_OUTPUT = "lm_head.weight"
_SHARED = "model.shared.weight"
_SOURCE, _TARGET = (f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder"))
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
_PARTS = {"attention": "self_attn", "cross_attention": "encoder_attn"}

_ONE_ROW = Transform(
    shape=lambda ours: (1, *ours),
    to_theirs=lambda array: array[None],
    to_ours=lambda array, shape: array.reshape(shape),
)


def table(subject: Subject, theirs: Mapping[str, Any]) -> list[Row]:
    """The rows of a Marian translation model."""
    config = subject.config
    rows = [one("output/bias", "final_logits_bias", _ONE_ROW)]
    if config.tied_embeddings == "all":
        rows += [Row(("embedding/table",), (_SHARED, _SOURCE, _TARGET, _OUTPUT))]
    else:
        output = (_OUTPUT,) if config.ties_output else ()
        rows += [Row(("embedding/table",), (_TARGET, *output))]
        rows += [one("source_embedding/table", _SOURCE)]
        rows += [] if output else [one("output/kernel", _OUTPUT, linear())]
    for stack, layers in (
        ("encoder", config.num_encoder_layers),
        ("decoder", config.num_decoder_layers),
    ):
        for i in range(layers):
            rows += _block(f"{stack}/blocks_{i}", f"model.{stack}.layers.{i}", stack == "decoder")
    return rows


def _block(ours: str, theirs: str, cross: bool) -> list[Row]:
    rows = []
    for part, name in _PARTS.items():
        if part == "attention" or cross:
            rows += attention(f"{ours}/{part}", f"{theirs}.{name}", _PROJECTIONS)
            rows += norm(f"{ours}/{part}_norm", f"{theirs}.{name}_layer_norm")
    return [
        *rows,
        *dense(f"{ours}/feed_forward/up", f"{theirs}.fc1"),
        *dense(f"{ours}/feed_forward/down", f"{theirs}.fc2"),
        *norm(f"{ours}/feed_forward_norm", f"{theirs}.final_layer_norm"),
    ]


class _Both(NamedTuple):
    """A number that their encoder and decoder have each, and that must be one here."""

    theirs: str
    ours: str
    default: int

    @property
    def keys(self) -> Sequence[str]:
        """The key of either."""
        return tuple(f"{stack}_{self.theirs}" for stack in ("encoder", "decoder"))

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """The field; `ConfigError` where the two differ."""
        one, other = (number(key, theirs.get(key, self.default), int) for key in self.keys)
        if one != other:
            raise ConfigError(
                f"{self.keys[0]}={one} and {self.keys[1]}={other} cannot be said here: encoder and "
                f"decoder have one {self.ours}"
            )
        return {self.ours: one}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """Both keys."""
        return dict.fromkeys(self.keys, getattr(config, self.ours))


class _Vocabularies(NamedTuple):
    """One vocabulary with one embedding for all, or two with the output tied or not."""

    keys: Sequence[str] = (
        "vocab_size",
        "decoder_vocab_size",
        "share_encoder_decoder_embeddings",
        "tie_word_embeddings",
    )

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """The fields; `ConfigError` for what is shared without being one."""
        source = number("vocab_size", theirs.get("vocab_size", 58_101), int)
        target = number("decoder_vocab_size", theirs.get("decoder_vocab_size") or source, int)
        shared, tied = (number(key, theirs.get(key, True), bool) for key in self.keys[2:])
        if not shared:
            sizes = {"vocab_size": target, "source_vocab_size": source}
            return sizes | {"tied_embeddings": "output" if tied else "none"}
        if source != target or not tied:
            raise ConfigError(
                f"share_encoder_decoder_embeddings=true with vocab_size={source}, "
                f"decoder_vocab_size={target} and tie_word_embeddings={str(tied).lower()} cannot "
                "be said here: what is shared has one vocabulary and is the output too"
            )
        return {"vocab_size": source, "tied_embeddings": "all"}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """The keys."""
        source = config.source_vocab_size or config.vocab_size
        shared = config.ties_inputs
        values = source, config.vocab_size, shared, config.ties_output
        return dict(zip(self.keys, values, strict=True))


FAMILY = Family(
    model_type="marian",
    architectures={"MarianMTModel": "encoder_decoder"},
    constants={
        "positions": "sinusoidal",
        "sinusoidal_layout": "halves",
        "norm_placement": "post",
        "norm_eps": 1e-5,
        "output_bias": True,
    },
    settings=(
        _Vocabularies(),
        Copied("max_position_embeddings", "max_len", 1024),
        Copied("d_model", "d_model", 1024),
        Copied("encoder_layers", "num_encoder_layers", 12),
        Copied("decoder_layers", "num_decoder_layers", 12),
        _Both("attention_heads", "num_heads", 16),
        _Both("ffn_dim", "d_ff", 4096),
        Named("activation_function", "activation", "gelu", ACTIVATIONS),
        Copied("scale_embedding", "scale_embeddings", False),
        Copied("dropout", "dropout_rate", 0.1),
        Copied("attention_dropout", "attention_dropout_rate", 0.0),
        Copied("activation_dropout", "activation_dropout_rate", 0.0),
        Fixed("static_position_embeddings", True),
        Fixed("is_decoder", False),
    ),
    table=table,
    prefix="model.",
    heads=("lm_head.", "final_logits_bias"),
    # The table of sines, which early versions wrote down.
    ignored=r"^model\.(en|de)coder\.embed_positions\.weight$",
    free=frozenset(
        """is_encoder_decoder init_std num_hidden_layers encoder_layerdrop decoder_layerdrop
        classif_dropout classifier_dropout extra_pos_embeddings _num_labels""".split()
    ),
)
"""Their positions end at `max_position_embeddings`; the table of sines here goes on."""
