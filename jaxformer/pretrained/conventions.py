"""How a folder's model is meant to be asked: its special ids and its way of searching."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxformer.config import ConfigError
from jaxformer.pretrained.files import Folder
from jaxformer.pretrained.hub import locate
from jaxformer.pretrained.settings import number

# Switches of other ways of searching, each with the positions in which it changes nothing.
_OFF = {
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "begin_suppress_tokens": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "sequence_bias": ({},),
    "exponential_decay_length_penalty": (),
}


class Conventions(NamedTuple):
    """What generation_config.json, or else config.json, says of a translation model.

    `start` comes before the target, `end` after source and target; `more_ends` end a target too.
    `first`, if there is one, is every target's first token, and a target that is as long as it may
    be ends at no cost if `ends_at_limit`. Tokens of `banned` are never written; with `renormalize`
    the others share their probability. A target has at least `least` tokens before its end, no run
    of `unrepeated` tokens twice (0: as it comes), and what it holds is penalised by `repetition`. A
    search has `width` hypotheses, whose score is divided by length to the power of
    `length_penalty`. A target has at most `longest` tokens, its end among them (None: not said).
    """

    start: int
    end: int
    pad: int
    first: int | None = None
    ends_at_limit: bool = False
    banned: tuple[int, ...] = ()
    renormalize: bool = False
    more_ends: tuple[int, ...] = ()
    least: int = 0
    unrepeated: int = 0
    repetition: float = 1.0
    width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    longest: int | None = None


def load_conventions(folder: str | os.PathLike[str]) -> Conventions:
    """The conventions of the encoder-decoder in `folder`, as `transformers` writes them.

    Raises `ConfigError`, naming the key, for ids that are missing or that no vocabulary has, and
    for ways of searching that are not here.
    """
    source = Folder(locate(folder))
    said = _said(source)
    size = number("vocab_size", said.get("decoder_vocab_size") or said.get("vocab_size"), int)
    try:
        return _read(said, size)
    except ConfigError as error:
        raise ConfigError(f"{source.path}: {error}") from error


def load_ends(folder: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """The ids that end a text of the decoder in `folder`, None where it states none.

    Raises `ConfigError` for ids that no vocabulary has.
    """
    source = Folder(locate(folder))
    said = _said(source)
    if "eos_token_id" not in said:
        return None
    size = number("vocab_size", said.get("vocab_size"), int)
    try:
        return tuple(_ids(said, "eos_token_id", size))
    except ConfigError as error:
        raise ConfigError(f"{source.path}: {error}") from error


def _said(source: Folder) -> dict[str, Any]:
    """What generation_config.json says, over what config.json says; null says nothing."""
    said = source.json("config.json")
    if source.has("generation_config.json"):
        said = said | source.json("generation_config.json")
    return {key: value for key, value in said.items() if value is not None}


def _read(said: Mapping[str, Any], size: int) -> Conventions:
    for key, positions in _OFF.items():
        if key in said and said[key] not in (*positions, [], None):
            raise ConfigError(f"{key}={json.dumps(said[key])[:80]} is not known here: remove it")
    pad = _id(said, "pad_token_id", size)
    start = said.get("decoder_start_token_id", said.get("bos_token_id"))
    early = said.get("early_stopping", False)
    if not isinstance(early, bool) and early != "never":
        raise ConfigError(f"early_stopping={early!r}, but it must be true, false or 'never'")
    end, *more_ends = _ids(said, "eos_token_id", size)
    if pad in (end, *more_ends):
        raise ConfigError(f"pad_token_id and eos_token_id are both {pad}: no text could end")
    return Conventions(
        start=_id({"decoder_start_token_id": start}, "decoder_start_token_id", size),
        end=end,
        pad=pad,
        first=_id(said, "forced_bos_token_id", size) if "forced_bos_token_id" in said else None,
        ends_at_limit=_ends_at_limit(said, [end, *more_ends], size),
        banned=_banned(said, size),
        renormalize=number("renormalize_logits", said.get("renormalize_logits", False), bool),
        more_ends=tuple(more_ends),
        least=_least(said),
        unrepeated=number("no_repeat_ngram_size", said.get("no_repeat_ngram_size", 0), int),
        repetition=_repetition(said.get("repetition_penalty", 1.0)),
        width=max(1, number("num_beams", said.get("num_beams", 1), int)),
        length_penalty=_penalty(said.get("length_penalty", 1.0)),
        early_stopping=early,
        longest=_longest(said),
    )


def _id(said: Mapping[str, Any], key: str, size: int) -> int:
    """The one id under `key`, which may stand in a list."""
    value = said.get(key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise ConfigError(
            f"{key}={json.dumps(value)[:80]}, but it must be one id from 0 to {size - 1}"
        )
    return value


def _ids(said: Mapping[str, Any], key: str, size: int) -> list[int]:
    """The ids under `key`, one or a list of them; `ConfigError` for other values and for none."""
    value = said.get(key)
    ids = value if isinstance(value, list) and value else [value]
    return [_id({key: one}, key, size) for one in ids]


def _least(said: Mapping[str, Any]) -> int:
    """How many tokens come before the end at least; `min_length` counts the one at the start."""
    whole = number("min_length", said.get("min_length", 0), int)
    return max(whole - 1, number("min_new_tokens", said.get("min_new_tokens", 0), int))


def _longest(said: Mapping[str, Any]) -> int | None:
    """How many tokens there may be; `max_length` counts the one at the start."""
    if "max_new_tokens" in said:
        return number("max_new_tokens", said["max_new_tokens"], int, 1)
    if "max_length" in said:
        return number("max_length", said["max_length"], int, 2) - 1
    return None


def _ends_at_limit(said: Mapping[str, Any], ends: Sequence[int], size: int) -> bool:
    if "forced_eos_token_id" not in said:
        return False
    forced = _id(said, "forced_eos_token_id", size)
    if [forced] != ends:
        raise ConfigError(
            f"forced_eos_token_id={forced} is not eos_token_id={said['eos_token_id']}: a text "
            "ends with one of them"
        )
    return True


def _banned(said: Mapping[str, Any], size: int) -> tuple[int, ...]:
    """The ids that may never be written: those of words of one token, and those suppressed."""
    words = said.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(_is_one(word) for word in words):
        raise ConfigError(
            f"bad_words_ids={json.dumps(words)[:80]}, but only words of one token can be banned"
        )
    suppressed = said.get("suppress_tokens", [])
    if not isinstance(suppressed, list):
        raise ConfigError(f"suppress_tokens={json.dumps(suppressed)[:80]} is no list of ids")
    ids = [*(word[0] for word in words), *suppressed]
    return tuple(_id({"bad_words_ids": id}, "bad_words_ids", size) for id in ids)


def _is_one(word: Any) -> bool:
    return isinstance(word, Sequence) and not isinstance(word, str) and len(word) == 1


def _repetition(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 100:
        raise ConfigError(
            f"repetition_penalty={json.dumps(value)[:80]} must be above 0 and at most 100"
        )
    return float(value)


def _penalty(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 100:
        raise ConfigError(f"length_penalty={json.dumps(value)[:80]} must be from -100 to 100")
    return float(value)
