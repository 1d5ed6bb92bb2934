"""generation_config.json of transformers, read and written."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.errors import ConfigError
from jaxformer.pretrained.config_keys import as_text, parse_number, unsupported
from jaxformer.pretrained.peft_adapters import locate_model
from jaxformer.storage import read_json

Result = TypeVar("Result")

# Keys, our fields of the same meaning, and the defaults of transformers.
_LOGITS = {
    "no_repeat_ngram_size": ("no_repeat_ngram_size", 0),
    "repetition_penalty": ("repetition_penalty", 1.0),
}
_SEARCH = _LOGITS | {
    "num_beams": ("beam_size", 1),
    "length_penalty": ("length_penalty", 1.0),
    "renormalize_logits": ("renormalize_logits", False),
}
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
_EARLY_STOPPING: dict[Any, Any] = {"never": "never", False: "heuristic", True: "beam_full"}

# Settings that are not supported, each with the value that changes nothing. Without do_sample,
# temperature, top_k and the like change nothing.
_NEUTRAL: dict[str, Any] = {
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "begin_suppress_tokens": [],
    "force_words_ids": [],
    "constraints": [],
    "sequence_bias": {},
    "max_time": None,
    "dola_layers": None,
    "prompt_lookup_num_tokens": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "token_healing": False,
}

_FORCED_BOS = "forced_bos_token_id"
_NEUTRAL_IN_SEARCH = _NEUTRAL | {"do_sample": False, "stop_strings": []}
"""The same of encoder-decoders."""
_NEUTRAL_IN_COMPLETION = _NEUTRAL | {
    "num_beams": 1,
    _FORCED_BOS: None,
    "forced_eos_token_id": None,
}
"""The same of decoders."""
_NEUTRAL_IN_SAMPLING = _NEUTRAL_IN_COMPLETION | {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
}
"""The same of decoders that sample."""


def load_generation_config(
    folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None
) -> tuple[SearchConfig, TranslationOptions]:
    """The search settings of the encoder-decoder in `folder`, and the ids around its texts.

    They stand in generation_config.json, or else in config.json, whose content is `config` (None:
    it is read). A search with them does what
    `generate` of transformers (version 5) does: scores are divided by a power of the length, and
    each step looks at a further candidate per hypothesis and EOS id.

    Raises `ConfigError`, naming the key, for ids that are missing or outside the vocabulary and for
    settings that are not supported.

    >>> import json
    >>> ids = {"pad_token_id": 10, "decoder_start_token_id": 10, "eos_token_id": 0}
    >>> Path("model").mkdir()
    >>> config = {"model_type": "marian", "vocab_size": 11, **ids, "num_beams": 6}
    >>> _ = Path("model", "config.json").write_text(json.dumps(config))
    >>> search, options = load_generation_config("model")
    >>> search.beam_size, search.eos, options.bos
    (6, (0,), 10)
    """
    return _read(folder, config, _search_settings)


def load_eos(folder: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """The ids that end a text of the decoder in `folder`; None where the folder does not name any.

    Raises `ConfigError` for ids outside the vocabulary.
    """
    return _read(folder, None, lambda settings: settings.ids("eos_token_id"))


def load_sampling_config(
    folder: str | os.PathLike[str],
    max_len: int = 400,
    config: Mapping[str, Any] | None = None,
) -> tuple[SamplingConfig, CompletionOptions]:
    """The settings with which the decoder in `folder` completes a text.

    They stand in generation_config.json, or else in config.json, whose content is `config` (None:
    it is read), and mean what they mean in `generate` of transformers (version 5): without
    "do_sample" the most likely token is taken.
    Without a length, a text grows by at most half of `max_len`, and by 200 tokens.

    Raises `ConfigError`, naming the key, for ids outside the vocabulary and for settings that are
    not supported.
    """
    return _read(folder, config, lambda settings: _sampling_settings(settings, max_len))


def generation_json(
    config: SearchConfig | SamplingConfig, max_len: int, token_ids: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of generation_config.json for `config`.

    `max_len` is the longest text of the model, `token_ids` has the ids of the special tokens, such
    as "eos_token_id". `inexpressible_settings` names the settings that have no counterpart.

    >>> written = generation_json(jf.SamplingConfig(temperature=0.5), 64, {"eos_token_id": 2})
    >>> written["do_sample"], written["temperature"], written["eos_token_id"]
    (True, 0.5, 2)
    """
    content: dict[str, Any] = dict(token_ids)
    content["min_new_tokens"] = config.min_new_tokens or None
    content["suppress_tokens"] = list(config.suppress_tokens) or None
    if isinstance(config, SearchConfig):
        fields = _SEARCH
        first = config.eos[0]
        has_one_eos = len(config.eos) == 1
        forces_eos = config.at_max_length == "force_eos_at_no_cost" and has_one_eos
        stops = {kind: value for value, kind in _EARLY_STOPPING.items()}
        content |= {
            "early_stopping": stops[config.early_stopping],
            "max_new_tokens": config.max_new_tokens or max_len - 1,
            "eos_token_id": first if has_one_eos else list(config.eos),
            "forced_eos_token_id": first if forces_eos else None,
            "forced_bos_token_id": config.forced_bos,
        }
    else:
        fields = _LOGITS
        content |= {"do_sample": config.temperature > 0, "max_new_tokens": config.max_new_tokens}
        if config.temperature > 0:  # without sampling, transformers warns of these
            names = ("temperature", "top_k", "top_p")
            content |= {name: getattr(config, name) for name in names}
            content["min_p"] = config.min_p or None
    content |= {key: getattr(config, field) for key, (field, _) in fields.items()}
    return {key: value for key, value in content.items() if value is not None}


