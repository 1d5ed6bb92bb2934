"""Commands of the READMEs and guides for several devices and machines run as they are typed.

Devices are simulated; further options give the commands a small text, few steps and, where a preset
is for accelerators, small sizes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import jaxformer as jf
from jaxformer.text.tokenizers import train_bpe
from tests.documents import PAGES, ROOT, commands
from tests.experiments.commands import metrics_of
from tests.experiments.tiny_runs import WORDS
from tests.pretrained.models import LLAMA, decoder, inputs_of
from tests.two_processes import ended, finished, free_port

CLUSTER = ".venv/bin/python -m experiments.translation.train --distributed --strategy sharded"
PLACED = "--coordinator HOST:PORT --num_processes N --process_id i"
EVALUATE = (
    ".venv/bin/python -m experiments.translation.evaluate --distributed --mesh data=4,tensor=4"
)
MESH = "--strategy sharded --mesh data=2,fsdp=2,tensor=2"
SHARDED = f"python -m experiments.translation.train {MESH}"
BATCH = "sbatch experiments/slurm.sh language_modelling --preset gpt2_124m --data.train text.txt"
GENERATE = (
    "python -m experiments.language_modelling.generate --run folder/of/llama --mesh tensor=4 "
    '--text "def main("'
)
STARTED_ELSEWHERE = {
    f"python -m experiments.benchmarks.device {MESH}": "experiments/test_benchmarks_device.py",
    "python -m experiments.language_modelling.train --strategy single": "test_guides.py",
}
STEPS = """
    --training.log_every 1 --training.save_every 5 --training.evaluate_every 0
    --optimizer.warmup_steps 1 --optimizer.total_steps
"""
SMALL = """
    --model.d_model 16 --model.d_ff 28 --model.num_heads 4 --model.num_decoder_layers 1
"""
PAIRS = f"""
    --data.corpus files --data.train.source a.txt --data.train.target a.txt
    --data.validation.source b.txt --data.validation.target b.txt
    --data.batch_tokens 190 --model.num_encoder_layers 1 --search.max_new_tokens 5
    --model.vocab_size 283 {SMALL} {STEPS} 23
"""
TEXT = f"""
    --data.train a.txt --data.validation b.txt --data.batch_size 7 --data.seq_len 19
    --prompts sun --sampling.max_new_tokens 3 {SMALL} {STEPS} 2
