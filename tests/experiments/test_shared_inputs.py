"""What all processes of a command must be given alike: each thing made different once."""

import json
import shutil
from pathlib import Path

import pytest

from tests.experiments.test_training_config import TRANSLATION
from tests.two_processes import finished, free_port, start

pytestmark = pytest.mark.long

COMMANDS = """
import importlib, json, sys, time
from experiments.harness import cli
from tests.experiments.commands import parsed

processes = sys.argv[2:]
for module, words in json.loads(sys.argv[1]):
    command = importlib.import_module(f"experiments.{module}")
    begun = time.monotonic()
    code = cli.run(lambda: command.main(parsed(command, [*words.split(), *processes])))
    sys.stderr.write(f"= {code} {time.monotonic() - begun:.1f}\\n")
"""
TRAINED = "--runs ../runs --strategy replicated"
CASES = {
    "the file in.txt": ("translation.translate", "--run tr --input in.txt"),
    "the text": ("translation.evaluate", "--run tr --source same.txt --target in.txt"),
    "the files of other_tr": ("translation.translate", "--run other_tr --input same.txt"),
    "the file lm.txt": ("language_modelling.evaluate", "--run lm --files lm.txt"),
    "the file prompt.txt": ("language_modelling.generate", "--run lm --input prompt.txt"),
    "the validation text": (
        "translation.train",
        f"{TRANSLATION.split(maxsplit=1)[1]} {TRAINED} --data.validation.target in.txt "
        "--data.validation.source same.txt",
    ),
    "the test text": (
        "translation.train",
        f"{TRANSLATION.split(maxsplit=1)[1]} {TRAINED} --data.test.target in.txt "
        "--data.test.source same.txt",
    ),
    "the training text": (
        "translation.train",
        f"{TRANSLATION.split(maxsplit=1)[1]} {TRAINED} --data.train.target lm.txt "
        "--data.train.source a.txt",
    ),
    "the files of other_lm": (
        "language_modelling.train",
        f"--data.train a.txt --data.validation b.txt --init_from other_lm {TRAINED} "
        "--data.seq_len 19 --data.batch_size 8",
    ),
    "the examples": (
        "language_modelling.finetune",
        f"--preset classification --init_from lm --data.train labels.tsv {TRAINED}",
    ),
}


def change(path: Path) -> None:
    """Another last line, as long."""
    path.write_text(path.read_text()[:-4] + "hil\n")


def test_each_thing_that_differs_ends_all_processes_with_2_and_its_name(
    translation_run, causal_run, tmp_path
):
    """Of four processes the last differs from the first, and the others do not."""
    processes = []
    address, last = f"127.0.0.1:{free_port()}", 3
    commands = [*CASES.values(), ("translation.translate", "--run tr --input only.txt")]
    for number in range(last + 1):
        home = tmp_path / f"host{number}"
        home.mkdir()
        for name, run in (("tr", translation_run), ("lm", causal_run)):
            shutil.copytree(run.folder, home / name)
            shutil.copytree(run.folder, home / f"other_{name}")
        text = "".join(f"sun moon {word}\n" for word in "rain snow lake tree".split() * 11)
        for name in ("in", "same", "lm", "prompt", "a", "b"):
            (home / f"{name}.txt").write_text(text if name != "in" else text[:130])
        (home / "same.txt").write_text(text[:130])
        lines = (f"{'ab'[i % 2]}\tsun moon {i}\n" for i in range(23))
        (home / "labels.tsv").write_text("".join(lines))
        if number < last:
            (home / "only.txt").write_text(text)
        else:
            for name in ("in.txt", "lm.txt", "prompt.txt", "labels.tsv"):
                change(home / name)
            for path in home.glob("other_*/config.json"):
                path.write_text(path.read_text() + " ")
        call = "-c", COMMANDS, json.dumps(commands), "--coordinator", address
        call += "--num_processes", last + 1, "--process_id", number
        place = {"XDG_CACHE_HOME": str(home / "cache")}
        processes.append(start(*call, folder=home, devices=1, environment=place))
    for number, process in enumerate(finished(*processes)):
        *outcomes, _ = process.err.split("= ")
        ends = [said.rpartition("error: ")[2] for said in outcomes]
        codes = [int(said.split()[0]) for said in process.err.split("= ")[1:]]
        assert codes == [2] * len(CASES) + [65], process.err
        for name, said in zip(CASES, ends, strict=False):
            assert f"the processes do not agree on {name.replace('examples', 'train')}" in said
            assert f"process {last} differs from process 0; process {number} of" in said
        assert ("only.txt: cannot read" in ends[-1]) == (number == last)
        assert number == last or f"process {last} has failed" in ends[-1]
