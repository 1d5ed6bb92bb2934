"""Settings of beam search, of samplers and of sampling."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from jaxformer.config import check_at_least, check_choices
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of beam search; the defaults are those of Vaswani et al. 2017, section 6.1.

    `jaxformer.pretrained.load_generation_config` reads them from a folder of transformers.
    Raises `ConfigError` for a value out of range.

    >>> greedy = jf.GenerationConfig(beam_size=1, max_length=20)
    >>> greedy.eos
    (2,)
    >>> jf.GenerationConfig(beam_size=0)
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: beam_size=0, but it must be at least 1
    """

    beam_size: int = 4
    """Hypotheses per sentence; 1 is greedy search."""
    length_penalty: float = 0.6
    """Exponent of the length penalty; a larger one favours longer texts."""
    length_penalty_kind: Literal["gnmt", "power"] = "gnmt"
    """gnmt: log p / ((5 + length) / 6)^length_penalty. power: log p / length^length_penalty."""
    early_stopping: Literal["never", "heuristic", "beam_full"] = "never"
    """When a sentence's search stops, once beam_size hypotheses have ended.

    never: when no unfinished hypothesis can become better than the worst of them. heuristic: when
    none would be better if it ended now (false in transformers). beam_full: at once (true in
    transformers).
    """
    at_max_length: Literal["force_eos", "force_eos_at_no_cost", "cut"] = "force_eos"
    """The last token of a hypothesis of the maximum length.

    force_eos: EOS, with the model's log-probability. force_eos_at_no_cost: EOS, with
    log-probability 0 (forced_eos_token_id in transformers). cut: any token.
    """
    max_extra_tokens: int = 50
    """How many tokens a translation may be longer than its source."""
    max_length: int | None = None
    """The most tokens of a text, EOS included; None: the source's length + max_extra_tokens."""
    min_length: int = 0
    """The fewest tokens before EOS."""
    suppress_tokens: tuple[int, ...] = ()
    """Token ids that are never written."""
    forced_bos: int | None = None
    """Token id that every text begins with, at no cost; None: no such token."""
    no_repeat_ngram_size: int = 0
    """No sequence of this many tokens occurs twice in a text; 0 allows repetitions."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that a text already holds become less likely.

    It changes log-probabilities, and logits if beam_size is 1, as in transformers.
    """
    renormalize_logits: bool = False
    """Normalize the probabilities again after all logits processors."""
    extra_candidates: int = 0
    """Further candidates per hypothesis and step; greedy search has none.

    Those that did not end replace hypotheses that ended. transformers has one for each EOS id.
    """
    batch_size: int = 64
    """The most sentences that are searched together."""
    bos: int = 1
    """Token id before the first token of a text (decoder_start_token_id in transformers)."""
    eos: tuple[int, ...] = (2,)
    """Token ids that end a text; the first one also ends each source."""
    pad: int = 0
    """Token id that fills up sources of a batch."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "beam_size", "batch_size", "max_length")
        check_at_least(self, 0, "max_extra_tokens", "min_length", "no_repeat_ngram_size")
        check_at_least(self, 0, "extra_candidates", "bos", "pad", "forced_bos")
        _check_repetition_penalty(self)
        if not math.isfinite(self.length_penalty):
            raise ConfigError(f"length_penalty={self.length_penalty}, but it must be finite")
        if not self.eos:
            raise ConfigError("eos is empty, but a text must be able to end: give an id")


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How a token is drawn. Raises `ConfigError` for a value out of range.

    >>> config = SamplerConfig(temperature=0.8, top_k=40)
    >>> config.top_p  # all of the 40 tokens
    1.0
    >>> SamplerConfig(temperature=-1.0)
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: temperature=-1.0, but it must be 0 or more
    """

    temperature: float = 1.0
    """Tokens are drawn from softmax(logits / temperature); 0: the most likely token."""
    top_k: int = 0
    """Draw from the top_k most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest of these tokens whose probabilities add up to top_p."""
    min_p: float = 0.0
    """Draw from those of them at least min_p times as likely as the most likely token."""
    seed: int = 0
    """Seed of the random numbers."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 0, "top_k", "seed")
        if self.seed >= 2**32:
            raise ConfigError(f"seed={self.seed}, but it must be below 2^32")
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature}, but it must be 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p}, but it must be above 0 and at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p={self.min_p}, but it must be 0 to 1")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(SamplerConfig):
    r"""Settings of the continuations of prompts. Raises `ConfigError` for a value out of range.

    >>> config = jf.SamplingConfig(max_new_tokens=50, temperature=0.8, stop=("\n",))
    >>> config.top_p, config.overflow  # from all tokens; a prompt must fit
    (1.0, 'refuse')
    """

    max_new_tokens: int = 200
    """The most tokens that a prompt is continued by."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and of its continuation become less likely."""
    no_repeat_ngram_size: int = 0
    """No sequence of this many tokens occurs twice in a continuation; 0 allows repetitions."""
    eos: tuple[int, ...] | None = None
    """Token ids that end a text; None: the tokenizer's EOS, if it has one."""
    stop: tuple[str, ...] = ()
    """A text ends before the first of these strings."""
    overflow: Literal["refuse", "slide"] = "refuse"
    """What to do if a prompt and its continuation are longer than max_len.

    refuse: raise an error. slide: continue in rounds of max_len // 2 tokens; each round sees the
    last tokens before it that fit.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "max_new_tokens")
        check_at_least(self, 0, "no_repeat_ngram_size")
        _check_repetition_penalty(self)
        if isinstance(self.stop, str) or "" in self.stop:
            raise ConfigError(f"stop={self.stop!r}, but it must be texts of at least a character")


def _check_repetition_penalty(config: Any) -> None:
    if not 0.0 < config.repetition_penalty < math.inf:
        raise ConfigError(
            f"repetition_penalty={config.repetition_penalty}, but it must be positive: 1 is none"
        )
