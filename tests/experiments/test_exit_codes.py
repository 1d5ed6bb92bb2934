"""The exit codes that guides/reliability.md promises, each with one sentence, from a command.

130 and 143 are those of a training that is stopped by a signal: see test_distributed.py. A bug has
code 1 and a traceback: see test_cli.py.
"""

import jax.numpy as jnp
import pytest

from experiments.language_modelling import generate, prepare, train
from jaxformer.training.losses import causal_loss
from tests.experiments.commands import call, refused
from tests.experiments.tiny_runs import language_config
from tests.two_processes import ended, start


def endless_loss(model, **options):
    """A loss that is never finite."""
    loss = causal_loss(model, **options)

    def endless(params, batch, rng):
        nats, tokens = loss(params, batch, rng)
        return nats + jnp.inf, tokens

    return endless


@pytest.fixture
def folder(tmp_path):
    """A folder with a text, and with the run tiny, which is prepared and was never trained."""
    assert call(prepare, language_config(tmp_path, name="tiny")).code == 0
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"data__train": ("absent.txt",)}, 65, "absent.txt: cannot read the file: No such file"),
        ({"runs": "a.txt"}, 74, "a.txt"),
    ],
)
def test_a_text_that_is_not_there_and_a_folder_that_cannot_be(
    folder, changes, code, said, monkeypatch
):
    monkeypatch.chdir(folder)
    refused(call(prepare, language_config(folder, name="other", **changes)), code, said)


def test_a_run_that_was_never_trained(folder):
    refused(call(generate, {"--run": folder / "runs/language_modelling/tiny"}), 66, "checkpoint")


@pytest.mark.long
def test_a_loss_that_is_never_finite(folder):
    changes = {"optimizer__total_steps": 13, "training__loss": f"{__name__}:endless_loss"}
    done = call(train, language_config(folder, name="endless", **changes))
    refused(done, 70, "not finite in 10 steps in a row, the last of them step 10 ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("-S -m", 1, "has no jax: run `pip install -e '.[experiments]'`"),
        ("-m", 2, "JAX finds no device for JAX_PLATFORMS=rocm: unset it, or on a machine"),
    ],
)
def test_a_process_ends_with_the_code_and_one_line(words, code, said):
    """Without the packages, and without the devices that are asked for."""
    command = [*words.split(), "experiments.language_modelling.train"]
    (done,) = ended(start(*command, environment={"JAX_PLATFORMS": "rocm"}))
    assert done.code == code and said in done.err and "Traceback" not in done.err
    assert done.err.count("error: ") == 1
