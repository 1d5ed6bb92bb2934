"""A GPT trained as a module of Flax NNX: `python -m experiments.examples.nnx_gpt`.

The model, its optimizer and its dropout are NNX's; only the architecture and its cache are ours.
The text is the file that is given, or the source of jaxformer: a minute on two cores.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxformer as jf

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", nargs="?", help="a text file; none: the source of jaxformer")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--length", type=int, default=64, help="characters that the model sees")
parser.add_argument("--d_model", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--characters", type=int, default=200, help="characters to generate")
parser.add_argument("--seed", type=int, default=0)


def read(path: str | None) -> str:
    """The text of the file, or of all modules of jaxformer."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    modules = sorted(Path(jf.__file__).parent.rglob("*.py"))
    return "".join(module.read_text(encoding="utf-8") for module in modules)


def mean_loss(model: jf.NNXModel, batch: jax.Array) -> jax.Array:
    """The mean of the nats of each character, given those before it; `batch` is [B, T + 1]."""
    logits = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@nnx.jit
def train_step(model: jf.NNXModel, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    """The loss of the batch, after which the model and the optimizer are changed in place."""
    loss, gradient = nnx.value_and_grad(mean_loss)(model, batch)
    optimizer.update(model, gradient)
    return loss


@nnx.jit
def next_character(
    model: jf.NNXModel, character: jax.Array, cache: jf.Cache, key: jax.Array
) -> tuple[jax.Array, jf.Cache]:
    """A character [1] drawn given all that `cache` has read, and `character` [1]."""
    logits, cache = model.decode_step(character[:, None, None], cache)
    return jax.random.categorical(key, logits[:, 0, 0] / 0.8), cache


def generate(model: jf.NNXModel, prompt: np.ndarray, count: int, rngs: nnx.Rngs) -> list[int]:
    """`count` characters after `prompt`, which is not empty."""
    cache = model.init_cache(1, max_length=len(prompt) + count)
    new = jnp.asarray(prompt[:1])
    characters = []
    for index in range(1, len(prompt) + count):
        new, cache = next_character(model, new, cache, rngs.sample())
        if index < len(prompt):
            new = jnp.asarray(prompt[index : index + 1])
        else:
            characters.append(int(new[0]))
    return characters


def main(args: list[str] | None = None) -> float:
    """Trains, prints a sample, and returns the loss of the held-out text in nats per character."""
    options = parser.parse_args(args)
    text = read(options.text)
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    ids = np.array([number[character] for character in text], np.int32)
    train, held_out = np.split(ids, [len(ids) * 9 // 10])
    random = np.random.default_rng(options.seed)

    def batch_of(ids: np.ndarray) -> jax.Array:
        """Random pieces of the text, [B, T + 1]."""
        starts = random.integers(0, len(ids) - options.length, options.batch_size)
        return jnp.asarray(np.stack([ids[x : x + options.length + 1] for x in starts]))

    config = jf.TransformerConfig(
        vocab_size=len(alphabet),
        d_model=options.d_model,
        d_ff=4 * options.d_model,
        num_heads=2,
        num_decoder_layers=options.layers,
        max_len=options.length + options.characters,
        dropout_rate=0.1,
        positions=jf.Rotary(),
        norm=jf.NormOptions(placement="pre"),
    )
    rngs = nnx.Rngs(options.seed, dropout=1, sample=2)
    model = jf.to_nnx(jf.DecoderOnly(config), rngs=rngs)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, options.steps // 10, options.steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)

    model.train()
    for count in range(1, options.steps + 1):
        loss = train_step(model, optimizer, batch_of(train))
        if count % 50 == 0 or count == options.steps:
            print(f"step {count:4}  loss {loss:.3f}", flush=True)

    model.eval()
    measure = nnx.jit(mean_loss)
    measured = float(np.mean([measure(model, batch_of(held_out)) for _ in range(10)]))
    prompt = train[: options.length]
    sample = [*prompt, *generate(model, prompt, options.characters, rngs)]
    print(f"held-out loss {measured:.3f}\n\n{''.join(alphabet[i] for i in sample)}")
    return measured


if __name__ == "__main__":
    main()
