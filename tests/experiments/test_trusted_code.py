"""Nothing that a stranger's folder names is imported, unless the reader says so."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxformer as jf
from experiments import runs
from experiments.harness import cli
from experiments.language_modelling import evaluate as score_language
from experiments.language_modelling import export as export_language
from experiments.language_modelling import finetune, generate
from experiments.language_modelling import train as train_language
from experiments.translation import evaluate as score_translation
from experiments.translation import export as export_translation
from experiments.translation import train as train_translation
from experiments.translation import translate
from jaxformer import TransformerConfig
from jaxformer.config import check_trusted, from_plain, import_module_class, trusting
from jaxformer.errors import ConfigError
from tests.experiments.commands import call

SIZES = {"vocab_size": 11, "d_model": 6, "d_ff": 7, "num_heads": 2}
POSITIONS = {"type": "subprocess:Popen", "args": ["touch", "x"]}
DOORS = {
    "model.positions": POSITIONS,
    "model.positions.scaling": {"type": "stranger:Scaling"},
    "training.model": "stranger:Model",
    "training.block": "stranger:Block",
    "training.attention_fn": "stranger:attention",
    "training.loss": "stranger:loss",
    "training.metrics": ["stranger:metric"],
    "training.loggers": ["stranger:Logger"],
    "optimizer.name": "stranger:optimizer",
    "optimizer.schedule": "stranger:schedule",
    "data.batches": "stranger:batches",
    "data.tokenizer": "stranger:tokenizer",
    "data.train": ["stranger:texts"],
}


@pytest.fixture(autouse=True)
def stranger(tmp_path, monkeypatch):
    """A module that could be imported; nobody of this home has trained anything."""
    (tmp_path / "stranger.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield
    assert "stranger" not in sys.modules and not (tmp_path / "x").exists()


def hostile(run: Path, folder: Path, field: str, value) -> Path:
    """A copy of `run` in `folder` whose configuration has another `value`."""
    shutil.copytree(run, folder)
    content = json.loads((folder / "config.json").read_text())
    part, inner = content, field.split(".")
    for name in inner[:-1]:
        part = part[name] if isinstance(part.get(name), dict) else part.setdefault(name, {})
    part[inner[-1]] = value
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def training(module, experiment):
    """The command of `module`, with --resume and --continue_from."""
    parse = partial(cli.parse, module.PRESETS, experiment=experiment)
    return SimpleNamespace(parse=parse, main=module.main)


LANGUAGE = training(train_language, "language_modelling")
TRANSLATION = training(train_translation, "translation")


def check(done, field):
    """The command ended with code 2 and a sentence that names the field and what to do."""
    assert done.code == 2, done
    assert f"{field}='" in done.err and "names code that would be imported" in done.err
    assert "--trust_code" in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize("field", DOORS)
def test_a_name_in_any_field_of_a_strangers_run_is_refused_before_it_is_imported(
    field, causal_run, tmp_path
):
    folder = hostile(causal_run.folder, tmp_path / "runs/language_modelling/r", field, DOORS[field])
    check(call(generate, {"--run": folder, "--text": "sun"}), field)
    check(call(LANGUAGE, {"--resume": folder}), field)
    if field in ("model.positions", "training.model", "training.block", "training.attention_fn"):
        with pytest.raises(ConfigError, match=f"{field}='.*trust_code=True to"):
            jf.load(folder)


def test_every_command_that_reads_a_run_refuses_a_strangers_code(
    causal_run, translation_run, tmp_path
):
    doors = {"language": causal_run.folder, "translation": translation_run.folder}
    language, pairs = (
        hostile(run, tmp_path / "runs" / kind / "r", "model.positions", POSITIONS)
        for kind, run in zip(("language_modelling", "translation"), doors.values(), strict=True)
    )
    for command in (score_language, generate):
        check(call(command, {"--run": language}), "model.positions")
    for command in (score_translation, translate):
        check(call(command, {"--run": pairs}), "model.positions")
    check(call(translate, {"--run": f"{pairs},{pairs}"}), "model.positions")
    for command, run in ((export_language, language), (export_translation, pairs)):
        check(call(command, {"--run": run, "--out": tmp_path / "out"}), "model.positions")
    check(
        call(finetune, {"--init_from": language}),
        "model.positions",
    )
    for option in ("--init_from", "--continue_from", "--config", "--resume"):
        check(call(LANGUAGE, {option: language}), "model.positions")
    shutil.copy(language / "config.json", tmp_path / "settings.json")
    check(call(LANGUAGE, {"--config": tmp_path / "settings.json"}), "model.positions")
    for run in (language, pairs):
        assert cli.run(lambda run=run: runs.main(["page", str(run)])) == 2


def test_the_name_of_a_folder_is_no_module_to_import(causal_run, tmp_path):
    """An experiment of one's own is in RUNS/package.module, and so may a stranger's be."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "page.py").write_text("raise RuntimeError('imported')\n")
    folder = shutil.copytree(causal_run.folder, tmp_path / "runs" / "package.page" / "r")
    words = ["page", str(folder), "--output", str(tmp_path / "page.html")]
    assert cli.run(lambda: runs.main(words)) == 0
    assert "package.page" not in sys.modules and (tmp_path / "page.html").exists()


