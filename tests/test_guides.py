"""The commands and the code of the guides run, in short versions, one after the other.

Left to other tests: commands for several devices and machines (`tests/test_typed_commands.py`),
buckets (`tests/experiments/test_bucket_runs.py`), other people's programs and packages.
"""

import ast
import contextlib
import io
import json
import pickle
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.text.tokenizers import train_bpe
from tests.documents import GUIDES, Block, blocks, prose
from tests.experiments.tiny_runs import WORDS
from tests.made_once import made_once
from tests.pretrained.models import MODELS, inputs_of

PYTORCH, TRANSFORMERS, TRAIN, USE, INSIDE, PRETRAINED = (
    f"experiments/guides/{name}.md"
    for name in ("pytorch", "transformers", "train", "use", "inside", "pretrained")
)
WORKED = ("A decoder of x-transformers", "An encoder-decoder like the Annotated Transformer's")
"""The sections of the guide `pytorch` with models of other people."""
CASES: list[tuple[str, str | None]] = [
    *((page, None) for page in GUIDES if page not in (PYTORCH, TRANSFORMERS, TRAIN, PRETRAINED)),
    *((PRETRAINED, section) for section in sorted({x.section for x in blocks(PRETRAINED, "sh")})),
]
"""The longest guide runs section by section, so that processes share it."""
LEFT_OUT = (  # what it would change, where it is tested otherwise, or other people's programs
    r"--strategy (?!single)|--(mesh|distributed)\b|sbatch|://|^(export|pip|kill|sacrebleu|ct2-)"
    r"|my_package|--preset gpt2_124m --name|device$|experiments\.results (runs|--table)"
)
STEPS = "--optimizer.warmup_steps 1 --optimizer.total_steps 2"
RUN = f"""
    --model.vocab_size 283 --model.d_model 16 --model.d_ff 28 --model.num_heads 4
    --model.max_len 61 --model.num_decoder_layers 1 {STEPS} --training.log_every 1
    --training.save_every 1 --training.evaluate_every 0
"""
TEXTS = """
    --data.train.source train.en --data.train.target train.de --data.validation.source val.en
    --data.validation.target val.de --data.test.source test.en --data.test.target test.de
"""
TRANSLATION = f"""
    {RUN} --model.num_encoder_layers 1 --model.dropout_rate 0.0 --data.batch_tokens 190
    --data.buckets 1 --training.attention_fn reference --training.average_checkpoints 1
    --search.beam_size 2 --search.max_new_tokens 7
"""
LANGUAGE = f"{RUN} --data.seq_len 19 --data.batch_size 3 --training.evaluate_every 1 --prompts sun"
ADDED = {
    "translation.train": TRANSLATION,
    "language_modelling.train": LANGUAGE,
    "language_modelling.finetune": f"""
        {STEPS} --data.seq_len 41 --task.num_examples 0
    """,
    "language_modelling.generate": "--max_new_tokens 5",
    "sweep translation": f"{TRANSLATION} --seeds 1",
    "sweep language_modelling": f"{LANGUAGE} --seeds 1",
    "sweep finetuning": f"""
        {STEPS} --data.seq_len 41 --task.num_examples 0 --data.train train.tsv
        --data.test test.tsv --seeds 1
    """,
    "plan translation": f"{TRANSLATION} --compiler cpu",
}
"""What makes a command short; of an option that stands twice the last one counts."""


def run(command: str) -> None:
    """Runs the command as it is typed, shortened, in this process, with its text in place."""
    words = shlex.split(
        command.replace("--step 1500", "--step 1").replace("--stride 64", "--stride 7")
    )[2:]
    files = {sign: words.pop(words.index(sign) + 1) for sign in "<>" if sign in words}
    module, *words = (word for word in words if word not in files)
    name = module.removeprefix("experiments.")
    name = f"{name} {words[0]}" if name in ("sweep", "plan") else name
    short = ADDED.get(name, "")
    if "--continue_from" in command:
        short += " --optimizer.total_steps 3"
    if name == "language_modelling.finetune" and "--data.train " not in command:
        short += " --data.train train.tsv --data.test test.tsv"
    if "--init_from" in command:  # the weights decide the sizes
        short = re.sub(r"--model\.\S+\s+\S+", "", short)
    if re.search("shakespeare|gpt2", command):  # their tokenizers have sizes of their own
        short = re.sub(r"--model\.vocab_size\s+\S+", "", short)
    if name == "examples.research_loop":
        words[0] = "a.txt"
        short += " --steps 3 --length 19 --layers 1 --d_model 8"
    if "--preset spans" in command:
        short += " --task.doc_stride 7"
    if re.search("_masked|/bert ", command) and "generate" in name:  # it continues no text
        short = ""
    if "--data.test.source test.tsv" in command:  # the pairs are too few to set some aside
        short += " --data.validation.source test.tsv"
    if "--strategy single" in command:
        short += " --name single"
    if "_masked" in command:
        short = short.replace("num_decoder", "num_encoder").replace("sun", "<mask>")
    if not re.search(r"--(data\.train|config|resume|continue_from)", command):
        kinds = {
            TRANSLATION: TEXTS,
            LANGUAGE: " --data.train a.txt --data.validation b.txt --data.test c.txt",
        }
        short += kinds.get(ADDED.get(name, "").removesuffix(" --seeds 1"), "")
    errors = io.StringIO()
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", [name, *words, *short.split()])
        if "<" in files:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.FileIO(files["<"])))
        code = 0
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            code = end.code
    assert not code, f"{command}: {errors.getvalue()[-500:]}"
    if ">" in files:
        Path(files[">"]).write_bytes(out.buffer.getvalue())


