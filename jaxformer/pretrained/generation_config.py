"""generation_config.json of transformers, read and written."""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.errors import ConfigError
from jaxformer.pretrained.family import as_text, parse_number, unsupported
from jaxformer.pretrained.hf_folder import locate, read_json

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
_NEUTRAL = {
    "do_sample": False,
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
    "stop_strings": [],
    "max_time": None,
    "dola_layers": None,
    "prompt_lookup_num_tokens": None,
    "exponential_decay_length_penalty": None,
}

# The same of decoders that sample.
_SAMPLED_ONLY = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}


def load_generation_config(
    folder: str | os.PathLike[str],
) -> tuple[SearchConfig, TranslationOptions]:
    """The search settings of the encoder-decoder in `folder`, and the ids around its texts.

    They are those of generation_config.json, or else of config.json. A search with them does what
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
    path = locate(folder)
    settings = _settings(path)
    size = settings.get("decoder_vocab_size") or settings.get("vocab_size")
    try:
        return _read(settings, parse_number("vocab_size", size, int))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_eos(folder: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """The ids that end a text of the decoder in `folder`; None where the folder does not name any.

    Raises `ConfigError` for ids outside the vocabulary.
    """
    path = locate(folder)
    settings = _settings(path)
    if "eos_token_id" not in settings:
        return None
    size = parse_number("vocab_size", settings.get("vocab_size"), int)
    try:
        return _ids("eos_token_id", settings["eos_token_id"], size)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_sampling_config(
    folder: str | os.PathLike[str], max_len: int = 400
) -> tuple[SamplingConfig, CompletionOptions]:
    """The settings with which the decoder in `folder` completes a text.

    They are those of generation_config.json, or else of config.json, and mean what they mean in
    `generate` of transformers (version 5): without "do_sample" the most likely token is taken.
    Without a length, a text grows by at most half of `max_len`, and by 200 tokens.

    Raises `ConfigError`, naming the key, for ids outside the vocabulary and for settings that are
    not supported.
    """
    path, eos = locate(folder), load_eos(folder)
    settings = _settings(path)
    sampled = bool(settings.get("do_sample"))
    neutral = _SAMPLED_ONLY if sampled else {}
    try:
        _check_neutral(
            settings | {"do_sample": False, "stop_strings": []},
            num_beams=1,
            forced_bos_token_id=None,
            forced_eos_token_id=None,
            **neutral,
        )
        size = parse_number("vocab_size", settings.get("vocab_size"), int)
        drawn = {key: settings.get(key, default) for key, default in _SAMPLING.items()}
        stop = settings.get("stop_strings", [])
        new = {end: settings.get(f"{end}_new_tokens") for end in ("min", "max")}
        whole = {end: settings.get(f"{end}_length") for end in ("min", "max") if new[end] is None}
        most = _length(settings, "max", 1) or max(1, min(200, max_len // 2))
        sampling = SamplingConfig(
            **(drawn if sampled else {"temperature": 0.0}),
            **{field: settings.get(key, default) for key, (field, default) in _LOGITS.items()},
            min_new_tokens=new["min"] or 0,
            max_new_tokens=most,
            suppress_tokens=_suppressed(settings, size, eos or ()),
        )
        return sampling, CompletionOptions(
            eos=eos,
            stop=(stop,) if isinstance(stop, str) else (*stop,),
            max_length=whole.get("max"),
            min_length=whole.get("min") or 0,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


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
        (first, *others), fields = config.eos, _SEARCH
        forces_eos = config.at_max_length == "force_eos_at_no_cost" and not others
        stops = {kind: value for value, kind in _EARLY_STOPPING.items()}
        content |= {
            "early_stopping": stops[config.early_stopping],
            "max_new_tokens": config.max_new_tokens or max_len - 1,
            "eos_token_id": list(config.eos) if others else first,
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


def _settings(folder: Path) -> dict[str, Any]:
    """generation_config.json or else config.json, and the model's vocabulary; no key is null.

    Settings in config.json do not count where there is a generation_config.json.
    """
    config = settings = read_json(folder / "config.json")
    if (folder / "generation_config.json").exists():
        settings = read_json(folder / "generation_config.json")
    sizes = {key: config.get(key) for key in ("vocab_size", "decoder_vocab_size")}
    return {key: value for key, value in (settings | sizes).items() if value is not None}


def _check_neutral(settings: Mapping[str, Any], **others: Any) -> None:
    for key, neutral in (_NEUTRAL | others).items():
        if settings.get(key, neutral) not in (neutral, []):
            raise ConfigError(f"{key}={as_text(settings[key])} is not supported: remove it")


def _read(settings: Mapping[str, Any], size: int) -> tuple[SearchConfig, TranslationOptions]:
    _check_neutral(settings)
    early = settings.get("early_stopping", False)
    if not isinstance(early, bool | str) or early not in _EARLY_STOPPING:
        raise unsupported("early_stopping", early, *_EARLY_STOPPING)
    start = settings.get("decoder_start_token_id", settings.get("bos_token_id"))
    bos = _id("decoder_start_token_id", start, size)
    pad = _id("pad_token_id", settings.get("pad_token_id"), size)
    eos = _ids("eos_token_id", settings.get("eos_token_id"), size)
    forced_bos = settings.get("forced_bos_token_id")
    forced_eos = _ids("forced_eos_token_id", settings.get("forced_eos_token_id", []), size)
    if not eos or pad in eos or forced_eos not in ((), eos):
        raise ConfigError(
            f"eos_token_id={list(eos)}, pad_token_id={pad} and forced_eos_token_id="
            f"{list(forced_eos)}, but a text must end with an id that is not the padding's, and "
            "that is the one that is forced"
        )
    search = SearchConfig(
        **{field: settings.get(key, default) for key, (field, default) in _SEARCH.items()},
        length_penalty_kind="power",
        early_stopping=_EARLY_STOPPING[early],
        at_max_length="force_eos_at_no_cost" if forced_eos else "cut",
        min_new_tokens=_length(settings, "min", 0) or 0,
        max_new_tokens=_length(settings, "max", 1),
        suppress_tokens=_suppressed(settings, size, eos),
        forced_bos=None if forced_bos is None else _id("forced_bos_token_id", forced_bos, size),
        extra_candidates=len(eos),
        eos=eos,
    )
    if search.early_stopping == "never" and search.length_penalty <= 0:
        # Without a penalty that favours length, "never" of transformers is its heuristic.
        search = replace(search, early_stopping="heuristic")
    return search, TranslationOptions(bos=bos, pad=pad)


def _suppressed(settings: Mapping[str, Any], size: int, eos: tuple[int, ...]) -> tuple[int, ...]:
    """The ids of suppress_tokens and bad_words_ids."""
    bad_words = settings.get("bad_words_ids", [])
    if not isinstance(bad_words, list) or any(
        not isinstance(word, list) or len(word) != 1 for word in bad_words
    ):
        raise ConfigError(
            f"bad_words_ids={as_text(bad_words)}, but only words of one token are supported"
        )
    bad_ids = _ids("bad_words_ids", [word[0] for word in bad_words], size)
    suppressed = _ids("suppress_tokens", settings.get("suppress_tokens", []), size)
    return *(id for id in bad_ids if id not in eos), *suppressed


def _id(key: str, value: Any, size: int) -> int:
    """The one id under `key`, which may stand in a list."""
    ids = _ids(key, value, size)
    if len(ids) != 1:
        raise ConfigError(f"{key}={as_text(value)}, but it must be one id from 0 to {size - 1}")
    return ids[0]


def _ids(key: str, value: Any, size: int) -> tuple[int, ...]:
    """The ids under `key`, one or a list of them; `ConfigError` for other values."""
    ids = value if isinstance(value, list) else [value]
    for one in ids:
        if type(one) is not int or not 0 <= one < size:
            raise ConfigError(f"{key}={as_text(one)}, but it must be one id from 0 to {size - 1}")
    return tuple(ids)


def _length(settings: Mapping[str, Any], end: str, least: int) -> int | None:
    """`min_new_tokens` or `max_new_tokens`; `min_length` and `max_length` count one more."""
    new, whole = f"{end}_new_tokens", f"{end}_length"
    if new in settings:
        return parse_number(new, settings[new], int, least)
    if whole in settings:
        return max(parse_number(whole, settings[whole], int) - 1, least)
    return None
