"""Runs in a bucket: trained, stopped, resumed and read there, equal to local ones to the bit."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxformer as jf
from experiments import runs
from experiments.harness import cli
from experiments.harness.results.comparing import compare
from experiments.harness.results.run_facts import RunFacts
from experiments.harness.runs.run_folder import Run
from experiments.harness.runs.sample_tables import read_table
from experiments.harness.training.profiling import profiled
from experiments.language_modelling import evaluate as language_evaluate
from experiments.language_modelling import export, generate, load_run
from experiments.language_modelling import train as language_modelling
from experiments.language_modelling.presets import PRESETS
from experiments.sweep import sweep
from experiments.translation import evaluate, translate
from experiments.translation import train as translation
from jaxformer import storage
from jaxformer.checkpoint.lock import lock
from jaxformer.errors import ConfigError
from jaxformer.pretrained.run_weights import select_weights
from jaxformer.storage import to_path
from jaxformer.training.parameters import flatten
from tests import buckets
from tests.evidence.records import results_of
from tests.experiments.commands import metrics_of
from tests.experiments.tiny_runs import language_config, translation_config
from tests.experiments.trained_runs import StopAt4
from tests.faults import states

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def cache_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def left(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves but times and places."""
    params = flatten(select_weights(folder).read())
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = sorted(str(path.relative_to(folder)) for path in paths)
    files = [x for x in names if x.split("/")[0] not in ("checkpoints", "tensorboard")]
    varying = ("config.json", "env.json", "metrics.jsonl")
    return {
        "metrics": metrics_of(folder),
        "params": {path: np.asarray(leaf).tobytes() for path, leaf in params.items()},
        "names": files,
        **{name: (folder / name).read_bytes() for name in files if name not in varying},
    }


def said(capsys: Any, command: Any, kind: Any, words: str) -> str:
    """What a command prints."""
    capsys.readouterr()
    command(cli.parse({"default": kind()}, words.split()))
    return capsys.readouterr().out


def test_a_run_in_a_bucket_is_stopped_resumed_by_its_address_and_the_local_one_to_the_bit(
    bucket_url, causal_run, tmp_path, capsys
):
    """Also with slow and failing requests."""
    make_step = causal_run.train.make_step
    far = replace(causal_run.config, runs=f"{bucket_url}/runs")
    address = f"{far.runs}/language_modelling/tiny"
    with pytest.raises(SystemExit) as stopped:
        language_modelling.train(far, loggers=[StopAt4(tmp_path)], make_step=make_step)
    assert stopped.value.code == 143
    assert 4 <= Run(address).metrics()[-1]["step"] < 7
    resumed = cli.parse(PRESETS, ["--resume", address], experiment="language_modelling")
    assert resumed == far
    capsys.readouterr()
    with buckets.injected(fail_every=20, slow_every=20, seconds=0.1):
        there = language_modelling.train(resumed, make_step=make_step).folder
        assert buckets.inject()["failed"] > 3
    assert "from step 0" not in capsys.readouterr().out
    assert str(there) == address
    expected, found = map(left, (causal_run.folder, there))
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    assert len(list((there / "tensorboard").iterdir())) == 2


