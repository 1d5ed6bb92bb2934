"""Fine-tuning of language models: what is learned from which rows, and runs on the one loop."""

import json
import operator
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer as jf
from experiments import runs as runs_command
from experiments.harness import cli
from experiments.harness.runs.run_folder import read_result
from experiments.harness.training.rows import Rows, choose, predict, take
from experiments.language_modelling import (
    evaluate,
    export,
    finetune,
    finetune_start,
    generate,
    train,
)
from experiments.language_modelling.finetune_presets import PRESETS, FinetuneConfig
from experiments.language_modelling.load_run import load_run
from experiments.language_modelling.presets import DataConfig
from experiments.language_modelling.tasks import chat, classification, preference, spans, squad
from experiments.language_modelling.tasks import rows as task_rows
from experiments.language_modelling.tasks.chat_template import (
    PLAIN_TEMPLATE,
    ChatTemplate,
    load_template,
    special_names,
)
from experiments.language_modelling.tasks.finetune_task import Encoded
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import with_fields
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.heads import Classifier
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.pretrained import load_pretrained, save_pretrained
from jaxformer.text.tokenizers import (
    BOS,
    EOS,
    MASKED_SPECIAL_TOKENS,
    Tokenizer,
    load_tokenizer,
    train_bpe,
    train_characters,
)
from jaxformer.training.parameters import flatten
from tests.experiments.commands import bytes_of, call, metrics_of, refused
from tests.experiments.tiny_runs import WORDS, changed
from tests.pretrained.models import LLAMA, PLAIN_BERT
from tests.stored import stored

