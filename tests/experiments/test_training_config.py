"""Settings of all experiments: devices, attention function, block."""

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

from experiments.harness import cli
from experiments.harness.training.build import build_attention, build_model
from experiments.harness.training.devices import choose_devices
from experiments.harness.training.doubtful_settings import doubts
from experiments.harness.training.parameters import init_params
from experiments.harness.training.training_config import Remat, TrainingConfig
from experiments.language_modelling import train as language_train
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.translation.presets import PRESETS as TRANSLATION_PRESETS
from jaxformer.config import TransformerConfig
from jaxformer.distributed import RULES
from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import Block
from jaxformer.nn.remat import REMAT
from jaxformer.ops.attention import KERNELS, blockwise, reference
from jaxformer.ops.masks import AttentionMask
from tests.experiments.commands import call
from tests.experiments.tiny_runs import language_config

SIZES = TransformerConfig(vocab_size=11, d_model=6, d_ff=7, num_heads=2, num_decoder_layers=1)
TINY = """
    --name tiny --model.d_model 16 --model.d_ff 22 --model.num_heads 2 --model.num_decoder_layers 1
    --model.max_len 23 --model.dropout_rate 0.1 --optimizer.warmup_steps 3
    --optimizer.total_steps 11 --training.log_every 1 --training.save_every 7
    --training.evaluate_every 11 --training.grad_accumulation 2 --training.ema_decay 0.5
"""
LANGUAGE = f"""
    language_modelling {TINY} --model.vocab_size 280 --data.train a.txt --data.validation b.txt
    --data.batch_size 8 --data.seq_len 19 --optimizer.name adam --prompts sun
    --sampling.max_new_tokens 3
"""
TRANSLATION = f"""
    translation {TINY} --model.vocab_size 290 --model.num_encoder_layers 1 --data.corpus files
    --data.train.source a.txt --data.train.target a.txt --data.validation.source b.txt
    --data.validation.target b.txt --data.batch_tokens 200 --data.buckets 1
    --search.beam_size 2 --search.max_new_tokens 5
"""


def test_one_device_copies_or_parts_are_chosen_by_name():
    rules_of = {"auto": None, "single": None, "replicated": None, "sharded": RULES}
    for strategy, rules in rules_of.items():
        chosen = choose_devices(strategy, "")
        assert (chosen.rules, chosen.mesh.size) == (rules, jax.device_count())
    for mesh in ("data=1", "tensor=1,fsdp=1"):
        assert choose_devices("sharded", mesh).rules == RULES


@pytest.mark.parametrize("presets", [LANGUAGE_PRESETS, TRANSLATION_PRESETS])
def test_an_unknown_strategy_is_refused_from_python_too(presets):
    known = "give one of auto, single, replicated, sharded"
    with pytest.raises(ConfigError, match=f"strategy='shard' is unknown: {known}"):
        replace(next(iter(presets.values())), strategy="shard")


def model_of(training):
    return build_model(SimpleNamespace(model=SIZES, training=training))


def test_attention_function_and_block_are_chosen_by_name():
    other = TrainingConfig(attention_fn="blockwise", remat="blocks")
    plain, other = map(model_of, (TrainingConfig(), other))
    assert (plain.attention_fn, other.attention_fn) == (reference, blockwise)
    assert (plain.block, other.block) == (Block, REMAT["blocks"])


NUMBERS = {
    "--training.seed 4294967296": "seed=4294967296, but it must be in [0, 4294967296)",
    "--training.seed 9223372036854775808": "but it must be in [0, 4294967296)",
    "--training.seed -1": "seed=-1, but it must be in [0, 4294967296)",
    "--training.z_loss nan": "z_loss=nan, but it must be finite",
    "--training.log_every -1": "log_every=-1, but it must be at least 0",
    "--training.grad_accumulation 0": "grad_accumulation=0, but it must be at least 1",
    "--training.patience 3 --training.evaluate_every 0": "patience=3 counts evaluations, but",
    "--optimizer.weight_decay nan": "weight_decay=nan, but it must be finite",
    "--optimizer.grad_clip_norm nan": "grad_clip_norm=nan, but it must be finite",
    "--optimizer.total_steps 0": "total_steps=0, but it must be at least 1",
    "--model.norm.eps -1": "eps=-1.0, but it must be at least 0",
    "--model.positions rotary --model.positions.base 0": "base=0.0, but it must be above 0",
}


