"""Models, optimizers and settings that differ from those that a run was made with."""

import contextlib
import io
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import cli
from experiments.translation import prepare, presets
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import AttentionOptions, EmbeddingOptions, Learned, TransformerConfig
from jaxformer.errors import CheckpointError
from jaxformer.nn.axes import parameter_axes
from jaxformer.nn.models import EncoderDecoder
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.train_step import TrainState, init_train_state
from tests.faults import children, trainings
from tests.faults import states as fault_states
from tests.faults.children import Count

CONFIG = TransformerConfig(
    vocab_size=13, d_model=12, d_ff=17, num_heads=2, num_encoder_layers=2, num_decoder_layers=2
)
MUTATIONS: dict[str, dict[str, Any]] = {
    "a layer more": {"num_decoder_layers": 3},
    "a layer less": {"num_encoder_layers": 1},
    "another width": {"d_model": 16},
    "another inner width": {"d_ff": 19},
    "another vocabulary": {"vocab_size": 11},
    "other heads": {"num_heads": 3},
    "shared keys and values": {"attention": AttentionOptions(num_kv_heads=1)},
    "untied embeddings": {"embeddings": EmbeddingOptions(tied="none")},
    "no biases": {"use_bias": False},
    "learned positions": {"positions": Learned()},
}
SETTINGS = {
    "model.d_ff": {"--model.d_ff": 23},
    "model.dtype": {"--model.dtype": "bfloat16"},
    "model.dropout_rate": {"--model.dropout_rate": 0.3},
    "training.seed": {"--training.seed": 5},
    "training.label_smoothing": {"--training.label_smoothing": 0.2},
    "training.grad_accumulation": {"--training.grad_accumulation": 2},
    "training.ema_decay": {"--training.ema_decay": 0.9},
    "optimizer.learning_rate": {"--optimizer.learning_rate": 0.5},
    "optimizer.schedule": {"--optimizer.schedule": "constant"},
    "data.batch_tokens": {"--data.batch_tokens": 256},
    "data.tokenizer": {"--data.tokenizer": "words"},
    "data.buckets": {"--data.buckets": 3},
}


def states(folder: Path) -> Count:
    """Other models, an optimizer with other moments, an average, a generator, another dtype.

    Each must be refused with a path and what is there and here, before anything is loaded.
    """
    return Count(*children.in_child(partial(_states, folder)))


def settings(folder: Path) -> Count:
    """Twelve settings that change what was learned, refused by name, and edited files.

    Edited training text and an edited tokenizer must be refused, edited validation text must be
    taken.
    """
    return Count(*children.in_child(partial(_settings, folder)))


def _state(config: TransformerConfig, *, name: str = "adam", ema: bool = False) -> TrainState:
    tokens = jnp.ones((2, 3), jnp.int32)
    model = EncoderDecoder(config)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)["params"]
    optimizer = make_optimizer(replace(OptimizerConfig(), name=name), axes=parameter_axes(model))
    make = partial(init_train_state, optimizer=optimizer, ema=ema)
    return jax.eval_shape(lambda params, rng: make(params, rng=rng), params, jax.random.key(0))


def _states(folder: Path) -> Count:
    blank = _state(CONFIG)
    full = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), blank.replace(rng=None))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, full.replace(rng=jax.random.key(0)), {})
    others = {what: _state(replace(CONFIG, **changes)) for what, changes in MUTATIONS.items()}
    others["another optimizer"] = _state(CONFIG, name="lion")
    others["an average"] = _state(CONFIG, ema=True)
    others["another generator"] = blank.replace(rng=jax.random.key(0, impl="rbg"))
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "bfloat16"), blank.params)
    others["another dtype"] = blank.replace(params=narrow)
    outcomes = []
    for what, other in others.items():
        said = _refused(folder, other)
        outcomes.append(f"{what}: {said}" if said != "survived" else said)
    Checkpoints(folder).restore(blank)  # which is refused for none of these reasons
    return children.counted(outcomes)


def _refused(folder: Path, other: TrainState) -> str:
    try:
        Checkpoints(folder).restore(other)
    except CheckpointError as error:
        named = re.search(
            r"(params|opt_state|ema|rng)\S* is (\w+\[[\d,]*\]|absent) in the checkpoint but "
            r"(\w+\[[\d,]*\]|absent) here",
            str(error),
        )
        return "survived" if named else f"no leaf is named: {error}"
    return "silent: it was loaded"


def _settings(folder: Path) -> Count:
    args = trainings.settings(folder) | {"--runs": folder / "runs"}
    run = prepared(args)
    fault_states.make_folder(run / "checkpoints", (5,))
    outcomes = []
    for name, changes in SETTINGS.items():
        code, said = prepare_again(args | changes)
        refused = code == 2 and re.search(rf"{re.escape(name)} is \S+ there but", said)
        outcomes.append("survived" if refused else f"silent: {name}: code {code}, {said}")
    for part, right in (("validation", 0), ("train", 66)):
        path = Path(args[f"--data.{part}.target"])
        whole = path.read_text()
        path.write_text(whole.replace("Hund", "Vogel", 1))
        code, said = prepare_again(args)
        told = code == 0 or "was trained on other text than this" in said
        outcomes.append("survived" if code == right and told else f"{part} edited: {code}, {said}")
        path.write_text(whole)
    tokenizer = run / "tokenizer" / "target.json"
    tokenizer.write_text(json.dumps(_edited(json.loads(tokenizer.read_text()))))
    code, said = prepare_again(args)
    told = code == 2 and "does not hold the tokenizers" in said
    outcomes.append("survived" if told else f"silent: tokenizer edited: {code}, {said}")
    return children.counted(outcomes)


def _edited(tokenizer: dict) -> dict:
    """`tokenizer` with the ids of two tokens exchanged."""
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    return tokenizer


def parsed(args: dict[str, Any]) -> presets.TranslationConfig:
    """The settings of a run with the options `args`."""
    return cli.parse(presets.PRESETS, words_of(args))


def words_of(args: dict[str, Any]) -> list[str]:
    """The options `args` as words of a command line."""
    return [str(word) for pair in args.items() for word in pair]


def prepared(args: dict[str, Any]) -> Path:
    """The folder of the run with the options `args`, its text prepared."""
    code, said = prepare_again(args)
    if code != 0:
        raise RuntimeError(f"preparing ended with {code}: {said}")
    config = parsed(args)
    return Path(config.runs) / "translation" / config.name


def prepare_again(args: dict[str, Any]) -> tuple[int, str]:
    """The exit code of preparing as a training does at its start, and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = cli.run(lambda: prepare.main(parsed(args)))
    return code, " ".join(said.getvalue().split())
