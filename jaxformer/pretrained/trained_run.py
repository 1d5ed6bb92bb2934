"""A run of `experiments`: its model, parameters, tokenizers and settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from flax import linen as nn

from jaxformer.checkpoint import Checkpoints
from jaxformer.config import (
    TransformerConfig,
    check_trusted,
    from_plain,
    import_by_name,
    import_module_class,
    trusting,
)
from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.distributed import Strategy
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.nn.blocks import Block
from jaxformer.nn.heads import Classifier, SpanPredictor
from jaxformer.ops.attention import ATTENTION_FNS, AttentionFn
from jaxformer.pretrained.loaded import Setting
from jaxformer.pretrained.model_specs import check_params, model_class
from jaxformer.pretrained.run_weights import CheckpointName, RunWeights, select_weights
from jaxformer.pretrained.vocabulary_sizes import check_vocabularies
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import Tokenizer

# The files of a run's tokenizers: one of both sides, or one of each.
_TOKENIZER = Path("tokenizer", "tokenizer.json")
_SOURCE, _TARGET = Path("tokenizer", "source.json"), Path("tokenizer", "target.json")

# The names of its settings in its config.json.
_SETTINGS: dict[str, type[Setting]] = {
    "search": SearchConfig,
    "translation": TranslationOptions,
    "sampling": SamplingConfig,
    "completion": CompletionOptions,
}


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """The run in a folder, here or in a bucket, with the weights that were chosen of it.

    Each part can be read alone.
    """

    folder: Path
    """The folder of the run."""
    config: dict[str, Any]
    """The content of its config.json."""
    weights: RunWeights | None = None
    """The weights of the model; None: only the settings of the run are known."""
    trust_code: bool = False
    """Whether functions and classes that config.json names are imported, whoever wrote it."""

    @property
    def is_trained(self) -> bool:
        """Whether the run has a complete checkpoint."""
        return Checkpoints(self.folder / "checkpoints").newest_step() is not None

    def with_weights(
        self, checkpoint: CheckpointName = "final", step: int | None = None
    ) -> "TrainedRun":
        """The run with the weights that `load` describes; raises what `select_weights` does."""
        return replace(self, weights=select_weights(self.folder, checkpoint, step))

    def model(
        self,
        attention_fn: AttentionFn | None = None,
        dtype: Literal["float32", "bfloat16"] | None = None,
    ) -> nn.Module:
        """The model, with the run's own attention function and type where None is given.

        Raises `ConfigError` for a damaged config.json and for names that are not trusted,
        `CheckpointError` for a model that does not have the parameters of the weights.
        """
        sizes = self._sizes
        training = self.config.get("training", {})
        imported = {name: training[name] for name in ("block", "model") if name in training}
        if attention_fn is None and "attention_fn" in training:
            imported["attention_fn"] = training["attention_fn"]
        self._check_trusted({"training": imported})
        try:
            if attention_fn is None:
                attention_fn = _find_attention_fn(imported.get("attention_fn", "reference"))
            block: Any = Block
            if imported.get("block"):
                block = import_module_class(imported["block"], "block")
            make: Any = model_class(sizes, has_head="backbone" in self._shapes)
            if imported.get("model"):
                make = import_module_class(imported["model"], "model")
        except ConfigError as error:
            raise self._of_config(error) from error
        body = make(replace(sizes, dtype=dtype or sizes.dtype), attention_fn, block)
        model = _with_head(body, self.config.get("task", {}), self._shapes)
        if self.weights:
            try:
                check_params(model, self._shapes)
            except ConfigError as error:
                raise CheckpointError(f"{self.folder / 'checkpoints'}: {error}") from error
        return model

    def params(self, model: nn.Module, strategy: Strategy | None = None) -> dict[str, Any]:
        """The parameters of `model`: numpy arrays, or JAX arrays on the devices of `strategy`.

        Raises `CheckpointError` where no weights were chosen.
        """
        if self.weights is None:
            raise CheckpointError(f"{self.folder}: no weights of the run were chosen")
        return self.weights.read(strategy.for_model(model) if strategy else None)

    def tokenizers(self) -> tuple[Tokenizer | None, Tokenizer | None]:
        """The tokenizers of source and target, one object where both sides share it.

        None for a run without tokenizers. Raises `ConfigError` for other tokenizers than the
        weights were trained with, and for one with more ids than the model.
        """
        if self.weights:
            _check_digest(self.weights)
        path = next((x for x in (_TARGET, _TOKENIZER) if (self.folder / x).exists()), None)
        if path is None:
            return None, None
        source = target = tokenizers.load(self.folder / path)
        if (self.folder / _SOURCE).exists():
            source = tokenizers.load(self.folder / _SOURCE)
        check_vocabularies(self.folder, source, target, self._sizes)
        return source, target

    def settings(self) -> tuple[Setting, ...]:
        """The run's defaults for the pipelines; `ConfigError` for damaged ones."""
        try:
            return tuple(
                from_plain(kind, self.config[name], name)
                for name, kind in _SETTINGS.items()
                if self.config.get(name)
            )
        except ConfigError as error:
            raise self._of_config(error) from error

    @cached_property
    def _shapes(self) -> dict[str, Any]:
        """The shapes of the parameters; {} without weights."""
        return self.weights.shapes() if self.weights else {}

    @cached_property
    def _sizes(self) -> TransformerConfig:
        """The recipe of the model, with the vocabularies of the weights."""
        self._check_trusted({"model": self.config["model"]})
        try:
            sizes = from_plain(TransformerConfig, self.config["model"], "model")
        except ConfigError as error:
            raise self._of_config(error) from error
        return _with_vocabularies(sizes, self._shapes)

    def _check_trusted(self, content: dict[str, Any]) -> None:
        """Raises `ConfigError` where `content` of config.json names code that is not trusted."""
        with trusting(self.trust_code):
            check_trusted(content, self.folder / "config.json")

    def _of_config(self, error: ConfigError) -> ConfigError:
        return ConfigError(f"{self.folder / 'config.json'}: {error}")


