"""What the READMEs say is so: their code runs, their commands parse, their names exist."""

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxformer
from experiments import commands
from experiments.benchmarks import (
    attention,
    decode,
    generate,
    growth,
    train_gpt,
    train_translation,
)
from experiments.benchmarks.gpu import __main__ as gpu
from experiments.embeddings import bank, ladder, lookup, positions
from experiments.language_modelling import embed, evaluate, fill_mask, finetune, sample
from experiments.language_modelling.plan import LanguagePlan
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.planning import with_machine
from experiments.pytorch_twin import compare, to_safetensors
from experiments.research import inside_linen, own_parts, own_rules, plain_attention
from experiments.translation.export import ExportOptions, export
from experiments.translation.plan import TranslationPlan
from experiments.translation.presets import PRESETS
from experiments.translation.score import ScoreOptions
from experiments.translation.trained import Trained
from experiments.translation.translate import TranslateOptions
from jaxformer.config import TransformerConfig
from jaxformer.generation import BeamConfig, translate
from jaxformer.models import EncoderDecoder
from jaxformer.tokenizers import train_bpe

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TRANSLATION = ROOT / "experiments" / "translation" / "README.md"
TWIN = ROOT / "experiments" / "pytorch_twin" / "README.md"
EMBEDDINGS = ROOT / "experiments" / "embeddings" / "README.md"
BENCHMARKS = ROOT / "experiments" / "benchmarks" / "README.md"
RESEARCH = ROOT / "experiments" / "research" / "README.md"
LANGUAGE_MODELLING = ROOT / "experiments" / "language_modelling" / "README.md"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        README,
        ROOT / "experiments" / "README.md",
        TRANSLATION,
        LANGUAGE_MODELLING,
        TWIN,
        EMBEDDINGS,
        RESEARCH,
        BENCHMARKS,
    )
}
OPTIONS = {
    "translation.prepare": PRESETS,
    "translation.train": PRESETS,
    "translation.translate": {"default": TranslateOptions()},
    "translation.score": {"default": ScoreOptions()},
    "translation.export": {"default": ExportOptions()},
    "language_modelling.prepare": LANGUAGE_PRESETS,
    "language_modelling.train": LANGUAGE_PRESETS,
    "language_modelling.sample": {"default": sample.SampleOptions()},
    "language_modelling.evaluate": {"default": evaluate.EvaluateOptions()},
    "language_modelling.fill_mask": {"default": fill_mask.FillMaskOptions()},
    "language_modelling.embed": {"default": embed.EmbedOptions()},
    "language_modelling.finetune": finetune.PRESETS,
    "pytorch_twin.train_gpt": LANGUAGE_PRESETS,
    "pytorch_twin.compare": compare.presets(),
    "embeddings.positions": {"default": positions.PositionOptions()},
    "embeddings.lookup": {"default": lookup.LookupOptions()},
    "embeddings.ladder": {"default": ladder.LadderOptions()},
    "embeddings.bank": {"default": bank.BankOptions()},
    "research.inside_linen": {"default": inside_linen.SeriesOptions()},
    "research.inside_nnx": {"default": inside_linen.SeriesOptions()},
    "research.plain_attention": {"default": plain_attention.ReachOptions()},
    "research.own_parts": {"default": own_parts.PartsOptions()},
    "research.own_rules": {"default": own_rules.RulesOptions()},
    "benchmarks.train_gpt": train_gpt.PRESETS,
    "benchmarks.decode": {"default": decode.DecodeOptions()},
    "benchmarks.generate": {"default": generate.GenerateOptions()},
    "benchmarks.train_translation": {"default": train_translation.TranslationOptions()},
    "benchmarks.attention": {"default": attention.AttentionOptions()},
    "benchmarks.growth": {"default": growth.GrowthOptions()},
    "translation.plan": with_machine(PRESETS, TranslationPlan),
    "language_modelling.plan": with_machine(LANGUAGE_PRESETS, LanguagePlan),
}
PARSERS = {
    "benchmarks.gpu": gpu.parse,
    "pytorch_twin.to_safetensors": to_safetensors.parse,
}


def text_of(path: Path) -> str:
    return PAGES[str(path.relative_to(ROOT))]


def python_of(path: Path) -> str:
    """The one block of Python of a README."""
    (code,) = re.findall(r"^```python\n(.*?)^```", text_of(path), re.DOTALL | re.MULTILINE)
    return code


def spans(text: str) -> list[str]:
    """What stands between backticks outside code blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def rows(text: str) -> Iterator[list[str]]:
    """The cells of every row of every table."""
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def option_names(value: Any, prefix: str = "") -> Iterator[str]:
    """The dotted name of every field of a dataclass, at every depth."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        yield prefix + field.name
        if dataclasses.is_dataclass(inner):
            yield from option_names(inner, f"{prefix}{field.name}.")


def written_commands() -> list[tuple[str, str]]:
    pattern = r"""python -m experiments\.([a-z_]+\.\w+)((?:"[^"\n]*"|[^"\n`<>|])*)"""
    return sorted({found for text in PAGES.values() for found in re.findall(pattern, text)})


