"""A classifier on a run's model: what it starts from, what it learns from, what is reported."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.training.finetuning import Examples
from experiments.language_modelling import finetune
from experiments.language_modelling.finetune import (
    FinetuneOptions,
    describe,
    fine_tune,
    make_task,
    predict,
    summarise,
)
from experiments.language_modelling.load_run import LoadedRun, load_run
from experiments.language_modelling.presets import DataConfig, LanguageConfig
from experiments.language_modelling.stdlib_classification import Labelled
from experiments.language_modelling.tasks import classification
from experiments.language_modelling.tasks.classification import encode, read
from experiments.language_modelling.tasks.rows import frame_of
from jaxformer.config import BERT_BASE, EmbeddingOptions, Learned, NormOptions, TransformerConfig
from jaxformer.errors import ConfigError, DataError, Diverged
from jaxformer.nn.heads import Classifier, MaskedLanguageModel, SpanPredictor, TokenClassifier
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.pretrained import save_pretrained
from jaxformer.text.tokenizers import BOS, EOS, MASKED_SPECIAL_TOKENS, train_characters, train_words
from jaxformer.training.optimizer import OptimizerConfig
from jaxformer.training.parameters import flatten

T = 7
TEXTS = {
    "animal": ["the old cat sleeps", "a dog", "one horse runs here", "the cat", "a horse sleeps"],
    "plant": ["the old tree", "a rose grows here", "one oak", "the tree grows", "an oak here"],
    "stone": ["the granite", "an old slate", "one slate lies here", "a marble lies", "the marble"],
}
SHARED = dict(
    vocab_size=31,
    d_model=12,
    d_ff=17,
    num_heads=3,
    max_len=T,
    embeddings=EmbeddingOptions(tied="none"),
    norm=NormOptions(placement="pre"),
    positions=Learned(),
)
CAUSAL = LanguageConfig(
    name="causal",
    model=TransformerConfig(num_decoder_layers=1, **SHARED),
    data=DataConfig(seq_len=T),
)
MASKED = LanguageConfig(
    name="masked",
    model=TransformerConfig(
        num_encoder_layers=1, embeddings=EmbeddingOptions(num_types=2), pooler="tanh", **SHARED
    ),
    objective="masked",
    data=DataConfig(seq_len=T),
)
OPTIONS = FinetuneOptions(
    num_train=11,
    seeds=2,
    batch_size=5,
    seq_len=T,
    optimizer=OptimizerConfig(
        schedule="constant",
        learning_rate=1e-2,
        warmup_steps=1,
        total_steps=3,
        grad_clip_norm=1.0,
        weight_decay=0.1,
    ),
)
LABELLED = Labelled(
    [label for label in TEXTS for _ in TEXTS[label]],
    [text for label in TEXTS for text in TEXTS[label]],
)


def make_trained(config: LanguageConfig, random_params) -> LoadedRun:
    tokenizer = train_words(LABELLED.texts, 31, special_tokens=MASKED_SPECIAL_TOKENS)
    make = MaskedLanguageModel if config.objective == "masked" else DecoderOnly
    model = make(replace(config.model, vocab_size=tokenizer.vocab_size))
    return LoadedRun(config, model, random_params(model, np.ones((2, T), np.int32)), tokenizer)


@pytest.fixture(scope="module")
def causal(random_params) -> LoadedRun:
    return make_trained(CAUSAL, random_params)


@pytest.fixture(scope="module")
def masked(random_params) -> LoadedRun:
    return make_trained(MASKED, random_params)


@pytest.fixture(scope="module")
def task(causal):
    return make_task(OPTIONS, causal, LABELLED, LABELLED)


@pytest.fixture(scope="module")
def examples() -> Examples:
    labels = np.array([0] * 13 + [1] * 3 + [2] * 7, np.int32)
    tokens = np.arange(23 * T, dtype=np.int32).reshape(23, T)
    return Examples(tokens, tokens % 2 == 0, labels)


def write_labelled(path: Path, *lines: str) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def leaves(params):
    return jax.tree.leaves(params)


def test_with_freeze_backbone_the_backbone_does_not_move_by_a_bit(masked):
    alone = make_task(replace(OPTIONS, freeze_backbone=True), masked, LABELLED, LABELLED)
    params = fine_tune(OPTIONS, alone, 0, pretrained=True)
    known = masked.params["encoder"]
    pairs = list(zip(leaves(params["backbone"]), leaves(known), strict=True))
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    fresh = alone.init(jax.random.split(jax.random.key(0))[0], *alone.data.train[:2])
    assert np.all(np.asarray(params["head"]["kernel"]) != fresh["head"]["kernel"])


def test_with_all_layers_every_matrix_moves(task, causal):
    params = fine_tune(OPTIONS, task, 0, pretrained=True)
    known = {name: causal.params[name] for name in params["backbone"]}
    moved = jax.tree.map(lambda a, b: np.any(a != b), params["backbone"], known)
    assert all(leaves(moved))
    assert sorted(params["backbone"]) == ["decoder", "embedding"]


def test_what_was_pretrained_is_still_there_after_training_from_it(task):
    before = task.pretrained
    task = task._replace(pretrained=jax.tree.map(jnp.asarray, before))
    first = fine_tune(OPTIONS, task, 1, pretrained=True)
    again = fine_tune(OPTIONS, task, 1, pretrained=True)
    for a, b in zip(leaves(first), leaves(again), strict=True):
        assert np.array_equal(a, b)
    for a, b in zip(leaves(before), leaves(task.pretrained), strict=True):
        assert np.array_equal(a, b)


def test_from_scratch_the_weights_are_of_the_seed(task):
    params = [fine_tune(OPTIONS, task, seed, pretrained=False) for seed in (0, 1)]
    tables = [np.asarray(tree["backbone"]["embedding"]["table"]) for tree in params]
    assert np.abs(tables[0] - tables[1]).mean() > 0.05


def test_a_batch_is_a_function_of_seed_and_step(examples):
    chosen = np.array([3, 17, 5, 11, 2, 19, 20])
    given = [examples.batch(chosen, 3, 5, step) for step in (4, 0, 4)]
    for a, b in zip(given[0], given[2], strict=True):
        assert np.array_equal(a, b)
    other = examples.batch(chosen, 3, 6, 4)
    assert not np.array_equal(given[0].tokens, given[1].tokens)
    assert not np.array_equal(given[0].tokens, other.tokens)
    assert np.array_equal(given[0].labels, examples.labels[given[0].tokens[:, 0] // T])
    assert given[0].loss_mask.all() and given[0].example_ids.tolist() == [0, 1, 2]


def test_an_epoch_takes_every_chosen_text_once(examples):
    chosen = np.array([3, 17, 5, 11, 2, 19, 20])
    seen = [examples.batch(chosen, 3, 5, step).tokens[:, 0] // T for step in range(14)]
    epochs = np.concatenate(seen).reshape(6, 7)
    assert all(sorted(epoch) == sorted(chosen) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])


def test_texts_are_drawn_as_evenly_as_the_labels_allow(examples):
    drawn = examples.select(14, seed=2)
    assert len(set(drawn)) == 14
    assert np.bincount(examples.labels[drawn]).tolist() in ([6, 3, 5], [5, 3, 6])
    assert np.array_equal(drawn, examples.select(14, seed=2))
    assert set(drawn) != set(examples.select(14, seed=3))
    assert sorted(examples.select(23, seed=2)) == list(range(23))


def test_covering_counts_every_text_once_in_order(examples):
    batches = list(examples.iterate_once(5))
    assert [batch.tokens.shape for batch in batches] == [(5, T)] * 5
    found = np.concatenate([batch.tokens[batch.loss_mask, 0] // T for batch in batches])
    assert found.tolist() == list(range(23))


def test_a_text_is_framed_as_it_was_in_pretraining_and_cut_to_fit(causal, masked):
    labelled = Labelled(["plant", "animal"], ["a dog", "the cat sleeps here a horse runs"])
    tokenizer = causal.tokenizer
    short, long = tokenizer.encode_batch(labelled.texts)
    apart = replace(causal.config, data=replace(causal.config.data, isolate_documents=False))
    expected = {
        "causal": [[BOS, *short], [BOS, *long[:5]]],
        "masked": [[BOS, *short, EOS], [BOS, *long[:4], EOS]],
        "one stream": [short, long[:6]],
    }
    for name, trained in zip(
        expected, (causal, masked, causal._replace(config=apart)), strict=True
    ):
        frame = frame_of(trained)
        found = encode(labelled, ["animal", "plant"], tokenizer, 6, frame)
        real = zip(found.tokens, found.padding_mask, strict=True)
        rows = [row[here].tolist() for row, here in real]
        assert rows == expected[name]
        assert found.labels.tolist() == [1, 0]
        assert np.all(np.sort(found.padding_mask)[:, ::-1] == found.padding_mask)


def test_a_vocabulary_without_special_tokens_frames_nothing(causal):
    characters = train_characters(LABELLED.texts, special_tokens=())
    assert frame_of(causal._replace(tokenizer=characters)) == ([], [])
    found = encode(Labelled(["x"], ["cat"]), ["x"], characters, 5, ([], []))
    assert found.padding_mask.sum() == 3


def test_training_that_diverges_is_an_error(task):
    nan = np.float32("nan")
    metrics = {"loss": nan, "grad_norm": nan, "consecutive_skips": 10}
    broken = task._replace(step=lambda state, batch: (state, metrics))
    with pytest.raises(Diverged, match="not finite in 10 steps in a row, the last of them step 3 "):
        fine_tune(OPTIONS, broken, 1, pretrained=False)


def test_mean_and_sample_deviation_are_over_seeds_and_the_margin_is_by_pairs():
    found = summarise({"pretrained": [0.5, 0.7, 0.9], "scratch": [0.2, 0.5, 0.5]})
    assert found["pretrained"]["mean"] == pytest.approx(0.7)
    assert found["pretrained"]["deviation"] == pytest.approx(0.2)
    assert found["margin"]["by_seed"] == pytest.approx([0.3, 0.2, 0.4])
    assert found["margin"]["mean"] == pytest.approx(0.3)
    assert found["margin"]["deviation"] == pytest.approx(0.1)
    one = summarise({"scratch": [0.25]})
    assert one == {"scratch": {"by_seed": [0.25], "mean": 0.25, "deviation": None}}
    said = describe(OPTIONS, found, "share of 4 test texts right")
    assert said.startswith("11 labelled texts, 2 seeds, layers all; share of 4 test texts right")
    assert "margin      30.0 %, deviation 10.0" in said


def test_a_classifier_that_sees_the_mean_is_made_and_kept_under_a_name_of_its_own(masked):
    options = replace(OPTIONS, pooling="mean")
    model = make_task(options, masked, LABELLED, LABELLED).data.model
    assert model.pooling == "mean"
    found = {"scratch": {"mean": 0.25, "deviation": None}}
    assert "layers all, mean of the tokens; right" in describe(options, found, "right")


def test_the_command_learns_prints_and_keeps_what_it_found(
    task, causal, tmp_path, monkeypatch, capsys
):
    lines = [f"{label}\t{text}" for label, text in zip(*LABELLED, strict=True)]
    train = write_labelled(tmp_path / "train.tsv", *lines)
    made = []
    monkeypatch.setattr(finetune, "load_run", lambda folder, *_, **__: (folder, causal))
    monkeypatch.setattr(finetune, "make_task", lambda *inputs: made.append(inputs) or task)
    options = replace(
        OPTIONS,
        run=str(tmp_path),
        train=train,
        test=train,
        num_train=15,
        output=str(tmp_path / "found.tsv"),
        optimizer=replace(OPTIONS.optimizer, total_steps=60),
    )
    finetune.main(options)
    assert made == [(options, (tmp_path, causal), LABELLED, LABELLED)]
    kept = json.loads((tmp_path / "finetune.json").read_text())
    assert list(kept) == ["all"] and kept["all"]["options"]["num_train"] == 15
    assert kept["all"]["pretrained"]["by_seed"] == [1.0, 1.0]
    assert len(kept["all"]["scratch"]["by_seed"]) == 2 and "margin" in kept["all"]
    said = capsys.readouterr().out
    assert "seed 1, pretrained: 100.0% right" in said and "layers all" in said
    assert said.index("seed 1, scratch") < said.index("seed 1, pretrained")  # which is written
    found = [f"{label}\t{line}\n" for label, line in zip(LABELLED.labels, lines, strict=True)]
    assert (tmp_path / "found.tsv").read_text() == "".join(found)
    learn_nothing = replace(OPTIONS.optimizer, total_steps=1)
    finetune.main(replace(options, freeze_backbone=True, start="scratch", optimizer=learn_nothing))
    kept = json.loads((tmp_path / "finetune.json").read_text())
    assert list(kept) == ["all", "head"] and "pretrained" not in kept["head"]


def test_other_peoples_folder_is_left_as_it_is(task, causal, tmp_path, monkeypatch):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    lines = [f"{label}\t{text}" for label, text in zip(*LABELLED, strict=True)]
    train = write_labelled(tmp_path / "train.tsv", *lines)
    monkeypatch.setattr(finetune, "load_run", lambda *_, **__: causal)
    monkeypatch.setattr(finetune, "make_task", lambda *inputs: task)
    options = replace(
        OPTIONS,
        run=str(tmp_path / "bert"),
        train=train,
        test=train,
        num_train=15,
        start="scratch",
        runs=str(tmp_path / "runs"),
        optimizer=replace(OPTIONS.optimizer, total_steps=1),
    )
    finetune.main(options)
    assert [path.name for path in (tmp_path / "bert").iterdir()] == ["config.json"]
    kept = tmp_path / "runs" / "language_modelling"
    assert list(json.loads((kept / "bert" / "finetune.json").read_text())) == ["all"]
    finetune.main(replace(options, name="tuned"))
    assert (kept / "tuned" / "finetune.json").is_file()
    with pytest.raises(ConfigError, match="'a/b' cannot name a folder"):
        finetune.main(replace(options, name="a/b"))


@pytest.mark.parametrize("kind", [Classifier, TokenClassifier, SpanPredictor])
def test_a_published_classifier_is_learned_from_without_its_head(kind, tmp_path, random_params):
    tokenizer = train_words(LABELLED.texts, 31, special_tokens=MASKED_SPECIAL_TOKENS)
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 12, "d_ff": 17, "num_heads": 3}
    config = replace(BERT_BASE, **sizes, num_encoder_layers=1, max_len=T)
    backbone = EncoderOnly(replace(config, pooler="tanh" if kind is Classifier else "none"))
    model = kind(backbone) if kind is SpanPredictor else kind(backbone, 4)
    ids = np.ones((2, T), np.int32)
    params = random_params(model, ids, ids > 0)
    save_pretrained(tmp_path / "bert", model, params, tokenizer)
    with pytest.raises(ConfigError, match=f"holds a {kind.__name__}, but a language model"):
        load_run(tmp_path / "bert")
    loaded = load_run(tmp_path / "bert", without_head=True)
    options = replace(OPTIONS, run=str(tmp_path / "bert"), freeze_backbone=True)
    task = make_task(options, loaded, LABELLED, LABELLED)
    tuned = fine_tune(options, task, 0, pretrained=True)
    kept, known = (flatten(tree["backbone"]) for tree in (tuned, params))
    for path in known:
        np.testing.assert_array_equal(kept[path], known[path])


def test_every_test_text_is_classified_in_order(task, assert_equal):
    params = fine_tune(OPTIONS, task, 0, pretrained=True)
    test = task.data.test
    logits = task.data.model.apply({"params": params}, test.tokens, test.padding_mask)
    assert_equal(predict(task, params, 4), logits)
    right = np.mean(np.argmax(np.asarray(logits), axis=-1) == test.labels)
    assert task.data.score(np.asarray(logits)).metrics == {"accuracy": right}
    assert "the commonest label: 33.3%" in task.data.title


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (
            ["a\tx", "b\ty"],
            ["a\tx", "c\ty"],
            r"test.tsv:2: no line of .* has the label 'c'",
        ),
        (["a\tx", "b y"], ["a\tx"], r"train.tsv:2: needed source<TAB>target, got no tab"),
        (["a\tx", "\ty"], ["a\tx"], r"train.tsv:2: needed label<TAB>text, got '' and 'y'"),
        (["a\tx", "b\ty"], ["a\t "], r"test.tsv:1: needed label<TAB>text, got 'a' and ' '"),
        (
            ["a\tx", "a\ty"],
            ["a\tx"],
            r"train.tsv: all lines have the label 'a'",
        ),
    ],
)
def test_labelled_text_that_cannot_be_used_is_refused(tmp_path, train, test, message):
    paths = [tmp_path / "train.tsv", tmp_path / "test.tsv"]
    files = [write_labelled(path, *lines) for path, lines in zip(paths, (train, test), strict=True)]
    with pytest.raises(DataError, match=message):
        read(FinetuneOptions(train=files[0], test=files[1], num_train=2))


def test_impossible_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="needs both files, but train='a.tsv' and test=''"):
        FinetuneOptions(train="a.tsv")
    with pytest.raises(ConfigError, match="seeds=0, but it must be at least 1"):
        FinetuneOptions(seeds=0)
    with pytest.raises(ConfigError, match="start='last' is unknown: give one of both, pretrained"):
        FinetuneOptions(start="last")
    with pytest.raises(ConfigError, match="total_steps=0, but it must be at least 1"):
        FinetuneOptions(optimizer=OptimizerConfig(total_steps=0))
    path = write_labelled(tmp_path / "both.tsv", "a\tx", "b\ty", "b\tz")
    for labels in (1, 4):
        with pytest.raises(ConfigError, match=f"num_train={labels}, but there are 3 texts"):
            read(FinetuneOptions(train=path, test=path, num_train=labels))


def test_without_files_the_texts_are_snippets_of_the_standard_library(monkeypatch):
    parts = {"train": LABELLED, "test": Labelled(["plant"], ["oak"])}
    monkeypatch.setitem(classification._LABELLED, "python_stdlib", parts.__getitem__)
    assert read(OPTIONS) == (LABELLED, parts["test"])