def _with_head(model: nn.Module, task: Mapping[str, Any], shapes: Mapping[str, Any]) -> nn.Module:
    """`model` below the head that a fine-tuning has given it, if any."""
    if "backbone" not in shapes:
        return model
    if task.get("kind") == "spans":
        return SpanPredictor(model)
    head = shapes["head"]
    return Classifier(
        model,
        classes=head["kernel"].shape[-1],
        pooling=task.get("pooling", "token"),
        use_bias="bias" in head,
    )


def _check_digest(weights: RunWeights) -> None:
    """Raises `ConfigError` for other tokenizers than the checkpoints were made with."""
    folder = weights.folder
    stored = Checkpoints(folder / "checkpoints").metadata(weights.steps[-1]).get("tokenizer")
    if stored not in (None, tokenizers.digest(folder / "tokenizer")):
        raise ConfigError(
            f"{folder / 'tokenizer'} is not the tokenizer that the run was trained with, and does "
            "not fit its weights: put the run's own back"
        )


def _with_vocabularies(sizes: TransformerConfig, shapes: Mapping[str, Any]) -> TransformerConfig:
    """`sizes` with the vocabularies of `shapes`; tokenizers may have fewer ids than asked for."""
    bodies = (shapes, shapes.get("encoder", {}), shapes.get("backbone", {}))
    body = next((body for body in bodies if "embedding" in body), {})
    if "embedding" in body:
        sizes = replace(sizes, vocab_size=body["embedding"]["table"].shape[0])
    if "source_embedding" in shapes:
        sizes = replace(sizes, source_vocab_size=shapes["source_embedding"]["table"].shape[0])
    return sizes


def _find_attention_fn(name: str) -> AttentionFn:
    if name in ATTENTION_FNS:
        return ATTENTION_FNS[name]
    return import_by_name(name, "attention_fn")
