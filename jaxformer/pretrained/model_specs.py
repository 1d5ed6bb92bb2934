"""Models as the weight maps see them: the kind of a model and its config."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict

from jaxformer.config import TransformerConfig, dotted_fields, with_fields
from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import Block
from jaxformer.nn.heads import Classifier, MaskedLanguageModel, SpanPredictor, TokenClassifier
from jaxformer.nn.models import DecoderOnly, DecodingModel, EncoderDecoder, EncoderOnly, Model
from jaxformer.nn.stacked_blocks import unstack_blocks
from jaxformer.ops.attention import AttentionFn
from jaxformer.pretrained.weight_map import Shape

Kind = Literal[
    "decoder",
    "bare_decoder",
    "encoder",
    "masked",
    "masked_and_next",
    "encoder_decoder",
    "encoder_classifier",
    "decoder_classifier",
    "token_classifier",
    "spans",
]
"""A `bare_decoder` is published without an output layer."""

_CLASSES: dict[Kind, tuple[type[nn.Module], type[Model] | None]] = {
    "decoder": (DecoderOnly, None),
    "bare_decoder": (DecoderOnly, None),
    "encoder": (EncoderOnly, None),
    "masked": (MaskedLanguageModel, None),
    "masked_and_next": (MaskedLanguageModel, None),
    "encoder_decoder": (EncoderDecoder, None),
    "encoder_classifier": (Classifier, EncoderOnly),
    "decoder_classifier": (Classifier, DecoderOnly),
    "token_classifier": (TokenClassifier, EncoderOnly),
    "spans": (SpanPredictor, EncoderOnly),
}
"""The class of each kind, and of the model under its head, where the head is a module around it."""

POOLERLESS: tuple[Kind, ...] = ("token_classifier", "spans")
"""The kinds of models that do not use the pooler of their encoder."""

TRAINING_ONLY = (
    "dropout_rate",
    "attention.dropout_rate",
    "feed_forward.dropout_rate",
    "initializer",
    "scan_layers",
    "dtype",
)
"""Fields of the config that do not change what trained weights compute."""

_ENCODER_ONLY = (
    "num_encoder_layers",
    "embeddings.num_types",
    "pooler",
)
_DECODER_ONLY = ("num_decoder_layers", "window.size", "window.full_every")


class ModelSpec(NamedTuple):
    """All that defines a model, without the model itself."""

    kind: Kind
    """The model class and its heads."""
    config: TransformerConfig
    """The config of the model, or of a classifier's backbone."""
    classes: int = 0
    """The number of classes; 0 for models that are no classifier."""

    @property
    def body(self) -> str:
        """The prefix of the parameter paths of the model under the heads."""
        if self.kind.startswith("masked"):
            return "encoder/"
        return "" if _CLASSES[self.kind][1] is None else "backbone/"

    def completed(self) -> "ModelSpec":
        """The spec itself; for a bare decoder, the spec of a decoder with tied output."""
        if self.kind != "bare_decoder":
            return self
        return ModelSpec("decoder", with_fields(self.config, {"embeddings.tied": "output"}))

    def effective_fields(self) -> dict[str, Any]:
        """The fields of the config that change what a model of this kind computes, by dotted name.

        A value of None that stands for a size is that size.
        """
        config = self.config
        fields = dotted_fields(config) | {
            "head_dim": config.key_size,
            "value_head_dim": config.value_size,
            "source_vocab_size": config.source_vocab_size or config.vocab_size,
            "attention.num_kv_heads": config.kv_heads,
            "attention.qkv_bias": config.qkv_bias,
            "attention.query_scalar": config.attention.query_scalar or config.key_size,
            "output.bias": bool(config.output.bias),
        }
        experts = config.feed_forward.experts
        if experts is not None:  # without what only training reads
            fields["feed_forward.experts"] = replace(
                experts, jitter=0.0, capacity_factor=None, dispatch="auto"
            )
        window = config.window
        if window.size is None or (window.full_every or 0) > config.num_decoder_layers:
            fields["window.full_every"] = None
        if self.kind != "encoder_decoder":
            is_tied = self.kind != "decoder" or config.ties_output
            fields["embeddings.tied"] = "output" if is_tied else "none"
        unused = self._unused_fields()
        return {name: value for name, value in fields.items() if name not in unused}

    def _unused_fields(self) -> set[str]:
        """The fields that nothing depends on that a model of this kind computes."""
        unused: set[str] = set(TRAINING_ONLY)
        if self.kind == "encoder_decoder":
            return unused
        unused.add("source_vocab_size")
        if self.kind.startswith("decoder"):
            unused.update(_ENCODER_ONLY)
        else:
            unused.update(_DECODER_ONLY)
        if self.kind in POOLERLESS:
            unused.add("pooler")
        if self.kind != "decoder":
            unused.add("output.bias")
        return unused


