"""Speculative decoding with two models: `python -m experiments.examples.speculative`.

A small model writes a few tokens, and a large one reads them in one call and keeps those that it
would have written (Leviathan et al. 2023): the text is the large model's greedy one, in fewer of
its steps. Both are trained on the text that is given, or on the source of jaxformer, and the file
prints the tokens that each way writes in a second: four minutes on two cores.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer as jf
from experiments.examples.character_models import add_options, read_characters, train
from jaxformer.decoding import SamplerInputs


class Written(NamedTuple):
    """Texts [B] that were written, and how."""

    tokens: jax.Array
    """[B, L]: the new tokens of each text up to its EOS, then zeros."""
    calls: jax.Array
    """[]: how often the large model was called after the prompts."""
    accepted: jax.Array
    """[B]: how many of the tokens that the small model proposed the text took over."""
    proposed: jax.Array
    """[B]: how many it proposed before the text ended."""


class State(NamedTuple):
    """Texts that are being written."""

    tokens: jax.Array
    """[B, L + k + 1]: the tokens that are written, then anything."""
    lengths: jax.Array
    """[B]: how many are written."""
    last: jax.Array
    """[B]: the last token, which no cache has."""
    stopped: jax.Array
    large_cache: jf.Cache
    small_cache: jf.Cache
    calls: jax.Array
    accepted: jax.Array
    proposed: jax.Array


@partial(jax.jit, static_argnames=("large", "small", "max_new_tokens", "guesses", "eos"))
def speculate(
    large: jf.DecoderOnly,
    large_params: Any,
    small: jf.DecoderOnly,
    small_params: Any,
    prompts: jax.Array,
    *,
    max_new_tokens: int,
    guesses: int = 4,
    eos: int | None = None,
) -> Written:
    """The greedy continuation by `large` of each of `prompts` [B, P], with the help of `small`.

    In each round `small` writes k = `guesses` tokens, and one call of `large` gives its own token
    after each of them. The first of these that agree are kept, and the one after them is the large
    model's own: a round writes 1 to k + 1 tokens. Both caches are then cut to the tokens that
    are kept. Texts end at `eos`, if it is given. Raises `ConfigError` for models with other
    vocabularies, and for a cache from which tokens cannot be taken back.
    """
    if large.config.vocab_size != small.config.vocab_size:
        raise jf.ConfigError(
            f"the large model has {large.config.vocab_size} ids and the small one "
            f"{small.config.vocab_size}: give models of one tokenizer"
        )
    large_step: Any = partial(large.apply, {"params": large_params}, method="decode_step")
    small_step: Any = partial(small.apply, {"params": small_params}, method="decode_step")
    prompts = jnp.asarray(prompts, jnp.int32)
    batch, length = prompts.shape
    rows = jnp.arange(batch)

    def read(model: jf.DecoderOnly, step: Any) -> jf.Cache:
        cache: Any = model.init_cache(batch, max_length=length + max_new_tokens + guesses)
        if not cache.can_truncate:
            raise jf.ConfigError(
                f"the {type(model).__name__} has a layer that cannot take tokens back, such as a "
                "recurrent state: give a model whose layers keep keys and values"
            )
        if length > 1:
            _, cache = step(prompts[:, None, :-1], cache)
        return cache.truncate(jnp.full(batch, length - 1))

    def guess(carry: tuple[jax.Array, jf.Cache], _: None) -> Any:
        token, cache = carry
        logits, cache = small_step(token[:, None, None], cache)
        return (jnp.argmax(logits[:, 0, 0], axis=-1), cache), token

    def advance(state: State) -> State:
        # The small model also reads its last guess, so that its cache has it if it is kept.
        carry = state.last, state.small_cache
        (_, small_cache), read_tokens = jax.lax.scan(guess, carry, length=guesses + 1)
        read_tokens = read_tokens.T  # [B, k + 1]: the last token, then the guesses
        logits, large_cache = large_step(read_tokens[:, None], state.large_cache)
        best = jnp.argmax(logits[:, 0], axis=-1)  # [B, k + 1]: the large model's token after each
        agrees = jnp.cumprod(read_tokens[:, 1:] == best[:, :-1], axis=1)
        kept = agrees.sum(axis=1)  # [B], of the guesses
        new = jnp.minimum(kept + 1, max_new_tokens - state.lengths)
        if eos is not None:
            is_end = best == eos
            first = jnp.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, guesses + 1)
            new = jnp.minimum(new, first)
        new = jnp.where(state.stopped, 0, new)
        places = state.lengths[:, None] + jnp.arange(guesses + 1)[None]
        last = jnp.where(new > 0, best[rows, new - 1], state.last)
        lengths = state.lengths + new
        ends = lengths >= max_new_tokens
        if eos is not None:
            ends |= last == eos
        in_caches = length - 1 + lengths
        return State(
            tokens=state.tokens.at[rows[:, None], places].set(best),
            lengths=lengths,
            last=last,
            stopped=state.stopped | ends,
            large_cache=large_cache.truncate(in_caches),
            small_cache=small_cache.truncate(in_caches),
            calls=state.calls + 1,
            accepted=state.accepted + jnp.minimum(kept, new),
            proposed=state.proposed + jnp.where(state.stopped, 0, guesses),
        )

    zeros = jnp.zeros(batch, jnp.int32)
    state = State(
        tokens=jnp.zeros((batch, max_new_tokens + guesses + 1), jnp.int32),
        lengths=zeros,
        last=prompts[:, -1],
        stopped=zeros > 0,
        large_cache=read(large, large_step),
        small_cache=read(small, small_step),
        calls=jnp.int32(0),
        accepted=zeros,
        proposed=zeros,
    )
    state = jax.lax.while_loop(lambda state: ~state.stopped.all(), advance, state)
    is_written = jnp.arange(max_new_tokens)[None] < state.lengths[:, None]
    tokens = jnp.where(is_written, state.tokens[:, :max_new_tokens], 0)
    return Written(tokens, state.calls, state.accepted, state.proposed)


def write_greedily(
    model: jf.DecoderOnly, params: Any, prompts: jax.Array, max_new_tokens: int
) -> jax.Array:
    """The new tokens [B, L] of the same texts, one for each call of the model."""
    batch, length = prompts.shape
    cache: Any = model.init_cache(batch, max_length=length + max_new_tokens)
    if length > 1:
        variables = {"params": params}
        _, cache = model.apply(variables, prompts[:, None, :-1], cache, method="decode_step")
    limits = jnp.full(batch, max_new_tokens)
    texts = SamplerInputs(prompts[:, -1], limits, example_ids=jnp.arange(batch))
    greedy = jf.SamplingConfig(max_new_tokens=max_new_tokens, temperature=0.0)
    step, key = jf.make_step_fn(model, params), jax.random.key(0)
    return jf.sample(step, cache, texts, key, greedy).tokens[:, 0]


parser = argparse.ArgumentParser(description=__doc__)
add_options(parser)
parser.add_argument("--d_model", type=int, default=192, help="of the large model")
parser.add_argument("--layers", type=int, default=3, help="of the large model")
parser.add_argument("--small_d_model", type=int, default=48)
parser.add_argument("--small_layers", type=int, default=1)
parser.add_argument("--guesses", type=int, default=4, help="tokens that the small model proposes")
parser.add_argument("--characters", type=int, default=256, help="characters to generate")


def seconds_of(write: Callable[[], Any], times: int = 5) -> float:
    """The median time of a call after the first one, which compiles."""
    jax.block_until_ready(write())
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(write())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def main(args: list[str] | None = None) -> dict[str, float]:
    """Trains both models and writes a text in both ways; returns tokens a second and the share."""
    options = parser.parse_args(args)
    characters = read_characters(options.text)

    def trained(d_model: int, layers: int) -> jf.Loaded:
        config = jf.TransformerConfig(
            vocab_size=characters.tokenizer.vocab_size,
            d_model=d_model,
            d_ff=4 * d_model,
            num_heads=max(1, d_model // 64),
            num_decoder_layers=layers,
            max_len=options.length,
            positions=jf.Rotary(),
            norm=jf.NormOptions("rms", placement="pre"),
        )
        return train(jf.DecoderOnly(config), characters, options)[0]

    small = trained(options.small_d_model, options.small_layers)
    large = trained(options.d_model, options.layers)
    prompts = jnp.array([characters.tokenizer.encode(characters.beginning)])
    count = options.characters
    greedy: Any = jax.jit(write_greedily, static_argnums=(0, 3))

    def write_plainly() -> jax.Array:
        return greedy(large.model, large.params, prompts, count)

    def write_speculatively() -> Written:
        return speculate(
            large.model,
            large.params,
            small.model,
            small.params,
            prompts,
            max_new_tokens=count,
            guesses=options.guesses,
        )

    plain, written = write_plainly(), write_speculatively()
    speeds = {
        "greedy": count / seconds_of(write_plainly),
        "speculative": count / seconds_of(write_speculatively),
        "accepted": float(written.accepted.sum() / written.proposed.sum()),
    }
    same = "the same text" if jnp.array_equal(plain, written.tokens) else "ANOTHER TEXT"
    print(f"\n{characters.beginning}|{characters.tokenizer.decode(plain[0].tolist())}\n")
    print(f"greedy: {speeds['greedy']:.0f} tokens a second, {count} calls of the large model")
    print(f"with guesses: {speeds['speculative']:.0f}, {written.calls} calls, {same}")
    print(f"{speeds['accepted']:.0%} of the proposed tokens were accepted")
    return speeds


if __name__ == "__main__":
    main()
