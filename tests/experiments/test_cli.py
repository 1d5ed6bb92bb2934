"""Options, files and parts become a configuration; what goes wrong has a code and a sentence."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import dataclass, make_dataclass
from pathlib import Path

import pytest

from experiments import registry, sweep
from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.harness.cli.help_text import suggestion
from jaxformer import optional_dependencies
from jaxformer.config import from_plain, to_plain
from jaxformer.errors import CheckpointError, ConfigError, DataError, Diverged

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class NoScaling:
    """None."""


@dataclass(frozen=True)
class Yarn:
    factor: float
    """Factor of the length."""
    beta: int = 32
    """Fast rotations."""


@dataclass(frozen=True)
class Sinusoidal:
    """Sines."""


@dataclass(frozen=True)
class Rotary:
    base: float = 1e4
    """The base."""
    scaling: NoScaling | Yarn = NoScaling()
    """The scaling."""

    def __post_init__(self):
        if self.base <= 0:
            raise ConfigError(f"base={self.base} must be above 0")


@dataclass(frozen=True)
class Mine:
    size: int = 3
    """The size."""


def scheme():
    """A part of one's own that is no dataclass."""


@dataclass(frozen=True)
class Model:
    d_model: int = 8
    """The width."""
    num_heads: int | None = 2
    """The heads."""
    positions: Sinusoidal | Rotary | str = Sinusoidal()
    """The positions."""

    def __post_init__(self):
        if self.num_heads and self.d_model % self.num_heads:
            raise ConfigError(f"d_model={self.d_model} is odd")


@dataclass(frozen=True)
class Train:
    common_options = ("steps", "model.d_model", "model.positions")

    model: Model = Model()
    steps: int = 100
    """The steps."""
    rate: float = 1e-3
    remat: bool = False
    betas: tuple[float, float] = (0.9, 0.98)
    names: tuple[str, ...] = ()


PRESETS = {"tiny": Train(), "multi30k": Train(steps=5, model=Model(d_model=32))}


def refused(args, capsys, presets=PRESETS):
    with pytest.raises(SystemExit) as end:
        cli.parse(presets, args)
    assert end.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_options_override_the_named_preset_and_only_what_they_name():
    assert cli.parse(PRESETS, []) == PRESETS["tiny"]
    args = ["--model.d_model", "16", "--preset", "multi30k", "--remat", "--betas"]
    args += ["0.5", "0.25", "--model.num-heads=None", "--steps", "7", "--steps", "5"]
    parsed = cli.parse(PRESETS, args)
    assert parsed == Train(Model(16, None), steps=5, remat=True, betas=(0.5, 0.25))
    assert cli.parse(PRESETS, ["--preset=multi30k"]) == PRESETS["multi30k"]
    assert not cli.parse(PRESETS, ["--remat", "--no-remat"]).remat
    assert cli.parse(PRESETS, ["--names", "a", "b", "--names", "c"]).names == ("a", "b", "c")


def test_a_part_is_chosen_by_its_name_and_set_by_dotted_options():
    args = "--model.positions rotary --model.positions.base 1e6 --model.positions.scaling YaRN"
    parsed = cli.parse(PRESETS, [*args.split(), "--model.positions.scaling.factor", "4"])
    assert parsed == Train(Model(positions=Rotary(1e6, Yarn(4.0))))
    presets = {"default": parsed}
    args = "--model.positions.scaling.beta 7 --model.positions.base 5"
    assert cli.parse(presets, args.split()).model.positions == Rotary(5.0, Yarn(4.0, 7))
    assert cli.parse(presets, ["--model.positions", "rotary"]).model.positions == Rotary()


def test_a_part_of_your_own_is_named_by_its_module():
    own = f"{__name__}:Mine"
    parsed = cli.parse(PRESETS, ["--model.positions", own, "--model.positions.size", "5"])
    assert parsed.model.positions == Mine(5)
    parsed = cli.parse(PRESETS, ["--model.positions", f"{__name__}:scheme", "--model.d_model", "6"])
    assert parsed.model == Model(6, positions=f"{__name__}:scheme")


@pytest.mark.parametrize(
    "part", [Sinusoidal(), Rotary(7.0, Yarn(4.0)), Mine(5), f"{__name__}:scheme"]
)
def test_a_part_in_json_has_its_name_next_to_its_fields(part):
    content = json.loads(json.dumps(to_plain(Train(Model(positions=part)))))
    assert from_plain(Train, content) == Train(Model(positions=part))
    if part == Rotary(7.0, Yarn(4.0)):
        assert config_files.flat(content["model"]["positions"]) == {
            **{"type": '"rotary"', "base": "7.0"},
            **{"scaling.type": '"yarn"', "scaling.factor": "4.0", "scaling.beta": "32"},
        }


