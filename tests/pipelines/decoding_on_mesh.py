"""A program: texts that 4 devices of a mesh write, `python -m tests.pipelines.decoding_on_mesh`.

It prints a line of JSON for each mesh: what is written, how often each piece is compiled, and the
share of the keys of a layer that a device holds before and after the first piece.
"""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer as jf
from jaxformer.distributed import make_mesh, sharded
from jaxformer.ops.top_k import top_k
from jaxformer.pipelines import rows
from jaxformer.text.tokenizers import train_characters

TEXTS = ["ab", "abcdefgha", "cd", "", "hgf"] * 5  # enter one after the other
TOKENIZER = train_characters(["abcdefgh"])
SIZES = {"d_model": 16, "d_ff": 20, "num_heads": 4, "num_decoder_layers": 2, "max_len": 61}


class Compiled(logging.Handler):
    """Counts the programs that JAX compiles, by the name of their function."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def emit(self, record):
        words = record.getMessage().split()
        if words[0] == "Compiling":
            name = words[1].removeprefix("jit(").removesuffix(")")
            self.counts[name] = self.counts.get(name, 0) + 1


def models():
    """A decoder and a translator, with 12 ids for a vocabulary that 4 divides."""
    size = TOKENIZER.vocab_size + -TOKENIZER.vocab_size % 4
    config = jf.TransformerConfig(size, **SIZES)
    translator = jf.TransformerConfig(size, num_encoder_layers=1, **SIZES)
    ids = jnp.ones((2, 3), jnp.int32)
    for model, inputs in ((jf.DecoderOnly(config), 1), (jf.EncoderDecoder(translator), 2)):
        params = jax.jit(model.init)(jax.random.key(0), *[ids] * inputs)["params"]
        yield model, params


def written(model, params):
    loaded = jf.Loaded(model, params, TOKENIZER)
    if isinstance(model, jf.EncoderDecoder):
        texts = [text or "a" for text in TEXTS]
        found = jf.translate_with_details(loaded, texts, beam_size=3, max_new_tokens=9)
        return [[best.ids for best in text] for text in found]
    settings = [{"temperature": 0.0}, {"top_k": 3, "seed": 3}, {"top_p": 0.7, "seed": 4}]
    found = [jf.complete_with_details(loaded, TEXTS, max_new_tokens=9, **x) for x in settings]
    return [[text.ids for text in texts] for texts in found]


def shares(tree):
    """The share of each layer's keys that a device holds."""
    keys = [layer.key for layer in tree.cache.layers]
    return [key.addressable_shards[0].data.size / key.size for key in keys]


def measure(name, model, params):
    """What is written on the mesh, and how."""
    devices = sharded(make_mesh(name)).for_model(model, *[np.ones((2, 3), np.int32)] * 2)
    compiled, held, search_more = Compiled(), [], rows.search_more

    class Spy:
        """`search_more`, which notes what the devices hold before and after it."""

        def __call__(self, model, params, state, *arrays, **static):
            held.append(shares(state))
            state = search_more(model, params, state, *arrays, **static)
            held.append(shares(state))
            return state

    for logger in ("jax._src.dispatch", "jax._src.interpreters.pxla"):
        logging.getLogger(logger).addHandler(compiled)
        logging.getLogger(logger).propagate = False
    jax.config.update("jax_log_compiles", True)
    rows.search_more = Spy()
    found = written(model, devices.shard_state(params))
    rows.search_more = search_more
    return found, compiled.counts, held


def check_top_k(name):
    """Equal numbers in parts of a row: the first ones are chosen."""
    mesh = make_mesh(name)
    numbers = np.random.default_rng(0).integers(0, 9, (6, 44)).astype(np.float32)
    with jax.set_mesh(mesh):
        found = jax.jit(top_k, static_argnums=1)(numbers, 7)
    for given, right in zip(found, jax.lax.top_k(numbers, 7), strict=True):
        assert np.array_equal(given, right), name


if __name__ == "__main__":
    expected = [written(model, params) for model, params in models()]
    for name in ("tensor=4", "data=2,tensor=2", "data=4", "sequence=4", "fsdp=4"):
        check_top_k(name)
        for (model, params), right in zip(models(), expected, strict=True):
            found, counts, held = measure(name, model, params)
            line = {"mesh": name, "equal": found == right, "compiled": counts, "held": held}
            print(json.dumps(line))
