"""A trained model with its tokenizers and settings: the first argument of every pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax

from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.linen_models import check_linen
from jaxformer.pretrained.sentence_modules import SentenceOptions
from jaxformer.text.tokenizers import Tokenizer

Setting = SearchConfig | TranslationOptions | SamplingConfig | CompletionOptions | SentenceOptions


@dataclass(frozen=True)
class Unsupported:
    """Settings of a folder that cannot be read or computed: an error where they are needed.

    Such a folder can be loaded for everything else.
    """

    kinds: tuple[type[Setting], ...]
    error: ConfigError | DataError


@dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """A model, its parameters and what turns text into its input and its output into text.

    `load` returns one. Research code builds one from its own model and parameters.

    >>> tokenizer = jf.train_bpe(["a rose is a rose"], 264)
    >>> config = jf.TransformerConfig(264, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> loaded = jf.Loaded(model, params, tokenizer, settings=(jf.SamplingConfig(top_k=5),))
    >>> loaded
    Loaded(DecoderOnly of 2,644 parameters, a tokenizer of 264 ids)
    """

    model: Any
    """The model, perhaps as `Ensemble` or `Patched`."""
    params: Any
    """Its parameters in nested dicts; numpy arrays where they are read from a folder."""
    tokenizer: Tokenizer | None = None
    """The tokenizer of the (source) text; None where the folder has none."""
    target_tokenizer: Tokenizer | None = None
    """The tokenizer of the target text; None: the one of the source."""
    settings: tuple[Setting | Unsupported, ...] = ()
    """The defaults of the pipelines."""
    config: Any = None
    """The settings of a run, as its config.json has them; None for other folders."""

    def __post_init__(self) -> None:
        check_linen(self.model)
        _check_tokenizer("tokenizer", self.tokenizer)
        _check_tokenizer("target_tokenizer", self.target_tokenizer)

    def __repr__(self) -> str:
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        if self.tokenizer is None:
            ids = "no tokenizer"
        else:
            ids = f"a tokenizer of {self.tokenizer.vocab_size} ids"
        return f"Loaded({type(self.model).__name__} of {count:,} parameters, {ids})"

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer of the (source) text; `ConfigError` where there is none."""
        if self.tokenizer is None:
            raise ConfigError(
                "the tokenizer is None: give the one that the model was trained with (jf.load "
                "gives None for a folder without tokenizer files)"
            )
        return self.tokenizer

    def require_target_tokenizer(self) -> Tokenizer:
        """The tokenizer of the target text; `ConfigError` where there is none."""
        if self.target_tokenizer is None:
            return self.require_tokenizer()
        return self.target_tokenizer

    def choose_settings(
        self, given: tuple[Setting, ...], changes: Mapping[str, Any], *kinds: type
    ) -> list[Any]:
        """A value of each class of `kinds`: the one in `given`, else the default here.

        `changes` replace single fields by name. Raises `ConfigError` for a value or a name of none
        of `kinds`, and the error of `Unsupported` settings that are needed.
        """
        classes = " or ".join(kind.__name__ for kind in kinds)
        for value in given:
            if not isinstance(value, kinds):
                raise ConfigError(f"{value!r} is not a setting of this call: give a {classes}")
            if sum(isinstance(other, type(value)) for other in given) > 1:
                raise ConfigError(f"several {type(value).__name__} were given: give one")
        kind_of = {field.name: kind for kind in kinds for field in fields(kind)}
        unknown = sorted(changes.keys() - kind_of)
        if unknown:
            raise ConfigError(
                f"{unknown[0]!r} is not a setting of this call: give {', '.join(sorted(kind_of))}"
            )
        chosen = []
        for kind in kinds:
            setting = next((x for x in given if isinstance(x, kind)), None)
            if setting is None:
                setting = self._default(kind)
            changed = {name: x for name, x in changes.items() if kind_of[name] is kind}
            chosen.append(replace(setting, **changed))
        return chosen

    def _default(self, kind: type[Setting]) -> Setting:
        """The setting of the class `kind`; raises the error of an `Unsupported` one."""
        for setting in self.settings:
            if isinstance(setting, kind):
                return setting
            if isinstance(setting, Unsupported) and kind in setting.kinds:
                raise type(setting.error)(str(setting.error)) from setting.error
        return kind()


def _check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raises `ConfigError` for a tokenizer of another library."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return
    kind = type(tokenizer)
    raise ConfigError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, but must be a jf.Tokenizer: "
        "jf.Tokenizer(t) makes one of a tokenizer t of the package tokenizers, such as the "
        "backend_tokenizer of a fast tokenizer of transformers; the ids of any other go into "
        "jf.sample(jf.make_step_fn(model, params), ...)"
    )
