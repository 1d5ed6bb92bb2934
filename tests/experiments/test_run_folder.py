import dataclasses
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from experiments.harness.runs import environment, run_folder
from experiments.harness.runs.run_folder import Run, load_config, open_folder
from jaxformer import records
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig, to_plain
from jaxformer.errors import ConfigError, DataError
from tests.distributed.test_out_of_memory import files_no_longer_than
from tests.experiments.events import events


@dataclass(frozen=True)
class InverseSquareRoot:
    warmup: int = 4000


@dataclass(frozen=True)
class Cosine:
    warmup: int = 100
    final: float = 0.1


@dataclass(frozen=True)
class Train:
    model: TransformerConfig = TransformerConfig(7, 8, 16, 2)
    schedule: InverseSquareRoot | Cosine = InverseSquareRoot()
    steps: int = 100
    rate: float = 1e-3
    out: Path | None = None
    log_every: int = 50


CONFIG = Train(schedule=Cosine(final=0.25), out=Path("a/b"))


def opened(root, config=CONFIG, **options):
    return open_folder(root, "translation", "tiny", config, **options)


def environment_of(folder):
    return json.loads((folder / "env.json").read_text())


def begin_run(root):
    folder = opened(root).folder
    (folder / "checkpoints" / "7").mkdir(parents=True)
    return folder


def test_a_config_read_back_is_the_config_written(tmp_path):
    folder = opened(tmp_path).folder
    assert folder == tmp_path / "translation" / "tiny"
    assert load_config(folder, Train) == CONFIG
    assert json.loads((folder / "config.json").read_text()) == to_plain(CONFIG)
    with pytest.raises(ConfigError, match=r"\(log_every, model, .*env.json"):
        load_config(folder, InverseSquareRoot)  # not the settings of such a run


def test_the_surroundings_are_written_down_and_those_of_earlier_starts_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    for _ in range(3):
        run = opened(tmp_path)
    found = environment_of(run.folder)
    assert found["XLA_FLAGS"] == "--xla_gpu_autotune_level=0" and "LIBTPU_INIT_ARGS" not in found
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["devices"] and found["cpus"] >= 1
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"} < found.keys()
    assert {"git_commit", "time"} < found.keys() and found["command"].startswith("python ")
    assert len(found["earlier"]) == 2
    assert found["earlier"][0]["jax"] == found["jax"] and "earlier" not in found["earlier"][0]


def test_the_commit_of_a_copied_script_is_written_down_beside_that_of_the_library(
    tmp_path, monkeypatch
):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    script = tmp_path / "train.py"
    script.write_text("")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "mine"]):
        subprocess.run([*git, *words], check=True)
    script.write_text("changed = True")
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    environments = []
    for file in (str(script), environment.__file__):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
        folder = open_folder(tmp_path / "runs", "translation", "tiny", CONFIG).folder
        environments.append(environment_of(folder))
    copied, own = environments
    assert (copied["script_git_commit"], copied["script_git_changed"]) == (head.strip(), True)
    assert own["git_commit"] == copied["git_commit"] != head.strip()
    assert "script_git_commit" not in own


def test_a_start_lasted_until_the_last_line_that_it_logged(tmp_path):
    opened(tmp_path).log(1, loss=2.0)
    folder = tmp_path / "translation" / "tiny"
    started = datetime.fromisoformat(environment_of(folder)["time"])
    os.utime(folder / "metrics.jsonl", (0, started.timestamp() + 29))
    opened(tmp_path)
    assert environment_of(folder)["earlier"][0]["seconds"] == 29


def changed(**fields):
    model = dataclasses.replace(CONFIG.model, **fields.pop("model", {}))
    return dataclasses.replace(CONFIG, model=model, **fields)


