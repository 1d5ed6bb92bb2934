"""A model of each family is fine-tuned, stopped and resumed, with the recipe of its folder."""

import json
from pathlib import Path

import pytest

from experiments.language_modelling import finetune
from experiments.language_modelling.finetune_presets import PRESETS as TASKS
from experiments.translation import train as translation
from experiments.translation.presets import PRESETS as TRANSLATION
from experiments.translation.presets import Files
from jaxformer.config import from_plain, to_plain
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pretrained import load_without_weights, save_pretrained
from tests.experiments.commands import call
from tests.experiments.tiny_runs import WORDS, changed
from tests.pretrained.models import MODELS, inputs_of, word_tokenizer

pytest.importorskip("safetensors", reason="needs the extra experiments")

FAMILIES = {family: name for name, (family, _) in reversed(MODELS.items())}
"""A model of each family, by the family's name."""
NAMES = ["<pad>", "<s>", "</s>", "<unk>", *WORDS, *"abcde", "en_XX", "__en__"]
ROLES = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture
def folder(random_params, tmp_path, request) -> Path:
    """The folder of `transformers` of a small model of a family, as a published one is written."""
    family = request.getfixturevalue("family")
    model = MODELS[FAMILIES[family]][1]
    path = tmp_path / "published"
    params = random_params(model, *inputs_of(model))
    names = NAMES
    if family in ("roberta", "xlm-roberta", "bart", "mbart", "m2m_100"):  # which have these ids
        names = ["<s>", "<pad>", *NAMES[2:]]
    words = word_tokenizer(names)
    words.library_tokenizer.add_special_tokens(names[-2:])  # languages, as mBART and M2M100 know
    save_pretrained(path, model, params, words, family=family)
    (path / "tokenizer_config.json").write_text(json.dumps(ROLES))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recipe_has_the_types_of_its_fields_wherever_it_was_read_from(family, folder):
    """Published files write 256 where a field is a float, and 1.0 may stand there, too."""
    content = json.loads((folder / "config.json").read_text())
    whole = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in content.items()
    }
    (folder / "config.json").write_text(json.dumps(whole))
    model = load_without_weights(folder).model
    recipe = getattr(model, "backbone", model).config
    as_json = json.dumps(to_plain(recipe))
    assert json.dumps(to_plain(from_plain(type(recipe), json.loads(as_json)))) == as_json


def settings_of(family: str, folder: Path) -> tuple:
    """The command that fine-tunes a model of a family, and the configuration of a short run."""
    steps = {
        "name": "tiny",
        "runs": str(folder.parent / "runs"),
        "init_from": str(folder),
        "optimizer__warmup_steps": 1,
        "optimizer__total_steps": 7,
        "training__log_every": 1,
        "training__save_every": 3,
        "training__evaluate_every": 0,
    }
    lines = [f"{a}\t{a} {b}" for a in WORDS[:5] for b in WORDS[:5]]
    path = folder.parent / "pairs.tsv"
    path.write_text("".join(f"{line}\n" for line in lines))
    if isinstance(MODELS[FAMILIES[family]][1], EncoderDecoder):
        files = Files(str(path))
        sizes = {"source_len": 5, "target_len": 5, "batch_tokens": 30, "batch_size_multiple": 1}
        data = {"train": files, "validation": files, "test": files} | sizes
        data = {f"data__{name}": value for name, value in data.items()}
        return translation, changed(TRANSLATION["summaries"], **steps, **data)
    data = {f"data__{part}": (str(path),) for part in ("train", "validation", "test")}
    data |= {"data__seq_len": 7, "data__batch_size": 5, "task__num_examples": 0}
    return finetune, changed(TASKS["classification"], **steps, **data)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stopped_fine_tuning_goes_on_by_its_command_and_by_resume(family, folder):
    command, config = settings_of(family, folder)
    stopping = {"training__loggers": ("tests.experiments.trained_runs:StopAt4",)}
    assert call(command, changed(config, **stopping)).code == 143
    again = call(command, config)
    assert again.code == 0 and "from step 5 to 7" in again.out, again.err
    run = folder.parent / "runs" / ("finetuning" if command is finetune else "translation") / "tiny"
    (run / "scores.json").unlink()
    resumed = call(command, {"--resume": str(run)})
    assert resumed.code == 0 and "from step 7 to 7" in resumed.out, resumed.err