def test_a_file_changes_the_preset_and_options_change_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('preset = "multi30k"\nrate = 1\n[model]\nnum_heads = 4\npositions = "Rotary"\n')
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as editors on Windows save it
    expected = Train(Model(32, 4, Rotary()), steps=7, rate=1.0)
    assert cli.parse(PRESETS, ["--steps", "7", "--config", str(path)]) == expected
    assert cli.parse(PRESETS, ["--config", str(path), "--preset", "tiny"]).steps == 100
    path.write_text('[model.positions]\ntype = "rotary"\nbase = 3\n')
    parsed = cli.parse(PRESETS, ["--config", str(path), "--model.positions.scaling", "no_scaling"])
    assert parsed.model.positions == Rotary(3.0)


@dataclass(frozen=True)
class Run:
    name: str = "tiny"
    runs: str = "runs"
    steps: int = 100


def test_resume_takes_the_settings_the_name_and_the_place_of_a_run(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "place" / "task" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"name": "old", "runs": "elsewhere", "steps": 7}')
    presets = {"tiny": Run()}

    def resumed(*args):
        return cli.parse(presets, ["--resume", *args], experiment="task")

    assert resumed(str(folder)) == Run("mine", str(tmp_path / "place"), 7)
    assert resumed(str(folder), "--steps", "9").steps == 9
    monkeypatch.chdir(folder.parent)
    assert resumed("mine") == Run("mine", "..", 7)
    with pytest.raises(SystemExit):
        resumed("mine", "--preset", "tiny")
    assert "--resume takes all settings of the run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.parse(presets, ["--resume", "mine"], experiment="other")
    assert "mine is not a run of other: it is not in a folder other/" in capsys.readouterr().err


def test_arguments_without_a_name_stand_before_or_after_options():
    fields = [("runs", tuple[str, ...], ()), ("metric", str, ""), ("int8", bool, False)]
    presets = {"default": make_dataclass("Two", fields, frozen=True)()}
    for words in ("a b --metric x", "--metric x a b", "a --metric x b", "--int8 a b --metric x"):
        found = cli.parse(presets, words.split(), positional="runs")
        assert found.runs == ("a", "b") and found.metric == "x", words
        assert found.int8 == ("--int8" in words)
    assert cli.parse(presets, ["--runs", "a"], positional="runs").runs == ("a",)
    assert cli.parse(presets, ["--preset", "default", "a"], positional="runs").runs == ("a",)


def test_an_experiment_is_found_before_or_after_options():
    words = ["--seeds", "3", "translation"]
    command = registry.parse(words, sweep.SweepOptions(), "")
    assert (command.experiment, command.options.seeds) == (registry.find("translation"), 3)


REFUSALS = [
    ("--model.d_modle 16", "there is no option --model.d_modle: did you mean --model.d_model"),
    ("--d_model=16", "error: there is no option --d_model: use --model.d_model"),
    ("--prset multi30k", "did you mean --preset"),
    ("--q=3", "there is no option --q: --help all lists them"),
    ("multi30k", "'multi30k' is no option: the name of an option begins with --"),
    ("--preset multi30", "there is no preset 'multi30': choose one of tiny, multi30k"),
    ("--preset", "--preset takes one value, but 0 were given"),
    ("--remat True", "--remat is a flag and takes no value: write --remat or --no_remat"),
    ("--no-remat=1", "--no_remat is a flag and takes no value: write --remat or --no_remat"),
    ("--steps many", '--steps is "many", but must be int'),
    ("--betas 1", '--betas is "1", but must be float float'),
    ("--rate None", '--rate is "None", but must be float'),
    ("--steps 3 4", "--steps takes one value, but 2 were given"),
    ("--model.d_model 7", "error: d_model=7 is odd"),
    ("--help modle", "--help modle: there is no such group: give all or one of model"),
    ("--model.positions alibi", "'alibi' is unknown: give one of sinusoidal, rotary, or your"),
    ("--model.positions rotary --model.positions.base 0", "base=0.0 must be above 0"),
    ("--model.positions.base 3", "model.positions.base is unknown (for Sinusoidal)"),
    (
        "--model.positions rotary --model.positions.scaling yarn",
        "model.positions.scaling.factor is missing (for Yarn)",
    ),
    ("--config absent.json", "absent.json cannot be read: No such file or directory"),
]
FILES = [
    ("a.toml", "[model]\nd_modle = 3\n", "a.toml: model.d_modle is unknown, did you mean d_model?"),
    ("a.json", '{"steps": "many"}', 'a.json: steps is "many", but must be int'),
    ("a.json", '{"steps": true}', "steps is true, but must be int"),
    ("a.json", '{"betas": [0.9]}', "betas is [0.9], but must be float float"),
    ("a.json", '{"names": ["a", 3]}', "names.1 is 3, but must be str"),
    ("a.json", '{"model": {"d_model": 7}}', "a.json: d_model=7 is odd"),
    ("a.json", '{"model": {"positions": "x"}}', "model.positions='x' is unknown: give one of"),
    ("a.json", "[1]", "a.json must hold a JSON object, but holds [1]"),
    ("a.toml", "a =", "a.toml is not TOML"),
    ("a.toml", 'preset = "large"', "there is no preset 'large'"),
    ("a.yaml", "", "a.yaml is neither a .json nor a .toml file, nor the folder of a run"),
]