def test_another_config_is_refused_and_every_differing_field_named(tmp_path):
    begin_run(tmp_path)
    other = changed(model={"d_model": 4}, rate=0.5, schedule=InverseSquareRoot())
    with pytest.raises(ConfigError) as error:
        opened(tmp_path, other, may_differ={"log_every"})
    said = str(error.value)
    assert "translation/tiny was made with another configuration: " in said
    assert "model.d_model is 8 there but 4 here; rate is 0.001 there but 0.5 here" in said
    assert "schedule.final is 0.25 there but absent here" in said
    assert said.endswith("use another --name, or give the stored value")
    assert "steps" not in said
    assert load_config(tmp_path / "translation" / "tiny", Train) == CONFIG


def test_fields_that_may_differ_are_free_and_their_neighbours_are_not(tmp_path):
    begin_run(tmp_path)
    free, other = {"model", "log_every"}, changed(model={"d_ff": 5}, log_every=7)
    with pytest.raises(ConfigError, match="log_every"):
        opened(tmp_path, changed(log_every=7), may_differ={"log"})
    with pytest.raises(ConfigError, match="model.d_ff"):
        opened(tmp_path, changed(model={"d_ff": 5}), may_differ={"model.d"})
    folder = opened(tmp_path, other, may_differ=free).folder
    assert load_config(folder, Train) == other


def test_a_run_without_a_checkpoint_takes_another_config(tmp_path):
    folder = opened(tmp_path).folder
    opened(tmp_path, changed(rate=0.5))
    assert load_config(folder, Train) == changed(rate=0.5)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "/x", ".x", "a b", "x\0", "-x"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=re.escape(repr(name))):
        open_folder(tmp_path, "translation", name, CONFIG)
    with pytest.raises(ConfigError, match=re.escape(repr(name))):
        open_folder(tmp_path, name, "tiny", CONFIG)
    assert not list(tmp_path.iterdir())


def test_a_config_that_json_cannot_hold_is_refused(tmp_path):
    @dataclass(frozen=True)
    class Odd:
        words: object = b"sun"

    with pytest.raises(ConfigError, match="sun.* config.json"):
        opened(tmp_path, Odd())


def test_a_stored_config_that_does_not_fit_is_refused_with_the_file_and_the_field(tmp_path):
    folder = begin_run(tmp_path)
    records.write_json(folder / "config.json", to_plain(CONFIG) | {"stepz": 3})
    with pytest.raises(ConfigError, match="stepz"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match=r"\(stepz\)"):
        load_config(folder, Train)
    records.write_json(folder / "config.json", to_plain(CONFIG) | {"schedule": {"rise": 3}})
    with pytest.raises(ConfigError, match="schedule"):
        load_config(folder, Train)


def test_surroundings_without_a_list_of_earlier_ones_are_refused(tmp_path):
    begin_run(tmp_path)
    (tmp_path / "translation" / "tiny" / "env.json").write_text('{"earlier": 3}')
    with pytest.raises(DataError, match="env.json"):
        opened(tmp_path)


def test_damaged_lines_of_metrics_are_named_and_left_out_and_a_torn_last_one_is_no_news(
    tmp_path, capsys
):
    lines = '{"step": 1, "loss": 2.0}\n{"stop": 2}\n\n{"step": "3"}\n{"step": 4}\n{"ste'
    (tmp_path / "metrics.jsonl").write_text(lines)
    run = Run(tmp_path)
    run.resume(7)
    said = f"warning: {tmp_path}/metrics.jsonl lines 2, 4: no metrics, left out\n"
    assert capsys.readouterr().err == said
    assert run.metrics() == [{"step": 1, "loss": 2.0}, {"step": 4}]
    run.resume(7)
    assert capsys.readouterr().err == ""


def test_each_logged_step_is_one_line_on_disk_at_once(tmp_path):
    run = Run(tmp_path)
    run.log(3, loss=2.5, tokens=7)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 3, "loss": 2.5, "tokens": 7.0}\n'
    run.log(5, loss=float("inf"))
    # JSON has no infinity.
    assert (tmp_path / "metrics.jsonl").read_text() == text + '{"step": 5, "loss": null}\n'
    assert run.metrics()[1] == {"step": 5}
    run.call("close")


