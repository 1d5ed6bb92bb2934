"""The beginning of a text in, its continuation out: at once, or piece by piece."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxformer.decoding import (
    CompletionOptions,
    LogitsProcessor,
    Prompts,
    SampleState,
    SamplingConfig,
    sample_more,
)
from jaxformer.decoding.hypotheses import row_values, without_values
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import DecoderOnly
from jaxformer.pipelines.batching import (
    BATCH_SIZE,
    Prompt,
    check_id,
    check_inputs,
    one_or_many,
    pad_right,
    suppressed_ids,
    unwrap_single,
)
from jaxformer.pipelines.partial_text import PartialText
from jaxformer.pipelines.reading import (
    NewTexts,
    begin_rows,
    read_prompts,
    reading_plan,
    text_size,
)
from jaxformer.pipelines.rows import FOREVER, Search, decode_groups, prepare, run_all
from jaxformer.pretrained.loaded import Loaded
from jaxformer.runtime import concurrency
from jaxformer.text.tokenizers import Tokenizer

TOKENS_AT_ONCE = 8
"""The number of tokens between two looks at a text, for its pieces and its stop strings."""

_Setting = SamplingConfig | CompletionOptions


class Completion(NamedTuple):
    """The continuation of a prompt."""

    text: str
    """Its text, without the stop string that ended it and without half a character at its end."""
    ids: list[int]
    """All ids that were written, EOS included."""
    log_probs: list[float]
    """The log-probability (nats) of each id."""
    ended: bool
    """Whether EOS or a stop string ended it, rather than its length."""


@one_or_many(str, Completion)
def complete(
    loaded: Loaded,
    prompts: str | Iterable[Prompt],
    *settings: _Setting,
    details: bool = False,
    first_example_id: int = 0,
    logits_processors: Sequence[LogitsProcessor] = (),
    **changes: Any,
) -> Any:
    """The continuation of each prompt, or of the one prompt, without the prompt.

    With `details` a `Completion`: its ids and their log-probabilities too. Tokens are drawn as the
    settings of `loaded` say; a `SamplingConfig` or `CompletionOptions` in `settings` replaces its
    own, `changes` replace single fields, as in temperature=0.7.

    `logits_processors` change the logits of each token, after the repetition penalty and before the
    constraints of the settings. A function that is made anew in each call is compiled anew.

    The continuation of prompt i depends on the seed of the settings and on its example id,
    `first_example_id + i`, not on the other prompts. On a CPU two programs run at a time. Of more
    prompts than they have rows, 64 each, the next takes the row of one that has ended. A text is
    read as the folder's own tokenizer reads it, perhaps after BOS; an empty one begins at BOS.
    Raises `DataError` for no prompt, and for an empty one if there is no BOS, `ConfigError` for a
    prompt that does not fit `max_len`, for another model, and for a tokenizer and settings that do
    not fit.

    >>> from jaxformer.text.tokenizers import train_characters
    >>> tokenizer = train_characters(["abcdef"])  # 10 ids with the special tokens
    >>> config = jf.TransformerConfig(10, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # all logits are 0
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> len(jf.complete(loaded, ["ab", "", "c"], max_new_tokens=3))
    3
    >>> added = jf.complete(loaded, "ab", max_new_tokens=3, details=True)
    >>> round(float(jnp.exp(added.log_probs[0])), 3)  # each of the 10 tokens is as likely
    0.1
    """
    call, texts = _start(loaded, prompts, settings, changes, first_example_id, logits_processors)
    step = TOKENS_AT_ONCE if call.options.stop else FOREVER
    programs = concurrency(call.params)
    run_all(decode_groups(call.groups(texts), programs, step), programs)
    if any(np.isnan(text.log_probs).any() for text in texts):
        warnings.warn("the model's logits are NaN: the texts mean nothing", stacklevel=2)
    if not details:
        return unwrap_single(prompts, [text.text for text in texts])
    completions = [Completion(text.text, text.ids, text.log_probs, text.ended) for text in texts]
    return unwrap_single(prompts, completions)


def stream(
    loaded: Loaded,
    prompts: str | Iterable[Prompt],
    *settings: _Setting,
    first_example_id: int = 0,
    logits_processors: Sequence[LogitsProcessor] = (),
    **changes: Any,
) -> Iterator[tuple[int, str]]:
    """Pairs of a prompt's index and a new piece of its continuation, as soon as it is written.

    The pieces of a prompt joined are the text that `complete` returns; no piece holds half a
    character. A piece is what up to 8 tokens add. Raises at once what `complete` raises.

    >>> tokenizer = jf.train_characters(["abcdef"])  # 10 ids with the special tokens
    >>> config = jf.TransformerConfig(10, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> pieces = [""] * 2
    >>> for index, piece in jf.stream(loaded, ["ab", "c"], max_new_tokens=3):
    ...     pieces[index] += piece
    >>> pieces == jf.complete(loaded, ["ab", "c"], max_new_tokens=3)
    True
    """
    call, texts = _start(loaded, prompts, settings, changes, first_example_id, logits_processors)
    writing = decode_groups(call.groups(texts), 1, TOKENS_AT_ONCE)
    pieces = itertools.chain.from_iterable(writing)
    return ((text.example_id - first_example_id, piece) for text, piece in pieces if piece)


def _start(
    loaded: Loaded,
    prompts: str | Iterable[Prompt],
    settings: tuple[_Setting, ...],
    changes: dict[str, Any],
    first_example_id: int,
    logits_processors: Sequence[LogitsProcessor],
) -> tuple["_Call", list[PartialText]]:
    """The values of the call, and the texts to write."""
    inputs, tokenizer, _ = check_inputs(loaded, prompts, DecoderOnly)
    config, options = loaded.choose_settings(settings, changes, SamplingConfig, CompletionOptions)
    given = changes.keys() | {field for x in settings for field in vars(x)}
    if "max_new_tokens" in given and "max_length" not in given:  # a folder's counts no more
        options = replace(options, max_length=None)
    model = loaded.model
    special, max_len, length = tokenizer.special, model.config.max_len, config.max_new_tokens
    eos = options.eos
    if eos is None:
        eos = () if special.eos is None else (special.eos,)
    for token in eos:
        check_id("eos", token, model.config.vocab_size)
    texts, encoded = [], _prompt_ids(inputs, tokenizer)
    for i, ids in enumerate(encoded):
        if not ids:
            if special.bos is None:
                raise DataError(
                    f"prompt {i + 1} of {len(encoded)} is empty, and the vocabulary has no token "
                    "to begin a text with: give it some text"
                )
            ids = [special.bos]
        new = min(length, (options.max_length or FOREVER) - len(ids))
        if new < 1:
            raise ConfigError(
                f"prompt {i + 1} of {len(encoded)} has {len(ids)} tokens, but max_length="
                f"{options.max_length} of prompt and continuation: give max_new_tokens instead"
            )
        total = len(ids) + new
        if total > max_len and options.overflow == "refuse":
            raise ConfigError(
                f"prompt {i + 1} of {len(encoded)} has {len(ids)} tokens, which makes {total} with "
                f"max_new_tokens={new}, but max_len={max_len}: shorten it, give a smaller "
                "max_new_tokens, or give overflow='slide'"
            )
        number, stop = first_example_id + i, options.stop
        texts.append(PartialText(number, ids, tokenizer, max_new_tokens=new, eos=eos, stop=stop))
    config = replace(config, suppress_tokens=suppressed_ids(model.config, tokenizer, config))
    model, params = prepare(model, loaded.params)
    return _Call(model, params, config, options, eos, tuple(logits_processors)), texts


def _prompt_ids(prompts: Iterable[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each prompt; `DataError` for what is neither a text nor ids of tokens."""
    prompts = list(prompts)
    texts = iter(tokenizer.encode_inputs([x for x in prompts if isinstance(x, str)]))
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            ids = np.asarray(next(texts) if isinstance(prompt, str) else prompt)
        except ValueError:  # lists of different lengths
            ids = np.empty(())
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise DataError(
                f"prompt {number} is a {type(prompt).__name__}, but must be a string or a sequence "
                "of integer ids"
            )
        if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise DataError(
                f"prompt {number} has ids from {ids.min()} to {ids.max()}, but ids are 0 to "
                f"{tokenizer.vocab_size - 1}"
            )
        encoded.append([int(index) for index in ids])
    return encoded


class _Call(NamedTuple):
    """The values that all texts of a call share."""

    model: DecoderOnly
    params: Any
    config: SamplingConfig
    options: CompletionOptions
    eos: tuple[int, ...]
    logits_processors: tuple[LogitsProcessor, ...]

    def groups(
        self, texts: list[PartialText]
    ) -> Iterator[tuple[list[PartialText], Callable[[int], "_Search"]]]:
        """The texts of each size, and a function that makes the search of some of them."""
        sizes = [text_size(len(text.prompt) + text.max_new_tokens) for text in texts]
        for size in sorted(set(sizes)):
            group = [text for text, other in zip(texts, sizes, strict=True) if other == size]
            # Prompts that enter together are of similar length.
            group.sort(key=lambda text: len(text.prompt))
            yield group, partial(_Search, self, group, size)

    def round(self, text: PartialText) -> tuple[int, int]:
        """How many tokens `text` sees when it enters, and how many it may then get.

        A text that does not fit slides: it sees its last tokens, beside room for max_len // 2.
        """
        max_len, new = self.model.config.max_len, text.max_new_tokens
        if len(text.prompt) + new <= max_len:
            return max_len, new
        half = max(1, max_len // 2)
        return max(1, max_len - half), half


class _Search(Search[PartialText]):
    """The search of `count` of the `texts`, each of at most `size` tokens."""

    def __init__(self, call: _Call, texts: Sequence[PartialText], size: int, count: int) -> None:
        max_len = call.model.config.max_len
        self.call, self.size, self.room = call, size, min(size, max_len)
        static: Any = {
            "config": replace(without_values(call.config), max_new_tokens=size),
            "eos": call.eos,
            "logits_processors": call.logits_processors,
        }
        begin = partial(begin_rows, call.model, cache_length=self.room, **static)
        super().__init__(call.model, call.params, count, BATCH_SIZE, begin, sample_more)
        rounds = [call.round(text) for text in texts]
        counts = {len(text.context(seen)) for text, (seen, _) in zip(texts, rounds, strict=True)}
        if slides := [seen for seen, _ in rounds if seen < max_len]:
            counts = {*range(min(counts), max(slides) + 1)}
        plans = [reading_plan(count - 1, self.room) for count in counts]
        rows = np.zeros(self.entering, np.int32)
        some = rows, self.new_texts(texts[:1])[0]
        self.parts: dict[tuple[int, bool], Any] = {}  # by the width, and whether others come before
        for width, later in sorted({(width, start > 0) for plan in plans for start, width in plan}):
            part = np.zeros((len(rows), width), np.int32), np.int32(0) if later else None
            self.parts[width, later] = self.compile(read_prompts, *some, *part, **static)

    def enter(
        self, state: Any, rows: Int[np.ndarray, " K"], texts: Sequence[PartialText]
    ) -> SampleState:
        """Reads the contexts of the texts, part by part."""
        new, tokens = self.new_texts(texts)
        tokens = np.pad(tokens, ((0, 0), (0, max(0, self.room - tokens.shape[1]))))
        for start, width in reading_plan(int(new.context.max()), self.room):
            part, place = tokens[:, start : start + width], np.int32(start) if start else None
            state = self.parts[width, start > 0](state, rows, new, part, place)
        return state

    def new_texts(self, texts: Sequence[PartialText]) -> tuple[NewTexts, Int[np.ndarray, "K T"]]:
        """`texts` that enter, and the tokens before the last one that each of them sees."""
        count, call = self.entering, self.call
        texts = [*texts, *[texts[0]] * (count - len(texts))]
        rounds = [call.round(text) for text in texts]
        contexts = [text.context(seen) for text, (seen, _) in zip(texts, rounds, strict=True)]
        wholes = [text.prompt + text.ids for text in texts]
        limits = [
            len(text.ids) + min(text.left, new)
            for text, (_, new) in zip(texts, rounds, strict=True)
        ]

        def column(values: Iterable[int]) -> Int[np.ndarray, " K"]:
            return np.array([*values], np.int32)

        prompts = Prompts(
            last_tokens=column(ids[-1] for ids in contexts),
            max_new_tokens=column(limits),
            example_ids=column(text.example_id for text in texts),
            history=pad_right(wholes, count, self.size),
            history_lengths=column(map(len, wholes)),
            written=column(len(text.ids) for text in texts),
        )
        values, context = row_values(call.config, count), column(map(len, contexts)) - 1
        missing = call.options.min_length - column(len(text.prompt) for text in texts)
        values["min_new_tokens"] = np.maximum(values["min_new_tokens"], missing)
        new = NewTexts(prompts, context, values, np.uint32(call.options.seed))
        return new, pad_right([ids[:-1] for ids in contexts], count, int(context.max()))

    def results(self, state: SampleState) -> Any:
        """The numbers of tokens, the tokens and their log-probabilities."""
        numbers = state.prompt_lengths, state.starts, state.lengths
        return *numbers, state.history, state.log_probs

    def take(self, text: PartialText, row: Any, stopped: bool) -> tuple[PartialText, str]:
        """Adds the new tokens to `text`; the text that they add."""
        prompt_length, start, length, history, log_probs = row
        piece = ""
        for place in range(prompt_length + len(text.ids), length):
            if not text.done:
                text.log_probs.append(float(log_probs[place - start]))
                piece += text.add(int(history[place]))
        return text, piece
