"""Every reported number in a table has a line that says where it comes from."""

import dataclasses
import json
import re
import shutil

import pytest

from jaxformer.errors import ConfigError, DataError
from jaxformer.training.optimizer import OptimizerConfig
from tests.evidence import __main__ as command
from tests.evidence import commands, pages, records, settings
from tests.experiments.finished_runs import sentences, worse, write_run

PAGES = pages.pages(command.ROOT)
PAGE = command.ROOT / "language_modelling" / "README.md"
TRAINING = "python -m experiments.translation.train --preset multi30k_tiny --model.d_ff 96"
LINES = [line for path in PAGES for line in records.read(path.with_name(records.FILE))]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A copy of a page of ours with its results."""
    folder = tmp_path_factory.mktemp("page")
    for path in (PAGE, PAGE.with_name(records.FILE)):
        shutil.copy(path, folder)
    return folder / PAGE.name


def test_the_tables_of_the_pages_are_those_that_their_results_make():
    assert {path.parent.name for path in PAGES} >= {"translation", "language_modelling"}
    command.main(command.EvidenceOptions(check=True))


def peers(row, other):
    """A row of the table of peers."""
    return "peers", (row, "jaxformer"), (row, other)


README = {  # the beginning of a row: its table, then system and metric of ours and of the other
    "Multi30k": ("quality", ("multi30k_lower, beam 5", "lowercased.bleu"), None),
    "Shakespeare": ("shakespeare", ("jaxformer", "loss"), ("PyTorch", "loss")),
    "the same": ("changes", ("and rows of 256, 3 a batch, 798,928", "loss"), None),
    "WikiText-2": ("quality", ("wikitext2, --stride 64", "word_perplexity"), None),
    "Python's": ("quality", ("python_stdlib", "bits_per_byte"), None),
    "training step of a": peers("training step, nanoGPT of 10.6 M, ms", "PyTorch, eager"),
    "generation": peers("240 tokens after 16, 1 text, ms", "PyTorch, eager"),
}


def test_each_number_of_the_readme_is_that_of_a_line_and_no_other_system_is_faster():
    text = (command.ROOT.parent / "README.md").read_text().partition("## Results")[2]
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    rows = [row for row in rows if any(row[0].startswith(name) for name in README)]
    assert len(rows) == len(README)
    for first, *cells in rows:
        ((table, *named),) = (row for name, row in README.items() if first.startswith(name))
        scores = {(x.system, x.metric): x for x in LINES if x.table == table}
        for cell, name in zip(cells, named, strict=True):
            if name is None:
                assert cell == "-" or "published" in cell
                continue
            number, *interval = re.findall(r"\d[\d,.]*", cell.partition(" (")[0])
            digits = len(number.partition(".")[2])
            assert f"{scores[name].score:,.{digits}f}" == number, first
            assert not interval or f"{scores[name].interval:.{digits}f}" == interval[0], first
        if table == "peers":
            (system, _), best = named[1], max if named[1][0].endswith("/s") else min
            others = [x for (s, m), x in scores.items() if s == system and m != "jaxformer"]
            assert scores[named[1]].score == best(x.score for x in others), first


def test_a_number_without_a_line_is_found(page):
    text = page.read_text()
    assert pages.with_tables(page) == text
    page.write_text(text.replace("1.457", "1.456"))
    assert pages.with_tables(page) == text != page.read_text()
    page.write_text(text.replace("results: quality", "results: better"))
    with pytest.raises(DataError, match="'better'"):
        pages.with_tables(page)


def test_a_line_names_every_field_and_a_wrong_one_is_named(tmp_path):
    names = {field.name for field in dataclasses.fields(records.Result)}
    for path in PAGES:
        for line in path.with_name(records.FILE).read_text().splitlines():
            assert json.loads(line).keys() == names
    path = tmp_path / records.FILE
    path.write_text('{"table": "a", "system": "b", "metric": "c", "score": "high"}\n')
    with pytest.raises(DataError, match="results.jsonl:1: score"):
        records.read(path)


def test_a_recorded_run_has_all_that_is_known_of_it(tmp_path, monkeypatch, capsys, request):
    request.addfinalizer(commands.recorded_commands.cache_clear)
    text = sentences(29, seed=1)
    environment = {"python": "3.11.7", "jax": "0.10.2", "command": TRAINING, "cpus": 2}
    environment |= {"devices": ["cpu:cpu"], "git_commit": "ab12", "git_changed": False}
    environment |= {"time": "2026-11-22T10:00:00+00:00", "earlier": []}
    environment |= {"finished": "2026-11-22T10:01:23+00:00"}
    for seed in (0, 1):
        run = write_run(
            tmp_path / "translation" / f"s{seed}", worse(text, 0.3, seed), text, seed=seed
        )
        (run / "env.json").write_text(json.dumps(environment))
        points = [{"step": step, "loss": 1 / step} for step in range(1, 98)]
        points += [{"step": 97, "validation_bleu": 31.5}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in points))
    recorded = tmp_path / "recorded.json"
    recorded.write_text('{"bases": [], "commands": []}')
    monkeypatch.setattr(commands, "RECORDED", recorded)
    commands.recorded_commands.cache_clear()
    page = tmp_path / "translation" / "README.md"
    page.write_text("before\n<!-- results: own -->\n<!-- end -->\nafter\n")
    options = command.EvidenceOptions(
        runs=(str(tmp_path / "translation"),), table="own", system="toy", metrics=("bleu", "exact")
    )
    for _ in range(2):  # recorded again, a line takes the place of the old one
        command.main(options, tmp_path)
    command.main(dataclasses.replace(options, system="again", metrics=("bleu",)), tmp_path)
    bleu, exact, again = records.read(tmp_path / "translation" / records.FILE)
    assert again == dataclasses.replace(bleu, system="again")
    assert bleu.seeds == [0, 1] and bleu.score == sum(bleu.scores) / 2 and bleu.interval > 0
    assert bleu.commit == "ab12" and bleu.versions == {"python": "3.11.7", "jax": "0.10.2"}
    assert bleu.device == "cpu:cpu, 2 CPU cores" and bleu.command == TRAINING
    assert bleu.seconds == 83 and bleu.date == "2026-11-22" and "tok:13a" in bleu.signature
    assert len(bleu.text_sha256) == 64 and exact.signature is None
    assert bleu.config_sha256 is None, "the settings of this folder are no experiment's"
    assert commands.why_not_repeated(TRAINING, "ab12") == ""
    row = f"| toy | bleu | 2 | {bleu.score:.0f} ± {bleu.interval:.0f} |"
    assert row in page.read_text() and page.read_text().endswith("after\n")
    page.write_text(page.read_text().replace("toy", "another"))
    with pytest.raises(DataError, match=str(page)):
        command.main(dataclasses.replace(options, check=True), tmp_path)
    capsys.readouterr()


TRAINED = [
    line for line in LINES if (line.commit or "", line.command) in commands.recorded_commands()
]


def test_each_command_that_trains_or_scores_is_recorded_with_its_settings():
    recorded = commands.recorded_commands()
    named = {(line.commit or "", line.command) for line in LINES}
    assert recorded.keys() <= named, "a command that no line has"
    for line in LINES:
        if line.config_sha256 and (line.commit or "", line.command) in recorded:
            (*_, cells, changed) = recorded[line.commit or "", line.command]
            digests = [
                settings.digest({name: cell[name] for name in names})
                for cell, names in zip(cells, changed, strict=True)
            ]
            assert line.config_sha256 in digests, line.system
    # The others read runs, or need what is not here any more.
    others = {line.command for line in LINES if line.command}
    others -= {command for _, command in recorded}
    gone = {name for name in others if commands.why_not_repeated(name, None)}
    assert gone == {"python -m experiments.benchmarks.scaling"}


@pytest.mark.parametrize(("commit", "line"), commands.recorded_commands())
def test_a_recorded_command_does_today_what_it_did_or_is_shown_with_its_commit(commit, line):
    why = commands.why_not_repeated(line, commit)
    shown = [
        pages.table_of([result]).rows[0][0]
        for result in LINES
        if (result.commit or "", result.command) == (commit, line)
    ]
    # A setting that is new or gone, and means the same, belongs into a table of commands.py.
    assert shown and all(("(with " in name) == bool(why) for name in shown), why


NOT_REPEATED = {
    "benchmarks.generate": "is no command",
    "finetune --run": "there is no option --run",
    "finetune --preset frozen_backbone": "optimizer.freeze was '' and is '^backbone/'",
    "--preset grammar --name grammar_post": "was ",
    "examples.recurrent": "experiments.examples.recurrent",
}
"""Parts of commands, and what their reasons say."""


def test_what_is_not_repeated_says_why():
    found = set()
    for commit, line in commands.recorded_commands():
        why = commands.why_not_repeated(line, commit)
        if why:
            (name,) = [name for name in NOT_REPEATED if name in line]
            assert NOT_REPEATED[name] in why
            found.add(name)
    assert found == NOT_REPEATED.keys()


@pytest.mark.parametrize(
    ("before", "today", "why"),
    [
        ({"model.d_ff": "64"}, {"model.d_ff": "64"}, []),
        ({"model.d_ff": "64"}, {"model.d_ff": "96"}, ["model.d_ff was 64 and is 96"]),
        ({"model.norm": '"rms"'}, {"model.norm.kind": '"rms"'}, []),
        (
            {"model.norm": '"rms"'},
            {"model.norm.kind": '"layer"'},
            ["model.norm.kind was 'rms' and is 'layer'"],
        ),
        ({"training.r_drop": "0.0"}, {}, []),
        ({"training.r_drop": "3.0"}, {}, ["training.r_drop, which was 3.0, is gone"]),
        ({}, {"training.usual_parts": "1"}, []),
        ({}, {"training.usual_parts": "4"}, ["training.usual_parts is new, and is 4"]),
        ({}, {"training.brand_new": "0"}, ["training.brand_new is new, and is 0"]),
        ({"training.grad_accumulation": "1"}, {"training.grad_accumulation": "null"}, []),
        ({"training.seed": "1", "name": '"a"'}, {"training.seed": "2", "name": '"b"'}, []),
    ],
)
def test_settings_are_compared_field_by_field(before, today, why):
    assert list(commands.differences(before, today)) == why


def test_a_preset_that_changes_is_found(monkeypatch):
    """As when the default translator's optimizer became another one."""
    from experiments.translation import presets

    line = ("d8a047da974b0002afc38cb0a7a48d51d5ca2a8c", "python -m experiments.translation.train")
    line = next(key for key in commands.recorded_commands() if key[1] == line[1])
    assert commands.why_not_repeated(line[1], line[0]) == ""
    grammar = presets.PRESETS["grammar"]
    slower = dataclasses.replace(grammar.optimizer, learning_rate=0.02)
    changed = dataclasses.replace(grammar, optimizer=slower)
    monkeypatch.setitem(presets.PRESETS, "grammar", changed)
    why = commands.why_not_repeated(line[1], line[0])
    assert why == "optimizer.learning_rate was 0.01 and is 0.02"


