"""Fine-tuning of language models: what is learned from which rows, and what is reported."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.training.finetuning import Examples
from experiments.harness.training.training_config import OptimizerConfig
from experiments.language_modelling import finetune, generate
from experiments.language_modelling.finetune import (
    FinetuneOptions,
    describe,
    fine_tune,
    make_learner,
    summarise,
    without_heads,
)
from experiments.language_modelling.generate import GenerateOptions
from experiments.language_modelling.load_run import LoadedRun, load_run
from experiments.language_modelling.presets import DataConfig, LanguageConfig
from experiments.language_modelling.tasks import chat, classification, predict, spans
from experiments.language_modelling.tasks.chat import (
    PLAIN_TEMPLATE,
    ChatTemplate,
    load_template,
    special_names,
)
from experiments.language_modelling.tasks.examples import Labelled
from jaxformer.config import (
    BERT_BASE,
    EmbeddingOptions,
    FeedForwardOptions,
    NormOptions,
    Rotary,
    TransformerConfig,
)
from jaxformer.decoding import SamplingConfig
from jaxformer.errors import ConfigError, DataError, Diverged
from jaxformer.nn.heads import Classifier, MaskedLanguageModel, SpanPredictor
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.pipelines import complete
from jaxformer.pretrained import load_pretrained, save_pretrained
from jaxformer.text.tokenizers import BOS, EOS, MASKED_SPECIAL_TOKENS, train_bpe, train_characters
from jaxformer.training.parameters import flatten
from tests.experiments.tiny_runs import WORDS

pytestmark = pytest.mark.long

T = 23
TEXTS = [f"the {a} is {b} and {c}." for a in WORDS for b in WORDS for c in WORDS[:2] if a != b]
SIZES = {"vocab_size": 300, "d_model": 12, "d_ff": 17, "num_heads": 3, "max_len": T}
LLAMA = {
    "norm": NormOptions("rms", placement="pre"),
    "feed_forward": FeedForwardOptions("silu", gated=True),
    "embeddings": EmbeddingOptions(tied="none", scale=False),
    "positions": Rotary(),
    "use_bias": False,
}
BERT = replace(BERT_BASE, **SIZES, num_encoder_layers=1, pooler="none", dropout_rate=0.0)
CAUSAL = LanguageConfig(
    name="causal",
    model=TransformerConfig(num_decoder_layers=1, **SIZES, **LLAMA),
    data=DataConfig(seq_len=T),
)
MASKED = LanguageConfig(name="masked", model=BERT, objective="masked", data=DataConfig(seq_len=T))
OPTIONS = FinetuneOptions(
    num_train=0,
    seeds=2,
    batch_size=5,
    seq_len=T,
    doc_stride=3,
    optimizer=OptimizerConfig(
        schedule="constant", learning_rate=1e-2, warmup_steps=1, total_steps=3, weight_decay=0.1
    ),
)
LABELLED = Labelled(
    ["light"] * 5 + ["wet"] * 4 + ["far"] * 6,
    [f"the {word} is here" for word in "sun moon star sun moon rain snow rain lake".split()]
    + [f"a {word} and a {word}" for word in "hill tree bird fish sand hill".split()],
)
PAIRS = Labelled(
    ["yes", "no", "maybe"] * 3,
    [f"the {word} is here" for word in WORDS[:9]],
    [f"the {word}" for word in WORDS[3:]],
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 290, special_tokens=MASKED_SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def runs(random_params, tokenizer) -> dict[str, LoadedRun]:
    """A causal and a masked run, without the masked one's head."""
    loaded = {}
    for config, kind in ((CAUSAL, DecoderOnly), (MASKED, MaskedLanguageModel)):
        model = kind(replace(config.model, vocab_size=tokenizer.vocab_size))
        params = random_params(model, np.ones((2, T), np.int32))
        loaded[config.name] = without_heads(LoadedRun(model, params, tokenizer, config=config))
    return loaded


@pytest.fixture(scope="module")
def folder(runs, tokenizer, tmp_path_factory):
    """The folder of `transformers` of one of `runs`."""
    root = tmp_path_factory.mktemp("published")

    def write(name: str) -> Path:
        if not (root / name).exists():
            save_pretrained(root / name, runs[name].model, runs[name].params, tokenizer)
        return root / name

    return write