"""


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder as the READMEs have it: a checkout with a virtual environment, texts, a Llama."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (python.parent / "python3").symlink_to(python)
    texts = [" ".join(three) for three in product(WORDS[:7], WORDS[:5], WORDS[:3])]
    for name, part in (("a.txt", texts), ("b.txt", texts[:7]), ("text.txt", texts)):
        (tmp_path / name).write_text("\n".join(part) + "\n")
    return tmp_path


def start(
    command: str, place: Path, *, devices: int, processes: int = 1, added: str = ""
) -> list[subprocess.Popen]:
    """The processes of a command that is typed in `place`, as a cluster starts them."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment["PATH"] = f"{place}/programs:{place}/.venv/bin:{os.environ['PATH']}"
    environment["JAX_NUM_CPU_DEVICES"] = str(devices)
    environment["ADDED"] = " ".join(added.split())
    port = free_port()
    environment |= {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost"}
    environment |= {"SLURM_NTASKS": str(processes), "JAX_COORDINATOR_PORT": str(port)}
    command = command.replace("HOST:PORT", f"127.0.0.1:{port}").replace(" N ", f" {processes} ")
    typed = command if command.startswith("sbatch") else f"exec {command} {environment['ADDED']}"
    return [
        subprocess.Popen(
            ["bash", "-c", typed.replace("--process_id i", f"--process_id {i}")],
            cwd=place,
            env=environment | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]


def run_of(place: Path, runs: str = "runs") -> Path:
    """The folder of the only run in `place`."""
    (config,) = (place / runs).glob("*/*/config.json")
    return config.parent


def wait_for(step: int, place: Path, processes: list[subprocess.Popen]) -> None:
    """Returns when a training has saved `step`."""
    while not list((place / "runs").glob(f"*/*/checkpoints/{step}/MANIFEST.json")):
        assert all(process.poll() is None for process in processes), ended(*processes)
        time.sleep(0.05)


def first_step(out: str) -> int:
    """The step from which a training that prints `out` has gone on."""
    return int(re.search(r"; from step (\d+) to", out)[1])


def test_the_commands_for_several_devices_and_machines_are_those_that_are_started():
    several = [
        line
        for page in PAGES
        for line in commands(page)
        if re.search(r"--(strategy|mesh|distributed)\b|sbatch", line)
        and "experiments.plan" not in line
    ]
    here = [BATCH, CLUSTER, EVALUATE, GENERATE, SHARDED]
    assert sorted(several) == sorted([*here, *STARTED_ELSEWHERE])
    assert all((ROOT / "tests" / file).is_file() for file in STARTED_ELSEWHERE.values())
    assert f"`{PLACED}`" in PAGES["experiments/guides/clusters.md"]


@pytest.mark.long
def test_a_job_of_slurm_trains_a_language_model_on_all_devices_of_its_tasks(place):
    write_programs(place / "programs")
    finished(*start(BATCH, place, devices=2, added=TEXT))
    surroundings = json.loads((run_of(place) / "env.json").read_text())
    assert (surroundings["processes"], len(surroundings["devices"])) == (2, 4)
    assert [line["step"] for line in metrics_of(run_of(place))][:2] == [1, 2]
    assert json.loads((run_of(place) / "scores.json").read_text())


@pytest.mark.long
def test_a_llama_on_four_devices_continues_a_text(place, random_params):
    save_llama(place / "folder" / "of" / "llama", random_params)
    (done,) = finished(*start(GENERATE, place, devices=4))
    assert done.out.startswith("def main(")


def save_llama(folder: Path, random_params: Any) -> None:
    """Writes a small Llama as transformers does."""
    tokenizer = train_bpe(["def main(): return"], 271)
    sizes = {"vocab_size": 271, "d_model": 24, "d_ff": 52, "max_len": 211}
    model = decoder(LLAMA, **sizes, num_heads=4, attention__num_kv_heads=None)
    folder.parent.mkdir(parents=True)
    params = random_params(model, *inputs_of(model))
    jf.save_pretrained(folder, model, params, tokenizer)


def write_programs(folder: Path) -> None:
    """Writes SLURM's programs: `sbatch` starts the script, and `srun` two tasks of a program."""
    tasks = """
        for i in 0 1; do
            SLURM_NTASKS=2 SLURM_PROCID=$i SLURM_LOCALID=$i "$@" $ADDED & tasks="$tasks $!"
        done
        for task in $tasks; do wait $task || exit; done
    """
    folder.mkdir()
    for name, text in {"sbatch": 'exec bash "$@"', "srun": tasks}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


@pytest.mark.slow
def test_hosts_are_lost_and_the_same_command_goes_on_also_with_fewer_hosts(place):
    """Two hosts lose one; two go on and one is stopped; one ends the run, and two evaluate it."""
    hosts = start(CLUSTER, place, devices=2, processes=2, added=PAIRS)
    wait_for(5, place, hosts)
    hosts[1].kill()
    moment = time.monotonic()
    # What the run is compared with trains while the first host waits for the second in vain.
    whole = start(f"{SHARDED} --runs whole", place, devices=8, added=PAIRS)
    survivor, lost = ended(*hosts)
    assert lost.code == -signal.SIGKILL and time.monotonic() - moment < 75
    assert survivor.code in (1, -signal.SIGABRT), survivor
    # Gloo, with which CPUs communicate, sometimes ends a process before it can say more.
    reasons = "another process has died|another task died|gloo::EnforceNotMet"
    assert re.search(reasons, survivor.err), survivor
    finished(*whole)
    again = CLUSTER.replace("--distributed", PLACED)
    hosts = start(again, place, devices=2, processes=2, added=PAIRS)
    wait_for(10, place, hosts)
    hosts[1].terminate()
    stopped = ended(*hosts)
    assert [process.code for process in stopped] == [143, 143], stopped
    assert 5 <= first_step(stopped[0].out) < 10
    alone = CLUSTER.replace("--distributed", "")
    (done,) = finished(*start(alone, place, devices=2, added=PAIRS))
    assert 10 <= first_step(done.out) < 23
    run, expected = run_of(place), run_of(place, "whole")
    assert [line["step"] for line in metrics_of(run)] == [
        line["step"] for line in metrics_of(expected)
    ]
    for line, other in zip(metrics_of(run), metrics_of(expected), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
    first, second = finished(*start(EVALUATE, place, devices=8, processes=2))
    scores = json.loads((run / "scores.json").read_text())
    assert scores == json.loads((expected / "scores.json").read_text())
    assert json.loads(first.out.splitlines()[-1])["chrf"] == scores["chrf"]
    # The second prints nothing of its own; Gloo's threads mix up their lines.
    assert not re.search("chrf|bleu|error", second.out), second.out
    texts = (folder / "samples" / "validation.tsv" for folder in (run, expected))
    assert len({path.read_text() for path in texts}) == 1
