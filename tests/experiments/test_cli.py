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

from experiments.harness import cli
from jaxformer import optional_dependencies
from jaxformer.errors import CheckpointError, ConfigError, DataError, Diverged

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Model:
    d_model: int = 8
    num_heads: int | None = 2

    def __post_init__(self):
        if self.num_heads and self.d_model % self.num_heads:
            raise ConfigError(f"d_model={self.d_model} is odd")


@dataclass(frozen=True)
class Train:
    model: Model = Model()
    steps: int = 100
    rate: float = 1e-3
    remat: bool = False
    betas: tuple[float, float] = (0.9, 0.98)


PRESETS = {"tiny": Train(), "multi30k": Train(steps=5, model=Model(d_model=32))}


def refused(args, capsys, presets=PRESETS):
    with pytest.raises(SystemExit) as end:
        cli.parse(presets, args)
    assert end.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_first_preset_is_the_default():
    assert cli.parse(PRESETS, []) == PRESETS["tiny"]


def test_options_override_the_named_preset_and_only_what_they_name():
    args = ["--model.d_model", "16", "--preset", "multi30k", "--remat", "--betas"]
    args += ["0.5", "0.25", "--model.num_heads", "None"]
    parsed = cli.parse(PRESETS, args)
    assert parsed == Train(Model(16, None), steps=5, remat=True, betas=(0.5, 0.25))
    assert cli.parse(PRESETS, ["--preset=multi30k"]) == PRESETS["multi30k"]


def test_an_unknown_preset_is_refused_with_the_near_one_and_all_of_them(capsys):
    said = refused(["--preset", "multi30"], capsys)
    assert said == (
        "error: there is no preset 'multi30': did you mean multi30k? choose one of tiny, multi30k"
    )


def test_a_file_changes_the_preset_and_options_change_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('preset = "multi30k"\nrate = 1\n[model]\nnum_heads = 4\n')
    expected = Train(Model(32, 4), steps=7, rate=1.0)
    assert cli.parse(PRESETS, ["--steps", "7", "--config", str(path)]) == expected
    assert cli.parse(PRESETS, ["--config", str(path), "--preset", "tiny"]).steps == 100


def test_a_field_that_a_run_does_not_know_yet_has_the_default_of_its_class(tmp_path):
    (tmp_path / "config.json").write_text('{"betas": [0.5, 0.25]}')
    presets = {"first": Train(steps=5), "second": Train(steps=6)}
    for path in (tmp_path, tmp_path / "config.json"):
        assert cli.parse(presets, ["--config", str(path)]) == Train(betas=(0.5, 0.25))
    asked = ["--config", str(tmp_path), "--preset", "second"]
    assert cli.parse(presets, asked) == Train(steps=6, betas=(0.5, 0.25))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.toml", "[model]\nd_modle = 3\n", "a.toml: model.d_modle is unknown (for Model)"),
        ("a.json", '{"steps": "many"}', 'a.json: steps is "many", but must be int'),
        ("a.json", '{"model": {"d_model": 7}}', "a.json: d_model=7 is odd"),
        ("a.json", "[1]", "a.json must hold a JSON object, but holds [1]"),
        ("a.toml", "a =", "a.toml is not TOML"),
        ("a.toml", 'preset = "large"', "there is no preset 'large'"),
        ("a.yaml", "", "a.yaml is neither a .json nor a .toml file, nor the folder of a run"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_its_name(name, content, said, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    assert said in refused(["--config", str(tmp_path / name)], capsys)


def test_an_absent_file_is_refused(tmp_path, capsys):
    said = refused(["--config", str(tmp_path / "a.json")], capsys)
    assert said.endswith("a.json cannot be read: No such file or directory")


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


def test_first_arguments_without_a_name_are_those_of_the_positional_option():
    presets = {"default": make_dataclass("Two", [("runs", tuple[str, ...], ())], frozen=True)()}
    assert cli.parse(presets, ["a", "b"], positional="runs").runs == ("a", "b")
    assert cli.parse(presets, ["--runs", "a"], positional="runs").runs == ("a",)


def test_an_unknown_option_is_refused_with_the_near_one(capsys):
    said = refused(["--model.d_modle", "16"], capsys)
    assert said == (
        "error: there is no option --model.d_modle: did you mean --model.d_model? "
        "--help lists them all"
    )
    assert refused(["--d_model=16"], capsys) == (
        "error: there is no option --d_model: use --model.d_model"
    )
    assert "did you mean --preset or " in refused(["--prset", "multi30k"], capsys)
    assert "there is no option --q: --help" in refused(["--q=3"], capsys)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--lr", "0.1"], "--lr: use --optimizer.learning_rate"),
        (["--learning-rate=0.1"], "--learning-rate: use --optimizer.learning_rate"),
        (["--num-layers", "3"], "--num-layers: use --model.num_layers"),
        (["--steps", "3"], "--steps: use --optimizer.total_steps"),
        (["--batch_size", "3"], "--batch_size: use --data.batch_tokens"),
        (["--optimizer", "3"], "--optimizer: it is a group of options, such as --optimizer.learn"),
        (["--resume"], "--resume: train has it; a training also resumes when its command is"),
    ],
)
def test_the_name_that_another_program_gives_an_option_is_answered_with_ours(args, said, capsys):
    groups = {
        "model": {"num_layers": 2},
        "data": {"batch_tokens": 2},
        "optimizer": {"learning_rate": 0.1, "total_steps": 2},
    }
    kinds = {
        group: make_dataclass(group, [(n, type(v), v) for n, v in fields.items()], frozen=True)
        for group, fields in groups.items()
    }
    fields = [(group, kind, kind()) for group, kind in kinds.items()]
    config = make_dataclass("Config", fields, frozen=True)
    assert said in refused(args, capsys, {"default": config()})


