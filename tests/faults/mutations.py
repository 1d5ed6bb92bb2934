"""Models, optimizers and settings that differ from those that a run was made with."""

import contextlib
import io
import json
import re
from collections.abc import Iterator
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
from tests.faults import children
from tests.faults import states as fault_states
from tests.faults.children import Count
from tests.faults.trainings import Training, run_of, words_of

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
SETTINGS = """--model.d_ff 23
--model.dtype bfloat16
--model.dropout_rate 0.3
--training.seed 5
--training.label_smoothing 0.2
--training.grad_accumulation 2
--training.ema_decay 0.9
--optimizer.learning_rate 0.5
--optimizer.schedule constant
--data.batch_tokens 256
--data.tokenizer words
--data.buckets 3"""


def states(folder: Path) -> Count:
    """Other models, an optimizer with other moments, an average, a generator, another dtype.

    Each must be refused with a path and what is there and here, before anything is loaded.
    """
    return children.counted_in_child(_states, folder)


def settings(folder: Path) -> Count:
    """Twelve settings that change what was learned, refused by name, and edited files.

    Edited training text and an edited tokenizer must be refused, edited validation text must be
    taken.
    """
    return children.counted_in_child(_settings, Training(folder, {"--runs": folder / "runs"}).args)


def _state(config: TransformerConfig, *, name: str = "adam", ema: bool = False) -> TrainState:
    tokens = jnp.ones((2, 3), jnp.int32)
    model = EncoderDecoder(config)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)["params"]
    optimizer = make_optimizer(replace(OptimizerConfig(), name=name), axes=parameter_axes(model))
    make = partial(init_train_state, optimizer=optimizer, ema=ema)
    return jax.eval_shape(lambda params, rng: make(params, rng=rng), params, jax.random.key(0))


def _states(folder: Path) -> list[tuple[str, str]]:
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
    outcomes = [(what, _refused(folder, other)) for what, other in others.items()]
    Checkpoints(folder).restore(blank)  # which is refused for none of these reasons
    return outcomes


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


def _settings(args: dict[str, Any]) -> Iterator[tuple[str, str]]:
    run = prepared(args)
    fault_states.make_folder(run / "checkpoints", (5,))
    for changed in SETTINGS.split("\n"):
        option, value = changed.split()
        code, said = _prepare(args | {option: value})
        refused = code == 2 and re.search(rf"{re.escape(option[2:])} is \S+ there but", said)
        yield option, "survived" if refused else f"silent: code {code}, {said}"
    for part, right in (("validation", 0), ("train", 66)):
        path = Path(args[f"--data.{part}.target"])
        whole = path.read_text()
        path.write_text(whole.replace("Hund", "Vogel", 1))
        code, said = _prepare(args)
        told = code == 0 or "was trained on other text than this" in said
        yield f"{part} edited", "survived" if code == right and told else f"{code}, {said}"
        path.write_text(whole)
    tokenizer = run / "tokenizer" / "target.json"
    tokenizer.write_text(json.dumps(_edited(json.loads(tokenizer.read_text()))))
    code, said = _prepare(args)
    told = code == 2 and "does not hold the tokenizers" in said
    yield "tokenizer edited", "survived" if told else f"silent: {code}, {said}"


def _edited(tokenizer: dict) -> dict:
    """`tokenizer` with the ids of two tokens exchanged."""
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    return tokenizer


def parsed(args: dict[str, Any]) -> presets.TranslationConfig:
    """The settings of a run with the options `args`."""
    return cli.parse(presets.PRESETS, words_of(args))


def prepared(args: dict[str, Any]) -> Path:
    """The folder of the run with the options `args`, its text prepared."""
    code, said = _prepare(args)
    if code != 0:
        raise RuntimeError(f"preparing ended with {code}: {said}")
    return run_of(Path(args["--runs"]))


def _prepare(args: dict[str, Any]) -> tuple[int, str]:
    """The exit code of preparing as a training does at its start, and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = cli.run(lambda: prepare.main(parsed(args)))
    return code, " ".join(said.getvalue().split())
