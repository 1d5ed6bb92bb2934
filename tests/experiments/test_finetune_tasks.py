"""Fine-tuning for pairs, spans and conversations, and with adapters: from files to scores."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.language_modelling import finetune, sample
from experiments.language_modelling.chat_templates import (
    PLAIN_TEMPLATE,
    ChatTemplate,
    load_template,
    special_names,
)
from experiments.language_modelling.finetune import FinetuneOptions, fine_tune, make_task, predict
from experiments.language_modelling.load_run import LoadedRun
from experiments.language_modelling.presets import DataConfig, LanguageConfig
from experiments.language_modelling.sample import SampleOptions
from experiments.language_modelling.tasks import chat, classification, spans
from experiments.language_modelling.tasks.classification import LabelledPairs
from jaxformer.config import (
    EmbeddingOptions,
    FeedForwardOptions,
    NormOptions,
    Rotary,
    TransformerConfig,
)
from jaxformer.decoding import SamplingConfig
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly
from jaxformer.pipelines import complete
from jaxformer.pretrained import load_pretrained
from jaxformer.text.tokenizers import BOS, EOS, MASKED_SPECIAL_TOKENS, train_bpe
from jaxformer.training.optimizer import OptimizerConfig
from jaxformer.training.parameters import flatten

T = 23
WORDS = "sun moon star rain snow wind hill lake tree bird fish sand".split()
TEXTS = [f"the {a} is {b} and {c}." for a in WORDS for b in WORDS for c in WORDS[:2] if a != b]
SIZES = {
    "vocab_size": 300,
    "d_model": 12,
    "d_ff": 17,
    "num_heads": 3,
    "max_len": T,
    "norm": NormOptions("rms", placement="pre"),
    "feed_forward": FeedForwardOptions("silu", gated=True),
    "embeddings": EmbeddingOptions(tied="none", scale=False),
    "positions": Rotary(),
    "use_bias": False,
}
CAUSAL = LanguageConfig(
    name="causal",
    model=TransformerConfig(num_decoder_layers=1, **SIZES),
    data=DataConfig(seq_len=T),
)
MASKED = LanguageConfig(
    name="masked",
    model=TransformerConfig(
        num_encoder_layers=1, embeddings=EmbeddingOptions(num_types=2), **SIZES
    ),
    objective="masked",
    data=DataConfig(seq_len=T),
)
OPTIONS = FinetuneOptions(
    num_train=0,
    seeds=1,
    batch_size=5,
    seq_len=T,
    doc_stride=3,
    start="pretrained",
    optimizer=OptimizerConfig(
        schedule="constant", learning_rate=1e-2, warmup_steps=1, total_steps=3, weight_decay=0.1
    ),
)
PAIRS = LabelledPairs(
    ["yes", "no", "maybe"] * 3,
    [f"the {word} is here" for word in WORDS[:9]],
    [f"the {word}" for word in WORDS[3:]],
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 290, special_tokens=MASKED_SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def runs(random_params, tokenizer) -> dict[str, LoadedRun]:
    found = {}
    for config, kind in ((CAUSAL, DecoderOnly), (MASKED, MaskedLanguageModel)):
        model = kind(replace(config.model, vocab_size=tokenizer.vocab_size))
        params = random_params(model, np.ones((2, T), np.int32))
        found[config.name] = LoadedRun(config, model, params, tokenizer)
    return found


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


def conversation(asked: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "say it"},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer},
    ]


def test_a_pair_is_framed_as_in_pretraining_and_cut_where_it_is_longer(runs, tokenizer):
    pairs = LabelledPairs(["a", "b"], ["the sun", " ".join(WORDS)], ["a", "the moon"])
    found = classification.encode_pairs(pairs, kinds=["a", "b"], loaded=runs["masked"], length=13)
    (one, two), (a, moon) = (tokenizer.encode_batch(x) for x in (pairs.texts, pairs.seconds))
    expected = [
        [BOS, *one, EOS, *a, EOS],
        [BOS, *two[: 10 - len(moon)], EOS, *moon, EOS],
    ]
    rows = zip(found.tokens, found.padding_mask, strict=True)
    assert [row[real].tolist() for row, real in rows] == expected
    types = [
        row[: len(ids)].tolist() for row, ids in zip(found.token_type_ids, expected, strict=True)
    ]
    firsts = [len(one) + 2, 12 - len(moon)]
    assert types == [
        [0] * first + [1] * (len(ids) - first) for first, ids in zip(firsts, expected, strict=True)
    ]
    causal = classification.encode_pairs(pairs, kinds=["a", "b"], loaded=runs["causal"], length=13)
    assert causal.token_type_ids is None
    row = causal.tokens[0][causal.padding_mask[0]].tolist()
    assert row == [BOS, *one, *tokenizer.encode("\n"), *a]


def test_where_both_texts_of_a_pair_are_too_long_each_has_half():
    assert classification._longest_first(9, 30, 11) == (5, 6)
    assert classification._longest_first(30, 9, 11) == (6, 5)
    assert classification._longest_first(3, 30, 11) == (3, 8)
    assert classification._longest_first(5, 6, 11) == (5, 6)


def test_token_types_reach_the_classifier(runs):
    task = make_task(replace(OPTIONS, task="pairs"), runs["masked"], PAIRS, PAIRS)
    params = fine_tune(OPTIONS, task, 0, pretrained=True)
    moved = params["backbone"]["type_embedding"]["table"]
    assert np.all(moved != runs["masked"].params["encoder"]["type_embedding"]["table"])
    score = task.data.score(predict(task, params, 4))
    assert score.lines[4].split("\t")[1:] == ["no", "the snow is here", "the lake"]


def test_pairs_are_read_from_tables_and_records(tmp_path):
    table, records = tmp_path / "a.tsv", tmp_path / "a.jsonl"
    table.write_text("yes\ta b\tc\nno\td\te f\n")
    record = {"hypothesis": "c", "premise": "a b", "label": "yes", "id": 3}
    records.write_text(json.dumps(record) + "\n")
    assert classification.read_pairs(str(table)).seconds == ["c", "e f"]
    assert classification.read_pairs(str(records)) == LabelledPairs(["yes"], ["a b"], ["c"])
    table.write_text("yes\ta b\tc\nno\td\n")
    with pytest.raises(DataError, match="a.tsv:2: needed label<TAB>premise<TAB>hypothesis, got 2"):
        classification.read_pairs(str(table))


def test_windows_of_a_long_context_overlap_and_the_answer_is_where_it_is(
    runs, questions, tokenizer
):
    read = spans.read_questions(str(questions))
    windows = spans.make_windows(read, runs["masked"], T, doc_stride=3)
    assert set(windows.of) == {0, 1, 2} and np.sum(windows.of == 1) > 3
    answered = set()
    for row, number, places, (first, last) in zip(
        windows.examples.tokens, windows.of, windows.offsets, windows.examples.labels, strict=True
    ):
        context, real = read[number].context, places[:, 0] >= 0
        cut = tokenizer.encode_batch([context])[0]
        ids = row[real].tolist()
        assert any(cut[i : i + len(ids)] == ids for i in range(len(cut)))
        if first:
            text = context[places[first, 0] : places[last, 1]].strip()
            assert text.startswith(read[number].answers[0])
            answered.add(number)
    assert answered == {0, 1, 2}
    starts = windows.offsets[windows.of == 1]
    real = [places[places[:, 0] >= 0] for places in starts]
    for one, other in zip(real, real[1:], strict=False):
        assert (one[-3:] == other[:3]).all()
    assert real[-1][-1, 1] == len(read[1].context)


def test_the_best_span_lies_in_the_context_and_ends_after_it_starts(runs, questions):
    read = spans.read_questions(str(questions))[2:]
    windows = spans.make_windows(read, runs["masked"], T, doc_stride=3)
    (real,) = np.flatnonzero(windows.offsets[0, :, 0] >= 0)[None]
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
    runs, questions, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(finetune, "load_run", lambda *_, **__: runs["masked"])
    output = tmp_path / "found.json"
    options = replace(
        OPTIONS,
        task="spans",
        run=str(tmp_path),
        train=str(questions),
        test=str(questions),
        output=str(output),
        optimizer=replace(OPTIONS.optimizer, total_steps=40),
    )
    finetune.main(options)
    found = json.loads(output.read_text())
    assert found.keys() == {"q0", "q1", "q2"}
    assert found["q2"] in ("hill", "hill.")
    said = capsys.readouterr().out
    assert "seed 0, pretrained: f1 " in said and "F1 of the answers to 3 test questions" in said
    kept = json.loads((tmp_path / "finetune.json").read_text())["spans, all"]
    assert kept["metrics"]["pretrained"][0].keys() == {"f1", "exact"}


def test_only_tokens_of_answers_are_learned(runs, tokenizer):
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


@pytest.mark.long
def test_a_conversation_learned_with_adapters_is_saved_as_a_plain_model(
    runs, tmp_path, monkeypatch, capsys, assert_equal
):
    config = replace(runs["causal"].model.config, max_len=71)
    long = runs["causal"]._replace(model=runs["causal"].model.clone(config=config))
    monkeypatch.setattr(finetune, "load_run", lambda *_, **__: long)
    path = tmp_path / "chat.jsonl"
    lines = [{"messages": conversation(f"the {a}", "is rain and snow")} for a in WORDS[:7]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = replace(
        OPTIONS,
        task="chat",
        run=str(tmp_path),
        train=str(path),
        test=str(path),
        seq_len=70,
        lora_rank=3,
        save=str(tmp_path / "saved"),
        optimizer=replace(OPTIONS.optimizer, learning_rate=5e-2, total_steps=40),
    )
    finetune.main(options)
    said = capsys.readouterr().out
    assert "layers adapters of rank 3; share of the tokens of the answers in 7" in said
    (metrics,) = json.loads((tmp_path / "finetune.json").read_text())["chat, adapters of rank 3"][
        "metrics"
    ]["pretrained"]
    assert metrics["accuracy"] > 0.4
    assert load_template(tmp_path / "saved", long.tokenizer).source == PLAIN_TEMPLATE
    saved = load_pretrained(tmp_path / "saved")
    before = flatten(long.params)
    moved = {x for x, leaf in flatten(saved.params).items() if not np.array_equal(leaf, before[x])}
    assert moved and all("blocks_0" in path and path.endswith("kernel") for path in moved)
    task = make_task(options, long, *chat.read(options))
    again = task.data.score(predict(task, saved.params, 5)).metrics
    assert_equal(list(again.values()), list(metrics.values()))
    with pytest.raises(ConfigError, match="is there already: give the name of a new folder"):
        finetune.main(options)
    capsys.readouterr()
    asked = SampleOptions(run=options.save, prompt=("the sun",), chat=True, max_new_tokens=7)
    sample.main(replace(asked, temperature=0.0))
    names = special_names(long.tokenizer)
    written = ChatTemplate(PLAIN_TEMPLATE, names).render(
        [{"role": "user", "content": "the sun"}], add_generation_prompt=True
    )
    ((ids, _),) = long.tokenizer.encode_with_special([written])
    assert ids[0] == BOS and ids.count(BOS) == 2
    greedy = SamplingConfig(max_new_tokens=7, temperature=0.0)
    (answer,) = complete(saved.model, saved.params, [ids], saved.tokenizer, greedy)
    assert capsys.readouterr().out == f"the sun\n{answer.text}\n"
    with pytest.raises(DataError, match="a message contains '<eos>', the name of a special token"):
        sample.main(replace(asked, prompt=("a <eos>",)))


@pytest.mark.slow
def test_adapters_of_a_backbone_leave_its_weights_and_train_the_head(runs):
    options = replace(OPTIONS, task="pairs", lora_rank=2)
    task = make_task(options, runs["masked"], PAIRS, PAIRS)
    params = fine_tune(options, task, 0, pretrained=True)
    before = flatten(runs["masked"].params["encoder"])
    for path, leaf in flatten(params["backbone"]).items():
        adapted = "blocks_0" in path and path.endswith("kernel")
        assert np.array_equal(leaf, before[path]) != adapted, path
    first = task.init(jax.random.split(jax.random.key(0))[0], *task.data.train[:2])
    assert np.all(params["head"]["kernel"] != first["head"]["kernel"])


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


def test_models_and_settings_that_do_not_fit_a_task_are_refused(runs, questions, tokenizer):
    read = spans.read_questions(str(questions))
    with pytest.raises(ConfigError, match="is a causal model, but task='spans' needs an encoder"):
        make_task(replace(OPTIONS, task="spans"), runs["causal"], read, read)
    with pytest.raises(ConfigError, match="doc_stride=19 leaves no new token in a window of"):
        spans.make_windows(read, runs["masked"], T, doc_stride=19)
    task = make_task(replace(OPTIONS, task="pairs"), runs["masked"], PAIRS, PAIRS)
    with pytest.raises(ConfigError, match="no family supports the model. .* bert: "):
        finetune.check_new_folder("nowhere", task)
    texts = [conversation("a", "b")]
    with pytest.raises(ConfigError, match="is a masked model, but task='chat' needs one that"):
        make_task(replace(OPTIONS, task="chat"), runs["masked"], texts, texts)
    with pytest.raises(ConfigError, match="lora_rank=2 trains adapters of pretrained weights"):
        FinetuneOptions(lora_rank=2)
    with pytest.raises(ConfigError, match="freeze_backbone trains the head alone"):
        FinetuneOptions(task="chat", freeze_backbone=True)
    with pytest.raises(ConfigError, match="num_train=5, but there are 3 questions"):
        spans.read(replace(OPTIONS, train=str(questions), test=str(questions), num_train=5))
    template = ChatTemplate(PLAIN_TEMPLATE, special_names(tokenizer))
    with pytest.raises(DataError, match="conversation 1: a message contains '<eos>', the name"):
        chat.encode_conversations([conversation("a <eos>", "b")], template, tokenizer, 60)
    with pytest.raises(DataError, match="no answer begins within 3 tokens"):
        chat.encode_conversations(texts, template, tokenizer, 3)


def test_made_examples_are_of_the_standard_library(monkeypatch):
    text = "total = 3\nfor x in y:\n    total += x\nreturn total"
    snippets = SimpleNamespace(texts=[text, "a\nb", "c\nd", "e\nf"])
    for module in (classification, spans):
        monkeypatch.setattr(module, "snippets", lambda part: snippets)
    (question,) = spans.made_questions("test")
    assert question[1:] == ("total", text, ["3"], [8])
    pairs = classification.snippet_pairs("test")
    assert pairs.labels == ["follows", "other", "follows", "other"]
    assert pairs.texts[1:] == ["a", "c", "e"] and pairs.seconds[1:] == ["f", "d", "b"]
    (messages, *_) = chat.made_conversations("test")
    assert messages[0]["content"].startswith("def ") and messages[1]["role"] == "assistant"