def run_all(block: Block) -> None:
    """Runs the commands of a block, one after the other."""
    for command in block.code.splitlines():
        if not re.search(LEFT_OUT, command):
            run(command)


@contextlib.contextmanager
def typing_in(folder: Path) -> Iterator[None]:
    """Commands are typed in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield


@pytest.fixture
def place(tmp_path_factory, worker_id, random_params, tmp_path):
    """A folder in which commands are typed: the texts and the models that the guides name."""

    def make(folder: Path) -> None:
        with typing_in(folder):
            write_texts()
            write_models(random_params)

    shared = made_once(tmp_path_factory, "guides", make, worker_id)
    with typing_in(shutil.copytree(shared, tmp_path / "place")):
        yield


@pytest.fixture
def runs(place, tmp_path_factory, worker_id):
    """The runs that most guides read, trained once."""

    def make(folder: Path) -> None:
        with typing_in(folder):
            write_texts()
            run("python -m experiments.translation.train")
            run("python -m experiments.language_modelling.train")
            run("python -m experiments.language_modelling.train --preset python_stdlib_masked")

    shared = made_once(tmp_path_factory, "runs-of-guides", make, worker_id)
    shutil.copytree(shared / "runs", "runs")


@pytest.fixture
def runs_of_train(runs):
    """The runs that the guide `train` makes: shortened, they differ from the first in the seed."""
    for name in ("seed1", "wider", "pairs"):
        folder = Path("runs/translation") / name
        shutil.copytree("runs/translation/grammar", folder)
        config = json.loads((folder / "config.json").read_text())
        config["training"]["seed"] = 1
        (folder / "config.json").write_text(json.dumps(config | {"name": name}))


def write_texts() -> None:
    lines = [" ".join(three) for three in product(WORDS[:7], WORDS[:5], WORDS[:3])]
    fields = ("en", "de", "label", "premise", "hypothesis")
    messages = [{"role": "user", "content": "sun"}, {"role": "assistant", "content": "moon"}]
    records = [
        json.dumps({**dict.fromkeys(fields, line), "label": line.split()[0], "messages": messages})
        for line in lines
    ]
    answer = {"text": "moon", "answer_start": 4}
    asked = {"id": "a", "question": "what?", "answers": [answer]}
    paragraphs = [{"context": "sun moon star", "qas": [{**asked, "id": str(n)}]} for n in range(23)]
    squad = json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]})
    tabs = [line.replace(" ", "\t", 1) for line in lines]
    long = "a.txt text.txt train.en train.de my.en my.de".split()
    short = "b.txt c.txt d.txt held-out.txt prompt.txt val.en val.de test.en test.de in.en"
    short += " mine.py other.py"
    kinds = dict.fromkeys(long, lines) | dict.fromkeys(short.split(), lines[:7])
    kinds |= {"train.tsv": tabs, "dev.tsv": tabs[:7], "test.tsv": tabs[:7], "train.jsonl": records}
    kinds |= {"test.jsonl": records[:7], "chat.jsonl": records, "held-out.jsonl": records[:7]}
    pairs = [json.dumps({"prompt": x, "chosen": "moon", "rejected": "star"}) for x in lines]
    kinds |= {"pairs.jsonl": pairs, "train-v1.1.json": [squad], "dev-v1.1.json": [squad]}
    for name, each in kinds.items():
        Path(name).write_text("\n".join(each) + "\n")
    write_ids(Path("data/shakespeare_char"), " ".join(lines))


def write_ids(folder: Path, text: str) -> None:
    """Writes train.bin, val.bin and meta.pkl as nanoGPT's prepare.py does."""
    folder.mkdir(parents=True)
    numbers = {character: i for i, character in enumerate(sorted(set(text)))}
    for name, part in (("train", text), ("val", text[-499:])):
        np.array([numbers[x] for x in part], np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"stoi": numbers}))


