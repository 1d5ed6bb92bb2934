"""generation_config.json of transformers, read and written."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.errors import ConfigError
from jaxformer.pretrained.family import as_text, parse_number
from jaxformer.pretrained.hf_folder import HFFolder, locate

# Settings that are not supported, each with the values that change nothing. Without do_sample,
# temperature, top_k and the like change nothing.
_NEUTRAL = {
    "do_sample": (False,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "begin_suppress_tokens": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "sequence_bias": ({},),
    "stop_strings": ([],),
    "max_time": (),
    "dola_layers": (),
    "prompt_lookup_num_tokens": (),
    "exponential_decay_length_penalty": (),
}

_EARLY_STOPPING = {"never": "never", "heuristic": False, "beam_full": True}


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
    source = HFFolder(locate(folder))
    settings = _settings(source)
    size = settings.get("decoder_vocab_size") or settings.get("vocab_size")
    try:
        return _read(settings, parse_number("vocab_size", size, int))
    except ConfigError as error:
        raise ConfigError(f"{source.path}: {error}") from error


def load_eos(folder: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """The ids that end a text of the decoder in `folder`; None where the folder does not name any.

    Raises `ConfigError` for ids outside the vocabulary.
    """
    source = HFFolder(locate(folder))
    settings = _settings(source)
    if "eos_token_id" not in settings:
        return None
    size = parse_number("vocab_size", settings.get("vocab_size"), int)
    try:
        return tuple(_ids(settings, "eos_token_id", size))
    except ConfigError as error:
        raise ConfigError(f"{source.path}: {error}") from error


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
    content = {key: value for key, value in token_ids.items() if value is not None}
    optional: dict[str, Any] = {
        "min_new_tokens": config.min_new_tokens,
        "suppress_tokens": list(config.suppress_tokens),
        "no_repeat_ngram_size": config.no_repeat_ngram_size,
    }
    if isinstance(config, SearchConfig):
        content |= {
            "num_beams": config.beam_size,
            "length_penalty": config.length_penalty,
            "early_stopping": _EARLY_STOPPING[config.early_stopping],
            "max_new_tokens": config.max_new_tokens or max_len - 1,
            "eos_token_id": config.eos[0] if len(config.eos) == 1 else list(config.eos),
        }
        if config.at_max_length == "force_eos_at_no_cost" and len(config.eos) == 1:
            content["forced_eos_token_id"] = config.eos[0]
        optional["forced_bos_token_id"] = config.forced_bos
        optional["renormalize_logits"] = config.renormalize_logits
    else:
        content |= {"do_sample": config.temperature > 0, "max_new_tokens": config.max_new_tokens}
        if config.temperature > 0:  # without sampling, transformers warns of these
            names = ("temperature", "top_k", "top_p")
            content |= {name: getattr(config, name) for name in names}
            optional["min_p"] = config.min_p
    content |= {key: value for key, value in optional.items() if value not in (0, None, [])}
    return content | {"repetition_penalty": config.repetition_penalty}


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


def _settings(source: HFFolder) -> dict[str, Any]:
    """generation_config.json or else config.json, and the model's vocabulary; no key is null.

    Settings in config.json do not count where there is a generation_config.json.
    """
    config = settings = source.json("config.json")
    if source.has("generation_config.json"):
        settings = source.json("generation_config.json")
    sizes = {key: config.get(key) for key in ("vocab_size", "decoder_vocab_size")}
    return {key: value for key, value in (settings | sizes).items() if value is not None}


def _read(settings: Mapping[str, Any], size: int) -> tuple[SearchConfig, TranslationOptions]:
    for key, neutral in _NEUTRAL.items():
        if key in settings and settings[key] not in (*neutral, []):
            raise ConfigError(f"{key}={as_text(settings[key])} is not supported: remove it")
    pad = _id(settings, "pad_token_id", size)
    start = settings.get("decoder_start_token_id", settings.get("bos_token_id"))
    eos = tuple(_ids(settings, "eos_token_id", size))
    if pad in eos:
        raise ConfigError(f"pad_token_id and eos_token_id are both {pad}: no text could end")
    length_penalty = _number(settings, "length_penalty", -100)
    forced = "forced_bos_token_id" in settings
    search = SearchConfig(
        beam_size=max(1, parse_number("num_beams", settings.get("num_beams", 1), int)),
        length_penalty=length_penalty,
        length_penalty_kind="power",
        early_stopping=_early_stopping(settings.get("early_stopping", False), length_penalty),
        at_max_length="force_eos_at_no_cost" if _forces_eos(settings, eos, size) else "cut",
        max_new_tokens=_max_new_tokens(settings),
        min_new_tokens=_min_new_tokens(settings),
        suppress_tokens=_suppressed(settings, eos, size),
        forced_bos=_id(settings, "forced_bos_token_id", size) if forced else None,
        no_repeat_ngram_size=parse_number(
            "no_repeat_ngram_size", settings.get("no_repeat_ngram_size", 0), int
        ),
        repetition_penalty=_number(settings, "repetition_penalty", 1e-3),
        renormalize_logits=parse_number(
            "renormalize_logits", settings.get("renormalize_logits", False), bool
        ),
        extra_candidates=len(eos),
        eos=eos,
    )
    bos = _id({"decoder_start_token_id": start}, "decoder_start_token_id", size)
    return search, TranslationOptions(bos=bos, pad=pad, source_bos=True)


def _id(settings: Mapping[str, Any], key: str, size: int) -> int:
    """The one id under `key`, which may stand in a list."""
    value = settings.get(key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise ConfigError(f"{key}={as_text(value)}, but it must be one id from 0 to {size - 1}")
    return value


def _ids(settings: Mapping[str, Any], key: str, size: int) -> list[int]:
    """The ids under `key`, one or a list of them; `ConfigError` for other values and for none."""
    value = settings.get(key)
    ids = value if isinstance(value, list) and value else [value]
    return [_id({key: one}, key, size) for one in ids]


def _early_stopping(
    value: Any, length_penalty: float
) -> Literal["never", "heuristic", "beam_full"]:
    if not isinstance(value, bool) and value != "never":
        raise ConfigError(f"early_stopping={value!r}, but it must be true, false or 'never'")
    if value is True:
        return "beam_full"
    # Without a penalty that favours length, "never" of transformers is its heuristic.
    return "never" if value == "never" and length_penalty > 0 else "heuristic"


def _min_new_tokens(settings: Mapping[str, Any]) -> int:
    """The fewest tokens before EOS; `min_length` of transformers counts the start token too.

    `min_new_tokens` replaces `min_length`.
    """
    if "min_new_tokens" in settings:
        return parse_number("min_new_tokens", settings["min_new_tokens"], int)
    return max(parse_number("min_length", settings.get("min_length", 0), int) - 1, 0)


def _max_new_tokens(settings: Mapping[str, Any]) -> int | None:
    """The most tokens; `max_length` of transformers counts the start token too."""
    if "max_new_tokens" in settings:
        return parse_number("max_new_tokens", settings["max_new_tokens"], int, 1)
    if "max_length" in settings:
        return parse_number("max_length", settings["max_length"], int, 2) - 1
    return None


def _forces_eos(settings: Mapping[str, Any], eos: tuple[int, ...], size: int) -> bool:
    if "forced_eos_token_id" not in settings:
        return False
    forced = _id(settings, "forced_eos_token_id", size)
    if (forced,) != eos:
        raise ConfigError(
            f"forced_eos_token_id={forced}, but eos_token_id={settings['eos_token_id']}: give both "
            "the same id"
        )
    return True


def _suppressed(settings: Mapping[str, Any], eos: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The ids of `bad_words_ids`, except those that end a text, and of `suppress_tokens`."""
    words = settings.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(_is_one(word) for word in words):
        raise ConfigError(
            f"bad_words_ids={as_text(words)}, but only words of one token are supported"
        )
    suppressed = settings.get("suppress_tokens", [])
    if not isinstance(suppressed, list):
        raise ConfigError(f"suppress_tokens={as_text(suppressed)}, but it must be a list of ids")
    bad = (_id({"bad_words_ids": word[0]}, "bad_words_ids", size) for word in words)
    ids = (_id({"suppress_tokens": id}, "suppress_tokens", size) for id in suppressed)
    return (*(id for id in bad if id not in eos), *ids)


def _is_one(word: Any) -> bool:
    return isinstance(word, Sequence) and not isinstance(word, str) and len(word) == 1


def _number(settings: Mapping[str, Any], key: str, least: float) -> float:
    """The number under `key`, which is 1 where the key is absent."""
    value = settings.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 100:
        raise ConfigError(f"{key}={as_text(value)}, but it must be from {least} to 100")
    return float(value)