@pytest.mark.parametrize("words", [("--remat", "True"), ("--remat=False",), ("--no-remat=1",)])
def test_a_flag_with_a_value_is_refused_with_both_spellings(words, capsys):
    said = refused([*words], capsys)
    name = words[0].partition("=")[0]
    spellings = "--remat or --no_remat" if name == "--remat" else "--no-remat or --remat"
    assert said == f"error: {name} is a flag and takes no value: write {spellings} alone"


def test_a_flag_is_switched_on_and_off_by_its_name_alone():
    assert cli.parse(PRESETS, ["--remat"]).remat and not cli.parse(PRESETS, ["--no-remat"]).remat


def test_an_option_may_be_written_with_hyphens_and_an_equals_sign():
    assert cli.parse(PRESETS, ["--model.d-model=16"]).model.d_model == 16


def test_a_wrong_value_and_a_refused_config_exit_with_2_and_say_why(capsys):
    assert "--steps" in refused(["--steps", "many"], capsys)
    assert refused(["--model.d_model", "7"], capsys) == "error: d_model=7 is odd"
    assert "--preset" in refused(["--preset"], capsys)


def test_help_lists_the_presets_and_the_defaults_of_the_chosen_one(capsys):
    with pytest.raises(SystemExit) as end:
        cli.parse(PRESETS, ["--preset", "multi30k", "--help"], "Trains a model.")
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    assert "Trains a model." in said and "--preset NAME chooses the defaults: tiny, mult" in said
    assert "(default: 32)" in said and "--model.d_model" in said


def test_without_tyro_the_extra_is_named_and_the_code_is_2(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.run(lambda: cli.parse(PRESETS, [])) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: tyro is needed") and "jaxformer[experiments]" in said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("d_model=7\nis odd"), 2, "error: d_model=7 is odd\n"),
        (optional_dependencies.MissingExtra("install it"), 2, "error: install it\n"),
        (DataError("a.de:3 is bad"), 65, "error: a.de:3 is bad\n"),
        (CheckpointError("none in x"), 66, "error: none in x\n"),
        (Diverged("at step 7"), 70, "error: at step 7\n"),
        (OSError(28, "No space left on device", "x.npy"), 74, "x.npy: No space left on device"),
        (OSError("could not be written"), 74, "error: could not be written\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_each_kind_of_error_has_its_code_and_one_sentence(error, code, said, capsys):
    def main():
        raise error

    assert cli.run(main) == code
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), ImportError("no numpy")])
def test_a_bug_has_code_1_and_a_traceback(error, capsys):
    def main():
        raise error

    assert cli.run(main) == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed and type(error).__name__ in printed
    assert printed.endswith(f"error: {error or 'MemoryError'}\n") or not str(error)


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


def test_a_real_sigterm_and_a_real_sigint_end_the_process_with_their_codes():
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = start("""
            import signal, time
            # a job that a shell has put in the background would not hear of it
            signal.signal(signal.SIGINT, signal.default_int_handler)
            def main():
                print("up", flush=True)
                for _ in range(300):  # a signal just before a long sleep would wait for its end
                    time.sleep(0.1)
            sys.exit(run(main))
        """)
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(10) == code
        assert process.stderr.read().count(b"\n") == 1


def test_a_refusal_on_a_terminal_is_one_sentence_without_colours_and_frame():
    red, plain = "\x1b[1;31m", "\x1b[0m"
    said = f"{red}╭─ Parsing error ─╮{plain}\n{red}│{plain} invalid choice 'x' {red}│{plain}\n"
    said += (
        f"{red}│{plain} for 'a'. {red}│{plain}\n{red}│{plain} For full helptext, run b │\n╰──╯\n"
    )
    assert cli._first_section(said) == "invalid choice 'x' for 'a'."
