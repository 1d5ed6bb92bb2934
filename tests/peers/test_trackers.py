"""Trackers have each step of a run once, also where it was killed and resumed: read from stores."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.peer
CONFIG = {"data": {"seed": 3, "train": ["a.txt"]}, "name": "tiny"}
STEPS = range(1, 8)
# A run of seven steps from `first` to `last`; `end` is "kill" or "close".
PROGRAM = """
import os, sys, time
from pathlib import Path
from experiments.examples import trackers

kind, folder, first, last, end = sys.argv[1:]
tracker = getattr(trackers, kind)(Path(folder))
for step in range(int(first), int(last) + 1):
    tracker.log(step, {"loss": 1.0 / step})
    if step % 2 == 0:
        tracker.log(step, {"validation_loss": 2.0 / step})
        tracker.log_text(step, "samples", [f"sample {step}", "another"])
if end == "kill":
    time.sleep(3)  # a tracker writes in another thread
    os._exit(9)
tracker.close()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that does a part of the run in a process of its own; the run's folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlflow'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))

    def part(kind, first, last, end):
        command = [sys.executable, "-c", PROGRAM, kind, str(folder), str(first), str(last), end]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == (9 if end == "kill" else 0), done.stderr
        return json.loads((folder / "trackers.json").read_text())[kind]

    return part


CURVES = {
    "loss": [(step, 1.0 / step) for step in STEPS],
    "validation_loss": [(step, 2.0 / step) for step in STEPS if step % 2 == 0],
}


def test_trackio_has_each_step_once_after_a_kill(run):
    trackio = pytest.importorskip("trackio", reason="needs the extra peers")
    first, second = run("Trackio", 1, 5, "kill"), run("Trackio", 4, 7, "close")
    assert first == second and second["address"] == "trackio show --project jaxformer"
    program = f"""
import json, trackio
(run,) = trackio.Api().runs("jaxformer")
assert run.name == {second["run"]!r}
print(json.dumps([run.config, trackio.SQLiteStorage.get_logs("jaxformer", run.name)]))
"""
    assert trackio.__version__
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    config, points = json.loads(found.stdout.splitlines()[-1])
    assert {name: config[name] for name in CONFIG} == CONFIG
    for name, expected in CURVES.items():
        assert [(x["step"], x[name]) for x in points if name in x] == expected
    samples = [(x["step"], x["samples"]["_value"]) for x in points if "samples" in x]
    assert samples == [(n, f"    sample {n}\n    another\n") for n in (2, 4, 6)]


def test_mlflow_has_each_step_once_after_a_kill(run):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra peers")
    first, second = run("MLflow", 1, 5, "kill"), run("MLflow", 4, 7, "close")
    assert first == second and second["run"] in second["address"]
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("jaxformer")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == second["run"] and found.info.status == "FINISHED"
    params = {"data.seed": "3", "data.train": "['a.txt']", "name": "tiny"}
    assert found.data.params == params
    for name, expected in CURVES.items():
        history = client.get_metric_history(second["run"], name)
        assert [(x.step, x.value) for x in history] == expected
    files = [file.path for file in client.list_artifacts(second["run"], "samples")]
    assert files == ["samples/2.txt", "samples/4.txt", "samples/6.txt"]
    text = mlflow.artifacts.load_text(f"runs:/{second['run']}/samples/6.txt")
    assert text == "sample 6\nanother\n"


def test_wandb_is_given_one_id_and_the_steps_after_the_checkpoint(run, tmp_path):
    pytest.importorskip("wandb", reason="needs the extra peers")
    first, second = run("WandB", 1, 3, "close"), run("WandB", 4, 7, "close")
    assert first == second
    assert second["address"] == f"wandb sync {tmp_path}/wandb/offline-run-*-{second['run']}"
    paths = sorted((tmp_path / "wandb").glob(f"offline-run-*-{second['run']}/*.wandb"))
    files = [list(wandb_records(path)) for path in paths]
    for records in files:
        (begun,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
        config = {item.key: json.loads(item.value_json) for item in begun.config.update}
        assert begun.run_id == second["run"] and config | CONFIG == config
    curves = {name: [] for name in CURVES}
    for record in (record for records in files for record in records):
        names = (item.key or "/".join(item.nested_key) for item in record.history.item)
        point = dict(zip(names, (x.value_json for x in record.history.item), strict=True))
        for name in curves.keys() & point.keys():
            curves[name].append((int(point["_step"]), float(point[name])))
    assert curves == CURVES


def wandb_records(path: Path):
    """The records of a file of wandb: blocks of 32,768 bytes of parts, each after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""
