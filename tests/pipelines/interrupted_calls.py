"""A program: calls that a SIGINT ends, `python -m tests.pipelines.interrupted_calls`.

It prints a line of JSON for each call: the seconds from the signal to the end of the call, the
threads that are left, and whether the same call gives the same text before and after it.
"""

import json
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp

import jaxformer as jf
from jaxformer.text.tokenizers import train_characters

TOKENIZER = train_characters(["abcdefgh"])
MOST = 4_000
SIZES = {"d_model": 512, "d_ff": 1024, "num_heads": 8, "num_decoder_layers": 2, "max_len": 4_100}
TEXTS = ["ab", "abcde", "cd", "hgf", "a", "b", "c", "d"]


def loaded(kind, ids, **layers):
    """A model of the class `kind` with random parameters."""
    model = kind(jf.TransformerConfig(TOKENIZER.vocab_size, **SIZES, **layers))
    params = jax.jit(model.init)(jax.random.key(0), *ids)["params"]
    return jf.Loaded(model, params, TOKENIZER)


def seconds_to_the_end(call):
    """From the signal to the end of a call of `MOST` tokens; None: it ended before the signal."""
    sent = []

    def send():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(2.0, send)
    timer.start()
    try:
        call(MOST)
        return None
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    finally:
        timer.join()


def interrupted(call, limit):
    """The end of a call by a signal, and what is left of it."""
    before = call(limit)
    seconds_to_the_end(call)  # the signal may have come while a program was compiled
    waited = seconds_to_the_end(call)
    threads = [each.name for each in threading.enumerate() if each.name.startswith("ThreadPool")]
    return {"waited": waited, "threads": threads, "equal": call(limit) == before}


def main():
    # As in a terminal: a shell lets what it starts in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ids = jnp.ones((1, 3), jnp.int32)
    writer = loaded(jf.DecoderOnly, [ids])
    translator = loaded(jf.EncoderDecoder, [ids, ids], num_encoder_layers=1)

    def complete(limit):
        options = {"eos": (), "max_length": limit, "max_new_tokens": MOST}
        return jf.complete(writer, TEXTS, temperature=1.0, **options)

    def stream(limit):
        options = {"eos": (), "max_length": limit, "max_new_tokens": MOST}
        return [*jf.stream(writer, TEXTS, temperature=1.0, **options)]

    def translate(limit):
        ends = {"max_new_tokens": limit, "min_new_tokens": limit, "at_max_length": "cut"}
        return jf.translate(translator, TEXTS, beam_size=2, **ends)

    for call, limit in ((complete, 20), (stream, 20), (translate, 20)):
        print(json.dumps({"call": call.__name__} | interrupted(call, limit)), flush=True)


if __name__ == "__main__":
    main()
