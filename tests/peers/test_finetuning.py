"""Pairs, windows, conversations and scores are those of `transformers` and its like."""

import json
from dataclasses import replace

import numpy as np
import pytest

from experiments.harness.training.training_config import OptimizerConfig
from experiments.language_modelling import export, finetune
from experiments.language_modelling.finetune_presets import PRESETS
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.language_modelling.tasks import chat, classification, spans
from experiments.language_modelling.tasks.chat_template import load_template
from experiments.language_modelling.tasks.squad import Question, score_answers
from jaxformer.pretrained import load_pretrained
from jaxformer.text import tokenizers
from tests.experiments.commands import call
from tests.experiments.tiny_runs import changed

pytestmark = pytest.mark.peer
transformers = pytest.importorskip("transformers", reason="needs the extra peers")

WORDS = "the a sun moon star rain snow wind ##s ##ing is and . , ? hill lake".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONTEXT = "The sun is snowing, and the moon rains. " * 5
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.role == "assistant" %}
{{ "<|assistant|>" }}{% generation %}{{ message.content | trim + eos_token }}{% endgeneration %}
{% else %}
{{ "<|" + message.role + "|>" + message.content + eos_token }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}"""
MESSAGES = [
    {"role": "system", "content": "Say  it.\n"},
    {"role": "user", "content": "Ünder <b>the</b> sun?"},
    {"role": "assistant", "content": " rain & snow "},
    {"role": "user", "content": "and then?"},
    {"role": "assistant", "content": "wind"},
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A tokenizer like BERT's in both libraries, and a run that has it."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    theirs = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    model = LANGUAGE_PRESETS["bert_base"].model
    config = replace(PRESETS["pairs"], model=model, objective="masked")
    return theirs, config, tokenizers.load(folder)


@pytest.mark.parametrize("length", [9, 10, 40])
def test_pairs_are_those_of_transformers(bert, length):
    theirs, config, tokenizer = bert
    firsts = ["the sun", "snowing and raining, the moon is a star.", "a"]
    seconds = ["is a hill? the lake and the wind", "the rain", "the moon"]
    pairs = list(zip("xyx", firsts, seconds, strict=True))
    config = changed(config, data__seq_len=length)
    found = classification.encode(config, tokenizer, pairs, ["x", "y"]).examples
    expected = theirs(firsts, seconds, truncation=True, max_length=length, padding="max_length")
    assert found.tokens.tolist() == expected["input_ids"]
    assert found.token_type_ids.tolist() == expected["token_type_ids"]
    assert found.padding_mask.astype(int).tolist() == expected["attention_mask"]


def test_a_saved_classifier_of_pairs_is_one_of_transformers(bert, torch, tmp_path, assert_equal):
    theirs, *_ = bert
    sizes = {"hidden_size": 12, "intermediate_size": 17, "num_attention_heads": 3}
    config = transformers.BertConfig(vocab_size=len(theirs), num_hidden_layers=1, **sizes)
    model = transformers.BertForMaskedLM(config)
    assert not any("pooler" in name for name, _ in model.named_parameters())
    model.save_pretrained(tmp_path / "bert")
    theirs.save_pretrained(tmp_path / "bert")
    lines = [
        f"{label}\tthe {word} is rain\tthe {word}"
        for label, word in zip(
            "xyz" * 2, ["sun", "moon", "star", "wind", "hill", "lake"], strict=True
        )
    ]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    paths = (str(tmp_path / "pairs.tsv"),)
    config = replace(
        PRESETS["pairs"],
        init_from=str(tmp_path / "bert"),
        runs=str(tmp_path / "runs"),
        optimizer=OptimizerConfig(
            schedule="constant", learning_rate=3e-2, warmup_steps=1, total_steps=20
        ),
    )
    config = changed(
        config,
        data__train=paths,
        data__validation=paths,
        data__test=paths,
        data__seq_len=13,
        data__batch_size=3,
        training__lora_rank=2,
    )
    run = finetune.train(config).folder
    assert call(export, {"--run": run, "--out": tmp_path / "saved"}).code == 0
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    table = (run / "samples" / "test.tsv").read_text().splitlines()[1:]
    found = [[model, *source.split(" / ")] for source, model, _ in (x.split("\t") for x in table)]
    pairs = theirs([row[1] for row in found], [row[2] for row in found], return_tensors="pt")
    with torch.no_grad():
        logits = saved(**pairs).logits.numpy()
    labels = logits.argmax(-1).tolist()
    assert [saved.config.id2label[label] for label in labels] == [row[0] for row in found]
    ours = load_pretrained(tmp_path / "saved")
    names = ("input_ids", "attention_mask", "token_type_ids")
    tokens, mask, types = (pairs[name].numpy() for name in names)
    assert_equal(ours.model.apply({"params": ours.params}, tokens, mask > 0, types), logits)


def test_windows_are_those_of_transformers(bert):
    theirs, config, tokenizer = bert
    start = CONTEXT.rindex("moon")
    questions = [
        Question("a", "what is the sun?", CONTEXT, ["moon"], [start]),
        Question("b", "the moon?", CONTEXT[:30], ["snow"], [11]),
    ]
    config = changed(config, data__seq_len=29, task__doc_stride=5)
    found = spans.encode(config, tokenizer, questions, [])
    expected = theirs(
        [each.question for each in questions],
        [each.context for each in questions],
        truncation="only_second",
        max_length=29,
        stride=5,
        padding="max_length",
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    assert found.examples.tokens.tolist() == expected["input_ids"]
    assert found.examples.token_type_ids.tolist() == expected["token_type_ids"]
    of, places = found.notes
    assert of.tolist() == expected["overflow_to_sample_mapping"] and len(of) > 3
    for row, offsets in enumerate(expected["offset_mapping"]):
        of_context = np.array(expected.sequence_ids(row)) == 1
        assert (places[row][of_context] == np.array(offsets)[of_context]).all()
        assert (places[row][~of_context] == -1).all()


def test_conversations_are_those_of_transformers(tmp_path):
    tokenizer = tokenizers.train_bpe([CONTEXT, "assistant user system"], 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    config |= {"bos_token": "<bos>", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = load_template(tmp_path, tokenizer)
    assert template.render(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False)
    expected = theirs.apply_chat_template(
        MESSAGES, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    config = changed(PRESETS["chat"], model__max_len=203, data__seq_len=200)
    found = chat.encode(config, tokenizer, [MESSAGES], template).examples
    count = len(expected["input_ids"])
    assert found.tokens[0, :count].tolist() == expected["input_ids"]
    learned = found.loss_mask[0, : count - 1].astype(int).tolist()
    assert learned == expected["assistant_masks"][1:] and sum(learned) > 5
    assert found.loss_mask.sum() == sum(learned)


def test_scores_of_answers_are_those_of_the_script():
    text = pytest.importorskip("torchmetrics.functional.text", reason="needs the extra peers")
    rng = np.random.default_rng(3)
    words = ["the", "A", "sun", "moon.", "moon", "rain", "U.S.", "an", "“star”", "-"]

    def some(most: int) -> str:
        return " ".join(rng.choice(words, rng.integers(1, most)))

    answers = {str(i): [f"sun {some(4)}" for _ in range(rng.integers(1, 4))] for i in range(97)}
    found = {key: str(rng.choice([some(5), right[-1].upper()])) for key, right in answers.items()}
    expected = text.squad(
        [{"prediction_text": found[key], "id": key} for key in answers],
        [
            {"answers": {"text": right, "answer_start": [0] * len(right)}, "id": key}
            for key, right in answers.items()
        ],
    )
    scores = score_answers(found, answers)
    assert 0.1 < scores["exact"] < scores["f1"] < 0.9
    assert 100 * scores["exact"] == pytest.approx(float(expected["exact_match"]), rel=1e-6)
    assert 100 * scores["f1"] == pytest.approx(float(expected["f1"]), rel=1e-6)
