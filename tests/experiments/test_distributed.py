"""Both experiments on two processes of two devices each, over loopback: one run, one folder."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.harness import cli
from experiments.harness.runs import distributed, lost_process
from experiments.translation.presets import PRESETS as TRANSLATION_PRESETS
from jaxformer.errors import ConfigError
from jaxformer.storage import to_path
from tests.experiments.test_training_config import LANGUAGE, ROOT, TRANSLATION
from tests.two_processes import free_port

MESH = "--strategy sharded --mesh data=2,tensor=2"
LONG = "--optimizer.total_steps 97 --training.evaluate_every 0 --training.save_every 0"


@dataclass(frozen=True)
class Ended:
    """The outcome of a process."""

    code: int
    out: str
    err: str


def begin(
    folder: Path, words: str, devices: int, place: Mapping[str, str] | None = None
) -> subprocess.Popen:
    """A process that trains in `folder`, with what a cluster says of its `place`."""
    experiment, *options = words.split()
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    environment |= place or {}
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.{experiment}.train", *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def begin_two(folder: Path, words: str, *of_each: str, apart: bool = False):
    """Two processes as one, each with its own words behind those of both.

    Those that are `apart` share no folder: each has its own copy of the text, and its own cache.
    """
    words = f"{words} --coordinator 127.0.0.1:{free_port()} --num_processes 2"
    own, processes = of_each or ("", ""), []
    for i in range(2):
        home = folder / f"host{i}" if apart else folder
        if apart and not home.exists():
            shutil.copytree(folder, home, ignore=lambda *_: ["host0", "host1"])
        place = {"XDG_CACHE_HOME": str(home / "cache")} if apart else {}
        processes.append(begin(home, f"{words} --process_id {i} {own[i]}", 2, place))
    return processes


def begin_job(folder: Path, words: str, *of_each: str) -> list[subprocess.Popen]:
    """The same as a job of SLURM, whose environment tells all."""
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    job["JAX_COORDINATOR_PORT"] = str(free_port())
    words = f"{words} --distributed"
    places = [job | {"SLURM_PROCID": f"{i}", "SLURM_LOCALID": f"{i}"} for i in range(2)]
    return [begin(folder, f"{words} {of_each[i]}", 2, places[i]) for i in range(2)]


def ended(*processes: subprocess.Popen) -> list[Ended]:
    try:
        said = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(p.returncode, *words) for p, words in zip(processes, said, strict=True)]


def finished(*processes: subprocess.Popen) -> list[Ended]:
    found = ended(*processes)
    assert [process.code for process in found] == [0] * len(found), found
    return found


def lines(folder: Path) -> list[dict]:
    """The metrics of a run but its speed."""
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    speeds = ("tokens_per_second", "data_wait")
    return [{k: v for k, v in line.items() if k not in speeds} for line in found]


@pytest.fixture
def text(tmp_path) -> Path:
    """A folder with a text to train on and one to validate."""
    rng = np.random.default_rng(3)
    for name, count in (("a.txt", 83), ("b.txt", 7)):
        texts = (" ".join(rng.choice(["sun", "moon", "rain", "hill"], 5)) for _ in range(count))
        (tmp_path / name).write_text("\n".join(texts) + "\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "index", "number", "codes"),
    [
        (f"{LANGUAGE} --strategy replicated", 1, signal.SIGTERM, [143, 143]),
        (f"{TRANSLATION} {MESH}", 0, signal.SIGINT, [130, 143]),
    ],
    ids=["SIGTERM to the second", "SIGINT to the first"],
)
def test_a_signal_to_one_stops_both_after_one_step_and_nothing_is_lost(
    words, index, number, codes, text
):
    words = f"{words} {LONG}"
    finished(*begin_two(text, f"{words} --runs whole"))
    processes = begin_two(text, f"{words} --runs stopped")
    whole, stopped = (text / runs / words.split()[0] / "tiny" for runs in ("whole", "stopped"))
    deadline = time.monotonic() + 120
    while len(lines(stopped)) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    processes[index].send_signal(number)
    found = ended(*processes)
    assert [process.code for process in found] == codes, found
    assert all("asked to stop: saving after this step" in process.err for process in found)
    step = lines(stopped)[-1]["step"]
    assert 5 <= step < 97 and (stopped / "checkpoints" / str(step)).is_dir()
    first, _ = finished(*begin_two(text, f"{words} --runs stopped"))
    assert f"from step {step} to 97" in first.out
    assert lines(stopped) == lines(whole)
    assert (stopped / "scores.json").read_bytes() == (whole / "scores.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("begin", [begin_two, begin_job])
def test_processes_with_different_settings_all_say_which_and_leave_nothing(begin, text):
    own = "--training.seed 2", "--training.seed 3"
    found = ended(*begin(text, f"{LANGUAGE} --strategy replicated", *own))
    for index, process in enumerate(found):
        assert process.code == 2
        assert f"do not agree on training.seed: process {index} of 2 has" in process.err
    assert not (text / "runs").exists()


@pytest.mark.long
def test_hosts_without_a_shared_folder_all_say_so_and_what_to_do(text):
    (text / "runs" / "language_modelling" / "tiny").mkdir(parents=True)  # as of an earlier start
    found = ended(*begin_two(text, f"{LANGUAGE} --strategy replicated", apart=True))
    assert [process.code for process in found] == [2, 2], found
    said = "error: runs/language_modelling/tiny is not shared by all hosts: give --runs a shared"
    for process in found:
        assert process.err.count("error: ") == process.err.count(said) == 1, process.err
    assert not list(text.rglob(".start-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "words"), [("s3", LANGUAGE), ("gs", TRANSLATION)])
def test_hosts_without_a_shared_folder_train_in_a_bucket_and_are_stopped_and_resumed(
    scheme, words, text, object_storage
):
    bucket_url = f"{scheme}://bucket/{text.name}"
    words += "--optimizer.total_steps 53 --training.save_every 17 --training.evaluate_every 23"

    def two(runs: str) -> list[subprocess.Popen]:
        words_of_both = f"{words} --strategy replicated --runs {runs}"
        return begin_two(text, words_of_both, apart="://" in runs)

    finished(*two("whole"))
    folder = to_path(bucket_url) / "runs" / words.split()[0] / "tiny"
    processes = two(f"{bucket_url}/runs")
    deadline = time.monotonic() + 120
    while not list(folder.glob("checkpoints/*/MANIFEST.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    found = ended(*processes)
    assert [process.code for process in found] == [143, 143], found
    finished(*two(f"{bucket_url}/runs"))
    whole = text / "whole" / words.split()[0] / "tiny"
    assert lines(folder) == lines(whole)
    for name in ("scores.json", "weights.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert not list(text.glob("host*/runs")) and list(text.glob("host1/cache/jaxformer/buckets/*"))


@pytest.mark.long
def test_what_the_first_process_cannot_read_ends_all_with_its_code(text):
    (text / "a.txt").write_bytes(b"sun\xff")
    first, second = ended(*begin_two(text, f"{LANGUAGE} --strategy replicated"))
    assert first.code == second.code == 65
    assert "a.txt:1" in first.err and "error: process 0 has failed: see its message" in second.err


def test_a_step_that_fails_because_another_process_is_gone_ends_with_that_sentence(capsys):
    def step(text):
        with lost_process.explained(lambda seconds: [1, 3]):
            raise jax.errors.JaxRuntimeError(text)

    gone = "UNKNOWN: Gloo all-reduce failed:\nConnection reset by peer"
    assert cli.run(lambda: step(gone)) == 1
    assert capsys.readouterr().err == (
        "error: another process has died (process 1, 3), or its connection has: start the same "
        "command again on all hosts, or on another number of them: it resumes from the newest "
        "checkpoint (UNKNOWN: Gloo all-reduce failed: Connection reset by peer)\n"
    )
    assert cli.run(lambda: step("INVALID_ARGUMENT: shapes")) == 1
    assert "another process" not in capsys.readouterr().err


@pytest.mark.slow
def test_the_process_that_died_is_named_by_the_other_which_says_how_to_go_on(text):
    processes = begin_two(text, f"{LANGUAGE} --strategy replicated {LONG} --runs lost")
    deadline = time.monotonic() + 120
    while len(lines(text / "lost" / "language_modelling" / "tiny")) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes[1].kill()
    first, _ = ended(*processes)
    # it waits in a collective until JAX's runtime ends it, or the collective fails
    assert first.code in (1, -signal.SIGABRT), first
    if "gloo::EnforceNotMet" in first.err:  # it has ended the process before it could say more
        return
    assert "process 1" in first.err, first
    assert "start the same command again on all hosts, or on another number of them" in first.err


CLUSTER = {"distributed": True, "strategy": "replicated"}
ALONE = {"coordinator": "localhost:1234", "num_processes": 2, "process_id": 0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (CLUSTER | {"strategy": "single"}, "strategy='single' trains in one process, but several"),
        (ALONE | {"strategy": "single"}, "give --strategy replicated or --strategy sharded"),
        (
            CLUSTER | {"num_processes": 2},
            "distributed=True reads coordinator, num_processes and process_id from the cluster, "
            "but coordinator='', num_processes=2 and process_id=None were given: give one or the",
        ),
        (
            {"process_id": 0, "strategy": "replicated"},
            "process_id=0: give all three, or none of them on a cluster",
        ),
        (
            ALONE | {"coordinator": "localhost", "strategy": "sharded"},
            "coordinator='localhost' is not an address: give HOST:PORT",
        ),
    ],
)
def test_machines_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        with distributed.joined(replace(TRANSLATION_PRESETS["grammar"], **settings)):
            pass