def write_models(random_params: Any) -> None:
    special = {"bert": ("<pad>", "<bos>", "<eos>", "[MASK]")}
    for name in ("gpt2", "llama", "bert, masked", "t5", "marian"):
        config = replace(MODELS[name][1].config, vocab_size=283, max_len=61, d_model=60)
        model = MODELS[name][1].clone(config=config)
        name = name.partition(",")[0]
        options = {"special_tokens": special[name]} if name in special else {}
        tokenizer = train_bpe(["sun moon star rain"], 283, **options)
        Path("folder/of").mkdir(parents=True, exist_ok=True)
        params = random_params(model, *inputs_of(model))
        jf.save_pretrained(f"folder/of/{name}", model, params, tokenizer, family=name)
    shutil.copytree("folder/of/llama", "smollm2")
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    Path("smollm2/chat_template.jinja").write_text(template)


@pytest.mark.long
def test_the_commands_of_the_guide_to_training_run(runs):
    for block in blocks(TRAIN, "sh"):
        run_all(block)


@pytest.mark.long
@pytest.mark.parametrize(("page", "section"), CASES)
def test_the_commands_and_the_code_of_a_guide_run(page, section, runs_of_train):
    variables: dict[str, Any] = {}
    for block in blocks(page, "sh", "python"):
        if section not in (None, block.section):
            continue
        if block.language == "sh":
            run_all(block)
        elif page in (USE, INSIDE):
            block.run(variables)


@pytest.mark.long
def test_three_lines_of_the_readme_lead_from_a_run_to_a_result(runs):
    """Of runs with the names that stand there, but small: the results have the types shown."""
    (block,) = blocks("README.md", "pycon")
    code, _, _ = block.code.partition(">>> from")  # the rest is of a published model
    variables: dict[str, Any] = {}
    shown = re.findall(r"^>>> (.*)\n((?:[^>\n].*\n)?)", code, re.MULTILINE)
    assert len(shown) == 5
    for line, result in shown:
        if result:
            value, told = eval(line, variables), ast.literal_eval(result)
            assert type(value) is type(told) and value, line
        else:
            exec(line, variables)


@pytest.mark.peer
def test_a_model_of_torch_is_loaded_changed_compared_and_taken_back(capsys):
    pytest.importorskip("torch", reason="the guide needs torch")
    variables: dict[str, Any] = {}
    for block in (x for x in blocks(PYTORCH, "python") if x.section not in WORKED):
        block._replace(code=re.sub(r"range\([12]00\)", "range(2)", block.code)).run(variables)
    shown = re.findall(r"^    (.*)$", prose(PYTORCH).partition(f"## {WORKED[0]}")[0], re.M)
    printed = capsys.readouterr().out
    assert [re.sub(r"\d", "0", line) for line in printed.splitlines()] == [
        re.sub(r"\d", "0", line) for line in shown
    ]
    differences = re.findall(r"difference.*: (.*)", printed)
    assert len(differences) == 2 and max(map(float, differences)) < 1e-4


@pytest.mark.peer
def test_models_of_other_people_compute_the_same_and_have_the_same_gradients(capsys):
    pytest.importorskip("x_transformers", reason="the guide needs x-transformers")
    variables: dict[str, Any] = {}
    for block in (x for x in blocks(PYTORCH, "python") if x.section in WORKED):
        block.run(variables)
    found = re.findall(r"outputs: (.*), gradients: (.*)", capsys.readouterr().out)
    assert len(found) == len(WORKED)
    for outputs, gradients in found:
        assert float(outputs) < 1e-5 and float(gradients) < 1e-4


@pytest.mark.peer
def test_a_folder_of_transformers_is_loaded_changed_compared_and_written(place, capsys):
    pytest.importorskip("transformers", reason="the guide needs transformers")
    for block in blocks(TRANSFORMERS, "python", "sh"):
        if "def variants" in block.code:
            Path("my_parts.py").write_text(block.code)
        elif block.language == "python":
            block.run({})
            assert capsys.readouterr().out.startswith("def read(")
        else:
            run_all(block)