def test_a_language_model_in_a_bucket_is_read_shown_loaded_and_exported(
    bucket_url, causal_run, tmp_path, capsys
):
    address = f"{bucket_url}/runs/language_modelling/tiny"
    storage.upload(causal_run.folder, to_path(address))
    words = f"--part validation --run {address}"
    said(capsys, language_evaluate.main, language_evaluate.EvaluateOptions, words)
    words = f"--max_new_tokens 3 --text sun --run {address}"
    assert "sun" in said(capsys, generate.main, generate.GenerateOptions, words)
    runs.main(["page", address, "--text", "sun"])
    assert b"<svg" in to_path(f"{address}/report.html").read_bytes()
    weights = select_weights(to_path(address))
    assert len(weights.steps) == 2
    read, loaded = load_run.load_run(to_path(address)), jf.load(address)
    assert loaded.tokenizer.fingerprint == read.tokenizer.fingerprint
    assert states.as_bytes(loaded.params) == states.as_bytes(read.params)
    said(capsys, export.main, export.ExportOptions, f"--run {address} --out {tmp_path / 'out'}")
    out = jf.load(tmp_path / "out")
    assert states.as_bytes(out.params) == states.as_bytes(loaded.params)
    with pytest.raises(ConfigError, match=f"{bucket_url}/out"):
        said(capsys, export.main, export.ExportOptions, f"--run {address} --out {bucket_url}/out")
    to_path(f"{bucket_url}/hub/config.json").write_bytes(b'{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=f"{bucket_url}/hub"):
        jf.load(f"{bucket_url}/hub")


def test_a_profile_is_written_to_a_bucket(bucket_url):
    folder = to_path(f"{bucket_url}/profile")
    step = profiled(lambda state, batch: (state + batch, {}), folder, first=1, steps=2)
    for number in range(4):
        step(np.float32(number), np.float32(3))
    assert [path for path in folder.rglob("*.xplane.pb") if path.read_bytes()]


def test_a_translation_run_in_a_bucket_is_read_by_every_command_as_the_local_one(
    bucket_url, translation_run, capsys
):
    """With credentials that cannot write, where a command writes nothing there."""
    here, there = translation_run.folder, to_path(f"{bucket_url}/runs/translation/tiny")
    storage.upload(here, there)
    assert storage.lengths(there) == storage.lengths(here)
    with buckets.injected(read_only=True):
        printed = said(capsys, evaluate.main, evaluate.EvaluateOptions, f"--run {there}")
        scores = json.loads((here / "scores.json").read_text())
        assert json.loads(printed.splitlines()[-1])["chrf"] == scores["chrf"]
        runs.main(["list", f"{bucket_url}/runs"])
        assert f"{there}  done   7 of 7" in capsys.readouterr().out
        assert results_of([there], "own") == results_of([here], "own")
    with lock(there / "checkpoints"):  # in place of the local lock, which was uploaded
        assert RunFacts(there).state == "running"
    assert RunFacts(there).state == "done"
    # The last line is longer than the model takes.
    samples = {side: x[:-1] for side, x in read_table(here / "samples" / "test.tsv").items()}
    to_path(f"{bucket_url}/in").write_text("\n".join(samples["source"]))
    words = f"--input {bucket_url}/in --output {bucket_url}/outs/out --run {there}"
    said(capsys, translate.main, translate.TranslateOptions, words)
    assert to_path(f"{bucket_url}/outs/out").read_text().splitlines() == samples["model"]
    onto_itself = f"--input {bucket_url}/in --output {bucket_url}/in --run {there}"
    with pytest.raises(ConfigError, match=f"{bucket_url}/in"):
        said(capsys, translate.main, translate.TranslateOptions, onto_itself)
    runs.main(["page", str(there), "--text", "sun moon"])
    assert b"loss by step" in (there / "report.html").read_bytes()


def test_a_sweep_in_a_bucket_trains_each_cell_that_no_other_process_holds_once(
    bucket_url, tmp_path, capsys
):
    config = language_config(tmp_path, runs=f"{bucket_url}/runs", training__evaluate_every=0)
    folder = to_path(f"{config.runs}/sweeps/s")

    def trained() -> list[Path]:
        results = sweep(config, name="s", vary={"training.seed": (2, 3)})
        return [result.folder for result in results.values()]

    with closing(lock(folder / "language_modelling" / "seed=2" / "checkpoints")):
        (second,) = trained()
    assert "failed: " in capsys.readouterr().out
    before = (second / "metrics.jsonl").version()
    cells = trained()
    assert cells == [folder / "language_modelling" / f"seed={seed}" for seed in (2, 3)]
    assert second == cells[1] and (second / "metrics.jsonl").version() == before
    assert (folder / "sweep.json").is_file()
    assert len(compare([str(folder)]).groups[0].runs) == 2


def test_a_bucket_that_cannot_be_used_ends_a_training_with_one_sentence(
    bucket_url, tmp_path, capsys
):
    config = translation_config(tmp_path)

    def refused(runs: str) -> str:
        capsys.readouterr()
        assert cli.run(lambda: translation.main(replace(config, runs=runs))) == 74
        err = capsys.readouterr().err
        assert err.count("error: ") == 1 and "Traceback" not in err
        return err

    err = refused("gs://other/runs")
    assert "error: gs://other/runs/translation/grammar/" in err
    assert "bucket 'other'" in err and "correct" in err
    with buckets.injected(read_only=True):
        err = refused(bucket_url)
    assert "Forbidden" in err and "use credentials that allow it to be written" in err