def test_after_a_resume_no_line_is_doubled_or_missing(tmp_path):
    run = Run(tmp_path)
    for step in range(1, 8):
        run.log(step, loss=step)
    run.call("close")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    resumed = Run(tmp_path)
    resumed.resume(5)
    for step in range(6, 10):
        resumed.log(step, loss=step)
    resumed.call("close")
    assert resumed.metrics() == [{"step": step, "loss": float(step)} for step in range(1, 10)]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 9
    assert {path.name for path in tmp_path.iterdir()} <= {"metrics.jsonl", "tensorboard"}


def test_tensorboard_gets_the_same_numbers_and_hides_those_before_a_resume(tmp_path):
    run = Run(tmp_path)
    run.log(3, loss=2.5)
    run.log(4, loss=2.0)
    run.call("close")
    run = Run(tmp_path)
    run.resume(3)
    run.log(4, loss=1.5)
    run.call("close")
    found = list(events(tmp_path))
    values = [(e.step, v.tag, v.simple_value) for e in found for v in e.summary.value]
    assert values == [(3, "loss", 2.5), (4, "loss", 2.0), (4, "loss", 1.5)]
    starts = [event.step for event in found if event.session_log.status == 1]
    assert starts == [3, 4]


def test_without_tensorboard_the_lines_are_still_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = Run(tmp_path)
    run.log(3, loss=2.5)
    run.log(5, loss=1.5)
    run.call("close")
    assert len(run.metrics()) == 2
    assert not (tmp_path / "tensorboard").exists()
    assert capsys.readouterr().err == ""


def test_a_full_disk_costs_metrics_and_one_warning_but_not_the_training(tmp_path, capsys):
    run = Run(tmp_path)
    run.log(1, loss=1.0)
    with files_no_longer_than((tmp_path / "metrics.jsonl").stat().st_size + 5):
        for step in (2, 3, 4):
            run.log(step, loss=float(step))
    run.log(5, loss=5.0)
    run.call("close")
    assert [line["step"] for line in run.metrics()] == [1, 5]
    said = capsys.readouterr().err
    assert said.count("the logger MetricsFile failed: OSError: ") == 1
    assert said.count(str(tmp_path / "metrics.jsonl")) == 1
    assert said.count("the logger TensorBoard failed") <= 1


def test_a_folder_that_vanished_does_not_stop_the_training(tmp_path, capsys):
    run = Run(tmp_path / "gone")
    run.log(1, loss=1.0)
    run.log(2, loss=1.0)
    run.resume(1)
    said = capsys.readouterr().err
    assert said.count(str(tmp_path / "gone" / "metrics.jsonl")) == 1


def test_numbers_are_compared_as_values_and_truth_values_are_none():
    stored = {"model": {"scalar": 256, "rate": 0.5}, "deep": 1}
    now = {"model": {"scalar": 256.0, "rate": 0.5}, "deep": 1}
    run_folder.refuse_differences(stored, now, Path("run"), ())
    for other in ({"scalar": 257.0, "rate": 0.5}, {"scalar": 256.0, "rate": "0.5"}):
        with pytest.raises(ConfigError, match="model.(scalar|rate)"):
            run_folder.refuse_differences(stored, now | {"model": other}, Path("run"), ())
    with pytest.raises(ConfigError, match="deep"):
        run_folder.refuse_differences(stored, now | {"deep": True}, Path("run"), ())


def test_fewer_steps_than_a_run_has_done_are_refused_and_its_record_stays(tmp_path):
    @dataclass
    class Optimizer:
        total_steps: int

    @dataclass
    class Config:
        optimizer: Optimizer

    def opened(total):
        config, free = Config(Optimizer(total)), ["optimizer.total_steps"]
        return run_folder.open_folder(tmp_path, "task", "run", config, may_differ=free).folder

    folder = opened(8)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(8, {"w": np.ones(3)})
    written = (folder / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="step 8 .*optimizer.total_steps=4"):
        opened(4)
    assert (folder / "config.json").read_bytes() == written
    assert opened(8) == opened(13) == folder