@pytest.mark.parametrize(("args", "said"), REFUSALS)
def test_options_that_do_not_fit_are_refused_in_one_sentence(args, said, capsys):
    assert said in refused(args.split(), capsys)


@pytest.mark.parametrize(("name", "content", "said"), FILES)
def test_a_file_that_does_not_fit_is_refused_with_its_name(name, content, said, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    assert said in refused(["--config", str(tmp_path / name)], capsys)


def test_the_name_that_another_program_gives_an_option_is_answered_with_ours():
    known = ["model.num_layers", "data.batch_tokens", "optimizer.learning_rate"]
    known += ["optimizer.total_steps"]
    assert suggestion("lr", known) == suggestion("learning_rate", known)
    assert suggestion("lr", known) == "use --optimizer.learning_rate"
    assert suggestion("num_layers", known) == "use --model.num_layers"
    assert suggestion("steps", known).startswith("did you mean --optimizer.total_steps? ")
    assert suggestion("batch_size", known) == "use --data.batch_tokens"
    assert "a group of options, such as --optimizer.learn" in suggestion("optimizer", known)


def helped(capsys, *topics):
    with pytest.raises(SystemExit) as end:
        cli.parse(PRESETS, ["--preset", "multi30k", "--help", *topics], "Trains a model.")
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_or_of_a_group_and_has_the_defaults_of_the_chosen_preset(capsys):
    short = helped(capsys)
    assert short.startswith("Trains a model.\n")
    assert "--preset NAME chooses the defaults: tiny, multi30k." in " ".join(short.split())
    rows = [line.split() for line in short.splitlines() if line.startswith("--")][-4:]
    assert rows[:3] == [
        ["--steps", "5", "The", "steps"],
        ["--model.d_model", "32", "The", "width"],
        ["--model.positions", "sinusoidal", "The", "positions"],
    ]
    assert "model (7), run (5)" in " ".join(short.split())
    group, whole = helped(capsys, "model"), helped(capsys, "all")
    assert (
        "--model.d_model int\n    The width. (default: 32)" in group
        and "--model.positions sinusoidal|rotary" in group
    )
    assert "--rate" not in group and "--rate" in whole and "--model.d_model" in whole


ERRORS = [
    (ConfigError("d_model=7\nis odd"), 2, "d_model=7 is odd"),
    (optional_dependencies.MissingExtra("install it"), 2, "install it"),
    (DataError("a.de:3 is bad"), 65, "a.de:3 is bad"),
    (CheckpointError("none in x"), 66, "none in x"),
    (Diverged("at step 7"), 70, "at step 7"),
    (OSError(28, "No space left on device", "x.npy"), 74, "x.npy: No space left on device"),
    (KeyboardInterrupt(), 130, "interrupted"),
]
BUGS = [  # and errors that name no file
    (ValueError("odd"), 1, "odd"),
    (MemoryError(), 1, "MemoryError"),
    (ConnectionResetError(104, "reset by a server of the user's"), 74, "reset by a server of"),
    (BrokenPipeError(32, "a pipe of the user's"), 74, "a pipe of the user's"),
]


@pytest.mark.parametrize(("error", "code", "said"), ERRORS + BUGS)
def test_each_kind_of_error_has_its_code_and_one_sentence_and_a_bug_a_traceback(
    error, code, said, capsys
):
    def main():
        raise error

    assert cli.run(main) == code
    *before, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"error: {said}")
    assert ("Traceback (most recent call last):" in before) == any(error is x for x, *_ in BUGS)


def test_a_main_that_ends_or_exits_gives_its_code(capsys):
    assert cli.run(lambda: None) == 0
    assert cli.run(lambda: sys.exit(3)) == 3
    assert cli.run(lambda: sys.exit()) == 0
    assert cli.run(lambda: sys.exit("bad")) == 1
    assert capsys.readouterr().err == "error: bad\n"


def test_sigterm_unwinds_the_stack_and_its_handler_is_put_back(capsys):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    unwound = []

    def main():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            unwound.append(True)

    assert cli.run(main) == 143
    assert unwound == [True]
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_DFL
    assert capsys.readouterr().err == "stopped by SIGTERM\n"


def test_a_warning_is_one_sentence(capsys):
    shown = warnings.showwarning
    assert cli.run(lambda: warnings.warn("step 3 is\ndamaged", stacklevel=1)) == 0
    assert capsys.readouterr().err == "warning: step 3 is damaged\n"
    assert warnings.showwarning is shown


def start(code):
    script = "import sys\nfrom experiments.harness.cli import run\n" + textwrap.dedent(code)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", script]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(command, cwd=ROOT, env=buffered, stdin=pipe, stdout=pipe, stderr=pipe)


@pytest.mark.parametrize("size", [7, 100_000])
def test_a_reader_that_closes_our_output_early_is_no_error(size):
    process = start(f"""
        def main():
            sys.stdin.read()
            print("x" * {size})
        sys.exit(run(main))
    """)
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait(30) == 0
