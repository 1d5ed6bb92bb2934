"""Our models as the tables see them, and back."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import ConfigError
from jaxformer.heads import Classifier, MaskedLanguageModel
from jaxformer.kernels import Kernel
from jaxformer.models import DecoderOnly, EncoderDecoder, EncoderOnly
from jaxformer.pretrained.subjects import Subject
from jaxformer.pretrained.transforms import Shape


def make(subject: Subject, kernel: Kernel) -> nn.Module:
    """The model of `subject`."""
    config = subject.config
    match subject.kind:
        case "decoder":
            return DecoderOnly(config, kernel)
        case "encoder":
            return EncoderOnly(config, kernel)
        case "encoder_decoder":
            return EncoderDecoder(config, kernel)
        case "masked" | "masked_and_next":
            return MaskedLanguageModel(config, kernel)
        case "decoder_classifier":
            return Classifier(DecoderOnly(config, kernel), subject.classes)
        case "encoder_classifier":
            return Classifier(EncoderOnly(config, kernel), subject.classes)


def subject_of(model: nn.Module) -> Subject:
    """What the tables need to know of `model`; `ConfigError` for a class that they do not know."""
    match model:
        case DecoderOnly():
            return Subject("decoder", model.config)
        case EncoderOnly():
            return Subject("encoder", model.config)
        case EncoderDecoder():
            return Subject("encoder_decoder", model.config)
        case MaskedLanguageModel():
            kind = "masked_and_next" if model.config.pooler else "masked"
            return Subject(kind, model.config)
        case Classifier(backbone=DecoderOnly() as backbone):
            return Subject("decoder_classifier", backbone.config, model.classes)
        case Classifier(backbone=EncoderOnly() as backbone):
            return Subject("encoder_classifier", backbone.config, model.classes)
    raise ConfigError(
        f"a {type(model).__name__} is none of the models that others have: give a DecoderOnly, "
        "EncoderOnly, EncoderDecoder, MaskedLanguageModel, or a Classifier on one of the first two"
    )


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """The shapes of the model's parameters by path; nothing is allocated."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    match model:
        case EncoderDecoder():
            inputs = (tokens, tokens)
        case Classifier():
            inputs = (tokens, tokens > 0)
        case _:
            inputs = (tokens,)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs)["params"])
    return {path: leaf.shape for path, leaf in flat(params).items()}


def flat(params: dict, prefix: str = "") -> dict:
    """The leaves of nested dicts by "path/of/leaf"."""
    found = {}
    for name, value in params.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{prefix}{name}/") if inner else {prefix + name: value}
    return found


def nested(leaves: dict) -> dict:
    """The nested dicts of which `flat` makes `leaves`."""
    params: dict = {}
    for path, leaf in leaves.items():
        *parts, last = path.split("/")
        inner = params
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = leaf
    return params
