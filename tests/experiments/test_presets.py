"""The first losses of every preset, cut to one narrow layer, on random tokens: recorded numbers.

A changed number means that a preset trains in another way than before. If that is what was meant,
record the new one.
"""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.harness.training import build
from experiments.language_modelling import objectives
from experiments.language_modelling import train as language_train
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.translation import load_run
from experiments.translation import train as translation_train
from experiments.translation.presets import PRESETS as TRANSLATION_PRESETS
from jaxformer.distributed import single
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import parameter_axes
from jaxformer.text.data import Tokens, bucket_pairs
from jaxformer.text.tokenizers import SpecialTokens
from jaxformer.training.train_step import init_train_state

pytestmark = pytest.mark.long

STEPS = 3
TRANSLATION = {
    "grammar": (5.33867, 5.56759, 5.76399),
    "grammar_marian": (5.95307, 5.40166, 6.00522),
    "multi30k_tiny": (5.42873, 5.24406, 5.20162),
    "multi30k_lower": (5.51617, 4.4568, 5.45534),
    "multi30k_base": (6.83068, 7.17733, 5.72735),
    "tatoeba": (5.17075, 4.77628, 5.64613),
    "wmt14_base": (6.36287, 7.90967, 6.49254),
    "wmt14_base_marian": (6.89725, 8.16869, 6.28356),
    "wmt14_big": (7.46358, 7.49703, 6.80139),
}
LANGUAGE = {
    "python_stdlib": (5.73128, 5.49342, 5.47189),
    "python_stdlib_masked": (4.92595, 5.47871, 5.96312),
    "shakespeare_char_cpu": (5.01836, 5.24078, 5.36122),
    "shakespeare_char": (5.51102, 5.62963, 5.60484),
    "wikitext2": (5.51236, 5.27031, 5.17627),
    "gpt2_124m": (7.17281, 7.03782, 6.97939),
    "gpt3_xl": (7.85465, 7.64379, 7.70961),
    "llama3_8b": (10.19824, 10.13599, 9.95256),
    "bert_base": (7.31702, 8.59928, 8.80733),
    "bert_tiny": (4.31182, 5.01026, 5.11931),
}
QUICK = ("grammar", "python_stdlib", "shakespeare_char_cpu", "bert_base")


def cases(presets):
    """The names of `presets`; those whose programs are much like another's are slow tests."""
    return [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in presets
    ]


def cut(config, **data):
    """`config` with one layer, four features a head, 97 ids, and a schedule of a few steps.

    In float32: how bfloat16 is rounded depends on the version of the compiler.
    """
    model, rate, width = config.model, config.optimizer, 4 * config.model.num_heads
    layers = {
        name: min(1, getattr(model, name)) for name in ("num_encoder_layers", "num_decoder_layers")
    }
    small = {
        "vocab_size": 97,
        "d_model": width,
        "d_ff": 3 * width,
        "max_len": 23,
        "dtype": "float32",
    }
    return replace(
        config,
        model=replace(model, **small, **layers),
        optimizer=replace(rate, warmup_steps=1, total_steps=7),
        data=replace(config.data, **data),
    )


def tokens(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 19, 211)
    ids = rng.integers(5, 97, lengths.sum())
    return Tokens(ids, np.cumsum([0, *lengths]))


def losses(config, model, inputs, assemble, batches, random_params):
    """The loss per token of each of the first steps."""
    batch = batches.batch(0)
    _, step = assemble(config, model, batch, single())
    params, optimizer = (
        random_params(model, *inputs(batch)),
        build.build_optimizer(config.optimizer, axes=parameter_axes(model)),
    )
    ema = config.training.ema_decay > 0
    start = jax.jit(lambda p: init_train_state(p, optimizer, jax.random.key(3), ema=ema))
    state, found = start(params), []
    for number in range(STEPS):
        state, metrics = step(state, batches.batch(number))
        found.append(float(metrics["loss"] / metrics["tokens"]))
    return found


@pytest.mark.parametrize("name", cases(TRANSLATION_PRESETS))
def test_a_translation_preset_begins_with_the_losses_recorded(name, random_params):
    config = cut(TRANSLATION_PRESETS[name])
    batches = bucket_pairs(
        tokens(1),
        tokens(1),
        seed=7,
        batch_tokens=41 * config.training.grad_accumulation,
        buckets=1,
        max_len=23,
        batch_size_multiple=config.training.grad_accumulation,
    )
    model = load_run.build_model(config)
    found = losses(
        config,
        model,
        lambda batch: (batch.source, batch.target[:, :-1]),
        translation_train.make_init_and_step,
        batches,
        random_params,
    )
    assert found == pytest.approx(TRANSLATION[name], rel=1e-4)


@pytest.mark.parametrize("name", cases(LANGUAGE_PRESETS))
def test_a_language_preset_begins_with_the_losses_recorded(name, random_params):
    parts = LANGUAGE_PRESETS[name].training.grad_accumulation
    config = cut(LANGUAGE_PRESETS[name], seq_len=17, batch_size=3 * parts)
    task = objectives.objective(config)
    special = SpecialTokens(pad=0, bos=1, eos=2, unk=3, mask=4)
    tokenizer = SimpleNamespace(special=special, vocab_size=97)
    batches = task.stream(tokens(1), tokenizer, config)
    model = objectives.build_model(config)
    found = losses(
        config, model, task.inputs, language_train.make_init_and_step, batches, random_params
    )
    assert found == pytest.approx(LANGUAGE[name], rel=1e-4)


def test_an_address_of_no_bucket_is_refused_for_runs():
    with pytest.raises(ConfigError, match="give a folder or gs://bucket/path"):
        replace(LANGUAGE_PRESETS["python_stdlib"], runs="ftp://host/folder")
