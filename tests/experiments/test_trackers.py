"""Trackers get the settings, metrics and scores of a run from its folder."""

import json
import os
import subprocess
import sys

import pytest

from experiments import runs
from experiments.harness.results.trackers import read_run
from jaxformer.errors import ConfigError
from tests.experiments.finished_runs import write_language_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_language_run(tmp_path_factory.mktemp("runs") / "a1", [3.0, 2.5], [64, 17], seed=3)


def words(tracker, run, output):
    names = ["--to", tracker, "--output", str(output), "--project", "own"]
    return ["export", str(run), *names]


def exported(tracker, run, output, **environment):
    """The text that the command prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.runs", *words(tracker, run, output)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tensorboard_gets_the_settings_the_curves_and_the_final_scores(run, tmp_path, capsys):
    summary = pytest.importorskip("tensorboardX.proto.plugin_hparams_pb2")
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    for _ in range(2):  # a second export replaces the first
        runs.main(words("tensorboard", run, tmp_path))
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
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "own")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    names, config, lines = json.loads(done.stdout.splitlines()[-1])
    assert names == ["a1"] and config["training.seed"] == 3
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert lines[0]["validation_loss"] == 2.0 and "test_bits_per_byte" in lines[2]


def resume(run, started, steps):
    """Adds a start of the run and the line of a further step, as resuming with more steps does."""
    config, environment = run / "config.json", run / "env.json"
    settings = json.loads(config.read_text()) | {"optimizer": {"total_steps": steps}}
    config.write_text(json.dumps(settings))
    before = json.loads(environment.read_text()) if environment.exists() else None
    starts = [*before.pop("earlier"), before] if before else []
    environment.write_text(json.dumps({"time": started, "earlier": starts}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": steps, "loss": 2.0}) + "\n")


def test_a_run_that_is_resumed_with_more_steps_keeps_its_id(tmp_path):
    run, other = (
        write_language_run(tmp_path / folder / "a1", [3.0, 2.5], [64, 17]) for folder in "ab"
    )
    ids = []
    for number in (3, 5, 7):
        resume(run, f"2026-11-2{number}T10:00:00+00:00", number)
        ids.append(read_run(run, "").id)
    resume(other, "2026-11-24T10:00:00+00:00", 3)
    assert len(set(ids)) == 1 and read_run(other, "").id not in ids


@pytest.mark.slow
def test_wandb_gets_one_offline_run_of_a_resumed_run(tmp_path):
    pytest.importorskip("wandb", reason="needs the extra tracking")
    run = write_language_run(tmp_path / "runs" / "a1", [3.0, 2.5], [64, 17])
    for number in (3, 5):
        resume(run, f"2026-11-2{number}T10:00:00+00:00", number)
        printed = exported("wandb", run, tmp_path / str(number), WANDB_SILENT="true")
    first, second = tmp_path.glob("*/wandb/offline-run-*")
    assert f"wandb sync {tmp_path / '5'}" in printed
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    (file,) = second.glob("*.wandb")
    content = file.read_bytes()
    assert b"validation_own" in content and b"test_perplexity" in content


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match="to='aim' is unknown: give one of tensorboard"):
        runs.ExportOptions(to="aim")
