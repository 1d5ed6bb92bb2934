"""Settings of beam search and of sampling, and of the pipelines that run them.

Each raises `ConfigError` for a value of another type or out of range.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from jaxformer.config import Checked, Count, Natural, NonNegative, Positive, Range, Seed
from jaxformer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LogitsConfig(Checked):
    """Changes of the logits that search and sampling share (`make_constraints`)."""

    VALUES: ClassVar[tuple[str, ...]] = ("min_new_tokens", "repetition_penalty")
    """The fields that each sentence of a batch may have its own values of."""

    min_new_tokens: Natural = 0
    """The fewest tokens before EOS."""
    suppress_tokens: tuple[Natural, ...] = ()
    """Token ids that are never written."""
    no_repeat_ngram_size: Natural = 0
    """No sequence of this many tokens occurs twice in a text, prompt included; 0 allows
    repetitions."""
    repetition_penalty: Positive = 1.0
    """Above 1, tokens that a text already holds, prompt included, become less likely.

    It changes logits; in a beam of several, log-probabilities, as in transformers.
    """


@dataclass(frozen=True, kw_only=True)
class SearchConfig(LogitsConfig):
    """Settings of beam search; the defaults follow Vaswani et al. 2017, section 6.1.

    `jaxformer.pretrained.load_generation_config` reads them from a folder of transformers.

    >>> jf.SearchConfig(beam_size=1, max_new_tokens=20).eos  # greedy search
    (2,)
    >>> jf.SearchConfig(beam_size=0)
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: beam_size=0, but it must be at least 1
    """

    VALUES: ClassVar[tuple[str, ...]] = ("length_penalty", *LogitsConfig.VALUES)

    beam_size: Count = 4
    """Hypotheses per sentence; 1 is greedy search."""
    length_penalty: Annotated[float, Range(-8, 8, "[]")] = 0.6
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
    """The last token of a hypothesis of max_new_tokens tokens.

    force_eos: EOS, with the model's log-probability. force_eos_at_no_cost: EOS, with
    log-probability 0 (forced_eos_token_id in transformers). cut: any token.
    """
    max_new_tokens: Count | None = None
    """The most tokens of a text, EOS included; None: each sentence's limit alone counts, which for
    a translation is the length of its source and some more."""
    forced_bos: Natural | None = None
    """Token id that every text begins with, at no cost; None: no such token."""
    renormalize_logits: bool = False
    """Normalize the probabilities again after all logits processors."""
    extra_candidates: Natural = 0
    """Candidates kept beyond beam_size, per hypothesis, so that the beam stays full when hypotheses
    end; greedy search has none. transformers: the number of EOS ids.
    """
    eos: tuple[Natural, ...] = (2,)
    """Token ids that end a text; the first one also ends each source."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eos:
            raise ConfigError("eos is empty, but a text must be able to end: give an id")
        _check_min_new_tokens(self)
        if self.max_new_tokens is not None:
            self.check_end(self.max_new_tokens)

    def check_end(self, most: int) -> None:
        """Raises `ConfigError` if a text of `most` tokens could not end as `at_max_length` says."""
        if self.at_max_length != "force_eos":
            return
        why = ""
        if self.min_new_tokens >= most:
            why = f"min_new_tokens={self.min_new_tokens} forbids it there"
        elif set(self.eos) <= set(self.suppress_tokens):
            why = "suppress_tokens forbids it"
        elif most == 1 and self.forced_bos not in (None, *self.eos):
            why = f"it begins with forced_bos={self.forced_bos}"
        if why:
            raise ConfigError(
                f"the last of at most {most} tokens of a text must be EOS {self.eos}, but {why}: "
                "allow more tokens, or give at_max_length='cut'"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(LogitsConfig):
    """Settings of `sample`: how tokens are drawn, and how many.

    >>> jf.SamplingConfig(max_new_tokens=50, temperature=0.8, top_k=40).top_p  # all of the 40
    1.0
    """

    VALUES: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        *LogitsConfig.VALUES,
    )

    temperature: NonNegative = 1.0
    """Tokens are drawn from softmax(logits / temperature); 0: the most likely token."""
    top_k: Natural = 0
    """Draw from the top_k most likely tokens; 0: from all."""
    top_p: Annotated[float, Range(0, 1, "(]")] = 1.0
    """Draw from the fewest of these tokens whose probabilities add up to top_p."""
    min_p: Annotated[float, Range(0, 1, "[]")] = 0.0
    """Draw only from tokens that are at least min_p times as likely as the most likely one."""
    max_new_tokens: Count = 200
    """The most tokens that a prompt is continued by."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_min_new_tokens(self)


@dataclass(frozen=True, kw_only=True)
class TranslationOptions(Checked):
    """Options of `translate` beside the search.

    The ids are those that tokenizers trained here have; `load_generation_config` gives a folder's
    own.

    >>> TranslationOptions(max_extra_tokens=10).bos
    1
    """

    max_extra_tokens: Natural = 50
    """The number of tokens by which a translation may be longer than its source, where the search
    has no max_new_tokens."""
    batch_size: Count = 64
    """The most sentences that are searched together."""
    bos: Natural = 1
    """Token id before the first token of a translation (decoder_start_token_id)."""
    pad: Natural = 0
    """Token id that fills up the sources of a batch."""
    source_language: str | None = None
    """The language of the sources, as the folder's tokenizer names it; None: the folder's."""
    target_language: str | None = None
    """The language of the translations; None: that which the folder's settings begin them with."""
    prefix: str = ""
    """Written before each source, such as the "summarize: " of T5, as the model was trained."""


@dataclass(frozen=True, kw_only=True)
class CompletionOptions(Checked):
    r"""Options of `complete` beside sampling.

    >>> CompletionOptions(stop=("\n",)).overflow  # a prompt must fit
    'refuse'
    """

    eos: tuple[Natural, ...] | None = None
    """Token ids that end a text; None: the tokenizer's EOS, if it has one."""
    stop: tuple[str, ...] = ()
    """A text ends before the first of these strings."""
    overflow: Literal["refuse", "slide"] = "refuse"
    """The treatment of a prompt and continuation that are longer than max_len.

    refuse: raise an error. slide: continue in rounds of max_len // 2 tokens; each round sees the
    last tokens before it that fit.
    """
    max_length: Count | None = None
    """The most tokens of a prompt and its continuation together, beside max_new_tokens; None: any
    number."""
    min_length: Natural = 0
    """The fewest tokens of both before EOS, beside min_new_tokens."""
    seed: Seed = 0
    """Seed of the random numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.stop:
            raise ConfigError(f"stop={self.stop!r}, but each must have at least one character")


def _check_min_new_tokens(config: Any) -> None:
    least, most = config.min_new_tokens, config.max_new_tokens
    if most is not None and least > most:
        raise ConfigError(
            f"min_new_tokens={least} is more than max_new_tokens={most}: no text could end"
        )
