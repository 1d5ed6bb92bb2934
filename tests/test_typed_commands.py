"""Commands of the READMEs and guides for several devices and machines run as they are typed.

Devices are simulated; further options give the commands a small text, few steps and, where a preset
is for accelerators, small sizes.
"""

import ast
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.text.tokenizers import train_bpe
from tests.experiments.test_distributed import ended, lines
from tests.experiments.tiny_runs import WORDS
from tests.test_readmes import PAGES, ROOT
from tests.two_processes import free_port

SEVERAL = [
    line
    for text in PAGES.values()
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
    if re.search(r"--(strategy|mesh|distributed)\b|sbatch", line) and "experiments.plan" not in line
]
"""The commands for several devices or machines."""
CLUSTER = next(line for line in SEVERAL if "--distributed" in line)
PLACED = re.search(r"`(--coordinator [^`]*)`", PAGES["experiments/guides/clusters.md"])[1]
STEPS = """
    --training.log_every 1 --training.save_every 5 --training.evaluate_every 0
    --optimizer.warmup_steps 1 --optimizer.total_steps
"""
GIVEN = {
    "translation.train": f"""
        --data.corpus files --data.train.source a.txt --data.train.target a.txt
        --data.validation.source b.txt --data.validation.target b.txt
        --data.batch_tokens 190 {STEPS}
    """,
    "language_modelling.train": f"""
        --data.train a.txt --data.validation b.txt --data.batch_size 7 --data.seq_len 19
        --prompts sun {STEPS}
    """,
    "language_modelling.generate": "",
    "benchmarks.device": "--preset small --repetitions 1 --results numbers.jsonl",
}
"""What is added to a command of a README: its text, and of a training the steps."""
SMALL = """
    --model.vocab_size 283 --model.d_model 16 --model.d_ff 28 --model.num_heads 4
    --model.num_decoder_layers 1
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
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
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


def scores(place: Path, runs: str) -> dict:
    """The final scores of the only run in `place`."""
    return json.loads((run_of(place, runs) / "scores.json").read_text())


def wait_for(step: int, place: Path, processes: list[subprocess.Popen]) -> None:
    """Returns when a training has saved `step`."""
    while not list((place / "runs").glob(f"*/*/checkpoints/{step}/MANIFEST.json")):
        assert all(process.poll() is None for process in processes), ended(*processes)
        time.sleep(0.05)


def first_step(out: str) -> int:
    """The step from which a training that prints `out` has gone on."""
    return int(re.search(r"; from step (\d+) to", out)[1])


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in SEVERAL if "--distributed" not in line])
def test_a_command_for_several_devices_runs_as_it_is_typed(command, place, random_params):
    sizes = re.findall(r"\w=(\d+)", command)
    devices = math.prod(map(int, sizes)) if sizes else 4
    module = re.search(r"experiments\.([\w.]+)", command)
    kind = module[1] if module else f"{re.search('slurm.sh (.*?) ', command)[1]}.train"
    if kind == "language_modelling.generate":
        save_llama(place / "folder" / "of" / "llama", random_params)
    if command.startswith("sbatch"):
        write_programs(place / "programs")
    added = GIVEN[kind] + (f" 2 {SMALL}" if kind.endswith("train") else "")
    (done,) = ended(*start(command, place, devices=devices, added=added))
    assert done.code == 0, done
    if not kind.endswith("train"):
        assert done.out.startswith("def main(") or (place / "numbers.jsonl").is_file()
        return
    surroundings = json.loads((run_of(place) / "env.json").read_text())
    assert len(surroundings["devices"]) == devices * surroundings["processes"]
    assert surroundings["processes"] == (1 if module else 2)
    assert [line["step"] for line in lines(run_of(place))][:2] == [1, 2]
    assert json.loads((run_of(place) / "scores.json").read_text())


def save_llama(folder: Path, random_params: Any) -> None:
    """Writes a small Llama as transformers does."""
    tokenizer = train_bpe(["def main(): return"], 271)
    sizes = {"vocab_size": 271, "d_model": 24, "d_ff": 52, "num_heads": 4}
    config = replace(
        jf.TransformerConfig(**sizes, num_decoder_layers=1, max_len=211),
        norm=jf.NormOptions("rms", placement="pre"),
        feed_forward=jf.FeedForwardOptions("silu", gated=True),
        embeddings=jf.EmbeddingOptions(tied="none", scale=False),
        positions=jf.Rotary(),
        use_bias=False,
    )
    model = jf.DecoderOnly(config)
    folder.parent.mkdir(parents=True)
    params = random_params(model, np.ones((2, 3), np.int32))
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


def test_the_commands_for_several_devices_and_machines_are_those_that_run_here():
    assert len(SEVERAL) == 7 and CLUSTER.count("--distributed") == 1
    assert PLACED == "--coordinator HOST:PORT --num_processes N --process_id i"


@pytest.mark.slow
def test_hosts_are_lost_and_the_same_command_goes_on_also_with_fewer_hosts(place):
    """Four processes lose one, then all are killed; two go on and are stopped; one ends it."""
    added = f"{GIVEN['translation.train']} 23 {SMALL}"
    alone = CLUSTER.replace("--distributed --strategy sharded", "--strategy single --runs whole")
    (done,) = ended(*start(alone, place, devices=1, added=added))
    assert done.code == 0, done
    four = start(CLUSTER, place, devices=4, processes=4, added=added)
    wait_for(5, place, four)
    four[2].kill()
    moment = time.monotonic()
    lost = ended(*four)
    assert lost.pop(2).code == -signal.SIGKILL and time.monotonic() - moment < 75
    for survivor in lost:
        assert survivor.code in (1, -signal.SIGABRT), survivor
        # Gloo, with which CPUs communicate, sometimes ends a process before it can say more.
        reasons = "another process has died|another task died|gloo::EnforceNotMet"
        assert re.search(reasons, survivor.err), survivor
    four = start(CLUSTER, place, devices=4, processes=4, added=added)
    wait_for(10, place, four)
    for process in four:
        process.kill()
    first, *_ = ended(*four)
    assert 5 <= first_step(first.out) < 10
    two = start(
        CLUSTER.replace("--distributed", PLACED), place, devices=4, processes=2, added=added
    )
    wait_for(15, place, two)
    two[1].terminate()
    stopped = ended(*two)
    assert [process.code for process in stopped] == [143, 143], stopped
    assert 10 <= first_step(stopped[0].out) < 15
    (done,) = ended(*start(CLUSTER.replace("--distributed", ""), place, devices=4, added=added))
    assert done.code == 0 and 15 <= first_step(done.out) < 23, done
    found, expected = lines(run_of(place)), lines(run_of(place, "whole"))
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, other in zip(found, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
    (command,) = (x for x in SEVERAL if "--distributed" in x and x != CLUSTER)
    first, *others = ended(*start(command, place, devices=4, processes=4))
    assert first.code == 0, first
    assert json.loads(first.out.splitlines()[-1])["chrf"] == scores(place, "runs")["chrf"]
    assert [process.code for process in others] == [0] * 3, others
    for process in others:  # they print nothing of their own; Gloo's threads mix up their lines
        assert not re.search("chrf|bleu|error", process.out), process.out
    assert scores(place, "runs") == scores(place, "whole")
    texts = [(run_of(place, runs) / "samples" / "validation.tsv") for runs in ("runs", "whole")]
    assert texts[0].read_text() == texts[1].read_text()


@pytest.mark.slow
def test_three_lines_of_the_readme_lead_from_a_run_to_a_result(place, monkeypatch):
    """Of runs with the names that stand there, but small: the results have the types shown."""
    code = re.search(r"```pycon\n(.*?)```", PAGES["README.md"], re.DOTALL)[1]
    for kind, name in re.findall(r'"runs/(\w+)/(\w+)"', code):
        command = f".venv/bin/python -m experiments.{kind}.train --name {name}"
        small = SMALL.replace("--model.num_decoder_layers 1", "--model.num_decoder_layers 2")
        added = f"{GIVEN[f'{kind}.train']} 2 {small} --training.evaluate_every 0"
        (done,) = ended(*start(command, place, devices=1, added=added))
        assert done.code == 0, done
    monkeypatch.chdir(place)
    variables: dict[str, Any] = {}
    shown = re.findall(r"^>>> (.*)\n((?:[^>\n].*\n)?)", code, re.MULTILINE)
    assert len(shown) == 6
    for line, result in shown:
        if result:
            value, told = eval(line, variables), ast.literal_eval(result)
            assert type(value) is type(told) and value, line
        else:
            exec(line, variables)
