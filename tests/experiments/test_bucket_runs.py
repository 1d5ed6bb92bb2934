"""Runs in a bucket: trained, stopped, resumed and read there, equal to local ones to the bit."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxformer as jf
from experiments import runs
from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.harness.results.comparing import compare
from experiments.harness.runs import checkpoint_selection
from experiments.harness.runs.run_folder import Run
from experiments.language_modelling import evaluate as language_evaluate
from experiments.language_modelling import export, generate, load_run
from experiments.language_modelling import train as language_modelling
from experiments.language_modelling.presets import PRESETS
from experiments.results import trained_run
from experiments.sweep import sweep
from experiments.translation import evaluate, finetune, translate
from experiments.translation import train as translation
from jaxformer.errors import ConfigError
from jaxformer.storage import to_path
from jaxformer.training.parameters import flatten
from tests import buckets
from tests.experiments.tiny_runs import language_config, translation_config
from tests.faults import states

pytestmark = pytest.mark.long

SPEEDS = {"tokens_per_second", "data_wait", "mfu"}
# What differs between the kinds of buckets is tested in tests/buckets: a run needs one of them.
IN_GS, IN_S3 = (
    pytest.mark.parametrize("bucket_url", [scheme], indirect=True) for scheme in buckets.SCHEMES
)


@pytest.fixture(autouse=True)
def cache_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Stopping:
    """A logger that asks for an end at the first start, as a system does that needs the machine."""

    def __init__(self, step: int):
        self._step = step

    def log(self, step: int, metrics: Any) -> None:
        if step == self._step:
            self._step = 0  # a second signal would end the process
            os.kill(os.getpid(), signal.SIGTERM)


def left(folder: Path, training: Any) -> dict[str, Any]:
    """Everything that a run leaves but times and places."""
    lines = [{k: v for k, v in x.items() if k not in SPEEDS} for x in Run(folder).metrics()]
    params = flatten(checkpoint_selection.load(folder, training))
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = sorted(str(path.relative_to(folder)) for path in paths)
    files = [x for x in names if x.split("/")[0] not in ("checkpoints", "tensorboard")]
    varying = ("config.json", "env.json", "metrics.jsonl")
    return {
        "metrics": lines,
        "params": {path: np.asarray(leaf).tobytes() for path, leaf in params.items()},
        "steps": sorted(x.split("/")[1] for x in names if x.endswith("MANIFEST.json")),
        "names": files,
        **{name: (folder / name).read_bytes() for name in files if name not in varying},
    }


def said(capsys: Any, command: Any, kind: Any, words: str) -> str:
    """What a command prints."""
    capsys.readouterr()
    command(cli.parse({"default": kind()}, words.split()))
    return capsys.readouterr().out


@IN_GS
def test_a_translation_run_in_a_bucket_is_the_local_one_to_the_bit(bucket_url, tmp_path, capsys):
    changes = {"optimizer__total_steps": 7, "training__save_every": 3, "training__seed": 5}
    local = translation_config(tmp_path, training__evaluate_every=2, **changes)
    far = replace(local, runs=f"{bucket_url}/runs")
    result = translation.train(local)
    with pytest.raises(SystemExit) as stopped:
        translation.train(far, loggers=[Stopping(4)])
    assert stopped.value.code == 143
    assert 4 <= [line["step"] for line in Run(f"{far.runs}/translation/grammar").metrics()][-1] < 7
    capsys.readouterr()
    there = translation.train(far)
    assert "from step 0" not in capsys.readouterr().out
    expected, found = (left(each.folder, local.training) for each in (result, there))
    expected["steps"] = [step for step in expected["steps"] if step in found["steps"]]
    assert found == expected and there[1:] == result[1:]
    assert str(there.folder) == f"{bucket_url}/runs/translation/grammar"
    assert len(list((there.folder / "tensorboard").iterdir())) == 2
    # every command reads it there
    texts = tmp_path / "test.source"
    words = f"--input {texts} --output {tmp_path / 'out'} --run"
    for folder in (result.folder, there.folder):
        said(capsys, translate.main, translate.TranslateOptions, f"{words} {folder}")
        assert (tmp_path / "out").read_text().count("\n") == 2
        (tmp_path / "out").rename(tmp_path / f"out of {folder.parts[1]}")
    to_path(f"{bucket_url}/in").write_bytes(texts.read_bytes())
    words = f"--input {bucket_url}/in --output {bucket_url}/outs/out --run {there.folder}"
    said(capsys, translate.main, translate.TranslateOptions, words)
    outs = [path.read_bytes() for path in tmp_path.glob("out of *")]
    assert len(outs) == 2 and {*outs} == {to_path(f"{bucket_url}/outs/out").read_bytes()}
    scores = [
        said(capsys, evaluate.main, evaluate.EvaluateOptions, f"--run {x}").splitlines()[:-1]
        for x in (result.folder, there.folder)
    ]
    assert scores[0] == scores[1]
    capsys.readouterr()
    runs.main(["list", f"{bucket_url}/runs"])
    assert f"{there.folder}  7 of 7" in capsys.readouterr().out
    runs.main(["page", str(there.folder), "--text", "sun moon"])
    assert b"data-hover" in (there.folder / "report.html").read_bytes()
    assert trained_run(there.folder).curve["loss"] == trained_run(result.folder).curve["loss"]
    tune = "--optimizer.total_steps 2 --optimizer.warmup_steps 1 --num_train 3"
    tune += f" --run {there.folder}"
    said(capsys, finetune.main, finetune.FinetuneOptions, tune)
    assert json.loads((there.folder / "finetune.json").read_text())["after"]
    child = replace(far, name="child", init_from=f"{there.folder}@6")
    translation.train(child)
    note = json.loads((to_path(child.runs) / "translation" / "child" / "parent.json").read_text())
    assert (note["run"], note["steps"]) == (str(there.folder), [6])
    comparison = compare([f"{far.runs}/translation"], "chrf", str(there.folder))
    assert [group.runs[0].folder for group in comparison.groups] == [
        there.folder,
        there.folder.with_name("child"),
    ]
    assert comparison.groups[0].mean == json.loads(found["scores.json"])["chrf"]


@IN_S3
def test_a_language_model_in_a_bucket_is_read_by_every_command(bucket_url, tmp_path, capsys):
    local = language_config(tmp_path, sampling__max_new_tokens=3)
    local = replace(local, prompts=("sun",))
    far = replace(local, runs=f"{bucket_url}/runs")
    result, there = (language_modelling.train(config) for config in (local, far))
    assert left(there.folder, far.training) == left(result.folder, local.training)
    words = f"--part validation --run {there.folder}"
    said(capsys, language_evaluate.main, language_evaluate.EvaluateOptions, words)
    words = f"--max_new_tokens 3 --text sun --run {there.folder}"
    assert "sun" in said(capsys, generate.main, generate.GenerateOptions, words)


@IN_GS
def test_a_sweep_in_a_bucket_trains_each_cell_once_and_compares_them_there(bucket_url, tmp_path):
    config = replace(language_config(tmp_path), runs=f"{bucket_url}/runs")
    vary = {"optimizer.learning_rate": (1e-2, 1e-3)}
    results = sweep(config, name="rates", vary=vary)
    assert len(results) == 2 and to_path(f"{config.runs}/sweeps/rates/sweep.json").is_file()
    assert not to_path(f"{config.runs}/sweeps/rates/texts").exists(), "the texts of all runs"
    assert to_path(f"{config.runs}/texts").is_dir()
    folders = [result.folder for result in results.values()]
    before = [(folder / "metrics.jsonl").version() for folder in folders]
    assert sweep(config, name="rates", vary=vary) == results
    assert [(folder / "metrics.jsonl").version() for folder in folders] == before
    assert len(compare([f"{config.runs}/sweeps/rates"]).groups) == 2


@IN_S3
def test_a_run_is_resumed_by_its_address_profiled_shown_loaded_and_exported(
    bucket_url, tmp_path, capsys
):
    config = language_config(
        tmp_path,
        optimizer__total_steps=31,
        training__average_checkpoints=2,
        training__log_every=1,
    )
    config = replace(config, runs=f"{bucket_url}/runs", profile=True)
    with pytest.raises(SystemExit):
        language_modelling.train(config, loggers=[Stopping(3)])
    address = f"{config.runs}/language_modelling/{config.name}"
    resumed = cli.parse(PRESETS, ["--resume", address], experiment="language_modelling")
    assert resumed == config
    folder = language_modelling.train(resumed).folder
    assert str(folder) == address and Run(folder).metrics()[-1]["step"] == 31
    assert [path for path in (folder / "profile").rglob("*.xplane.pb") if path.read_bytes()]
    runs.main(["page", address, "--text", "sun"])
    assert b"<svg" in (folder / "report.html").read_bytes()
    weights = checkpoint_selection.select(folder, config.training)
    assert len(weights.steps) == 2
    read, loaded = load_run.load_run(folder), jf.load(address)
    assert loaded.tokenizer.fingerprint == read.tokenizer.fingerprint
    assert states.as_bytes(loaded.params) == states.as_bytes(read.params)
    said(capsys, export.main, export.ExportOptions, f"--run {address} --out {tmp_path / 'out'}")
    out = jf.load(tmp_path / "out")
    assert states.as_bytes(out.params) == states.as_bytes(loaded.params)
    with pytest.raises(ConfigError, match=f"{bucket_url}/out is in a bucket: give a folder"):
        said(capsys, export.main, export.ExportOptions, f"--run {address} --out {bucket_url}/out")
    to_path(f"{bucket_url}/hub/config.json").write_bytes(b'{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=f"{bucket_url}/hub is in a bucket: give a folder"):
        jf.load(f"{bucket_url}/hub")


@IN_S3
def test_two_processes_train_the_cells_of_a_sweep_in_a_bucket(bucket_url, tmp_path):
    config = replace(language_config(tmp_path), runs=f"{bucket_url}/runs")
    (tmp_path / "settings.json").write_text(json.dumps(config_files.plain(config)))
    words = f"language_modelling --config {tmp_path / 'settings.json'} --name s --jobs 2 --vary"
    command = [sys.executable, "-m", "experiments.sweep", *words.split(), "training.seed=2,3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "2 of 2 cells are finished" in done.stdout, done
    folder = to_path(f"{config.runs}/sweeps/s")
    logs = [path.read_text() for path in folder.glob("logs/job[01].txt")]
    assert len(logs) == len(list(folder.glob("language_modelling/*/scores.json"))) == 2
    assert all("from step 0 to 4" in log for log in logs), "each has trained one of them"


@pytest.mark.parametrize("scheme", buckets.SCHEMES)
def test_a_bucket_that_cannot_be_used_ends_a_training_with_one_sentence(
    scheme, object_storage, tmp_path, capsys
):
    config = translation_config(tmp_path)

    def trained(runs: str) -> tuple[int, str]:
        capsys.readouterr()
        code = cli.run(lambda: translation.main(replace(config, runs=runs)))
        return code, capsys.readouterr().err

    code, err = trained(f"{scheme}://other/runs")
    assert code == 74 and err.count("error: ") == 1 and "Traceback" not in err
    assert f"error: {scheme}://other/runs/translation/grammar/" in err
    assert "bucket 'other'" in err and "correct" in err
    with buckets.injected(scheme, read_only=True):
        code, err = trained(f"{scheme}://bucket/{tmp_path.name}")
    assert code == 74 and err.count("error: ") == 1 and "Traceback" not in err
    assert "Forbidden" in err and "use credentials that allow it to be written" in err


@IN_GS
def test_a_run_is_read_with_credentials_that_cannot_write(bucket_url, tmp_path, capsys):
    far = translation_config(tmp_path, training__average_checkpoints=1)
    far = replace(far, runs=f"{bucket_url}/runs")
    folder = translation.train(far).folder
    with buckets.injected(bucket_url[:2], read_only=True):
        words = f"--run {folder} --input {tmp_path / 'test.source'} --output {tmp_path / 'out'}"
        said(capsys, translate.main, translate.TranslateOptions, words)
        assert (tmp_path / "out").read_text().count("\n") == 2
        runs.main(["list", f"{bucket_url}/runs"])
        assert f"{folder}  2 of 2" in capsys.readouterr().out


@IN_S3
def test_a_training_with_slow_and_failing_requests_has_the_same_bits(bucket_url, tmp_path):
    local = translation_config(tmp_path)
    expected = left(translation.train(local).folder, local.training)
    far = replace(local, runs=f"{bucket_url}/runs")
    with buckets.injected(bucket_url[:2], fail_every=10, slow_every=7, seconds=0.1):
        folder = translation.train(far).folder
        assert buckets.inject(bucket_url[:2])["failed"] > 9
    assert left(folder, local.training) == expected