def test_a_digest_is_of_what_differs_from_the_defaults():
    @dataclasses.dataclass(frozen=True)
    class Before:
        name: str
        optimizer: OptimizerConfig = OptimizerConfig()
        width: int = 7

    @dataclasses.dataclass(frozen=True)
    class After:
        name: str
        optimizer: OptimizerConfig = OptimizerConfig()
        width: int = 7
        depth: int = 3
        rates: tuple[float, ...] = dataclasses.field(default_factory=tuple)

    def of(config):
        return settings.digest(settings.changed_settings(config))

    fast = OptimizerConfig(learning_rate=0.5)
    assert of(Before("a", fast)) == of(After("b", fast)), "new fields with defaults, another name"
    assert of(After("a", fast)) != of(After("a"))
    assert settings.changed_settings(After("a", fast)) == {
        "name": '"a"',
        "optimizer.learning_rate": "0.5",
    }
    assert of(After("a", depth=5)) != of(After("a"))


def test_a_command_that_names_what_is_not_there_is_refused():
    for line, said in (
        ("python -m experiments.nothing --seeds 3", "experiments.nothing"),
        (f"{TRAINING} --training.speed 3", "training.speed"),
        ("MaxText's train_compile", "is no command"),
    ):
        with pytest.raises(ConfigError, match=said):
            commands.parse(line)
    assert "no_such" in commands.why_not_repeated(f"{TRAINING} --training.loss x.no_such:f", "")


def test_the_time_of_a_run_is_that_of_all_its_starts(tmp_path):
    text = sentences(3, seed=1)
    run = write_run(tmp_path / "translation" / "resumed", text, text)
    environment = {"time": "2026-11-22T10:00:00+00:00", "earlier": [{"seconds": 40.0}]}
    environment |= {"finished": "2026-11-22T10:00:07+00:00"}
    (run / "env.json").write_text(json.dumps(environment))
    assert records.results_of([run], "own")[0].seconds == 47
    (run / "env.json").write_text(json.dumps(environment | {"earlier": [{}]}))
    assert records.results_of([run], "own")[0].seconds is None
