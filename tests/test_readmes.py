"""The READMEs are true: their code runs, their commands parse, what they name exists.

The commands for several devices and machines are executed as typed, on simulated devices; further
options give them a small text, few steps and, where a preset is for accelerators, small sizes.
"""

import ast
import importlib
import json
import math
import os
import re
import shlex
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
from experiments.harness import cli
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.plan import presets_of
from experiments.runs import COMMANDS as RUNS_COMMANDS
from experiments.sweep import presets_of as sweep_presets
from experiments.torch_reference.compare import presets as compare_presets
from experiments.translation.presets import PRESETS
from jaxformer.text.tokenizers import train_bpe
from tests.experiments.test_distributed import ended, lines
from tests.experiments.tiny_runs import WORDS
from tests.two_processes import free_port

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TRANSLATION = ROOT / "experiments" / "translation" / "README.md"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (README, *sorted((ROOT / "experiments").rglob("*.md")))
    if path.name != "model_card.md"  # a template
}
COMMAND = r"""python -m experiments\.([a-z_]+(?:\.[a-z_]+)*)((?:"[^"\n]*"|[^"\n`<>|])*)"""
COMMANDS = sorted({found for text in PAGES.values() for found in re.findall(COMMAND, text)})

SEVERAL = [
    line
    for text in PAGES.values()
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
    if re.search(r"--(strategy|mesh|distributed)\b|sbatch", line)
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

POSITIONAL = {
    **{f"runs {word}": "runs" for word in RUNS_COMMANDS},
    "results": "runs",
    "sweep": "experiment",
    "plan": "experiment",
}


def options_of(command: str) -> dict:
    """The presets that a command chooses from, or its options under the name "default"."""
    presets = {
        "translation.prepare": PRESETS,
        "translation.train": PRESETS,
        "language_modelling.prepare": LANGUAGE_PRESETS,
        "language_modelling.train": LANGUAGE_PRESETS,
        "plan": presets_of("translation"),
        "plan language_modelling": presets_of("language_modelling"),
        "sweep": sweep_presets("translation"),
        "sweep language_modelling": sweep_presets("language_modelling"),
        **{f"runs {word}": {"default": each.options} for word, each in RUNS_COMMANDS.items()},
        "torch_reference.train_gpt": LANGUAGE_PRESETS,
        "torch_reference.train_translation": PRESETS,
        "torch_reference.compare": compare_presets(),
    }
    if command in presets:
        return presets[command]
    module = importlib.import_module(f"experiments.{command}")
    if hasattr(module, "PRESETS"):
        return module.PRESETS
    # The last such name: a module defines its own options after what it imports.
    *_, options = (value for key, value in vars(module).items() if key.endswith("Options"))
    return {"default": options()}


def prose(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def slugs(text: str) -> set[str]:
    """The anchors of the titles of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def rows(text: str, header: str) -> dict[str, list[str]]:
    """The rows of the table whose first header is `header`: first cell -> the other cells."""
    table = re.search(rf"^\| {header} \|.*\n\|[-:| ]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table, f"no table begins with {header}"
    cells = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()
    )
    return {first.strip("`"): rest for first, *rest in cells}


def python_block(path: Path) -> str:
    pattern = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return "\n".join(pattern.findall(path.read_text("utf-8")))


def test_the_code_of_the_readme_prints_what_its_comments_say(capsys):
    code = python_block(README)
    exec(compile(code, str(README), "exec"), {})
    comments = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert comments and capsys.readouterr().out.splitlines() == comments


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


def test_the_layers_of_the_readme_are_the_folders_of_the_package():
    layers = rows(PAGES["README.md"], "layer").values()
    named = [name for folders, *_ in layers for name in re.findall(r"`(\w+)`", folders)]
    entries = Path(jf.__file__).parent.glob("[a-z]*")
    entries = [e for e in entries if e.suffix == ".py" or (e / "__init__.py").exists()]
    folders = [path.stem for path in entries]
    assert sorted(named) == sorted(folders)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_readme_names_or_links_exists(page):
    text = prose(PAGES[page])
    absent = []
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^):]+))?\)", text):
        path = (ROOT / page).parent.joinpath(link) if link else ROOT / page
        if not path.exists() or (anchor and anchor not in slugs(path.read_text("utf-8"))):
            absent.append(f"{link}#{anchor}")
    names = re.findall(r"`((?:jaxformer|experiments|tests)/[^`\s]*)`", text)
    absent += [name for name in names if not (ROOT / name).exists()]
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", text)
    absent += [name for name in named if f"def {name}(" not in tests and "flickr" not in name]
    assert not absent


@pytest.mark.parametrize("command, args", COMMANDS)
def test_a_command_of_a_readme_parses(command, args):
    if "gs://" in args:
        pytest.importorskip("gcsfs", reason="needs the extra buckets")
    words = shlex.split(args)
    for option in ("--config", "--resume"):  # they name a run that a reader has made
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    if command == "runs":
        word = words.pop(0) if words and words[0] in RUNS_COMMANDS else "list"
        command = f"runs {word}"
    positional = POSITIONAL.get(command, "")
    if command in ("sweep", "plan") and words[:1] == ["language_modelling"]:
        command = f"{command} {words[0]}"
    cli.parse(options_of(command), words, positional=positional)


def test_an_option_that_a_readme_names_exists():
    known = {"preset", "config", "resume", "help"}
    named = {command for command, _ in COMMANDS} - {"runs"}
    for command in named | {f"runs {word}" for word in RUNS_COMMANDS}:
        for name in cli.config_files.settings(next(iter(options_of(command).values()))):
            group, dot, last = name.rpartition(".")
            known |= {name, group, f"{group}{dot}no_{last}"}
    written = {
        name for text in PAGES.values() for name in re.findall(r"(?<![\w-])--([\w.]+)", text)
    }
    others = {"field", "lr"}  # placeholders
    others |= {"output_dir", "inplace", "to"}  # of ct2-transformers-converter and jupyter
    others |= {
        "array",
        "wrap",
        "echo",
        "full",
        "nodes",
        "ntasks",
        "gpus",
        "signal",
        "requeue",
        "zone",
        "worker",
    }
    assert written - others - {"command"} <= known


def test_the_presets_are_as_the_readmes_say():
    told = rows(TRANSLATION.read_text("utf-8"), "preset")
    for name, preset in PRESETS.items():
        model = preset.model
        numbers = [model.d_model, model.d_ff, model.num_heads, model.dropout_rate]
        numbers += [preset.data.batch_tokens, preset.optimizer.total_steps]
        layers = f"{model.num_encoder_layers}+{model.num_decoder_layers}"
        assert told[name][1:] == [layers, *(f"{number:,}" for number in numbers)]
    told = rows(PAGES["experiments/language_modelling/README.md"], "preset")
    for name, preset in LANGUAGE_PRESETS.items():
        model, data = preset.model, preset.data
        numbers = [model.num_encoder_layers + model.num_decoder_layers, model.d_model, model.d_ff]
        numbers += [model.num_heads, data.seq_len, data.batch_size, preset.optimizer.total_steps]
        assert [told[name][0], *told[name][2:]] == [preset.objective, *(f"{n:,}" for n in numbers)]


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
