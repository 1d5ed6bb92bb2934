"""Settings of runs that train in a few seconds, on words in a folder."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from experiments.language_modelling.presets import PRESETS as LANGUAGE
from experiments.language_modelling.presets import LanguageConfig
from experiments.translation.presets import PRESETS as TRANSLATION
from experiments.translation.presets import Files, TranslationConfig
from jaxformer.config import with_fields

WORDS = "sun moon star rain snow wind hill lake tree bird fish sand".split()
SIZES = {"vocab_size": 283, "d_model": 16, "d_ff": 22, "num_heads": 2, "max_len": 23}


def changed(config: Any, **changes: Any) -> Any:
    """`config` with fields of its parts, such as optimizer__total_steps=7."""
    return with_fields(config, {name.replace("__", "."): x for name, x in changes.items()})


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
    config = replace(
        preset,
        runs=str(folder / "runs"),
        model=replace(preset.model, num_encoder_layers=1, num_decoder_layers=1, **SIZES),
        data=replace(preset.data, corpus="files", batch_tokens=64, buckets=1, **files),
        optimizer=replace(preset.optimizer, schedule="constant", warmup_steps=1, total_steps=2),
        training=replace(preset.training, save_every=1, evaluate_every=0, log_every=1),
        search=replace(preset.search, beam_size=1, max_new_tokens=5),
    )
    return changed(config, **changes)