@pytest.mark.parametrize("presets", [LANGUAGE_PRESETS, TRANSLATION_PRESETS])
@pytest.mark.parametrize("words", NUMBERS)
def test_a_number_that_cannot_be_is_refused_by_its_name_and_range(words, presets, capsys):
    assert cli.run(lambda: cli.parse(presets, words.split())) == 2
    printed = capsys.readouterr().err
    assert NUMBERS[words] in printed and printed.count("\n") == 1


DOUBTS = {
    "--optimizer.learning_rate 0": "learning_rate=0 changes no weight",
    "--training.lora_rank 3 --init_from a --training.lora_alpha 0": "lora_alpha=0 multiplies",
    "--optimizer.warmup_steps 400 --optimizer.total_steps 100": "warm-up of 400 steps is longer",
    "--optimizer.learning_rate 7": "learning_rate=7 moves each weight by about 7",
    "--optimizer.weight_decay 1000 --optimizer.learning_rate 0.001": "takes 100% of each weight",
}


@pytest.mark.parametrize("presets", [LANGUAGE_PRESETS, TRANSLATION_PRESETS])
@pytest.mark.parametrize("words", DOUBTS)
def test_a_setting_that_keeps_a_run_from_learning_is_in_doubt(words, presets):
    enough = "--optimizer.schedule constant --optimizer.warmup_steps 3"
    (doubt,) = doubts(cli.parse(presets, [*enough.split(), *words.split()]))
    assert DOUBTS[words] in doubt


@pytest.mark.parametrize("presets", [LANGUAGE_PRESETS, TRANSLATION_PRESETS])
def test_no_preset_is_in_doubt(presets):
    assert not [doubt for preset in presets.values() for doubt in doubts(preset)]


def test_a_run_says_what_keeps_it_from_learning(tmp_path):
    config = language_config(tmp_path, optimizer__learning_rate=0.0, data__train=("absent.txt",))
    done = call(language_train, config)
    assert done.code == 65 and "warning: learning_rate=0 changes no weight" in done.out


@pytest.mark.parametrize("old", [True, False, "full"])
def test_what_is_computed_again_has_a_name(old):
    assert get_args(Remat) == tuple(REMAT)
    known = "give one of none, attention, matmuls, all_but_attention, blocks"
    with pytest.raises(ConfigError, match=f"remat={old!r} is unknown: {known}"):
        TrainingConfig(remat=old)


def test_an_attention_function_may_be_chosen_for_each_shape_and_says_so(capsys):
    auto = build_attention(TrainingConfig(attention_fn="auto"))
    x = jax.ShapeDtypeStruct((1, 7, 2, 4), jnp.float32)
    for mask in (AttentionMask(), AttentionMask(causal=True)):
        jax.eval_shape(lambda x, mask=mask: auto(x, x, x, mask, scale=0.5), x)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "attention B=1 T=7 S=7 N=2 K=2 H=4 Hv=4 float32 on cpu: reference"
    assert max(map(len, lines)) <= 80
    passed_over = [line.split()[1] for line in lines if line.startswith("  not ")]
    assert passed_over == [f"{each.name}:" for each in KERNELS[:-1]]


def test_attention_is_selected_for_the_step_and_not_for_initialization(capsys):
    tokens = jnp.ones((2, 7), jnp.int32)
    auto = model_of(TrainingConfig(attention_fn="auto"))
    params = jax.eval_shape(lambda: init_params(auto, jax.random.key(5), tokens))
    assert capsys.readouterr().out == "" and not auto.attention_fn.calls
    jax.eval_shape(auto.apply, {"params": params}, tokens)
    assert "on cpu: reference" in capsys.readouterr().out
