"""Both experiments on two processes of two devices each, over loopback: one run, one folder."""

import json
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.harness import cli
from experiments.harness.runs import distributed
from experiments.translation.presets import PRESETS as TRANSLATION_PRESETS
from jaxformer.errors import ConfigError
from jaxformer.storage import to_path
from tests.experiments.commands import metrics_of
from tests.experiments.test_training_config import LANGUAGE, TRANSLATION
from tests.two_processes import ended, finished, free_port, start

MESH = "--strategy sharded --mesh data=2,tensor=2"


def begin_two(folder: Path, words: str, *, apart: bool = False) -> list[subprocess.Popen]:
    """A training of two processes as one.

    Those that are `apart` share no folder: each has its own copy of the text, and its own cache.
    """
    experiment, *options = words.split()
    call = ["-m", f"experiments.{experiment}.train", *options, "--num_processes", "2"]
    call += ["--coordinator", f"127.0.0.1:{free_port()}", "--process_id"]
    processes = []
    for index in range(2):
        home = folder / f"host{index}" if apart else folder
        if apart and not home.exists():
            shutil.copytree(folder, home, ignore=lambda *_: ["host0", "host1"])
        place = {"XDG_CACHE_HOME": str(home / "cache")} if apart else {}
        processes.append(start(*call, index, folder=home, devices=2, environment=place))
    return processes


@pytest.fixture
def text(tmp_path) -> Path:
    """A folder with a text to train on and one to validate."""
    rng = np.random.default_rng(3)
    for name, count in (("a.txt", 83), ("b.txt", 7)):
        texts = (" ".join(rng.choice(["sun", "moon", "rain", "hill"], 5)) for _ in range(count))
        (tmp_path / name).write_text("\n".join(texts) + "\n")
    return tmp_path