def test_what_the_user_has_typed_trusted_or_trained_is_imported(causal_run, tmp_path):
    field, name = "training.attention_fn", "tests.experiments.own_parts:cosine_attention"
    place = tmp_path / "runs" / "language_modelling" / "r"
    folder = hostile(causal_run.folder, place, field, name)
    read = {"--run": folder, "--text": "sun"}
    check(call(generate, read), field)
    trusted = call(generate, {**read, "--trust_code": True})
    assert trusted.code == 0 and trusted.out.startswith("sun")
    check(call(generate, read), field)
    # A training that goes on records that its user trusts the names.
    more = {"--resume": folder, "--training.attention_fn": name}
    assert call(LANGUAGE, more).code == 0
    assert call(generate, read).out == trusted.out
    assert jf.load(folder).model.attention_fn.__name__ == "cosine_attention"
    other = hostile(causal_run.folder, tmp_path / "other", "training.metrics", [name])
    check(call(generate, {**read, "--run": other}), "training.metrics")
    with pytest.raises(ConfigError, match="names code"):
        jf.load(hostile(causal_run.folder, tmp_path / "third", "training.block", name))


@pytest.mark.parametrize(
    ("name", "is_imported"),
    [
        ("experiments.examples.custom_modules:DistanceBias", True),
        ("jaxformer.config.positions:Rotary", True),
        ("jaxformer.config:Rotary", False),  # imported there
        ("jaxformer.storage:os.system", False),
        ("jaxformer.storage:write", False),  # a function
        ("experiments.harness.runs.run_folder:Run", False),  # a class of another kind
    ],
)
def test_of_our_own_names_those_of_models_blocks_and_parts_are_imported(name, is_imported):
    try:
        check_trusted({"model": {"positions": {"type": name}}}, "config.json")
        assert is_imported
    except ConfigError:
        assert not is_imported


def test_another_package_that_is_called_experiments_is_no_part_of_ours(tmp_path):
    """A script in a stranger's folder, without our checkout, would find the stranger's package."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("print('imported')\n")
    code = "from jaxformer.config import check_trusted as c; c(['experiments.a:B'], 'file')"
    library = tmp_path / "library"
    library.mkdir()
    (library / "jaxformer").symlink_to(Path(jf.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
    )
    assert "names code that would be imported" in done.stderr and not done.stdout


def test_a_value_of_another_kind_is_refused_before_it_is_called(tmp_path):
    with trusting(True):
        with pytest.raises(ConfigError, match="positions='subprocess:Popen'"):
            from_plain(TransformerConfig, SIZES | {"positions": POSITIONS})
        with pytest.raises(ConfigError, match="block='subprocess:Popen'"):
            import_module_class("subprocess:Popen", "block")
