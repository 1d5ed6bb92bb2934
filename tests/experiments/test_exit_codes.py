"""The exit codes that guides/reliability.md promises, each from a command in its own process.

130 and 143 are those of a training that is stopped by a signal: see test_distributed.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxformer.training.losses import causal_loss

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
HERE = "tests.experiments.test_exit_codes"
SIZES = """
    --name tiny --model.d_model 14 --model.d_ff 22 --model.num_heads 1 --model.num_decoder_layers 1
    --model.vocab_size 283 --model.max_len 23 --data.seq_len 19 --data.batch_size 3
    --optimizer.name adam --optimizer.warmup_steps 1 --optimizer.total_steps 13 --prompts sun
"""


def endless_loss(model, **options):
    """A loss that is never finite."""
    loss = causal_loss(model, **options)

    def endless(params, batch, rng):
        nats, tokens = loss(params, batch, rng)
        return nats + jnp.inf, tokens

    return endless


def broken_loss(model, **options):
    """A loss with a bug."""
    raise ZeroDivisionError("a bug")


def started(command, platform="cpu", isolated=()):
    environment = os.environ | {"JAX_PLATFORMS": platform}
    return subprocess.Popen(
        [sys.executable, *isolated, "-m", *command.split()],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The end of each command: (exit code, stderr)."""
    folder = tmp_path_factory.mktemp("codes")
    text = folder / "text.txt"
    text.write_text("sun moon star rain snow wind hill lake tree bird fish sand\n" * 47)
    package = "experiments.language_modelling"
    options = f"{SIZES} --data.train {text} --data.validation {text} --runs {folder}"
    prepared = started(f"{package}.prepare {options}")
    found = {"prepare": (prepared.communicate()[1], prepared.returncode)}
    own_loss = f"{package}.train {options} --training.loss {HERE}"
    processes = {
        "unknown option": started(f"{package}.train --lr 1"),
        "missing text": started(f"{package}.prepare {options} --name no --data.train {folder}/no"),
        "no checkpoint": started(f"{package}.generate --run {folder}/language_modelling/tiny"),
        "not writable": started(f"{package}.prepare {options} --runs {text}"),
        "no device": started(f"{package}.train {options} --name gpu", platform="rocm"),
        "no packages": started(f"{package}.train", isolated=["-S"]),
        "diverged": started(f"{own_loss}:endless_loss --name endless"),
        "bug": started(f"{own_loss}:broken_loss --name broken"),
    }
    found |= {name: (each.communicate()[1], each.returncode) for name, each in processes.items()}
    return found


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("prepare", 0, ""),
        ("unknown option", 2, "error: there is no option --lr: use --optimizer.learning_rate"),
        ("no device", 2, "JAX finds no device for JAX_PLATFORMS=rocm: unset it, or on a machine"),
        ("no packages", 1, "has no jax: run `pip install -e '.[experiments]'`"),
        ("missing text", 65, "/no"),
        ("no checkpoint", 66, "checkpoint"),
        ("not writable", 74, "text.txt"),
        ("diverged", 70, "not finite in 10 steps in a row, the last of them step 10 "),
        ("bug", 1, "ZeroDivisionError: a bug"),
    ],
)
def test_a_command_ends_with_the_code_and_the_sentence_that_are_promised(
    ended, command, code, said
):
    printed, found = ended[command]
    assert found == code and said in printed
    assert ("Traceback" in printed) == (command == "bug")
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == (code != 0)
