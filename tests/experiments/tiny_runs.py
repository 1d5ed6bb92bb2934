"""Settings of runs that train in a few seconds, on words in a folder.

`finished_translation`, `finished_causal` and `finished_masked` are the settings of the runs that a
session trains once (see `conftest.py`), with what is logged, evaluated and saved on the way.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from experiments.language_modelling.presets import PRESETS as LANGUAGE
from experiments.language_modelling.presets import LanguageConfig
from experiments.translation.presets import PRESETS as TRANSLATION
from experiments.translation.presets import Files, TranslationConfig
from tests.configs import changed

TOO_LONG = "sun " * 47
WORDS = "sun moon star rain snow wind hill lake tree bird fish sand".split()
SIZES = {"vocab_size": 283, "d_model": 16, "d_ff": 22, "num_heads": 2, "max_len": 23}


def language_config(folder: Path, **changes: Any) -> LanguageConfig:
    """A causal run of four steps on a.txt; b.txt is another text."""
    for name, words in (("a", WORDS), ("b", WORDS[::-1])):
        lines = (" ".join(three) + "\n" for three in product(words, words, words[:3]))
        (folder / f"{name}.txt").write_text("".join(lines))
    preset = LANGUAGE["python_stdlib"]
    config = replace(
        preset,
        runs=str(folder / "runs"),
        model=replace(preset.model, num_decoder_layers=1, **SIZES),
        data=replace(preset.data, train=(str(folder / "a.txt"),), seq_len=19, batch_size=3),
        optimizer=replace(preset.optimizer, name="adam", warmup_steps=1, total_steps=4),
        training=replace(preset.training, save_every=2, evaluate_every=2),
        prompts=(),
    )
    return changed(config, **changes)


def translation_config(folder: Path, **changes: Any) -> TranslationConfig:
    """A run of two steps on pairs of lines and their words in reverse."""
    lines = [" ".join(three) for three in product(WORDS[:7], WORDS[:7], WORDS[:3])]
    files = {}
    for part, texts in (("train", lines), ("validation", lines[:3]), ("test", lines[:2])):
        paths = folder / f"{part}.source", folder / f"{part}.target"
        paths[0].write_text("\n".join(texts) + "\n")
        paths[1].write_text("\n".join(" ".join(x.split()[::-1]) for x in texts) + "\n")
        files[part] = Files(*map(str, paths))
    preset = TRANSLATION["grammar"]
    adam = replace(preset.optimizer, name="adam", learning_rate=3e-3, schedule="constant")
    config = replace(
        preset,
        runs=str(folder / "runs"),
        model=replace(preset.model, num_encoder_layers=1, num_decoder_layers=1, **SIZES),
        data=replace(preset.data, corpus="files", batch_tokens=64, buckets=1, **files),
        optimizer=replace(adam, warmup_steps=1, total_steps=2),
        training=replace(preset.training, save_every=1, evaluate_every=0, log_every=1),
        search=replace(preset.search, beam_size=1, max_new_tokens=5),
    )
    return changed(config, **changes)


def finished_translation(folder: Path) -> TranslationConfig:
    """Seven steps; of the pairs one has an empty side and two are too long, one of them in test."""
    config = translation_config(
        folder,
        name="tiny",
        model__dropout_rate=0.1,
        optimizer__total_steps=7,
        training__save_every=3,
        training__evaluate_every=3,
        training__average_checkpoints=2,
        training__eval_beam_size=2,
        search__beam_size=2,
        translation__batch_size=1,
    )
    kept = Path(config.data.train.source).read_text().splitlines()
    add_pairs(config.data.train, [("", "leer"), (TOO_LONG, "sun")])
    add_pairs(config.data.validation, [(line, line) for line in kept[30:33]])
    add_pairs(config.data.test, [(kept[97], f"{kept[98]} sun"), (TOO_LONG, "sun")])
    return config


def add_pairs(files: Files, pairs: list[tuple[str, str]]) -> None:
    """Adds `pairs` at the end of the two files."""
    for path, lines in zip((files.source, files.target), zip(*pairs, strict=True), strict=True):
        with Path(path).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


def finished_causal(folder: Path) -> LanguageConfig:
    """Seven steps on two documents, with a text to validate and one to test on."""
    for name, words in (("validation", WORDS[1:9]), ("test", WORDS[3:])):
        (folder / f"{name}.txt").write_text("".join(f"{a} {b}\n" for a in words for b in words))
    settings = {
        "name": "tiny",
        "data__train": (str(folder / "a.txt"), str(folder / "b.txt")),
        "data__validation": (str(folder / "validation.txt"),),
        "data__test": (str(folder / "test.txt"),),
        "data__batch_size": 4,
        "model__dropout_rate": 0.1,
        "optimizer__schedule": "constant",
        "optimizer__warmup_steps": 3,
        "optimizer__total_steps": 7,
        "training__log_every": 1,
        "training__save_every": 3,
        "training__evaluate_every": 3,
        "training__average_checkpoints": 2,
        "training__grad_accumulation": 2,
        "training__ema_decay": 0.5,
        "sampling__max_new_tokens": 7,
        "completion__overflow": "refuse",
        "prompts": ("sun",),
    }
    return language_config(folder, **settings)


def finished_masked(folder: Path) -> LanguageConfig:
    """Five steps on masked pairs of pieces, rematerialised."""
    causal, preset = finished_causal(folder), LANGUAGE["bert_tiny"]
    sizes = SIZES | {"num_encoder_layers": 1, "pooler": "tanh"}
    embeddings = replace(preset.model.embeddings, num_types=2)
    return replace(
        preset,
        name="masked",
        runs=causal.runs,
        model=replace(preset.model, embeddings=embeddings, **sizes),
        data=replace(causal.data, batch_size=3, next_sentence=True),
        optimizer=replace(preset.optimizer, warmup_steps=2, total_steps=5),
        training=replace(preset.training, remat="blocks", save_every=3, evaluate_every=3),
        prompts=None,
    )