T = 23
TEXTS = [f"the {a} is {b} and {c}." for a in WORDS for b in WORDS for c in WORDS[:2] if a != b]
SIZES = {"vocab_size": 300, "max_len": 71}
BERT = with_fields(PLAIN_BERT, SIZES | {"num_encoder_layers": 1})
GPT = with_fields(LLAMA, SIZES | {"num_decoder_layers": 1, "d_model": 20})
CAUSAL = FinetuneConfig("causal", GPT, data=DataConfig(seq_len=T))
MASKED = replace(CAUSAL, model=BERT, objective="masked", init_from="x")
LABELLED = list(
    zip(
        ["light"] * 5 + ["wet"] * 4 + ["far"] * 6,
        [f"the {word} is here" for word in "sun moon star sun moon rain snow rain lake".split()]
        + [f"a {word} and a {word}" for word in "hill tree bird fish sand hill".split()],
        strict=True,
    )
)
PAIRS = [
    (label, f"the {word} is here", f"the {other}")
    for label, word, other in zip(["yes", "no", "maybe"] * 3, WORDS, WORDS[3:], strict=False)
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 290, special_tokens=MASKED_SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def folder(random_params, tokenizer, tmp_path_factory):
    """The folder of `transformers` of a causal or a masked model."""
    root = tmp_path_factory.mktemp("published")

    def write(name: str) -> Path:
        if not (root / name).exists():
            kind, sizes = {"causal": (DecoderOnly, GPT), "masked": (EncoderOnly, BERT)}[name]
            model = kind(replace(sizes, vocab_size=tokenizer.vocab_size))
            params = random_params(model, np.ones((2, T), np.int32))
            save_pretrained(root / name, model, params, tokenizer)
        return root / name

    return write


def write_lines(path: Path, *lines: str) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def squad_json(*questions: tuple[str, str, list[tuple[str, int]]]) -> dict:
    """The JSON of SQuAD of (context, question, [(answer, start)])."""
    paragraphs = [
        {
            "context": context,
            "qas": [
                {
                    "id": f"q{number}",
                    "question": question,
                    "answers": [{"text": text, "answer_start": at} for text, at in answers],
                }
            ],
        }
        for number, (context, question, answers) in enumerate(questions)
    ]
    return {"version": "1.1", "data": [{"title": "x", "paragraphs": paragraphs}]}


QUESTIONS = squad_json(
    ("the sun is rain and snow. the moon is wind and sand.", "moon?", [("wind and sand", 38)]),
    (" ".join(TEXTS[:7]), "star?", [(TEXTS[2][4:7], len(" ".join(TEXTS[:2])) + 5)]),
    ("the lake is hill.", "what is the lake?", [("hill", 12), ("hill.", 12)]),
)


def conversation(asked: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "say it"},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer},
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of examples for each kind of task."""
    place = tmp_path_factory.mktemp("examples")
    (place / "spans.json").write_text(json.dumps(QUESTIONS), encoding="utf-8-sig")
    lines = {"classification": LABELLED, "pairs": PAIRS}
    found = {"spans": str(place / "spans.json")}
    for kind, rows in lines.items():
        found[kind] = write_lines(place / f"{kind}.tsv", *("\t".join(row) for row in rows))
    said = (json.dumps({"messages": conversation(f"the {a}", "is rain")}) for a in WORDS[:7])
    found["chat"] = write_lines(place / "chat.jsonl", *said)
    pairs = ({"prompt": f"the {a}", "chosen": "is snow", "rejected": "is rain"} for a in WORDS[:7])
    return found | {"preference": write_lines(place / "pairs.jsonl", *map(json.dumps, pairs))}


def config_of(kind: str, start: Path, path: str, runs: Path, **changes) -> FinetuneConfig:
    """A run of a few steps on the examples of a file, which it is also tested with."""
    config = changed(
        PRESETS[kind],
        name="tiny",
        runs=str(runs),
        init_from=str(start),
        data__train=(path,),
        data__validation=(path,),
        data__test=(path,),
        data__seq_len=70 if kind in ("chat", "preference") else T,
        data__batch_size=5,
        task__num_examples=0,
        task__doc_stride=3,
        optimizer__learning_rate=1e-2,
        optimizer__warmup_steps=1,
        optimizer__total_steps=7,
        training__log_every=1,
        training__save_every=3,
        training__evaluate_every=3,
    )
    return changed(config, **changes)


STARTS = {"classification": "causal", "pairs": "masked", "spans": "masked", "chat": "causal"}
STARTS["preference"] = "causal"


@pytest.mark.long
@pytest.mark.parametrize("kind", STARTS)
def test_a_task_is_learned_stopped_resumed_to_the_bit_and_compared(
    kind, folder, files, tmp_path, capsys
):
    config = config_of(kind, folder(STARTS[kind]), files[kind], tmp_path / "whole")
    whole = finetune.train(config).folder
    stopping = {"training__loggers": ("tests.experiments.trained_runs:StopAt4",)}
    parts = changed(config, runs=str(tmp_path / "parts"))
    assert call(finetune, changed(parts, **stopping)).code == 143
    again = call(finetune, parts)
    assert again.code == 0 and "from step 5 to 7" in again.out
    stopped = tmp_path / "parts" / "finetuning" / "tiny"
    assert bytes_of(stopped, 7) == bytes_of(whole, 7)
    assert metrics_of(stopped) == metrics_of(whole)
    for path in ("scores.json", "weights.json", f"samples/test{'-losses' * (kind == 'chat')}.tsv"):
        assert (stopped / path).read_bytes() == (whole / path).read_bytes()
    other = finetune.train(changed(config, name="other", training__seed=1)).folder
    assert bytes_of(other, 7) != bytes_of(whole, 7)
    capsys.readouterr()
    metric = {"spans": "f1", "chat": "loss", "preference": "loss"}.get(kind, "accuracy")
    runs_command.main(["compare", str(whole), str(other), "--metric", metric])
    said = capsys.readouterr().out
    assert metric in said and "2" in said
    scores = read_result(whole).scores
    assert metric in scores and scores["text"] == "test" and len(scores["text_sha256"]) == 64


@pytest.mark.long
def test_a_classifier_of_a_run_learns_more_from_its_weights_and_is_exported(
    causal_run, files, tmp_path, capsys
):
    config = config_of(
        "classification", causal_run.folder, files["classification"], tmp_path / "runs"
    )
    frozen = changed(config, name="frozen", optimizer__freeze="^backbone/")
    run = finetune.train(frozen).folder
    before = flatten(load_run(causal_run.folder).params)
    after = flatten(stored(Checkpoints(run / "checkpoints"), 7))
    for path, leaf in after.items():
        if path.startswith("backbone/"):
            np.testing.assert_array_equal(leaf, before[path.removeprefix("backbone/")])
    assert json.loads((run / "parent.json").read_text())["run"] == str(causal_run.folder)
    scratch = finetune.train(changed(config, name="scratch", task__from_scratch=True)).folder
    table = flatten(stored(Checkpoints(scratch / "checkpoints"), 7))
    assert not np.allclose(table["backbone/embedding/table"], before["embedding/table"], atol=0.05)
    learned = finetune.train(
        changed(config, name="learned", optimizer__total_steps=97, training__evaluate_every=0)
    )
    assert learned.scores["accuracy"] > 0.9
    loaded = load_run(learned.folder)
    assert isinstance(loaded.model, Classifier) and loaded.model.classes == 3


def test_a_setting_that_contradicts_the_start_is_refused_and_shorter_rows_are_said(
    folder, files, tmp_path, capsys
):
    config = config_of("chat", folder("causal"), files["chat"], tmp_path)
    joined = changed(config, data__isolate_documents=False)
    with pytest.raises(ConfigError, match=r"data\.isolate_documents is False here, but True in"):
        finetune_start.with_start(joined)
    longest = GPT.max_len
    assert finetune_start.with_start(changed(config, data__seq_len=longest)).data.seq_len == longest
    assert "rows have" not in capsys.readouterr().out
    cut = finetune_start.with_start(changed(config, data__seq_len=longest + 1))
    assert cut.data.seq_len == longest
    said = capsys.readouterr().out
    assert f"rows have {longest} tokens, not data.seq_len={longest + 1}" in said


def test_a_run_on_documents_with_settings_of_their_own_may_be_fine_tuned(
    causal_run, masked_run, files, tmp_path
):
    """The settings are refused where they are given to the fine-tuning alone."""
    start = shutil.copytree(causal_run.folder, tmp_path / "start")
    content = json.loads((start / "config.json").read_text())
    content["data"] |= {"corpus": "wikitext2", "split": "line", "text_field": "body"}
    (start / "config.json").write_text(json.dumps(content))
    assert masked_run.config.data.next_sentence
    for kind, folder in (("classification", start), ("spans", masked_run.folder)):
        config = config_of(kind, folder, files[kind], tmp_path, data__seq_len=13)
        started = finetune_start.with_start(config)
        assert started.model.d_model == 16 and started.data.split == "file"
        with pytest.raises(ConfigError, match="data.split"):
            changed(config, data__split="line")


def test_held_out_examples_that_are_trained_on_are_counted(folder, files, tmp_path, capsys):
    config = config_of("classification", folder("causal"), files["classification"], tmp_path)
    finetune.prepare(config, tmp_path, load_pretrained(folder("causal")).tokenizer)
    said, count = capsys.readouterr().out, len(LABELLED)
    for part in ("validation", "test"):
        assert f"{part}: {count} of {count} examples are trained on, too" in said
    assert f"test: {count} of {count} examples are validated on, too" in said


@pytest.mark.long
def test_a_run_with_a_block_of_its_own_is_fine_tuned_with_that_block(
    causal_run, files, tmp_path, capsys
):
    own = {"training__block": "tests.experiments.own_parts:OwnBlock", "runs": str(tmp_path)}
    few = {"optimizer__total_steps": 2, "training__evaluate_every": 0}
    parent = train.train(changed(causal_run.config, name="own", **own, **few)).folder
    config = config_of("classification", parent, files["classification"], tmp_path, **few)
    tuned = finetune.train(changed(config, data__seq_len=13)).folder
    gain = "backbone/decoder/blocks_0/gain"
    assert gain in flatten(stored(Checkpoints(tuned / "checkpoints"), 2))
    capsys.readouterr()
    other = changed(config, name="other", data__seq_len=13)
    finetune.train(changed(other, training__block="jaxformer.nn.blocks:Block"))
    assert f"not in this model, so they are left out: {gain}" in capsys.readouterr().out


@pytest.mark.long
def test_a_conversation_learned_with_adapters_is_exported_as_a_plain_model_and_answers(
    folder, files, tmp_path, capsys
):
    changes = {"training__lora_rank": 3, "optimizer__learning_rate": 5e-2}
    changes |= {"optimizer__total_steps": 40, "training__evaluate_every": 0}
    published = shutil.copytree(folder("causal"), tmp_path / "published")
    said = json.loads((published / "tokenizer_config.json").read_text())
    (published / "tokenizer_config.json").write_text(json.dumps(said | {"eos_token": "<bos>"}))
    (published / "generation_config.json").write_text('{"eos_token_id": [1], "max_new_tokens": 7}')
    config = config_of("chat", published, files["chat"], tmp_path, **changes)
    run = finetune.train(config)
    assert run.scores["accuracy"] > 0.4
    assert load_run(run.folder).tokenizer.special.eos == 1, "the folder's role, not a name's"
    assert load_template(run.folder, load_run(run.folder).tokenizer).source == PLAIN_TEMPLATE
    moved = flatten(load_run(run.folder).params)
    before = flatten(load_pretrained(folder("causal")).params)
    changed_paths = {x for x, leaf in moved.items() if not np.array_equal(leaf, before[x])}
    assert changed_paths and all(
        "blocks_0" in path and path.endswith("kernel") for path in changed_paths
    )
    out = tmp_path / "exported"
    assert call(export, {"--run": run.folder, "--out": out}).code == 0
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (published / name).read_bytes()
    capsys.readouterr()
    asked = {"--text": "the sun", "--chat": True}
    answers = [call(generate, asked | {"--run": place}).out for place in (run.folder, out)]
    refused(call(evaluate, {"--run": run.folder}), 2, "learned a task from examples (chat)")
    assert answers[0] == answers[1] and answers[0].startswith("the sun\n")


@pytest.mark.long
def test_a_folder_is_read_once_what_it_has_is_not_drawn_and_adapters_are_exported_alone(
    folder, files, tmp_path, monkeypatch
):
    reads, programs, weights = [], [], []
    read_json, init = load_tokenizer._read_json, Strategy.init

    def init_seen(self, make_state, *donated):
        programs.append(jax.jit(operator.call).lower(make_state, *donated).as_text())
        weights.extend(jax.tree.leaves(donated))
        return init(self, make_state, *donated)

    monkeypatch.setattr(load_tokenizer, "_read_json", lambda x: reads.append(x) or read_json(x))
    monkeypatch.setattr(Strategy, "init", init_seen)
    few = {"optimizer__total_steps": 2, "training__evaluate_every": 0}
    config = config_of("chat", folder("causal"), files["chat"], tmp_path, **few)
    tuned = changed(config, training__lora_rank=3)
    run = finetune.train(tuned).folder
    assert len(reads) == 1, reads
    assert weights and all(leaf.is_deleted() for leaf in weights), "the state has their memory"
    scratch = changed(config, name="scratch", task__from_scratch=True)
    finetune.train(scratch)
    assert ["erf_inv" in program for program in programs] == [False, True]
    finetune.train(tuned)
    assert len(programs) == 2, "a resumed run draws nothing"
    out = tmp_path / "adapter"
    exported = call(export, {"--run": run, "--out": out, "--adapter": True})
    assert exported.code == 0, exported.err
    names = sorted(path.name for path in out.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    alone, merged = flatten(jf.load(out).params), flatten(load_run(run).params)
    assert alone.keys() == merged.keys()
    for path, leaf in merged.items():
        np.testing.assert_allclose(alone[path], leaf, rtol=0, atol=1e-6)
    run_of_run = {"--run": tmp_path / "finetuning" / "scratch", "--out": tmp_path / "no"}
    refused(call(export, run_of_run | {"--adapter": True}), 2, "no adapters")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["classification", "pairs", "spans"])
def test_adapters_with_a_new_head_are_exported_alone_and_read_back(kind, folder, files, tmp_path):
    few = {"optimizer__total_steps": 2, "training__evaluate_every": 0, "training__lora_rank": 3}
    config = config_of(kind, folder(STARTS[kind]), files[kind], tmp_path, **few)
    run, out = finetune.train(config).folder, tmp_path / "adapter"
    exported = call(export, {"--run": run, "--out": out, "--adapter": True})
    assert exported.code == 0, exported.err
    whole = call(export, {"--run": run, "--out": tmp_path / "whole"})
    assert whole.code == 0, whole.err
    learned = load_run(run)
    for again in (jf.load(out), jf.load(tmp_path / "whole")):
        assert type(again.model) is type(learned.model)
        leaves = flatten(again.params)
        for path, leaf in flatten(learned.params).items():
            np.testing.assert_allclose(leaves.pop(path), leaf, rtol=0, atol=1e-6)
        assert not any(leaf.any() for leaf in leaves.values()), "a decoder's head has no bias"


@pytest.mark.long
def test_a_chat_model_gives_the_answer_that_it_has_learned_to_prefer(folder, files, tmp_path):
    changes = {"training__evaluate_every": 0, "data__batch_size": 7}
    said = ("is rain", "is rain", "is snow")
    # The first of three messages is the system's, which nobody writes below.
    lines = [{"messages": conversation(f"the {a}", text)[1:]} for a in WORDS[:7] for text in said]
    path = write_lines(tmp_path / "chat.jsonl", *map(json.dumps, lines))
    learned = {"optimizer__learning_rate": 3e-2, "optimizer__total_steps": 50}
    said = finetune.train(config_of("chat", folder("causal"), path, tmp_path, **learned, **changes))
    asked = {"--text": "the sun", "--chat": True}
    first = call(generate, asked | {"--run": said.folder}).out
    assert "is rain" in first and "is snow" not in first
    config = config_of("preference", said.folder, files["preference"], tmp_path, name="prefers")
    config = changed(config, task__beta=0.2, **changes)
    config = changed(config, optimizer__total_steps=30, optimizer__learning_rate=3e-3)
    adapters = changed(config, name="adapted", training__lora_rank=3, training__lora_alpha=6.0)
    for trained in (config, adapters):
        result = finetune.train(trained)
        assert result.scores["accuracy"] == result.scores["likelier"] == 1.0
        assert result.scores["loss"] < 0.6
        reference = json.loads((result.folder / "reference.json").read_text())["test"]
        assert all(chosen < rejected for chosen, rejected in reference), "the other was likelier"
        second = call(generate, asked | {"--run": result.folder}).out
        assert "is snow" in second and "is rain" not in second


@pytest.mark.long
def test_the_built_in_examples_need_no_files(causal_run, tmp_path):
    config = changed(
        PRESETS["classification"],
        runs=str(tmp_path),
        init_from=str(causal_run.folder),
        data__seq_len=13,
        task__num_examples=30,
        optimizer__warmup_steps=1,
        optimizer__total_steps=3,
        training__evaluate_every=0,
    )
    result = finetune.train(config)
    assert 0.0 <= result.scores["accuracy"] <= 0.5
    table = (result.folder / "samples" / "test.tsv").read_text().splitlines()
    assert len(table) == 501 and table[0] == "source\tmodel\treference"


# Rows


@pytest.fixture
def rows(tokenizer):
    items = [(f"{number % 3}", f"the {word}") for number, word in enumerate(WORDS)]
    return classification.encode(CAUSAL, tokenizer, items, ["0", "1", "2"]).examples


def test_a_batch_is_a_function_of_seed_and_step_and_an_epoch_takes_each_row_once(rows):
    chosen = np.array([3, 7, 5, 11, 2, 9, 10])
    first, other, again = (Rows(rows, chosen, 3, seed).batch(4) for seed in (5, 6, 5))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first.tokens, other.tokens)
    assert first.loss_mask.all() and first.example_ids.tolist() == [0, 1, 2]
    last = Rows(rows, chosen, 3, 5).batch(4, lambda count: np.array([2]))
    np.testing.assert_array_equal(last.tokens, first.tokens[2:])
    numbered = rows._replace(labels=np.arange(12))
    seen = [Rows(numbered, chosen, 3, 5).batch(step).labels for step in range(14)]
    epochs = np.concatenate(seen).reshape(6, 7)
    assert all(sorted(epoch) == sorted(chosen) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    assert (
        len({Rows(rows, chosen, size, seed).fingerprint for size in (3, 5) for seed in (1, 2)}) == 4
    )


def test_rows_are_chosen_as_evenly_as_the_labels_allow():
    labels = np.array([0] * 13 + [1] * 3 + [2] * 7, np.int32)
    drawn = choose(23, 14, 2, labels)
    assert len(set(drawn)) == 14
    assert np.bincount(labels[drawn]).tolist() in ([6, 3, 5], [5, 3, 6])
    assert np.array_equal(drawn, choose(23, 14, 2, labels))
    assert set(drawn) != set(choose(23, 14, 3, labels))
    assert sorted(choose(23, 0, 2, labels)) == list(range(23))
    for count in (2, 24):
        with pytest.raises(ConfigError, match=f"num_examples={count}"):
            choose(23, count, 2, labels)


def test_the_rows_are_predicted_once_and_in_order(rows):
    def outputs(params, batch):
        return batch.tokens * params["w"]

    found = predict(outputs, {"w": jax.numpy.int32(3)}, rows, 5)
    np.testing.assert_array_equal(found, 3 * rows.tokens)
    np.testing.assert_array_equal(take(rows, np.array([4, 1])).tokens, rows.tokens[[4, 1]])


def test_a_text_is_framed_as_it_was_in_pretraining_and_cut_to_fit(tokenizer):
    labelled = [("plant", "a tree"), ("animal", " ".join(WORDS))]
    texts = [text for _, text in labelled]
    short, long = tokenizer.encode_batch(texts)
    causal, masked = (changed(config, data__seq_len=6) for config in (CAUSAL, MASKED))
    apart = changed(causal, data__isolate_documents=False)
    characters = train_characters(TEXTS, special_tokens=())
    letters = characters.encode_batch(texts)
    expected = [
        (causal, tokenizer, [[BOS, *short], [BOS, *long[:5]]]),
        (masked, tokenizer, [[BOS, *short, EOS], [BOS, *long[:4], EOS]]),
        (apart, tokenizer, [short, long[:6]]),
        (causal, characters, [letters[0][:6], letters[1][:6]]),
    ]
    for config, used, rows in expected:
        found = classification.encode(config, used, labelled, ["animal", "plant"]).examples
        real = zip(found.tokens, found.padding_mask, strict=True)
        assert [row[here].tolist() for row, here in real] == rows
        assert found.labels.tolist() == [1, 0]
        assert np.all(np.sort(found.padding_mask)[:, ::-1] == found.padding_mask)


def test_a_pair_is_framed_as_in_pretraining_and_cut_where_it_is_longer(tokenizer):
    pairs = [("a", "the sun", "a"), ("b", " ".join(WORDS), "the moon")]

    def encoded(config, items, length):
        config = changed(config, data__seq_len=length)
        return classification.encode(config, tokenizer, items, ["a", "b"]).examples

    found = encoded(MASKED, pairs, 13)
    (one, a), (two, moon) = (tokenizer.encode_batch(texts) for _, *texts in pairs)
    expected = [
        [BOS, *one, EOS, *a, EOS],
        [BOS, *two[: 10 - len(moon)], EOS, *moon, EOS],
    ]
    rows = zip(found.tokens, found.padding_mask, strict=True)
    assert [row[real].tolist() for row, real in rows] == expected
    firsts = [len(one) + 2, 12 - len(moon)]
    for row, ids, first in zip(found.token_type_ids, expected, firsts, strict=True):
        assert row[: len(ids)].tolist() == [0] * first + [1] * (len(ids) - first)
    both = [("a", " ".join(WORDS), " ".join(WORDS[::-1]))]
    row = encoded(MASKED, both, 14).tokens[0].tolist()
    assert row.index(EOS) == 6 and row[-1] == EOS, "each of two long texts has half of 11 ids"
    causal = encoded(CAUSAL, pairs, 13)
    assert causal.token_type_ids is None
    row = causal.tokens[0][causal.padding_mask[0]].tolist()
    assert row == [BOS, *one, *tokenizer.encode("\n"), *a]


def test_pairs_are_read_from_tables_and_records(tmp_path):
    config = changed(CAUSAL, task__kind="pairs")
    table = write_lines(tmp_path / "a.tsv", "yes\ta b\tc", "no\td\te f")
    record = {"hypothesis": "c", "premise": "a b", "label": "yes", "id": 3}
    records = write_lines(tmp_path / "a.jsonl", json.dumps(record))
    assert classification.read(config, table) == [("yes", "a b", "c"), ("no", "d", "e f")]
    assert classification.read(config, records) == [("yes", "a b", "c")]
    table = write_lines(tmp_path / "a.tsv", "yes\ta b\tc", "no\td")
    with pytest.raises(DataError, match="a.tsv:2: .*label<TAB>premise<TAB>hypothesis"):
        classification.read(config, table)


def test_a_first_line_that_names_the_columns_is_no_example(tmp_path):
    rows = ["label\ttext", "a\tthe sun", "b\tthe moon"]
    plain = classification.read(CAUSAL, write_lines(tmp_path / "plain.tsv", *rows[1:]))
    named = write_lines(tmp_path / "named.tsv", *rows)
    assert classification.read(CAUSAL, named) == plain == [("a", "the sun"), ("b", "the moon")]
    used = write_lines(tmp_path / "used.tsv", *rows, "label\tthe star")
    assert len(classification.read(CAUSAL, used)) == 4, "here it is a class"
    turned = write_lines(tmp_path / "turned.tsv", "sentence\tlabel", "the sun\ta")
    with pytest.raises(DataError, match="turned.tsv:1: "):
        classification.read(CAUSAL, turned)


def test_white_space_around_a_label_makes_no_other_label(tmp_path):
    path = write_lines(tmp_path / "spaced.tsv", "a \tthe sun", " a\tthe moon", "b\t a star ")
    assert classification.read(CAUSAL, path) == [
        ("a", "the sun"),
        ("a", "the moon"),
        ("b", " a star "),
    ]


def test_labelled_text_that_cannot_be_used_is_refused(tmp_path, tokenizer):
    for lines, said in (
        (["a\tx", "b y"], r"a.tsv:2: needed label<TAB>text, got 1 columns: 'b y'"),
        (["a\t "], r"a.tsv:1: needed label<TAB>text, got 2 columns: 'a' ' '"),
    ):
        with pytest.raises(DataError, match=said):
            classification.read(CAUSAL, write_lines(tmp_path / "a.tsv", *lines))
    with pytest.raises(DataError, match="'a'"):
        classification.facts(CAUSAL, tmp_path, tokenizer, [("a", "x"), ("a", "y")])
    with pytest.raises(DataError, match="'c'"):
        classification.encode(CAUSAL, tokenizer, [("c", "sun")], ["a", "b"])


class CountedTokenizer:
    """A tokenizer of the library, and the most texts that it has encoded at once."""

    def __init__(self, library):
        self.library = library
        self.most = 0

    def encode_batch(self, texts):
        self.most = max(self.most, len(texts))
        return self.library.encode_batch(texts)


def test_labelled_texts_are_encoded_in_blocks_that_change_no_row(tokenizer, monkeypatch):
    items = [("ab"[n % 2], f"the {word}", word) for n, word in enumerate(WORDS[:11])]
    labels = ["a", "b"]
    whole = classification.encode(MASKED, tokenizer, items, labels).examples
    counted = CountedTokenizer(classification.row_tokenizer(MASKED, tokenizer))
    monkeypatch.setattr(classification, "row_tokenizer", lambda *_: counted)
    monkeypatch.setattr(task_rows, "_TEXTS_AT_ONCE", 4, raising=False)
    in_blocks = classification.encode(MASKED, tokenizer, items, labels).examples
    assert counted.most == 4
    for one, other in zip(whole, in_blocks, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one is None or one.dtype == other.dtype


def test_conversations_are_encoded_in_blocks_that_change_no_row(tokenizer, monkeypatch):
    longer = changed(CAUSAL, model__max_len=103, data__seq_len=100)
    template = ChatTemplate(PLAIN_TEMPLATE, special_names(tokenizer))
    texts = [conversation(f"the {word}", f"is {word}") for word in WORDS[:11]]
    pairs = [
        preference.Pair(conversation("a", "b"), [x[-1]], [y[-1]])
        for x, y in zip(texts[:7], texts[1:8], strict=True)
    ]
    whole = chat.encode(longer, tokenizer, texts, template).examples
    whole_pairs = preference.encode(longer, tokenizer, pairs, template).examples
    most = []
    encode = Tokenizer.encode_with_special

    def counted(self, texts):
        most.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_with_special", counted)
    monkeypatch.setattr(task_rows, "_TEXTS_AT_ONCE", 4, raising=False)
    for one, other in (
        *zip(whole, chat.encode(longer, tokenizer, texts, template).examples, strict=True),
        *zip(
            whole_pairs,
            preference.encode(longer, tokenizer, pairs, template).examples,
            strict=True,
        ),
    ):
        np.testing.assert_array_equal(one, other)
    assert max(most) == 4


def test_a_text_without_tokens_for_its_letters_is_named_by_its_number(monkeypatch):
    monkeypatch.setattr(task_rows, "_TEXTS_AT_ONCE", 2, raising=False)
    letters = train_characters(["abc"], special_tokens=())
    items = [("x", "a"), ("y", "b"), ("x", "c"), ("y", "ad"), ("x", "ba")]
    with pytest.raises(DataError, match="^example 4: "):
        classification.encode(CAUSAL, letters, items, ["x", "y"])


# Answers in a text


@pytest.fixture(scope="module")
def windows(files, tokenizer) -> Encoded:
    config = changed(MASKED, task__doc_stride=3)
    return spans.encode(config, tokenizer, spans.read(config, files["spans"]), [])


def test_windows_of_a_long_context_overlap_and_the_answer_is_where_it_is(windows, tokenizer):
    read, (of, places) = windows.items, windows.notes
    assert set(of) == {0, 1, 2} and np.sum(of == 1) > 3
    answered = set()
    for row, number, offsets, (first, last) in zip(
        windows.examples.tokens, of, places, windows.examples.labels, strict=True
    ):
        context, real = read[number].context, offsets[:, 0] >= 0
        whole = tokenizer.encode_batch([context])[0]
        ids = row[real].tolist()
        assert any(whole[i : i + len(ids)] == ids for i in range(len(whole)))
        if first:
            text = context[offsets[first, 0] : offsets[last, 1]].strip()
            assert text.startswith(read[number].answers[0])
            answered.add(number)
    assert answered == {0, 1, 2}
    real = [x[x[:, 0] >= 0] for x in places[of == 1]]
    for one, other in zip(real, real[1:], strict=False):
        assert (one[-3:] == other[:3]).all()
    assert real[-1][-1, 1] == len(read[1].context)


def test_the_best_span_lies_in_the_context_and_ends_after_it_starts(windows, tokenizer):
    read = windows.items[2:]
    text = spans.encode(changed(MASKED, task__doc_stride=3), tokenizer, read, [])
    offsets = text.notes.offsets
    real = np.flatnonzero(offsets[0, :, 0] >= 0)
    logits = np.zeros((1, 2, T), np.float32)
    logits[0, 0, real[2]] = logits[0, 1, real[3]] = 2.0
    logits[0, 1, real[1]] = 3.0  # before the start
    logits[0, 0, 0] = logits[0, 1, 0] = 9.0  # no answer, if there may be none

    def answer(most: int, may_be_none: bool = False) -> str:
        return spans.best_answers(logits, text, most, may_be_none=may_be_none)[0]

    start, end = offsets[0, real[2], 0], offsets[0, real[3], 1]
    assert answer(5) == read[0].context[start:end].strip()
    assert answer(1) == read[0].context[slice(*offsets[0, real[1]])].strip()
    assert answer(5, may_be_none=True) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read the file"),
        ('{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "needed the JSON of SQuAD .* 'context' is"),
        ('{"data": []}', "there are no questions"),
        (json.dumps(squad_json(("a b", "x?", [("b", 1)]))), "'b' is not at 1 of its context"),
    ],
)
def test_questions_that_cannot_be_used_are_refused(text, message, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=message):
        squad.read_questions(str(tmp_path / "x.json"))


# Conversations


def test_only_tokens_of_answers_are_learned(tokenizer):
    longer = changed(CAUSAL, model__max_len=103, data__seq_len=100)
    template = ChatTemplate(PLAIN_TEMPLATE, special_names(tokenizer))
    more = [{"role": "user", "content": "the star"}, {"role": "assistant", "content": "sand"}]
    texts = [conversation("the sun", "is rain"), [*conversation("the moon", "and snow"), *more]]
    found = chat.encode(longer, tokenizer, texts, template).examples
    assert found.tokens.shape == (2, 101) and found.loss_mask.shape == (2, 100)
    learned = [
        [tokenizer.token(i) for i in row[1:][mask]]
        for row, mask in zip(found.tokens, found.loss_mask, strict=True)
    ]
    assert ["".join(tokens) for tokens in learned] == ["isĠrain<eos>", "andĠsnow<eos>sand<eos>"]
    row = found.tokens[0]
    assert row[0] == BOS and tokenizer.decode(row).startswith("system:\nsay it")


@pytest.mark.parametrize("form", ["texts", "messages", "whole conversations"])
def test_only_tokens_of_the_two_answers_are_compared(form, tokenizer, tmp_path):
    asked = [*conversation("the moon", "and snow"), {"role": "user", "content": "the star"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("is sand", "is far away")]
    record = dict(zip(("chosen", "rejected"), answers, strict=True), prompt=asked)
    if form == "texts":
        asked = [{"role": "user", "content": "the star"}]
        record = {"prompt": "the star", "chosen": "is sand", "rejected": "is far away"}
    elif form == "whole conversations":
        record = {name: [*asked, *record[name]] for name in ("chosen", "rejected")}
    path = write_lines(tmp_path / "pairs.jsonl", json.dumps(record))
    longer = changed(CAUSAL, model__max_len=103, data__seq_len=100)
    items = preference.read(longer, path)
    assert items == [preference.Pair(asked, *answers)]
    template = ChatTemplate(PLAIN_TEMPLATE, special_names(tokenizer))
    found = preference.encode(longer, tokenizer, items, template).examples
    assert found.tokens.shape == (1, 2, 101) and found.loss_mask.shape == (1, 2, 100)
    learned = [
        tokenizer.decode(row[1:][mask])
        for row, mask in zip(found.tokens[0], found.loss_mask[0], strict=True)
    ]
    assert learned == ["is sand", "is far away"]
    for record, words in (
        ({"prompt": "a", "chosen": "b"}, "needed"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equal"),
        ({"prompt": "a", "chosen": "b", "rejected": asked[:2]}, "role assistant"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": [1]}, "tools"),
    ):
        path = write_lines(tmp_path / "wrong.jsonl", json.dumps(record))
        with pytest.raises(DataError, match=f"wrong.jsonl:1: .*{words}"):
            preference.read(longer, path)


@pytest.mark.parametrize("kind", ["spans", "chat", "preference"])
def test_models_that_do_not_fit_a_task_are_refused(kind, files):
    config = changed(CAUSAL if kind == "spans" else MASKED, task__kind=kind)
    module = {"spans": spans, "chat": chat, "preference": preference}[kind]
    with pytest.raises(ConfigError, match=f"task='{kind}'"):
        module.read(config, files[kind])


def test_rows_that_have_no_room_for_what_is_learned_are_refused(files, tokenizer):
    read = squad.read_questions(files["spans"])
    with pytest.raises(ConfigError, match="doc_stride=19 "):
        spans.encode(changed(MASKED, task__doc_stride=19), tokenizer, read, [])
    template = ChatTemplate(PLAIN_TEMPLATE, special_names(tokenizer))
    with pytest.raises(DataError, match="conversation 1: .*'<eos>'"):
        chat.encode(CAUSAL, tokenizer, [conversation("a <eos>", "b")], template)
    endless = template._replace(source=PLAIN_TEMPLATE.replace("{{ eos_token }}", ""))
    with pytest.raises(ConfigError, match="special token"):
        chat.encode(CAUSAL, tokenizer, [conversation("a", "b")], endless)
    short, long = conversation("a", "b"), conversation("a " * 40, "b")
    with pytest.warns(UserWarning, match="1 of 2 conversations"):
        few = chat.encode(changed(CAUSAL, data__seq_len=43), tokenizer, [long, short], template)
    assert len(few.examples.tokens) == 1
    with pytest.raises(DataError, match="3 tokens"):
        chat.encode(changed(CAUSAL, data__seq_len=3), tokenizer, [conversation("a", "b")], template)


def test_a_table_of_conversations_has_a_line_for_each_that_is_scored(tokenizer):
    template = ChatTemplate(PLAIN_TEMPLATE, special_names(tokenizer))
    config = changed(CAUSAL, model__max_len=103, data__seq_len=53)
    asked = ["the sun", "the moon " * 29, "the star", "the rain " * 31, "the\tsnow"]
    items = [conversation(text, "is far") for text in asked]
    with pytest.warns(UserWarning, match="2 of 5 conversations"):
        text = chat.encode(config, tokenizer, items, template)
    assert text.items == items[::2]
    sums = np.arange(9.0).reshape(3, 3)
    table = chat.score(config, sums, text, template).table
    assert table == {"source": asked[::2], "nats": ["0", "3", "6"], "tokens": ["2", "5", "8"]}


def test_a_table_of_pairs_has_a_line_for_each_that_is_scored(tokenizer):
    template = ChatTemplate(PLAIN_TEMPLATE, special_names(tokenizer))
    config = changed(CAUSAL, model__max_len=103, data__seq_len=53)
    asked = ["the moon " * 29, "the sun", "the star", "the rain"]
    later = [{"role": "user", "content": "and " * 60}, {"role": "assistant", "content": "snow"}]
    first, second = ({"role": "assistant", "content": text} for text in ("is far", "is here"))
    items = [
        preference.Pair([{"role": "user", "content": text}], [first], [second]) for text in asked
    ]
    items[2] = items[2]._replace(rejected=later)  # one of its two answers is cut off
    with pytest.warns(UserWarning, match="2 of 4 pairs"):
        text = preference.encode(config, tokenizer, items, template)
    assert text.items == items[1::2]
    log_probs = np.array([[-3.0, -5.0], [-7.0, -6.0]])
    text.examples.reference[:] = 0.0
    table = preference.score(config, log_probs, text, template).table
    assert table["source"] == asked[1::2] and table["chosen"] == ["-3", "-7"]


def test_questions_of_one_key_are_questions_of_their_own(tokenizer):
    config = changed(MASKED, task__doc_stride=3)
    german = squad.Question("q0", "the star?", "rain and snow", ["snow"], [9])
    english = squad.Question("q0", "the sun?", "moon and sand", ["moon"], [0])
    text = spans.encode(config, tokenizer, [german, english], [])
    logits = np.zeros((2, 2, T), np.float32)
    for row, (first, last) in enumerate(text.examples.labels):
        logits[row, 0, first] = logits[row, 1, last] = 5.0
    scored = spans.score(config, logits, text, [])
    assert scored.scores == {"f1": 1.0, "exact": 1.0}
    assert scored.table["model"] == ["snow", "moon"]


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="from_scratch=True"):
        changed(PRESETS["chat"], task__from_scratch=True, training__lora_rank=2)


@pytest.mark.parametrize(
    "option",
    [
        "data.corpus shakespeare",
        "data.split line",
        "data.text_field body",
        "data.document_id 5",
        "data.validation_tokens 7",
        "data.mask_prob 0.3",
        "data.batches a.module:name",
        "training.metrics a.module:name",
    ],
)
def test_options_that_fine_tuning_does_not_read_are_refused(option, capsys):
    with pytest.raises(SystemExit) as end:
        cli.parse(PRESETS, f"--{option}".split())
    assert end.value.code == 2 and option.split()[0] in capsys.readouterr().err