def test_a_newcomer_reads_at_most_150_lines():
    assert len(text_of(README).splitlines()) <= 150


def test_the_code_of_the_readme_prints_what_it_says(capsys):
    code = python_of(README)
    exec(compile(code, str(README), "exec"), {})
    said = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert len(said) == 3
    assert capsys.readouterr().out.splitlines() == said


def test_the_picture_of_the_floors_shows_the_modules_that_exist():
    lines = re.findall(r"^\| \d \w+[^|]*\|.*\|$", text_of(README), re.MULTILINE)
    shown = [name for line in lines for name in spans(line)]
    entries = Path(jaxformer.__file__).parent.glob("[a-z]*")
    assert sorted(shown) == sorted(
        path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()
    )


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_readme_names_exist(page):
    names = [
        span for span in spans(PAGES[page]) if re.match(r"(jaxformer|experiments|tests)/", span)
    ]
    folder = (ROOT / page).parent
    links = [link for link in re.findall(r"\]\(([^)#:]+)\)", PAGES[page])]
    absent = [name for name in names if not (ROOT / name).exists()]
    absent += [link for link in links if not (folder / link).exists()]
    assert names + links and not absent


def test_links_to_headings_meet_one():
    for page, text in PAGES.items():
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= slugs, page


@pytest.mark.parametrize(("command", "args"), written_commands())
def test_a_command_of_a_readme_can_be_typed(command, args):
    if command in PARSERS:
        PARSERS[command](shlex.split(args))
    else:
        commands.parse(OPTIONS[command], shlex.split(args))


def test_an_option_that_a_readme_names_exists():
    known = {"preset", "help"}
    for presets in OPTIONS.values():
        known.update(option_names(next(iter(presets.values()))))
    named = {m for text in PAGES.values() for m in re.findall(r"(?<![\w-])--([\w.]+)", text)}
    others = {"field", "echo", "full"}  # a placeholder, of sacreBLEU, of tests.faults
    others |= {"nodes", "ntasks", "gpus", "signal", "requeue"}  # SLURM's
    others |= {"small", "minutes", "only"}  # of benchmarks.gpu
    others |= {"zone", "worker", "command"}  # of gcloud
    assert named - others <= known


def test_the_table_of_presets_is_what_the_presets_are():
    told = {row[0]: row[2:] for row in rows(text_of(TRANSLATION)) if len(row) == 9}
    for name, preset in PRESETS.items():
        model = preset.model
        numbers = [model.d_model, model.d_ff, model.num_heads, model.dropout_rate]
        numbers += [preset.data.tokens, preset.optimizer.total_steps]
        layers = f"{model.num_encoder_layers}+{model.num_decoder_layers}"
        assert told[name] == [layers, *(f"{number:,}" for number in numbers)]


def test_the_table_of_language_models_is_what_the_presets_are():
    told = {row[0]: row[1:] for row in rows(text_of(LANGUAGE_MODELLING)) if len(row) == 10}
    for name, preset in LANGUAGE_PRESETS.items():
        model, data = preset.model, preset.data
        layers = model.num_encoder_layers + model.num_decoder_layers
        numbers = [layers, model.d_model, model.d_ff, model.num_heads, data.length, data.rows]
        numbers.append(preset.optimizer.total_steps)
        assert told[name][0] == preset.objective
        assert told[name][2:] == [f"{number:,}" for number in numbers]


def test_the_table_of_exit_codes_is_complete():
    page = PAGES["experiments/README.md"]
    told = {
        int(code)
        for row in rows(page)
        for code in re.findall(r"^[\d, ]+$", row[0])
        for code in code.split(",")
    }
    assert told == {0, 1, 2, 65, 66, 70, 74, 130, 143}


def test_the_exported_program_is_loaded_by_the_lines_that_the_readme_gives(
    tmp_path, capsys, random_params, assert_equal
):
    code = python_of(TRANSLATION)
    (line,) = re.findall(r'encode\("(.*)"\)', code)
    tokenizer = train_bpe([line], 290)
    size = {"d_model": 12, "d_ff": 20, "num_heads": 3, "max_len": 40}
    config = TransformerConfig(
        tokenizer.vocab_size, **size, num_encoder_layers=1, num_decoder_layers=1
    )
    model, ids = EncoderDecoder(config), np.ones((2, 5), np.int32)
    search = BeamConfig(width=2, extra_length=3)
    trained = Trained(
        replace(PRESETS["grammar"], model=config, search=search),
        model,
        jax.tree.map(jax.numpy.asarray, random_params(model, ids, ids)),
        tokenizer,
        tokenizer,
    )
    folder = tmp_path / "runs" / "translation" / "grammar" / "tokenizer"
    folder.mkdir(parents=True)
    tokenizer.save(folder / "target.json")
    (tmp_path / "translate.jax").write_bytes(export(trained, 8, 32, ("cpu",)))
    with contextlib.chdir(tmp_path):
        names = {}
        exec(compile(code, str(TRANSLATION), "exec"), names)
    ((best, _),) = translate(model, trained.params, [line], tokenizer, tokenizer, search)
    assert_equal(names["found"]["scores"][0, 0], best.score)
    assert capsys.readouterr().out == best.text + "\n"
