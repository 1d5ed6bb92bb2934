"""What is carried: a kind of model and what defines it, without the model itself."""

from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple

from jaxformer.config import TransformerConfig

Kind = Literal[
    "decoder",
    "bare_decoder",
    "encoder",
    "masked",
    "masked_and_next",
    "encoder_decoder",
    "encoder_classifier",
    "decoder_classifier",
]

_BODIES = {
    "masked": "encoder/",
    "masked_and_next": "encoder/",
    "encoder_classifier": "backbone/",
    "decoder_classifier": "backbone/",
}

_ONLY_WITH = {
    "rotary_base": "rotary",
    "sinusoidal_layout": "sinusoidal",
    "relative_buckets": "relative",
    "relative_max_distance": "relative",
}

# What only training asks for, or how numbers are held: none of it changes what weights compute.
UNSEEN = (
    "dropout_rate",
    "attention_dropout_rate",
    "activation_dropout_rate",
    "initializer",
    "dtype",
)


class Subject(NamedTuple):
    """A model as the tables see it; `classes` counts for classifiers only.

    A bare decoder is one that others publish without an output.
    """

    kind: Kind
    config: TransformerConfig
    classes: int = 0

    @property
    def body(self) -> str:
        """Where the paths of the model under the heads begin."""
        return _BODIES.get(self.kind, "")

    def completed(self) -> "Subject":
        """The subject itself; a bare decoder as one whose output is its embedding."""
        if self.kind != "bare_decoder":
            return self
        return Subject("decoder", replace(self.config, tied_embeddings="output"))

    def facts(self) -> dict[str, Any]:
        """The fields of the config that change what this kind of model computes."""
        config = self.config
        facts = asdict(config)
        facts |= {"num_kv_heads": config.kv_heads, "head_dim": config.key_size}
        facts |= {"value_head_dim": config.value_size}
        facts |= {"source_vocab_size": config.source_vocab_size or config.vocab_size}
        unseen = [
            *UNSEEN,
            *(name for name, scheme in _ONLY_WITH.items() if scheme != config.positions),
        ]
        if self.kind != "encoder_decoder":
            decoder = self.kind.startswith("decoder")
            unseen.append("num_encoder_layers" if decoder else "num_decoder_layers")
            unseen += ["source_vocab_size", *(["pooler", "num_token_types"] if decoder else [])]
            tied = self.kind != "decoder" or config.ties_output
            facts["tied_embeddings"] = "output" if tied else "none"
            unseen += ["output_bias"] if self.kind != "decoder" else []
        return {name: value for name, value in facts.items() if name not in unseen}
