"""No memory on a device, no room on a disk: what is said, what goes on, what ends."""

import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs.run_folder import Run
from experiments.harness.training.saves import Saves
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import CheckpointError, is_out_of_memory
from tests.experiments.test_display import FullDisk

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 1234 bytes."


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def state_of(step: int) -> dict:
    return {"w": np.random.default_rng(step).normal(size=(97, 89))}


def save_all(saves: Saves, *steps: int) -> None:
    for step in steps:
        saves.save(step, state_of(step), {})


def test_saves_that_fail_are_warned_of_and_the_third_in_a_row_ends(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save_all(saves := Saves(checkpoints), 1)
        saves.end()
        with files_no_longer_than(9_000), pytest.warns(UserWarning) as said:
            with pytest.raises(OSError, match="/c"):
                save_all(saves, 2, 3, 5, 7)
        assert ["2 more failures end the run", "1 more failures end the run"] == [
            str(warning.message).rpartition(", and ")[2] for warning in said
        ]
        assert checkpoints.steps() == [1]


def test_a_save_that_succeeds_makes_the_failures_before_it_forgotten(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        saves = Saves(checkpoints)
        for step in (2, 5, 11):
            with (
                files_no_longer_than(9_000),
                pytest.warns(UserWarning, match="2 more"),
            ):
                save_all(saves, step, step + 1)
                with pytest.raises(OSError):
                    saves.end()
            save_all(saves, step + 2)
            saves.end()
        assert checkpoints.steps() == [4, 7, 13]
        restored, _ = checkpoints.restore(state_of(0))
        assert restored["w"].tobytes() == jnp.asarray(state_of(13)["w"]).tobytes()


def test_the_last_save_is_never_forgiven(tmp_path, monkeypatch):
    with Checkpoints(tmp_path / "c") as checkpoints:
        with files_no_longer_than(9_000), pytest.raises(OSError, match="/c"):
            save_all(saves := Saves(checkpoints), 2)
            saves.end()
        full = shutil.disk_usage(tmp_path)._replace(free=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
        with pytest.warns(UserWarning, match="No space left.* 2 more"):
            save_all(saves := Saves(checkpoints), 2)
        with pytest.raises(OSError, match="No space left"):
            saves.end()


def test_no_checkpoint_to_keep_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


@pytest.mark.parametrize(
    ("error", "is_short"),
    [
        (jax.errors.JaxRuntimeError(OUT_OF_MEMORY), True),
        (jax.errors.JaxRuntimeError("INTERNAL: YNNPACK operation failed"), True),
        (jax.errors.JaxRuntimeError("Ran out of memory in memory space hbm"), True),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shapes"), False),
        (ValueError(OUT_OF_MEMORY), False),
    ],
)
def test_memory_is_short_when_jax_says_so_and_only_then(error, is_short):
    assert is_out_of_memory(error) == is_short


def test_a_command_that_trains_nothing_is_given_no_setting_of_a_training(capsys):
    def main():
        raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

    assert cli.run(main) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: out of memory: 1234 bytes were asked for. Give fewer")
    assert "--training" not in said and "--data" not in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("allocate 1234 bytes", "1234 bytes were"),
        ("allocate 34359738368 bytes", "32.0 GiB were"),
        ("allocating 34,359,738,368 bytes", "32.0 GiB were"),
        ("allocate 1.53GiB", "1.53 GiB were"),
        ("allocation, 7 times", "RESOURCE_EXHAUSTED: allocation, 7 times."),
    ],
)
def test_the_memory_that_was_asked_for_is_told_in_units_a_person_reads(words, told, capsys):
    def main():
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {words}")

    assert cli.run(main) == 1
    assert f"out of memory: {told}" in capsys.readouterr().err.splitlines()[-1]


def test_a_log_on_a_full_disk_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", FullDisk())
    monkeypatch.setattr(sys, "stderr", FullDisk())
    display.say("step 3")
    with Run(tmp_path / "absent").surviving("samples"):  # whose warning cannot be printed either
        raise OSError(28, "No space left on device")


def test_what_cannot_be_written_is_named_once(tmp_path, capsys):
    run = Run(tmp_path)
    for _ in range(2):
        with run.surviving("samples"):
            raise OSError(28, "No space left on device")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{tmp_path}/samples could not be written" in said
