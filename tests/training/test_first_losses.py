"""The small models of all presets have the recorded parameters and the recorded first losses."""

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.language_modelling.presets import PRESETS as LANGUAGE
from experiments.translation.presets import PRESETS as TRANSLATION
from jaxformer.training.losses import masked_and_next_sentence_loss
from jaxformer.training.parameters import flatten
from jaxformer.training.train_step import loss_and_gradient

pytestmark = pytest.mark.long  # 19 models are compiled

RECORDED = Path(__file__).with_name("first_losses.json")
ALL = {**TRANSLATION, **{f"language {name}": preset for name, preset in LANGUAGE.items()}}
# The others have the sizes and the weights of what they start from.
PRESETS = {name: preset for name, preset in ALL.items() if not preset.init_from}
ROWS, LENGTH, VOCAB = 3, 13, 31


def small_config(config):
    """`config` with small sizes."""
    return replace(
        config,
        vocab_size=VOCAB,
        source_vocab_size=None,
        d_model=4 * config.num_heads,
        d_ff=22,
        head_dim=None,
        num_encoder_layers=min(config.num_encoder_layers, 2),
        num_decoder_layers=min(config.num_decoder_layers, 2),
        max_len=LENGTH + 1,
    )


def measured(preset):
    """A digest of all paths and shapes, the loss with dropout, and the norm of the gradient."""
    small = small_config(preset.model)
    ids = np.random.default_rng(5).integers(4, VOCAB, (ROWS, LENGTH), np.int32)
    ids[1, -4:] = jf.PAD
    if small.num_encoder_layers and small.num_decoder_layers:
        model, inputs = jf.EncoderDecoder(small), (ids, ids[:, 1:])
        smoothing = preset.training.label_smoothing
        loss = jf.seq2seq_loss(model, pad=jf.PAD, label_smoothing=smoothing)
        batch = jf.PairBatch.create(ids[:, ::-1], ids, vocab_size=VOCAB)
    elif small.num_decoder_layers:
        model, inputs = jf.DecoderOnly(small), (ids,)
        loss, batch = jf.causal_loss(model), jf.StreamBatch.create(ids, vocab_size=VOCAB)
    else:
        model, inputs = jf.MaskedLanguageModel(small), (ids,)
        has_pooler = small.pooler != "none"
        loss = (masked_and_next_sentence_loss if has_pooler else jf.masked_loss)(model)
        positions = np.array([[1, 5], [0, 3], [7, 12]], np.int32)
        batch = jf.MaskedBatch(
            tokens=ids,
            padding_mask=ids != jf.PAD,
            token_type_ids=np.zeros_like(ids),
            masked_positions=positions,
            labels=positions + 4,
            loss_mask=np.array([[True, True], [True, False], [True, True]]),
            example_ids=np.arange(ROWS, dtype=np.int32),
            next_sentence=np.array([0, 1, 1], np.int32),
        )

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def first(key):
        params = model.init(key, *inputs)["params"]
        grads, total, tokens, _ = loss_and_gradient(loss, params, batch, jax.random.key(1))
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))
        return params, total / tokens, jnp.sqrt(squares) / tokens

    params, nats, norm = first(jax.random.key(0))
    paths = sorted(f"{path} {list(leaf.shape)}" for path, leaf in flatten(params).items())
    digest = hashlib.sha256("\n".join(paths).encode()).hexdigest()[:16]
    return {"paths": digest, "loss": float(nats), "grad_norm": float(norm)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_paths_and_first_loss_are_those_that_were_recorded(name):
    expected, found = json.loads(RECORDED.read_text())[name], measured(PRESETS[name])
    assert found.pop("paths") == expected.pop("paths"), "paths and shapes of parameters"
    assert found == pytest.approx(
        expected, rel=1e-6 if PRESETS[name].model.dtype == "float32" else 1e-3
    )


if __name__ == "__main__":  # records
    RECORDED.write_text(json.dumps({name: measured(PRESETS[name]) for name in PRESETS}, indent=1))
