"""Trackers get the settings, metrics and scores of a run from its folder."""

import json
import os
import subprocess
import sys

import pytest

from experiments import export_metrics
from experiments.harness import cli
from jaxformer.errors import ConfigError
from tests.experiments.finished_runs import write_language_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_language_run(tmp_path_factory.mktemp("runs") / "a1", [3.0, 2.5], [64, 17], seed=3)


def export(tracker, run, output):
    words = [str(run), "--to", tracker, "--output", str(output), "--project", "own"]
    options = cli.parse({"default": export_metrics.ExportOptions()}, words, positional="runs")
    export_metrics.main(options)


def exported(tracker, run, output, **environment):
    """What the command prints, in a process of its own."""
    words = [sys.executable, "-m", "experiments.export_metrics", str(run), "--to", tracker]
    words += ["--output", str(output), "--project", "own"]
    done = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tensorboard_gets_the_settings_the_curves_and_the_final_scores(run, tmp_path, capsys):
    summary = pytest.importorskip("tensorboardX.proto.plugin_hparams_pb2")
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    for _ in range(2):  # a second export replaces the first
        export("tensorboard-hparams", run, tmp_path)
    assert "tensorboard --logdir" in capsys.readouterr().out
    (path,) = (tmp_path / "own" / "a1").glob("events.*")
    values, settings, rest = {}, {}, path.read_bytes()
    while rest:  # length (8 bytes), its checksum (4), the record, its checksum (4)
        size = int.from_bytes(rest[:8], "little")
        event = events.Event.FromString(rest[12 : 12 + size])
        rest = rest[16 + size :]
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                values.setdefault(value.tag, {})[event.step] = value.simple_value
            elif value.tag.endswith("session_start_info"):
                content = value.metadata.plugin_data.content
                settings = summary.HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["validation_own"] == {1: 1.0, 2: 2.0}
    loss = json.loads((run / "scores.json").read_text())["loss"]
    assert values["test_loss"] == {2: pytest.approx(loss)}
    assert settings["training.seed"].number_value == 3 and settings["name"].string_value == "a1"


@pytest.mark.slow
def test_trackio_gets_a_run_once(run, tmp_path):
    pytest.importorskip("trackio", reason="needs the extra tracking")
    for _ in range(2):
        said = exported("trackio", run, tmp_path, TRACKIO_DIR=str(tmp_path / "own"))
    assert f"{tmp_path / 'own'}: look at it with trackio show --project own" in said
    code = """if True:
        import json
        from trackio.sqlite_storage import SQLiteStorage as storage
        run = "own", "a1"
        found = storage.get_runs("own"), storage.get_run_config(*run), storage.get_logs(*run)
        print(json.dumps(found))
    """
    words = [sys.executable, "-c", code]
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "own")}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    names, config, lines = json.loads(done.stdout.splitlines()[-1])
    assert names == ["a1"] and config["training.seed"] == 3
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert lines[0]["validation_loss"] == 2.0 and "test_bits_per_byte" in lines[2]


@pytest.mark.slow
def test_wandb_gets_an_offline_run(run, tmp_path):
    pytest.importorskip("wandb", reason="needs the extra tracking")
    said = exported("wandb", run, tmp_path, WANDB_SILENT="true")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert f"wandb sync {folder}" in said
    (file,) = folder.glob("*.wandb")
    content = file.read_bytes()
    assert b"validation_own" in content and b"test_perplexity" in content


def test_an_unknown_tracker_and_no_runs_are_refused():
    with pytest.raises(ConfigError, match="to='aim' is unknown: give one of tensorboard-hparams"):
        export_metrics.ExportOptions(to="aim")
    with pytest.raises(ConfigError, match="no runs were given"):
        export_metrics.main(export_metrics.ExportOptions())
