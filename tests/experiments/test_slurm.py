"""The batch script for SLURM, with programs of the test in place of SLURM's."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("ends", "code", "queued"), [(0, 0, ""), (143, 0, "7\n"), (65, 65, "")])
def test_the_batch_script_starts_the_training_and_queues_itself_again(ends, code, queued, tmp_path):
    programs = {
        "srun": f'printf "%s\\n" "$@" > started; exit {ends}',
        "scontrol": '[ "$1" = requeue ] && echo "$2" > queued',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = ["bash", ROOT / "experiments/slurm.sh", "translation", "--name", "a b", "--seed", "3"]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(command, cwd=tmp_path, env=environment)
    assert done.returncode == code
    expected = [".venv/bin/python", "-m", "experiments.translation.train"]
    expected += ["--name", "a b", "--seed", "3", "--distributed"]
    assert (tmp_path / "started").read_text().splitlines() == expected
    record = tmp_path / "queued"
    assert (record.read_text() if record.exists() else "") == queued
