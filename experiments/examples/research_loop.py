"""A loop to change, for a GPT of a text file: `python -m experiments.examples.research_loop TEXT`.

Data, update, evaluation, checkpoints and the `for` are in sight, and made of public functions of
JAX, optax and jaxformer. The same command again resumes, to the bit. Copy the file to train two
models in turn, to sample within training, to choose batches by the loss.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax

import jaxformer as jf
from jaxformer.text.data import Tokens, iterate_once
from jaxformer.text.tokenizers import train_characters

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", help="a text file")
parser.add_argument("--folder", default="runs/research_loop", help="where the run is kept")
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--save_every", type=int, default=100, help="steps between checkpoints")
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--length", type=int, default=64, help="characters that the model sees")
parser.add_argument("--d_model", type=int, default=96)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--learning_rate", type=float, default=2e-3)
parser.add_argument("--dropout_rate", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)


def main(args: list[str] | None = None) -> dict[str, Any]:
    """Trains from the newest checkpoint, prints a sample, and returns the last state."""
    options = parser.parse_args(args)
    folder = Path(options.folder)

    # Data: characters; the last tenth is held out. A batch is a function of (seed, step).
    text = Path(options.text).read_text(encoding="utf-8")
    tokenizer = train_characters([text])
    cut = len(text) * 9 // 10
    train = Tokens.from_lists([tokenizer.encode(text[:cut])])
    held_out = Tokens.from_lists([tokenizer.encode(text[cut:])])
    stream = jf.Stream(
        train,
        batch_size=options.batch_size,
        seq_len=options.length,
        seed=options.seed,
        isolate_documents=False,
    )

    # Model and optimizer.
    model = jf.DecoderOnly(
        jf.TransformerConfig(
            vocab_size=tokenizer.vocab_size,
            d_model=options.d_model,
            d_ff=4 * options.d_model,
            num_heads=2,
            num_decoder_layers=options.layers,
            max_len=options.length,
            dropout_rate=options.dropout_rate,
        )
    )
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, options.steps // 10, options.steps
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    key = jax.random.key(options.seed)

    def first_state(model: jf.DecoderOnly, key: jax.Array) -> dict[str, Any]:
        params = jax.jit(model.init)(key, stream.batch(0).tokens[:, :-1])["params"]
        return {"params": params, "opt_state": optimizer.init(params)}

    @partial(jax.jit, static_argnames="model")
    def update(
        model: jf.DecoderOnly, state: dict[str, Any], batch: jf.StreamBatch, key: jax.Array
    ) -> tuple[dict[str, Any], jax.Array]:
        """The next state, and the mean loss in nats before the update; `key` is dropout's."""

        def mean_loss(params: Any) -> jax.Array:
            nats, count = jf.causal_loss(model)(params, batch, key)[:2]
            return nats / count

        value, gradient = jax.value_and_grad(mean_loss)(state["params"])
        change, opt_state = optimizer.update(gradient, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], change)
        return {"params": params, "opt_state": opt_state}, value

    @partial(jax.jit, static_argnames="model")
    def measure(
        model: jf.DecoderOnly, params: Any, batch: jf.StreamBatch
    ) -> tuple[jax.Array, jax.Array]:
        """The loss of `batch` in nats, without dropout, and the number of its tokens."""
        nats, count = jf.causal_loss(model)(params, batch, None)[:2]
        return nats, count

    def evaluate(model: jf.DecoderOnly, params: Any) -> float:
        """The mean loss of the held-out text."""
        batches = iterate_once(
            held_out,
            batch_size=options.batch_size,
            seq_len=options.length,
            isolate_documents=False,
        )
        sums = [measure(model, params, batch) for batch in batches]
        return float(sum(nats for nats, _ in sums) / sum(count for _, count in sums))

    # The loop.
    state = first_state(model, key)
    log = folder / "losses.jsonl"
    with jf.Checkpoints(folder / "checkpoints") as checkpoints:
        start = checkpoints.newest_step() or 0
        if start:
            state, saved = checkpoints.restore(state)
            assert saved["data"] == stream.fingerprint, f"{folder} was trained on other batches"
            lines = [x for x in log.read_text().splitlines() if json.loads(x)["step"] <= start]
            log.write_text("".join(f"{line}\n" for line in lines))
        for step in range(start, options.steps):
            batch = stream.batch(step)
            state, value = update(model, state, batch, jax.random.fold_in(key, step))
            if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                scores = {"loss": float(value), "held_out": evaluate(model, state["params"])}
                with log.open("a") as file:
                    file.write(json.dumps({"step": step + 1, **scores}) + "\n")
                print(f"step {step + 1:5}  {scores}", flush=True)
                checkpoints.save(
                    step + 1, state, {"data": stream.fingerprint}, metric=scores["held_out"]
                )

    # A sample.
    loaded = jf.Loaded(model, state["params"], tokenizer)
    print(jf.complete(loaded, text[: options.length // 2], max_new_tokens=options.length // 2))
    return state


if __name__ == "__main__":
    main()