def model_class(config: TransformerConfig, *, has_head: bool = False) -> type[Model]:
    """The class of the model of `config`; with a head, of the model below it."""
    if config.num_encoder_layers and config.num_decoder_layers:
        return EncoderDecoder
    if config.num_decoder_layers:
        return DecoderOnly
    return EncoderOnly if has_head else MaskedLanguageModel


def make_model(spec: ModelSpec, attention_fn: AttentionFn) -> nn.Module:
    """The model of `spec`."""
    whole, body = _CLASSES[spec.kind]
    if body is None:
        return whole(spec.config, attention_fn)
    backbone = body(spec.config, attention_fn)
    return whole(backbone) if spec.kind == "spans" else whole(backbone, spec.classes)


def spec_of(model: nn.Module) -> ModelSpec:
    """The spec of `model`; `ConfigError` for a class that weight maps do not know."""
    if isinstance(model, Classifier) and model.pooling == "mean":
        raise ConfigError(
            "a Classifier with pooling='mean' cannot be exported, because transformers has none: "
            "give pooling='token'"
        )
    backbone: Any = getattr(model, "backbone", None)
    for kind, (whole, body) in _CLASSES.items():
        if isinstance(model, whole) and isinstance(backbone, body or type(None)):
            config = (backbone or model).config
            if kind == "masked" and config.pooler != "none":
                kind = "masked_and_next"
            return ModelSpec(kind, config, getattr(model, "classes", 0))
    raise ConfigError(
        f"a {type(model).__name__} cannot be exported: give a DecoderOnly, EncoderOnly, "
        "EncoderDecoder, MaskedLanguageModel, a Classifier on a DecoderOnly or EncoderOnly, or a "
        "TokenClassifier or SpanPredictor on an EncoderOnly"
    )


def param_shapes(model: nn.Module) -> dict[str, Shape]:
    """The shapes of the model's parameters by path; no parameter is allocated.

    Tracing a model takes seconds, so the shapes of the last few models are kept.
    """
    try:
        hash(model)
    except TypeError:  # a user's part without a hash
        return _trace_shapes(model)
    return dict(_known_shapes(model))


def _trace_shapes(model: nn.Module) -> dict[str, Shape]:
    tokens = np.zeros((1, 1), np.int32)
    inputs: tuple[np.ndarray, ...]
    match model:
        case EncoderOnly():  # perhaps with the recipe of a whole translator
            inputs = (tokens,)
        case Model(config=sizes) if sizes.num_encoder_layers and sizes.num_decoder_layers:
            inputs = (tokens, tokens)
        case Classifier() | TokenClassifier() | SpanPredictor():
            inputs = (tokens, tokens > 0)
        case _:
            inputs = (tokens,)
    scanned = model
    if isinstance(model, DecodingModel) and model.block is Block and not model.config.scan_layers:
        # Its equal layers are traced once.
        scanned = model.clone(config=replace(model.config, scan_layers=True))
    params = jax.eval_shape(lambda: scanned.init(jax.random.key(0), *inputs)["params"])
    if scanned is not model:
        params = jax.eval_shape(unstack_blocks, params)
    leaves: dict[str, Any] = flatten_dict(params, sep="/")
    return {path: leaf.shape for path, leaf in leaves.items()}


_known_shapes = lru_cache(maxsize=16)(_trace_shapes)


def check_params(model: nn.Module, params: Mapping[str, Any]) -> None:
    """Raises `ConfigError`, naming the first one, for parameters that are not the model's."""
    leaves: dict[str, Any] = flatten_dict(dict(params), sep="/")
    shapes = {path: np.shape(leaf) for path, leaf in leaves.items()}
    needed = param_shapes(model)
    for path in sorted(shapes.keys() | needed.keys()):
        if shapes.get(path) != needed.get(path):
            raise ConfigError(
                f"{path} is {shapes.get(path, 'absent')} in params, but "
                f"{needed.get(path, 'absent')} in the model: give the params of this model"
            )