@pytest.fixture(scope="module")
def learner(runs):
    return make_learner(OPTIONS, runs["causal"], LABELLED, LABELLED)


@pytest.fixture(scope="module")
def examples() -> Examples:
    labels = np.array([0] * 13 + [1] * 3 + [2] * 7, np.int32)
    tokens = np.arange(23 * T, dtype=np.int32).reshape(23, T)
    return Examples(tokens, tokens % 2 == 0, labels)


def write_lines(path: Path, *lines: str) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def labelled_lines() -> list[str]:
    return ["\t".join(row) for row in zip(*LABELLED[:2], strict=True)]


def leaves(params):
    return jax.tree.leaves(params)


# Weights


def test_with_freeze_backbone_the_backbone_does_not_move_by_a_bit(runs):
    options = replace(OPTIONS, freeze_backbone=True)
    learner = make_learner(options, runs["masked"], LABELLED, LABELLED)
    params = fine_tune(learner, 0, pretrained=True)
    pairs = zip(leaves(params["backbone"]), leaves(runs["masked"].params), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    fresh = learner.init(jax.random.split(jax.random.key(0))[0], *learner.task.train[:2])
    assert np.all(np.asarray(params["head"]["kernel"]) != fresh["head"]["kernel"])


def test_with_all_layers_every_matrix_moves(learner, runs):
    params = fine_tune(learner, 0, pretrained=True)
    known = {name: runs["causal"].params[name] for name in params["backbone"]}
    assert all(leaves(jax.tree.map(lambda a, b: np.any(a != b), params["backbone"], known)))
    assert sorted(params["backbone"]) == ["decoder", "embedding"]


def test_what_was_pretrained_is_still_there_after_training_from_it(learner):
    before = learner.pretrained
    learner = learner._replace(pretrained=jax.tree.map(jnp.asarray, before))
    first, again = (fine_tune(learner, 1, pretrained=True) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    jax.tree.map(np.testing.assert_array_equal, before, learner.pretrained)


def test_from_scratch_the_weights_are_of_the_seed(learner):
    params = [fine_tune(learner, seed, pretrained=False) for seed in (0, 1)]
    tables = [np.asarray(tree["backbone"]["embedding"]["table"]) for tree in params]
    assert np.abs(tables[0] - tables[1]).mean() > 0.05


def test_training_that_diverges_is_an_error(runs):
    steps = replace(OPTIONS.optimizer, learning_rate=1e38, total_steps=23)
    options = replace(OPTIONS, optimizer=steps)
    learner = make_learner(options, runs["causal"], LABELLED, LABELLED)
    with pytest.raises(
        Diverged, match="not finite in 10 steps in a row, the last of them step 11 "
    ):
        fine_tune(learner, 1, pretrained=False)


@pytest.mark.slow
def test_adapters_of_a_backbone_leave_its_weights_and_train_the_head(runs):
    options = replace(OPTIONS, task="pairs", lora_rank=2, start="pretrained")
    learner = make_learner(options, runs["masked"], PAIRS, PAIRS)
    params = fine_tune(learner, 0, pretrained=True)
    before = flatten(runs["masked"].params)
    for path, leaf in flatten(params["backbone"]).items():
        adapted = "blocks_0" in path and path.endswith("kernel")
        assert np.array_equal(leaf, before[path]) != adapted, path
    first = learner.init(jax.random.split(jax.random.key(0))[0], *learner.task.train[:2])
    assert np.all(params["head"]["kernel"] != first["head"]["kernel"])


@pytest.mark.parametrize("kind", [Classifier, SpanPredictor])
def test_a_published_classifier_is_learned_from_without_its_head(
    kind, tokenizer, tmp_path, random_params
):
    config = replace(
        BERT, vocab_size=tokenizer.vocab_size, pooler="tanh" if kind is Classifier else "none"
    )
    model = kind(EncoderOnly(config), *([] if kind is SpanPredictor else [4]))
    ids = np.ones((2, T), np.int32)
    params = random_params(model, ids, ids > 0)
    save_pretrained(tmp_path / "bert", model, params, tokenizer)
    with pytest.raises(ConfigError, match=f"holds a {kind.__name__}, but a language model"):
        load_run(tmp_path / "bert")
    loaded = load_run(tmp_path / "bert", without_head=True)
    options = replace(OPTIONS, run=str(tmp_path / "bert"), freeze_backbone=True)
    tuned = fine_tune(make_learner(options, loaded, LABELLED, LABELLED), 0, pretrained=True)
    kept, known = (flatten(tree["backbone"]) for tree in (tuned, params))
    for path in known:
        np.testing.assert_array_equal(kept[path], known[path])


# Batches


def test_a_batch_is_a_function_of_seed_and_step(examples):
    chosen = np.array([3, 17, 5, 11, 2, 19, 20])
    first, other_step, again = (examples.batch(chosen, 3, 5, step) for step in (4, 0, 4))
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(first.tokens, other_step.tokens)
    assert not np.array_equal(first.tokens, examples.batch(chosen, 3, 6, 4).tokens)
    assert np.array_equal(first.labels, examples.labels[first.tokens[:, 0] // T])
    assert first.loss_mask.all() and first.example_ids.tolist() == [0, 1, 2]


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


def test_the_test_rows_are_predicted_once_and_in_order(learner, examples, assert_equal):
    batches = list(examples.iterate_once(5))
    assert [batch.tokens.shape for batch in batches] == [(5, T)] * 5
    numbers = np.concatenate([batch.tokens[batch.loss_mask, 0] // T for batch in batches])
    assert numbers.tolist() == list(range(23))
    task = learner.task
    params = fine_tune(learner, 0, pretrained=True)
    logits = task.model.apply({"params": params}, task.test.tokens, task.test.padding_mask)
    assert_equal(predict(task, params, 4), logits)
    right = np.mean(np.argmax(np.asarray(logits), axis=-1) == task.test.labels)
    assert task.score(np.asarray(logits)).metrics == {"accuracy": right}
    assert "the commonest label: 40.0%" in task.title


# Labels


def test_a_text_is_framed_as_it_was_in_pretraining_and_cut_to_fit(runs, tokenizer):
    labelled = Labelled(["plant", "animal"], ["a tree", " ".join(WORDS)])
    short, long = tokenizer.encode_batch(labelled.texts)
    causal = runs["causal"]
    apart = replace(causal.config, data=replace(causal.config.data, isolate_documents=False))
    characters = train_characters(TEXTS, special_tokens=())
    bare, letters = replace(causal, tokenizer=characters), characters.encode_batch(labelled.texts)
    expected = [
        (causal, [[BOS, *short], [BOS, *long[:5]]]),
        (runs["masked"], [[BOS, *short, EOS], [BOS, *long[:4], EOS]]),
        (replace(causal, config=apart), [short, long[:6]]),
        (bare, [letters[0][:6], letters[1][:6]]),
    ]
    for loaded, rows in expected:
        found = classification.encode(labelled, ["animal", "plant"], loaded, 6)
        real = zip(found.tokens, found.padding_mask, strict=True)
        assert [row[here].tolist() for row, here in real] == rows
        assert found.labels.tolist() == [1, 0]
        assert np.all(np.sort(found.padding_mask)[:, ::-1] == found.padding_mask)


def test_a_pair_is_framed_as_in_pretraining_and_cut_where_it_is_longer(runs, tokenizer):
    pairs = Labelled(["a", "b"], ["the sun", " ".join(WORDS)], ["a", "the moon"])
    found = classification.encode(pairs, ["a", "b"], runs["masked"], 13)
    (one, two), (a, moon) = (tokenizer.encode_batch(x) for x in (pairs.texts, pairs.seconds))
    expected = [
        [BOS, *one, EOS, *a, EOS],
        [BOS, *two[: 10 - len(moon)], EOS, *moon, EOS],
    ]
    rows = zip(found.tokens, found.padding_mask, strict=True)
    assert [row[real].tolist() for row, real in rows] == expected
    firsts = [len(one) + 2, 12 - len(moon)]
    for row, ids, first in zip(found.token_type_ids, expected, firsts, strict=True):
        assert row[: len(ids)].tolist() == [0] * first + [1] * (len(ids) - first)
    both = Labelled(["a"], [" ".join(WORDS)], [" ".join(WORDS[::-1])])
    row = classification.encode(both, ["a"], runs["masked"], 14).tokens[0].tolist()
    assert row.index(EOS) == 6 and row[-1] == EOS, "each of two long texts has half of 11 ids"
    causal = classification.encode(pairs, ["a", "b"], runs["causal"], 13)
    assert causal.token_type_ids is None
    row = causal.tokens[0][causal.padding_mask[0]].tolist()
    assert row == [BOS, *one, *tokenizer.encode("\n"), *a]


def test_token_types_reach_the_classifier(runs):
    learner = make_learner(replace(OPTIONS, task="pairs"), runs["masked"], PAIRS, PAIRS)
    params = fine_tune(learner, 0, pretrained=True)
    moved = params["backbone"]["type_embedding"]["table"]
    assert np.all(moved != runs["masked"].params["type_embedding"]["table"])
    score = learner.task.score(predict(learner.task, params, 4))
    assert score.lines[4].split("\t")[1:] == ["no", "the snow is here", "the lake"]


def test_pairs_are_read_from_tables_and_records(tmp_path):
    table = write_lines(tmp_path / "a.tsv", "yes\ta b\tc", "no\td\te f")
    record = {"hypothesis": "c", "premise": "a b", "label": "yes", "id": 3}
    records = write_lines(tmp_path / "a.jsonl", json.dumps(record))
    assert classification.read_labelled(table, pairs=True).seconds == ["c", "e f"]
    read = classification.read_labelled(records, pairs=True)
    assert read == Labelled(["yes"], ["a b"], ["c"])
    table = write_lines(tmp_path / "a.tsv", "yes\ta b\tc", "no\td")
    with pytest.raises(DataError, match="a.tsv:2: needed label<TAB>premise<TAB>hypothesis, got 2"):
        classification.read_labelled(table, pairs=True)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (["a\tx", "b\ty"], ["a\tx", "c\ty"], r"test.tsv:2: no line of .* has the label 'c'"),
        (["a\tx", "b y"], ["a\tx"], r"train.tsv:2: needed label<TAB>text, got 1 columns: 'b y'"),
        (["a\tx", "b\ty"], ["a\t "], r"test.tsv:1: needed label<TAB>text, got 2 columns: 'a' ' '"),
        (["a\tx", "a\ty"], ["a\tx"], r"train.tsv: all lines have the label 'a'"),
    ],
)
def test_labelled_text_that_cannot_be_used_is_refused(tmp_path, train, test, message):
    files = (write_lines(tmp_path / "train.tsv", *train), write_lines(tmp_path / "test.tsv", *test))
    with pytest.raises(DataError, match=message):
        classification.read(FinetuneOptions(train=files[0], test=files[1], num_train=2))


# Answers in a text


def squad(*questions: tuple[str, str, list[tuple[str, int]]]) -> dict:
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


QUESTIONS = squad(
    ("the sun is rain and snow. the moon is wind and sand.", "moon?", [("wind and sand", 38)]),
    (" ".join(TEXTS[:7]), "star?", [(TEXTS[2][4:7], len(" ".join(TEXTS[:2])) + 5)]),
    ("the lake is hill.", "what is the lake?", [("hill", 12), ("hill.", 12)]),
)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("squad") / "squad.json"
    path.write_text(json.dumps(QUESTIONS))
    return path


def test_windows_of_a_long_context_overlap_and_the_answer_is_where_it_is(
    runs, questions, tokenizer
):
    read = spans.read_questions(str(questions))
    windows = spans.make_windows(read, runs["masked"], T, doc_stride=3)
    assert set(windows.of) == {0, 1, 2} and np.sum(windows.of == 1) > 3
    answered = set()
    for row, number, offsets, (first, last) in zip(
        windows.examples.tokens, windows.of, windows.offsets, windows.examples.labels, strict=True
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
    real = [x[x[:, 0] >= 0] for x in windows.offsets[windows.of == 1]]
    for one, other in zip(real, real[1:], strict=False):
        assert (one[-3:] == other[:3]).all()
    assert real[-1][-1, 1] == len(read[1].context)


def test_the_best_span_lies_in_the_context_and_ends_after_it_starts(runs, questions):
    read = spans.read_questions(str(questions))[2:]
    windows = spans.make_windows(read, runs["masked"], T, doc_stride=3)
    real = np.flatnonzero(windows.offsets[0, :, 0] >= 0)
    logits = np.zeros((1, 2, T), np.float32)
    logits[0, 0, real[2]] = logits[0, 1, real[3]] = 2.0
    logits[0, 1, real[1]] = 3.0  # before the start
    logits[0, 0, 0] = logits[0, 1, 0] = 9.0  # no answer, if there may be none

    def answer(most: int, may_be_none: bool = False) -> str:
        return spans.best_answers(logits, windows, read, most, may_be_none=may_be_none)["q2"]

    start, end = windows.offsets[0, real[2], 0], windows.offsets[0, real[3], 1]
    assert answer(5) == read[0].context[start:end].strip()
    assert answer(1) == read[0].context[slice(*windows.offsets[0, real[1]])].strip()
    assert answer(5, may_be_none=True) == ""


def test_spans_are_learned_and_written_as_the_script_reads_them(
    folder, questions, tmp_path, capsys
):
    output = tmp_path / "answers.json"
    options = replace(
        OPTIONS,
        task="spans",
        seeds=1,
        start="pretrained",
        run=str(folder("masked")),
        train=str(questions),
        test=str(questions),
        output=str(output),
        runs=str(tmp_path),
        optimizer=replace(OPTIONS.optimizer, total_steps=40),
    )
    finetune.main(options)
    answers = json.loads(output.read_text())
    assert answers.keys() == {"q0", "q1", "q2"} and answers["q2"] in ("hill", "hill.")
    said = capsys.readouterr().out
    assert "seed 0, pretrained: f1 " in said and "F1 of the answers to 3 test questions" in said
    path = tmp_path / "language_modelling" / "masked" / "finetune.json"
    metrics = json.loads(path.read_text())["spans, all"]["metrics"]
    assert metrics["pretrained"][0].keys() == {"f1", "exact"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read the file"),
        ('{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "needed the JSON of SQuAD .* 'context' is"),
        ('{"data": []}', "there are no questions"),
        (json.dumps(squad(("a b", "x?", [("b", 1)]))), "'b' is not at 1 of its context"),
    ],
)
def test_questions_that_cannot_be_used_are_refused(text, message, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=message):
        spans.read_questions(str(tmp_path / "x.json"))


# Conversations


def conversation(asked: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "say it"},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer},
    ]


def test_only_tokens_of_answers_are_learned(tokenizer):
    template = ChatTemplate(PLAIN_TEMPLATE, special_names(tokenizer))
    more = [{"role": "user", "content": "the star"}, {"role": "assistant", "content": "sand"}]
    texts = [conversation("the sun", "is rain"), [*conversation("the moon", "and snow"), *more]]
    found = chat.encode_conversations(texts, template, tokenizer, 100)
    assert found.tokens.shape == found.labels.shape == (2, 101)
    learned = [
        [tokenizer.token(i) for i in row[mask]]
        for row, mask in zip(found.tokens, found.labels, strict=True)
    ]
    assert ["".join(tokens) for tokens in learned] == ["isĠrain<eos>", "andĠsnow<eos>sand<eos>"]
    row = found.tokens[0][found.padding_mask[0]]
    assert row[0] == BOS and tokenizer.decode(row).startswith("system:\nsay it")


def test_a_conversation_learned_with_adapters_is_saved_as_a_plain_model(
    tokenizer, random_params, tmp_path, capsys, assert_equal
):
    model = DecoderOnly(replace(CAUSAL.model, vocab_size=tokenizer.vocab_size, max_len=71))
    params = random_params(model, np.ones((2, T), np.int32))
    save_pretrained(tmp_path / "llama", model, params, tokenizer)
    lines = [json.dumps({"messages": conversation(f"the {a}", "is rain")}) for a in WORDS[:7]]
    path = write_lines(tmp_path / "chat.jsonl", *lines)
    options = replace(
        OPTIONS,
        task="chat",
        run=str(tmp_path / "llama"),
        runs=str(tmp_path),
        train=path,
        test=path,
        seeds=1,
        start="pretrained",
        seq_len=70,
        lora_rank=3,
        save=str(tmp_path / "saved"),
        optimizer=replace(OPTIONS.optimizer, learning_rate=5e-2, total_steps=40),
    )
    finetune.main(options)
    said = capsys.readouterr().out
    assert "chat, adapters of rank 3; all examples; share of the tokens of the answers" in said
    results = json.loads((tmp_path / "language_modelling" / "llama" / "finetune.json").read_text())
    (metrics,) = results["chat, adapters of rank 3"]["metrics"]["pretrained"]
    assert metrics["accuracy"] > 0.4
    assert load_template(tmp_path / "saved", tokenizer).source == PLAIN_TEMPLATE
    saved, before = load_pretrained(tmp_path / "saved"), flatten(params)
    moved = {x for x, leaf in flatten(saved.params).items() if not np.array_equal(leaf, before[x])}
    assert moved and all("blocks_0" in path and path.endswith("kernel") for path in moved)
    rows = chat.read(options)
    again = chat.make(options, load_run(tmp_path / "saved"), *rows)
    scores = again.score(predict(again, saved.params, 5)).metrics
    assert_equal(list(scores.values()), list(metrics.values()))
    with pytest.raises(ConfigError, match="exists already: give the name of a new folder"):
        finetune.main(options)
    asked = GenerateOptions(run=options.save, text=("the sun",), chat=True, max_new_tokens=7)
    generate.main(replace(asked, temperature=0.0))
    template = ChatTemplate(PLAIN_TEMPLATE, special_names(tokenizer))
    messages = [{"role": "user", "content": "the sun"}]
    written = template.render(messages, add_generation_prompt=True)
    ((ids, _),) = tokenizer.encode_with_special([written])
    assert ids[0] == BOS and ids.count(BOS) == 2
    greedy = SamplingConfig(max_new_tokens=7, temperature=0.0)
    (answer,) = complete(saved, [ids], greedy)
    assert capsys.readouterr().out == f"the sun\n{answer}\n"
    with pytest.raises(DataError, match="a message contains '<eos>', the name of a special token"):
        generate.main(replace(asked, text=("a <eos>",)))


# The command


def test_mean_and_sample_deviation_are_over_seeds_and_the_margin_is_by_pairs():
    result = summarise({"pretrained": [0.5, 0.7, 0.9], "scratch": [0.2, 0.5, 0.5]})
    assert result["pretrained"]["mean"] == pytest.approx(0.7)
    assert result["pretrained"]["deviation"] == pytest.approx(0.2)
    assert result["margin"]["by_seed"] == pytest.approx([0.3, 0.2, 0.4])
    assert result["margin"]["mean"] == pytest.approx(0.3)
    assert result["margin"]["deviation"] == pytest.approx(0.1)
    one = summarise({"scratch": [0.25]})
    assert one == {"scratch": {"by_seed": [0.25], "mean": 0.25, "deviation": None}}
    said = describe(replace(OPTIONS, num_train=11), result, "share of 4 test texts right")
    assert said.startswith("classification, all; 11 examples; share of 4 test texts right")
    assert "margin      30.0 ± 10.0 % (2 seeds)" in said
    mean = replace(OPTIONS, pooling="mean")
    assert "all, mean of the tokens; all examples; right" in describe(mean, one, "right")


def test_the_command_learns_prints_and_records_what_it_found(folder, tmp_path, capsys):
    train = write_lines(tmp_path / "train.tsv", *labelled_lines())
    options = replace(
        OPTIONS,
        run=str(folder("causal")),
        train=train,
        test=train,
        num_train=15,
        runs=str(tmp_path),
        output=str(tmp_path / "found.tsv"),
        optimizer=replace(OPTIONS.optimizer, total_steps=97),
    )
    before = {path: path.stat().st_mtime_ns for path in folder("causal").iterdir()}
    finetune.main(options)
    path = tmp_path / "language_modelling" / "causal" / "finetune.json"
    record = json.loads(path.read_text())
    assert list(record) == ["classification, all"]
    result = record["classification, all"]
    assert result["options"]["num_train"] == 15 and "margin" in result
    assert result["pretrained"]["by_seed"] == [1.0, 1.0]
    assert len(result["scratch"]["by_seed"]) == 2
    said = capsys.readouterr().out
    assert "seed 1, pretrained: accuracy 1.0000" in said
    assert said.index("seed 1, scratch") < said.index("seed 1, pretrained")  # which is written
    rows = zip(LABELLED.labels, labelled_lines(), strict=True)
    assert (tmp_path / "found.tsv").read_text() == "".join(f"{x}\t{line}\n" for x, line in rows)
    learn_nothing = replace(OPTIONS.optimizer, total_steps=1)
    fewer = replace(options, freeze_backbone=True, start="scratch", optimizer=learn_nothing)
    finetune.main(fewer)
    record = json.loads(path.read_text())
    assert list(record) == ["classification, all", "classification, head"]
    assert "pretrained" not in record["classification, head"]
    finetune.main(replace(fewer, name="tuned"))
    assert (tmp_path / "language_modelling" / "tuned" / "finetune.json").is_file()
    assert {path: path.stat().st_mtime_ns for path in folder("causal").iterdir()} == before
    with pytest.raises(ConfigError, match="'a/b' cannot name a folder"):
        finetune.main(replace(fewer, name="a/b"))


def test_settings_that_contradict_each_other_are_refused(tmp_path, questions):
    for changes, message in (
        ({"train": "a.tsv"}, "needs both files, but train='a.tsv' and test=''"),
        ({"seeds": 0}, "seeds=0, but it must be at least 1"),
        ({"start": "last"}, "start='last' is unknown: give one of both, pretrained"),
        ({"lora_rank": 2}, "lora_rank=2 trains adapters of pretrained weights"),
        ({"task": "chat", "freeze_backbone": True}, "freeze_backbone trains the head alone"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(OPTIONS, **changes)
    with pytest.raises(ConfigError, match="task='spans' needs files: give --train FILE and"):
        finetune.main(replace(OPTIONS, task="spans"))
    path = write_lines(tmp_path / "both.tsv", "a\tx", "b\ty", "b\tz")
    for count in (1, 4):
        with pytest.raises(ConfigError, match=f"num_train={count}, but there are 3 texts"):
            classification.read(FinetuneOptions(train=path, test=path, num_train=count))
    with pytest.raises(ConfigError, match="num_train=5, but there are 3 questions"):
        spans.read(replace(OPTIONS, train=str(questions), test=str(questions), num_train=5))


def test_models_that_do_not_fit_a_task_are_refused(runs, questions, tokenizer, folder):
    read = spans.read_questions(str(questions))
    with pytest.raises(ConfigError, match="is a causal model, but task='spans' needs an encoder"):
        spans.make(OPTIONS, runs["causal"], read, read)
    with pytest.raises(ConfigError, match="doc_stride=19 leaves no new token in a window of"):
        spans.make_windows(read, runs["masked"], T, doc_stride=19)
    texts = [conversation("a", "b")]
    with pytest.raises(ConfigError, match="is a masked model, but task='chat' needs one that"):
        chat.make(OPTIONS, runs["masked"], texts, texts)
    template = ChatTemplate(PLAIN_TEMPLATE, special_names(tokenizer))
    with pytest.raises(DataError, match="conversation 1: a message contains '<eos>', the name"):
        chat.encode_conversations([conversation("a <eos>", "b")], template, tokenizer, 60)
    with pytest.raises(DataError, match="no answer begins within 3 tokens"):
        chat.encode_conversations(texts, template, tokenizer, 3)


def test_a_model_that_cannot_be_saved_is_refused_before_it_is_trained(folder, tmp_path):
    train = write_lines(tmp_path / "train.tsv", *labelled_lines())
    options = replace(OPTIONS, run=str(folder("causal")), train=train, test=train)
    options = replace(options, num_train=3, pooling="mean", save=str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="pooling='mean' cannot be exported"):
        finetune.main(options)
    assert not (tmp_path / "saved").exists()
