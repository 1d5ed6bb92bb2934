"""Trainings that start from the encoder-decoder of others: layout of the ids, and scores."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxformer as jf
from experiments import runs
from experiments.harness.runs.run_folder import read_result
from experiments.harness.training.metric_inputs import MetricInputs
from experiments.harness.training.training_config import OptimizerConfig
from experiments.translation import evaluate, export, scoring, train, translate
from experiments.translation.corpus import Text, read_files
from experiments.translation.evaluate import rouge
from experiments.translation.load_run import load_run
from experiments.translation.prepare import sides
from experiments.translation.presets import PRESETS, Files, TranslationConfig
from experiments.translation.scoring import search_of
from jaxformer import load_pretrained, save_pretrained
from jaxformer.checkpoint import Checkpoints
from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.pretrained import Loaded
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.parameters import flatten
from tests.experiments.commands import bytes_of, call, metrics_of
from tests.experiments.tiny_runs import changed
from tests.experiments.trained_runs import shared_step
from tests.pretrained.models import T5, inputs_of, model_of, word_tokenizer
from tests.stored import stored

library = pytest.importorskip("tokenizers", reason="needs the extra experiments")
pytest.importorskip("safetensors", reason="needs the extra experiments")
pytest.importorskip("rouge_score", reason="needs the extra finetuning")

pytestmark = pytest.mark.long

WORDS = ["<pad>", "</s>", "<unk>", "sun", "moon", "star", "rain", "snow", "short", ":"]
PAD, EOS = 0, 1
MODEL = model_of(
    T5, {"vocab_size": len(WORDS), "max_len": 12, "embeddings.tied": "inputs", "d_model": 10}
)


@pytest.fixture(scope="module")
def folder(random_params, tmp_path_factory):
    """A T5 with its tokenizer and search settings."""
    path = tmp_path_factory.mktemp("t5") / "model"
    save_pretrained(
        path, MODEL, random_params(MODEL, *inputs_of(MODEL)), word_tokenizer(WORDS), family="t5"
    )
    asked = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD}
    (path / "generation_config.json").write_text(json.dumps(asked | {"max_length": 6}))
    return path


@pytest.fixture(scope="module")
def config(folder, tmp_path_factory) -> TranslationConfig:
    path = tmp_path_factory.mktemp("text") / "pairs.tsv"
    names = WORDS[3:8]
    lines = [f"{a} {b} {c}\t{a} {c}" for a in names for b in names for c in names[:3]]
    path.write_text("\n".join(lines) + "\n")
    files, held_out = Files(str(path)), Files(str(path.with_name("few.tsv")))
    path.with_name("few.tsv").write_text("\n".join(lines[:7]) + "\n")
    return replace(
        changed(
            PRESETS["summaries"],
            name="tuned",
            init_from=str(folder),
            runs=str(path.parent / "runs"),
            translation__prefix="short: ",
            data__source_len=7,
            data__target_len=5,
            data__batch_tokens=30,
            data__batch_size_multiple=1,
            data__train=files,
            data__validation=held_out,
            data__test=held_out,
            training__log_every=1,
            training__save_every=3,
            training__evaluate_every=3,
        ),
        optimizer=OptimizerConfig(
            schedule="constant", learning_rate=5e-2, warmup_steps=1, total_steps=7
        ),
    )


def scored(config: TranslationConfig, folder: Path, text: Text) -> scoring.Result:
    """What a run with `config` says of the model in `folder`."""
    loaded = load_run(folder)
    search, options = search_of(loaded)
    settings = search, replace(options, prefix=config.translation.prefix)
    return scoring.evaluate(replace(loaded, config=config, settings=settings), text, search)


def encoded(loaded: Loaded, config: TranslationConfig, *lines: list[str]) -> list[list[list[int]]]:
    """The ids of source and target in the run `config`, with the search of `loaded`."""
    search, options = search_of(loaded)
    options = replace(options, prefix=config.translation.prefix)
    config = replace(config, model=MODEL.config, search=search, translation=options)
    both, special = sides(config, loaded.tokenizer, loaded.target_tokenizer)
    ends = [] if special.eos is None else [special.eos]
    rows = [side.encode_batch(texts) for side, texts in zip(both, lines, strict=True)]
    return [[[*row, *ends] if row else [] for row in side] for side in rows]


def test_every_text_ends_also_where_it_is_cut(folder, config):
    config = changed(config, translation__prefix="")
    source, target = encoded(
        load_run(folder), config, ["sun moon", "sun " * 9, " "], ["star", "rain " * 8, ""]
    )
    assert source == [[3, 4, EOS], [3] * 6 + [EOS], []]
    assert target == [[5, EOS], [6, 6, 6, 6, EOS], []]


@pytest.mark.parametrize(("forced", "second"), [(None, 1), (4, 4)])
def test_texts_of_bart_begin_with_its_own_token(forced, second):
    bart = word_tokenizer(
        ["<pad>", "<s>", "</s>", "<unk>", "sun", "moon", "star"]
    ).library_tokenizer
    bart.post_processor = library.processors.BertProcessing(("</s>", 2), ("<s>", 1))
    tokenizer = Tokenizer(bart)
    search = SearchConfig(eos=(2,), forced_bos=forced)
    settings = TranslationOptions(bos=2, pad=0)
    bart = Loaded(MODEL, {}, tokenizer, tokenizer, (search, settings))
    source, target = encoded(bart, PRESETS["summaries"], ["sun moon"], ["star"])
    assert (source, target) == ([[1, 4, 5, 2]], [[second, 6, 2]])


def test_pairs_are_learned_stopped_resumed_to_the_bit_and_compared(config, tmp_path, capsys):
    config = changed(config, search__min_new_tokens=2)  # so that a text is written
    command = shared_step(train)
    whole = command.main(changed(config, runs=str(tmp_path / "whole"))).folder
    parts = changed(config, runs=str(tmp_path / "parts"))
    stopping = {"training__loggers": ("tests.experiments.trained_runs:StopAt4",)}
    assert call(command, changed(parts, **stopping)).code == 143
    again = call(command, parts)
    assert again.code == 0 and "from step 5 to 7" in again.out
    stopped = tmp_path / "parts" / "translation" / "tuned"
    assert bytes_of(stopped, 7) == bytes_of(whole, 7)
    assert metrics_of(stopped) == metrics_of(whole)
    for path in ("scores.json", "weights.json", "samples/test.tsv"):
        assert (stopped / path).read_bytes() == (whole / path).read_bytes()
    evaluated = json.loads(call(evaluate, {"--run": whole}).out.splitlines()[-1])
    recorded = {key: x for key, x in read_result(whole).scores.items() if key != "text"}
    assert {key: evaluated[key] for key in recorded} == recorded
    best = jf.translate_with_details(jf.load(whole), "sun moon")[0]
    written = jf.translate_with_details(jf.load(whole), "short: sun moon", prefix="")[0]
    unlearned = jf.translate_with_details(jf.load(whole), "sun moon", prefix="")[0]
    assert best.log_probs == written.log_probs != unlearned.log_probs
    row = call(translate, {"--run": whole, "--scores": True}, b"sun moon\n").out.split("\t")
    assert row[2:] == [best.text, " ".join(f"{x:.4f}" for x in best.log_probs) + "\n"]
    pairs = {"--source": tmp_path / "x", "--target": tmp_path / "y"}
    for path, line in zip(pairs.values(), ("sun moon", best.text), strict=True):
        path.write_text(line + "\n")
    forced = call(evaluate, {"--run": whole, "--forced": True} | pairs).out.split("\t")[1]
    assert forced == row[3]
    changes = {"runs": str(tmp_path / "whole"), "name": "other", "training__seed": 1}
    other = command.main(changed(config, **changes)).folder
    capsys.readouterr()
    runs.main(["compare", str(whole), str(other)])
    assert "rougeLsum" in capsys.readouterr().out


def test_adapters_learn_to_shorten_and_the_exported_folder_scores_the_same(
    folder, config, tmp_path
):
    changes = {"training__lora_rank": 4, "training__lora_targets": "kernel$|table$"}
    changes |= {"optimizer__total_steps": 60, "training__evaluate_every": 0, "runs": str(tmp_path)}
    run = train.train(changed(config, **changes))
    test = read_files(config.data.test)
    before, _ = scored(config, folder, test)
    assert run.scores["rouge1"] > before["rouge1"] + 10
    done = call(export, {"--run": run.folder, "--out": tmp_path / "saved"})
    assert done.code == 0, done.err
    saved, first = load_pretrained(tmp_path / "saved"), load_pretrained(folder)
    base = flatten(first.params)
    for path, leaf in flatten(saved.params).items():
        moved = path.endswith(("kernel", "table"))
        assert np.array_equal(leaf, base[path]) != moved, path
    for place in (run.folder, tmp_path / "saved"):
        scores, hypotheses = scored(config, place, test)
        assert scores == pytest.approx({name: run.scores[name] for name in scores})
    summaries = {name: x for name, x in scores.items() if name.startswith("rouge")}
    assert rouge(MetricInputs(None, test, {}, hypotheses)) == summaries


def test_a_run_is_learned_from_with_its_own_tokenizers(translation_run, tmp_path):
    config = changed(
        PRESETS["translations"],
        runs=str(tmp_path),
        init_from=f"{translation_run.folder}@6",
        data=translation_run.config.data,
        optimizer__warmup_steps=1,
        optimizer__total_steps=2,
        optimizer__freeze="^decoder/",
        training__evaluate_every=0,
    )
    run = train.train(config)
    before = flatten(stored(Checkpoints(translation_run.folder / "checkpoints"), 6))
    after = flatten(stored(Checkpoints(run.folder / "checkpoints"), 2))
    kept = {path for path in after if np.array_equal(after[path], before[path])}
    assert kept == {path for path in after if path.startswith("decoder/")}
    loaded = load_run(run.folder)
    assert loaded.tokenizer is loaded.target_tokenizer and run.scores["bleu"] >= 0
    names = [f"tokenizer/{path.name}" for path in (run.folder / "tokenizer").iterdir()]
    assert {
        (run.folder / x).read_bytes() == (translation_run.folder / x).read_bytes() for x in names
    }


def test_sources_are_scored_after_the_prefix_and_cut_as_in_training(folder, config, monkeypatch):
    read = []

    def read_ids(model, ids, *args, **kwargs):
        read.extend(ids)
        return translation_ids(model, ids, *args, **kwargs)

    translation_ids = jf.pipelines.translation._translate
    monkeypatch.setattr(jf.pipelines.translation, "_translate", read_ids)
    text = Text(["sun moon", "sun moon star rain snow sun", " "], ["sun"] * 3)
    scored(config, folder, text)
    assert read == [[8, 9, 3, 4, EOS], [8, 9, 3, 4, 5, 6, EOS], []]
    source, _ = encoded(load_run(folder), config, text.source, text.target)
    assert source == read