def inexpressible_settings(
    config: SearchConfig | SamplingConfig, options: CompletionOptions = CompletionOptions()
) -> list[str]:
    """The settings, as "name=value", with which transformers gives other texts."""
    differs = {"stop": bool(options.stop), "overflow": options.overflow == "slide"}
    if isinstance(config, SearchConfig):
        beam = config.beam_size > 1
        never = config.early_stopping == "never" and config.length_penalty <= 0
        differs |= {
            "length_penalty_kind": beam and config.length_penalty_kind == "gnmt",
            "early_stopping": beam and never,
            "extra_candidates": beam and config.extra_candidates != len(config.eos),
            "at_max_length": config.at_max_length == "force_eos",
            "max_new_tokens": config.max_new_tokens is None,
        }
    values = asdict(options) | asdict(config)
    return [f"{name}={values[name]!r}" for name, other in differs.items() if other]


@dataclass(frozen=True)
class _Settings:
    """The settings of a folder's generation."""

    values: Mapping[str, Any]
    """Those that are not null, by key."""
    vocab_size: int
    """The number of ids of the model."""

    def check_neutral(self, neutral: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for a key of `neutral` that changes something."""
        for key, value in neutral.items():
            if self.values.get(key, value) not in (value, []):
                given = as_text(self.values[key])
                raise ConfigError(f"{key}={given} is not supported: remove it")

    def fields(self, keys: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        """Our fields with the values of `keys`."""
        return {field: self.values.get(key, default) for key, (field, default) in keys.items()}

    def one_id(self, *keys: str) -> int:
        """The one id under the first of `keys` that is there; it may stand in a list."""
        value = next((self.values[key] for key in keys if key in self.values), None)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        return self._parse_id(keys[0], value)

    def ids(self, key: str) -> tuple[int, ...] | None:
        """The ids under `key`, one or a list of them; None where it is absent."""
        return self.required_ids(key) if key in self.values else None

    def required_ids(self, key: str) -> tuple[int, ...]:
        """The ids under `key`, one or a list of them; `ConfigError` where it is absent."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [value]
        return tuple(self._parse_id(key, each) for each in ids)

    def length(self, new_tokens: str, length: str, least: int) -> int | None:
        """The number under the key `new_tokens`, or else one less than under the key `length`."""
        if new_tokens in self.values:
            return parse_number(new_tokens, self.values[new_tokens], int, least)
        if length in self.values:
            return max(parse_number(length, self.values[length], int) - 1, least)
        return None

    def suppressed(self, eos: tuple[int, ...]) -> tuple[int, ...]:
        """The ids of suppress_tokens and bad_words_ids."""
        words = self.values.get("bad_words_ids", [])
        if not isinstance(words, list) or any(
            not isinstance(word, list) or len(word) != 1 for word in words
        ):
            raise ConfigError(
                f"bad_words_ids={as_text(words)}, but only words of one token are supported"
            )
        bad_ids = [self._parse_id("bad_words_ids", word[0]) for word in words]
        bad_ids = [index for index in bad_ids if index not in eos]
        return *bad_ids, *(self.ids("suppress_tokens") or ())

    def _parse_id(self, key: str, value: Any) -> int:
        """`value` as an id of the vocabulary; `key` is named in the error."""
        if type(value) is not int or not 0 <= value < self.vocab_size:
            limits = f"0 to {self.vocab_size - 1}"
            raise ConfigError(f"{key}={as_text(value)}, but it must be one id from {limits}")
        return value


def _read(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any] | None,
    read: Callable[[_Settings], Result],
) -> Result:
    """`read` of generation_config.json, or else of config.json, and the model's vocabulary.

    `config` is the content of config.json; None: it is read. Settings in config.json do not count
    where there is a generation_config.json.
    """
    path = locate_model(folder)
    if config is None:
        config = read_json(path / "config.json")
    content = read_json(path / "generation_config.json", default=dict(config))
    values = {key: value for key, value in content.items() if value is not None}
    size = config.get("decoder_vocab_size") or config.get("vocab_size")
    try:
        return read(_Settings(values, parse_number("vocab_size", size, int)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _search_settings(settings: _Settings) -> tuple[SearchConfig, TranslationOptions]:
    settings.check_neutral(_NEUTRAL_IN_SEARCH)
    early = settings.values.get("early_stopping", False)
    if not isinstance(early, bool | str) or early not in _EARLY_STOPPING:
        raise unsupported("early_stopping", early, *_EARLY_STOPPING)
    bos = settings.one_id("decoder_start_token_id", "bos_token_id")
    pad = settings.one_id("pad_token_id")
    eos = settings.required_ids("eos_token_id")
    forced_eos = settings.ids("forced_eos_token_id") or ()
    if not eos or pad in eos or forced_eos not in ((), eos):
        raise ConfigError(
            f"eos_token_id={list(eos)}, pad_token_id={pad} and forced_eos_token_id="
            f"{list(forced_eos)}, but a text must end with an id that is not the padding's, and "
            "that is the one that is forced"
        )
    search = SearchConfig(
        **settings.fields(_SEARCH),
        length_penalty_kind="power",
        early_stopping=_EARLY_STOPPING[early],
        at_max_length="force_eos_at_no_cost" if forced_eos else "cut",
        min_new_tokens=settings.length("min_new_tokens", "min_length", 0) or 0,
        max_new_tokens=settings.length("max_new_tokens", "max_length", 1),
        suppress_tokens=settings.suppressed(eos),
        forced_bos=settings.one_id(_FORCED_BOS) if _FORCED_BOS in settings.values else None,
        extra_candidates=len(eos),
        eos=eos,
    )
    if search.early_stopping == "never" and search.length_penalty <= 0:
        # Without a penalty that favours length, "never" of transformers is its heuristic.
        search = replace(search, early_stopping="heuristic")
    return search, TranslationOptions(bos=bos, pad=pad)


def _sampling_settings(
    settings: _Settings, max_len: int
) -> tuple[SamplingConfig, CompletionOptions]:
    values = settings.values
    samples = values.get("do_sample", False)
    settings.check_neutral(_NEUTRAL_IN_SAMPLING if samples else _NEUTRAL_IN_COMPLETION)
    drawing: dict[str, Any] = {"temperature": 0.0}
    if samples:
        drawing = {key: values.get(key, usual) for key, usual in _SAMPLING.items()}
    eos = settings.ids("eos_token_id")
    max_new_tokens = settings.length("max_new_tokens", "max_length", 1)
    if max_new_tokens is None:
        max_new_tokens = max(1, min(200, max_len // 2))
    sampling = SamplingConfig(
        **drawing,
        **settings.fields(_LOGITS),
        min_new_tokens=values.get("min_new_tokens", 0),
        max_new_tokens=max_new_tokens,
        suppress_tokens=settings.suppressed(eos or ()),
    )
    stop = values.get("stop_strings", ())
    options = CompletionOptions(eos=eos, stop=(stop,) if isinstance(stop, str) else tuple(stop))
    # The length of a whole text counts where the length of its new part is not given.
    if "min_length" in values and "min_new_tokens" not in values:
        options = replace(options, min_length=values["min_length"])
    if "max_length" in values and "max_new_tokens" not in values:
        options = replace(options, max_length=values["max_length"])
    return sampling, options