@pytest.mark.slow
def test_a_signal_to_one_stops_both_and_their_run_in_a_bucket_goes_on(text, object_storage):
    """Hosts without a shared folder train in a bucket what one shared folder would hold."""
    words = f"{TRANSLATION} {MESH} --optimizer.total_steps 61"
    words += " --training.save_every 11 --training.evaluate_every 31"
    finished(*begin_two(text, f"{words} --runs whole"))
    runs = f"gs://bucket/{text.name}/runs"
    folder = to_path(runs) / "translation" / "tiny"
    processes = begin_two(text, f"{words} --runs {runs}", apart=True)
    while not list(folder.glob("checkpoints/11/MANIFEST.json")):
        assert all(process.poll() is None for process in processes), ended(*processes)
        time.sleep(0.05)
    processes[0].send_signal(signal.SIGINT)
    found = ended(*processes)
    assert [process.code for process in found] == [130, 143], found
    assert all("saving after the current step" in process.err for process in found)
    first, _ = finished(*begin_two(text, f"{words} --runs {runs}", apart=True))
    assert 11 <= int(re.search(r"; from step (\d+) to 61", first.out)[1]) < 61
    whole = text / "whole" / "translation" / "tiny"
    assert metrics_of(folder) == metrics_of(whole)
    for name in ("scores.json", "weights.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert not list(text.glob("host*/runs")) and list(text.glob("host1/cache/jaxformer/buckets/*"))


@pytest.mark.slow
def test_a_run_that_was_divided_over_8_devices_goes_on_on_3(text):
    """Three divide neither eight nor the eight parts of the state that was saved."""
    experiment, *words = LANGUAGE.split()
    sizes = "--model.d_model 24 --model.d_ff 48 --data.batch_size 24 --optimizer.schedule constant"
    words += f"{sizes} --optimizer.warmup_steps 1 --strategy sharded".split()
    command = ["-m", f"experiments.{experiment}.train", *words]

    def begin(devices: int, steps: int, *more: str) -> subprocess.Popen:
        places = ["--mesh", f"fsdp={devices}", "--optimizer.total_steps", str(steps), *more]
        return start(*command, *places, folder=text, devices=devices)

    finished(begin(1, 7, "--runs", "whole"), begin(8, 4))
    (later,) = finished(begin(3, 7))
    assert "; from step 4 to 7" in later.out
    alone, divided = (
        [line["loss"] for line in metrics_of(text / runs / "language_modelling" / "tiny", "loss")]
        for runs in ("whole", "runs")
    )
    assert len(divided) == 7
    np.testing.assert_allclose(divided, alone, rtol=1e-5)


ONE_AFTER_THE_OTHER = """
import json, os, sys
from experiments.harness import cli
from experiments.language_modelling import train

codes = []
for folder, words in json.loads(sys.argv[1]):
    os.chdir(folder)
    codes.append(cli.run(lambda: train.main(cli.parse(train.PRESETS, words.split()))))
    print("= end", file=sys.stderr)
print(*codes)
"""


@pytest.mark.long
def test_what_one_of_two_cannot_do_ends_both_with_its_code_and_a_sentence(text):
    """Of one job of SLURM, whose environment tells where each process is."""
    for folder in ("host0", "host1"):
        (text / folder / "runs" / "language_modelling" / "tiny").mkdir(parents=True)
        for name in ("a.txt", "b.txt"):
            shutil.copy(text / name, text / folder)
    (text / "bad.txt").write_bytes(b"sun\xff")
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    job["JAX_COORDINATOR_PORT"] = str(free_port())
    words = f"{LANGUAGE.split(maxsplit=1)[1]} --strategy replicated --distributed"
    processes = []
    for index in range(2):
        commands = [
            (str(text), f"{words} --runs other --training.seed {2 + index}"),
            (f"{text}/host{index}", words),
            (str(text), f"{words} --data.train bad.txt"),
        ]
        place = {"SLURM_PROCID": f"{index}", "SLURM_LOCALID": f"{index}"}
        place |= job | {"XDG_CACHE_HOME": f"{text}/{index}"}
        call = "-c", ONE_AFTER_THE_OTHER, json.dumps(commands)
        processes.append(start(*call, folder=text, devices=2, environment=place))
    first, second = (process.err.split("= end\n") for process in finished(*processes))
    unshared = (
        "error: runs/language_modelling/tiny is not shared by all hosts: give --runs a shared"
    )
    for index, said in enumerate((first, second)):
        assert "do not agree on training.seed: process 1 differs from process 0" in said[0]
        assert f"process {index} of 2 has training.seed" in said[0]
        assert said[1].count("error: ") == said[1].count(unshared) == 1
    assert "bad.txt:1" in first[2] and "error: process 0 has failed: see its mess" in second[2]
    assert not (text / "other").exists() and not list(text.rglob(".start-*"))


def test_a_step_that_fails_because_another_process_is_gone_ends_with_that_sentence(capsys):
    def step(text):
        with distributed.lost_process_explained():
            raise jax.errors.JaxRuntimeError(text)

    gone = "UNKNOWN: Gloo all-reduce failed:\nConnection reset by peer"
    assert cli.run(lambda: step(gone)) == 1
    assert capsys.readouterr().err == (
        "error: another process has died, or its connection has: start the same "
        "command again on all hosts, or on another number of them: it resumes from the newest "
        "checkpoint (UNKNOWN: Gloo all-reduce failed: Connection reset by peer)\n"
    )
    assert cli.run(lambda: step("INVALID_ARGUMENT: shapes")) == 1
    assert "another process" not in capsys.readouterr().err


CLUSTER = {"distributed": True, "strategy": "replicated"}
ALONE = {"coordinator": "localhost:1234", "num_processes": 2, "process_id": 0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (CLUSTER | {"strategy": "single"}, "strategy='single'"),
        (ALONE | {"strategy": "single"}, "give --strategy replicated or --strategy sharded"),
        (
            CLUSTER | {"num_processes": 2},
            "distributed=True",
        ),
    ],
)
def test_machines_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        with distributed.joined(replace(TRANSLATION_PRESETS["grammar"], **settings)):
            pass
