"""The READMEs and guides are true: their commands parse, what they name or link exists."""

import io
import re
import runpy
import shlex
import sys
import tokenize
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import jaxformer as jf
from experiments import plan, sweep
from experiments.harness import cli
from experiments.harness.cli.config_files import settings
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.translation.presets import PRESETS
from tests.documents import PAGES, ROOT, blocks, prose
from tests.two_processes import finished, start

COMMAND = r"""python -m experiments\.([a-z_]+(?:\.[a-z_]+)*)((?:"[^"\n]*"|[^"\n`<>|])*)"""
COMMANDS = sorted({found for text in PAGES.values() for found in re.findall(COMMAND, text)})
OWN_PARSERS = (
    *("examples.inside_flax", "examples.nnx_gpt", "examples.research_loop"),
    *("examples.linear_attention", "examples.speculative"),
)
"""Their own tests run them."""
COMMANDS = [command for command in COMMANDS if command[0] not in OWN_PARSERS]

PARSED = 97


@cache
def offered(command: str, args: str) -> set[str]:
    """The names of the options of a command, which is typed and ends when `args` are read."""
    words = shlex.split(args.replace("my_package.train", "translation"))
    for option in ("--config", "--resume", "--continue_from"):  # a run that a reader has made
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    names = set()
    if own := {"sweep": sweep.SweepOptions, "plan": plan.PlanOptions}.get(command):
        names, words = set(settings(own())), words or ["translation"]

    def and_end(parse: Callable[..., Any]) -> Callable[..., None]:
        def parse_only(presets: dict, *more: Any, **named: Any) -> None:
            names.update(settings(next(iter(presets.values()))))
            parse(presets, *more, **named)
            raise SystemExit(PARSED)

        return parse_only

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setattr(cli, "parse", and_end(cli.parse))
        patch.setattr(cli, "parse_base", and_end(cli.parse_base))
        patch.setattr(sys, "argv", [command, *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_module(f"experiments.{command}", run_name="__main__")
    assert end.value.code == PARSED
    return names


def slugs(text: str) -> set[str]:
    """The anchors of the titles of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def rows(text: str, header: str) -> dict[str, list[str]]:
    """The rows of the table whose first header is `header`: first cell -> the other cells."""
    table = re.search(rf"^\| {header} \|.*\n\|[-:| ]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table, f"no table begins with {header}"
    cells = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()
    )
    return {first.strip("`"): rest for first, *rest in cells}


def test_the_code_of_the_readme_prints_what_its_comments_say(capsys):
    variables, comments = {}, []
    for block in blocks("README.md", "python"):
        block.run(variables)
        comments += re.findall(r"^print\(.*\)  # (.*)$", block.code, re.MULTILINE)
    assert comments and capsys.readouterr().out.splitlines() == comments


@pytest.mark.long
def test_the_step_of_the_readme_has_one_loss_under_jit_pmap_shard_map_and_on_a_mesh():
    code = "\n".join(block.code for block in blocks("README.md", "python"))
    code += "print(*(x['loss'].max() for x in (one, copied, mapped, divided)))\n"
    (done,) = finished(start("-c", code, devices=4))
    losses = [float(word) for word in done.out.split()[-4:]]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


def test_the_layers_of_the_readme_are_the_folders_of_the_package():
    layers = rows(PAGES["README.md"], "layer").values()
    named = [name for folders, *_ in layers for name in re.findall(r"`(\w+)`", folders)]
    entries = Path(jf.__file__).parent.glob("[a-z]*")
    entries = [e for e in entries if e.suffix == ".py" or (e / "__init__.py").exists()]
    folders = [path.stem for path in entries]
    assert sorted(named) == sorted(folders)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_readme_names_or_links_exists(page):
    text = prose(page)
    absent = []
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^):]+))?\)", text):
        path = (ROOT / page).parent.joinpath(link) if link else ROOT / page
        if not path.exists() or (anchor and anchor not in slugs(path.read_text("utf-8"))):
            absent.append(f"{link}#{anchor}")
    names = re.findall(r"`((?:jaxformer|experiments|tests)/[^`\s]*)`", text)
    absent += [name for name in names if not (ROOT / name).exists()]
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", text)
    absent += [name for name in named if f"def {name}(" not in tests and "flickr" not in name]
    assert not absent


@cache
def names_of_the_code() -> set[str]:
    """The names in our code, without its comments and docstrings, and words of its strings."""
    names: set[str] = set()
    for folder in ("experiments", "jaxformer"):
        for path in (ROOT / folder).rglob("*.py"):
            names.add(path.stem)
            for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
                is_short = token.type == tokenize.STRING and not token.string.startswith('"""')
                if token.type == tokenize.NAME or is_short:
                    names |= set(re.findall(r"\w+", token.string))
    return names


ELSEWHERE = {
    *("fn", "jacfwd", "linearize", "null", "srun"),  # of JAX, JSON and Slurm
    *("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer"),  # of PyTorch
    *("after_attention", "after_cross_attention", "after_feed_forward"),  # a tap's, as it runs
    *("validation_NAME", "validation_a", "validation_custom_loss"),  # a metric's
    "target_parameters",  # of peft
    "my_parts",  # a reader's
    "validation_a",  # of a reader's file, a.txt
}
"""Names in pages that stand nowhere in our code."""


@pytest.mark.parametrize("page", PAGES)
def test_a_name_in_a_page_exists(page):
    spans = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", prose(page))
    words = {word for span in spans for word in span.split(".") if word}
    flags = {word for word in words if word.removeprefix("no_") in names_of_the_code()}
    tests = {word for word in words if word.startswith("test_")}  # see the test before
    assert words - tests - flags - ELSEWHERE - names_of_the_code() == set()


@pytest.mark.parametrize("command, args", COMMANDS)
def test_a_command_of_a_readme_parses(command, args):
    if "gs://" in args:
        pytest.importorskip("gcsfs", reason="needs the extra buckets")
    offered(command, args)


def test_an_option_that_a_readme_names_exists():
    known = {"preset", "config", "resume", "help", "trust_code"}
    for command, args in COMMANDS:
        for name in offered(command, args) if "gs://" not in args else ():
            group, dot, last = name.rpartition(".")
            known |= {name, group, f"{group}{dot}no_{last}"}
    written = {
        name for text in PAGES.values() for name in re.findall(r"(?<![\w-])--([\w.]+)", text)
    }
    others = {"field", "lr"}  # placeholders
    others |= {name for name in written if name.startswith("xla_")}  # of XLA_FLAGS
    others |= {"output_dir", "inplace", "to"}  # of ct2-transformers-converter and jupyter
    others |= {"no"}  # --no-deps of pip
    others |= {"array", "wrap", "echo", "full", "nodes", "ntasks", "gpus", "signal", "requeue"}
    others |= {"zone", "worker"}
    others |= {"report"}  # of tests.compilers.grid
    assert written - others - {"command"} <= known


def test_the_presets_are_as_the_readmes_say():
    told = rows(PAGES["experiments/translation/README.md"], "preset")
    for name, preset in PRESETS.items():
        model = preset.model
        numbers = [model.d_model, model.d_ff, model.num_heads, model.dropout_rate]
        numbers += [preset.data.batch_tokens, preset.optimizer.total_steps]
        layers = f"{model.num_encoder_layers}+{model.num_decoder_layers}"
        assert told[name][1:] == [layers, *(f"{number:,}" for number in numbers)]
    told = rows(PAGES["experiments/language_modelling/README.md"], "preset")
    for name, preset in LANGUAGE_PRESETS.items():
        model, data = preset.model, preset.data
        numbers = [model.num_encoder_layers + model.num_decoder_layers, model.d_model, model.d_ff]
        numbers += [model.num_heads, data.seq_len, data.batch_size, preset.optimizer.total_steps]
        assert [told[name][0], *told[name][2:]] == [preset.objective, *(f"{n:,}" for n in numbers)]
