"""A model of the characters of a text, trained by one call: what several examples begin with."""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxformer as jf
from jaxformer.text.data import iterate_once


class Characters(NamedTuple):
    """A text as characters, whose last tenth is held out."""

    tokenizer: jf.Tokenizer
    learned: jf.Tokens
    held_out: jf.Tokens
    beginning: str
    """The first characters of the held-out text."""


def read_characters(path: str | None, count: int = 64) -> Characters:
    """The characters of the file, or of all modules of jaxformer, and `count` for a prompt."""
    if path is None:
        modules = sorted(Path(jf.__file__).parent.rglob("*.py"))
        text = "".join(module.read_text(encoding="utf-8") for module in modules)
    else:
        text = Path(path).read_text(encoding="utf-8")
    tokenizer = jf.train_characters([text])
    cut = len(text) * 9 // 10
    parts = text[:cut], text[cut:]
    learned, held_out = (jf.Tokens.from_lists([tokenizer.encode(part)]) for part in parts)
    return Characters(tokenizer, learned, held_out, text[cut : cut + count])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `train` reads, and the text, to a command."""
    parser.add_argument("text", nargs="?", help="a text file; none: the source of jaxformer")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)


def train(
    model: jf.DecoderOnly, characters: Characters, options: argparse.Namespace
) -> tuple[jf.Loaded, float]:
    """The trained model, and its loss of the held-out text in nats per character."""
    stream = jf.Stream(
        characters.learned,
        batch_size=options.batch_size,
        seq_len=options.length,
        seed=options.seed,
        isolate_documents=False,
    )
    loss = jf.causal_loss(model)
    rates = jf.OptimizerConfig(
        learning_rate=options.learning_rate,
        warmup_steps=options.steps // 10,
        total_steps=options.steps,
    )
    optimizer = jf.make_optimizer(rates)
    init_key, key = jax.random.split(jax.random.key(options.seed))
    params = jax.jit(model.init)(init_key, stream.batch(0).tokens[:, :-1])["params"]
    state = jf.init_train_state(params, optimizer, key)
    step = jax.jit(jf.make_train_step(loss, optimizer), donate_argnums=0)
    start = time.time()
    for number in range(1, options.steps + 1):
        state, metrics = step(state, stream.batch(number - 1))
        if number % 50 == 0 or number == options.steps:
            value, seconds = metrics["loss"] / metrics["tokens"], time.time() - start
            print(f"step {number:4}  loss {value:.3f}  {seconds:.0f} s", flush=True)

    measure: Any = jax.jit(lambda params, batch: loss(params, batch, None)[:2])
    batches = iterate_once(
        characters.held_out,
        batch_size=options.batch_size,
        seq_len=options.length,
        isolate_documents=False,
    )
    sums = [measure(state.params, batch) for batch in batches]
    held_out = float(sum(nats for nats, _ in sums) / sum(count for _, count in sums))
    loaded = jf.Loaded(model, state.params, characters.tokenizer)
    print(f"{loaded}: held-out loss {held_out:.3f}")
    return loaded, held_out
