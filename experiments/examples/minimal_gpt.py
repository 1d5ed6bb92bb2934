"""A small GPT from raw text to generated text: `python -m experiments.examples.minimal_gpt`.

JAX and jaxformer alone, from top to bottom: characters, batches, model, step, loop, samples. The
text is the file that is given, or the source of jaxformer: two minutes on two cores.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxformer as jf

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", nargs="?", help="a text file; none: the source of jaxformer")
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--length", type=int, default=64, help="characters that the model sees")
parser.add_argument("--d_model", type=int, default=96)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--learning_rate", type=float, default=2e-3)
parser.add_argument("--characters", type=int, default=400, help="characters to generate")
parser.add_argument("--temperature", type=float, default=0.8)
parser.add_argument("--seed", type=int, default=0)


def read(path: str | None) -> str:
    """The text of the file, or of all modules of jaxformer."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    modules = sorted(Path(jf.__file__).parent.rglob("*.py"))
    return "".join(module.read_text(encoding="utf-8") for module in modules)


def main(args: list[str] | None = None) -> float:
    """Trains, prints a sample, and returns the loss of the held-out text in nats per character."""
    options = parser.parse_args(args)

    # Data: each character is an id; the last tenth of the text is held out.
    text = read(options.text)
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    ids = np.array([number[character] for character in text], np.int32)
    train, held_out = np.split(ids, [len(ids) * 9 // 10])
    rng = np.random.default_rng(options.seed)

    def batch_of(ids: np.ndarray) -> np.ndarray:
        """Random pieces of the text, [B, T + 1]: each character is predicted from those before."""
        starts = rng.integers(0, len(ids) - options.length, options.batch_size)
        return np.stack([ids[start : start + options.length + 1] for start in starts])

    # Model: logits [B, T, V] of the character after each of tokens [B, T].
    model = jf.DecoderOnly(
        jf.TransformerConfig(
            vocab_size=len(alphabet),
            d_model=options.d_model,
            d_ff=4 * options.d_model,
            num_heads=options.d_model // 32,
            num_decoder_layers=options.layers,
            max_len=options.length,
            dropout_rate=0.0,
        )
    )

    # Loss and step: the mean negative log-likelihood, its gradient, one update.
    def loss(params: dict, batch: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, options.steps // 10, options.steps
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))

    @jax.jit
    def step(params: dict, state: optax.OptState, batch: jax.Array) -> tuple:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    # Loop.
    params = model.init(jax.random.key(options.seed), batch_of(train)[:, :-1])["params"]
    state = optimizer.init(params)
    start = time.time()
    print(f"{len(text):,} characters, {sum(x.size for x in jax.tree.leaves(params)):,} parameters")
    for count in range(1, options.steps + 1):
        params, state, value = step(params, state, batch_of(train))
        if count % 50 == 0 or count == options.steps:
            print(f"step {count:4}  loss {value:.3f}  {time.time() - start:.0f} s", flush=True)

    # Score: the mean of ten batches of held-out text.
    measure = jax.jit(loss)
    held_out_loss = float(np.mean([measure(params, batch_of(held_out)) for _ in range(10)]))
    print(f"held-out loss {held_out_loss:.3f}\n")

    # Sample: each new character is drawn given the last `length` ones.
    logits_of = jax.jit(lambda params, ids: model.apply({"params": params}, ids))
    key = jax.random.key(options.seed)
    generated = train[: options.length]
    for count in range(options.characters):
        window = generated[None, -options.length :]  # [1, T]
        logits = logits_of(params, window)[0, -1] / options.temperature  # [V]
        new = jax.random.categorical(jax.random.fold_in(key, count), logits)
        generated = np.append(generated, np.int32(new))
    print("".join(alphabet[i] for i in generated))
    return held_out_loss


if __name__ == "__main__":
    main()
