"""The share of a GPU's memory that commands take."""

import os

import pytest

from experiments.harness import cli
from tests.two_processes import finished, start

NAMES = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


def taken(monkeypatch, **said):
    """The variables of a process in which a user has said these, after a command."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert cli.run(lambda: None) == 0
    after = {name: os.environ[name] for name in NAMES if name in os.environ}
    if "XLA_CLIENT_MEM_FRACTION" not in said:
        monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    return after


def test_a_command_takes_nine_tenths_of_a_gpu(monkeypatch):
    assert taken(monkeypatch) == {"XLA_CLIENT_MEM_FRACTION": "0.9"}


@pytest.mark.parametrize(
    ("name", "value"), [*zip(NAMES, ("0.45", ".3", "false", "platform"), strict=True)]
)
def test_a_command_leaves_the_memory_that_the_user_has_said(monkeypatch, name, value):
    assert taken(monkeypatch, **{name: value}) == {name: value}


def test_an_import_takes_no_memory(monkeypatch):
    for name in NAMES:  # of commands that other tests have run in this process
        monkeypatch.delenv(name, raising=False)
    code = "import os, jaxformer, experiments.harness.cli; print(sorted(os.environ))"
    (done,) = finished(start("-c", code))
    assert "MEM_FRACTION" not in done.out
