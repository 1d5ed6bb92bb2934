"""generation_config.json of a search or of sampling, and what transformers has no setting for."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.decoding import GenerationConfig, SamplingConfig

_EARLY_STOPPING = {"never": "never", "heuristic": False, "beam_full": True}


def generation_json(
    config: GenerationConfig | SamplingConfig, max_len: int, token_ids: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of generation_config.json for `config`.

    `max_len` is the longest text of the model, `token_ids` has the ids of the special tokens, such
    as "eos_token_id". `left_out` names the settings that have no counterpart.

    >>> found = generation_json(jf.SamplingConfig(temperature=0.5), 64, {"eos_token_id": 2})
    >>> found["do_sample"], found["temperature"], found["eos_token_id"]
    (True, 0.5, 2)
    """
    ids = {key: value for key, value in token_ids.items() if value is not None}
    if isinstance(config, SamplingConfig):
        return ids | _sampling(config)
    return ids | _search(config, max_len)


def _search(config: GenerationConfig, max_len: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_beams": config.beam_size,
        "length_penalty": config.length_penalty,
        "early_stopping": _EARLY_STOPPING[config.early_stopping],
        "max_new_tokens": config.max_length or max_len - 1,
        "decoder_start_token_id": config.bos,
        "eos_token_id": _one_or_list(config.eos),
        "pad_token_id": config.pad,
    }
    if config.at_max_length == "force_eos_at_no_cost" and len(config.eos) == 1:
        found["forced_eos_token_id"] = config.eos[0]
    optional = {
        "min_new_tokens": config.min_length,
        "suppress_tokens": list(config.suppress_tokens),
        "forced_bos_token_id": config.forced_bos,
        "no_repeat_ngram_size": config.no_repeat_ngram_size,
        "renormalize_logits": config.renormalize_logits,
    }
    found |= {key: value for key, value in optional.items() if value not in (0, None, [])}
    return found | {"repetition_penalty": config.repetition_penalty}


def _sampling(config: SamplingConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "do_sample": config.temperature > 0,
        "max_new_tokens": config.max_new_tokens,
        "repetition_penalty": config.repetition_penalty,
    }
    if config.temperature > 0:  # without sampling, transformers warns of these
        found |= {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
        found |= {"min_p": config.min_p} if config.min_p else {}
    if config.no_repeat_ngram_size:
        found["no_repeat_ngram_size"] = config.no_repeat_ngram_size
    return found | ({} if config.eos is None else {"eos_token_id": _one_or_list(config.eos)})


def left_out(config: GenerationConfig | SamplingConfig) -> list[str]:
    """The settings of `config`, as "name=value", with which transformers gives other texts.

    >>> left_out(jf.GenerationConfig(beam_size=1, at_max_length="cut", max_length=20))
    []
    >>> left_out(jf.GenerationConfig(beam_size=4, at_max_length="cut"))
    ["length_penalty_kind='gnmt'", 'extra_candidates=0', 'max_length=None']
    """
    names: list[str] = []
    if isinstance(config, SamplingConfig):
        names += ["stop"] if config.stop else []
        names += ["overflow"] if config.overflow == "slide" else []
    else:
        if config.beam_size > 1:
            names += ["length_penalty_kind"] if config.length_penalty_kind == "gnmt" else []
            other = config.early_stopping == "never" and config.length_penalty <= 0
            names += ["early_stopping"] if other else []
            names += ["extra_candidates"] if config.extra_candidates != len(config.eos) else []
        names += ["at_max_length"] if config.at_max_length == "force_eos" else []
        names += ["max_length"] if config.max_length is None else []
    return [f"{name}={getattr(config, name)!r}" for name in names]


def _one_or_list(ids: Sequence[int]) -> int | list[int]:
    return ids[0] if len(ids) == 1 else list(ids)
