"""Tokenizers with added tokens that their model lacks, as those of Gemma 3 and CodeLlama have."""

import json

import numpy as np
import pytest
import tokenizers as library

import jaxformer as jf
from experiments.language_modelling.finetune_presets import PRESETS
from experiments.language_modelling.tasks import chat, classification
from experiments.language_modelling.tasks.chat_template import ChatTemplate
from jaxformer.errors import ConfigError, DataError
from jaxformer.text import tokenizers
from jaxformer.text.data import MaskedStream, Tokens
from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS
from tests.experiments.tiny_runs import changed

WORDS = [["a b c d e f g h i j k l m n o p q r"], 23, MASKED_SPECIAL_TOKENS]
IMAGE, TOOL = "<image>", "tool"


@pytest.fixture
def larger(folder):
    """A folder of a model of 23 ids whose tokenizer has two more: IMAGE, special, and TOOL."""
    path = folder("gpt2")
    made = tokenizers.train_words(WORDS[0], WORDS[1], special_tokens=WORDS[2]).to_library()
    assert made.get_vocab_size() == 23
    made.add_special_tokens([IMAGE])
    made.add_tokens([library.AddedToken(TOOL, normalized=False)])
    made.save(str(path / "tokenizer.json"))
    return path


def with_padding(path, name):
    roles = {"pad_token": name, "bos_token": "<bos>", "eos_token": "<eos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(roles))


def test_texts_without_them_are_read_as_without_them(larger, filled):
    loaded = jf.load(larger)
    assert loaded.tokenizer.vocab_size == loaded.model.config.vocab_size == 23
    known = tokenizers.train_words(WORDS[0], WORDS[1], special_tokens=WORDS[2])
    texts = ["a b", "the <image> c q"]
    assert loaded.tokenizer.encode_batch(texts) == known.encode_batch(texts)
    expected = jf.complete(
        jf.Loaded(*filled("gpt2"), known), texts, temperature=0.0, max_new_tokens=3
    )
    assert jf.complete(loaded, texts, temperature=0.0, max_new_tokens=3) == expected


def test_a_text_that_gives_one_is_refused_with_its_name(larger):
    loaded = jf.load(larger)
    uses = [
        lambda texts: loaded.tokenizer.encode_batch(texts),
        lambda texts: loaded.tokenizer.encode_inputs(texts),
        lambda texts: jf.complete(loaded, texts, max_new_tokens=2),
        lambda texts: jf.score(loaded, texts),
    ]
    for use in uses:
        with pytest.raises(DataError, match="text 2 of 2 .*'tool' .*24"):
            use(["a b", "c tool d"])
    with pytest.raises(DataError, match="text 1 of 2 .*'<image>' .*23"):
        loaded.tokenizer.encode_with_special(["<image> a", "b"])
    for index in (23, 24):
        with pytest.raises(DataError, match="(?s)0 to 22"):
            loaded.tokenizer.decode([1, index])


def test_the_copy_in_a_run_refuses_them_too(larger, tmp_path):
    tokenizers.load(larger).save(tmp_path / "words.json")
    again = tokenizers.load(tmp_path / "words.json")
    assert again.vocab_size == 23
    with pytest.raises(DataError, match="'tool' .*24"):
        again.encode("tool")


def test_padding_that_is_one_is_refused_where_rows_are_filled_up(larger):
    with_padding(larger, IMAGE)
    tokenizer = jf.load(larger).tokenizer
    reason = "filled up with '<image>', which has the id 23"
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}",
        {},
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    config = changed(PRESETS["chat"], data__seq_len=7)
    with pytest.raises(DataError, match=reason):
        chat.encode(config, tokenizer, [messages], template)
    config = changed(PRESETS["classification"], data__seq_len=7)
    with pytest.raises(DataError, match=reason):
        classification.encode(config, tokenizer, [("x", "a"), ("y", "b")], ["x", "y"])
    corpus = Tokens(np.arange(5, 12, dtype=np.uint32), np.array([0, 7]))
    with pytest.raises(DataError, match="pad token .*23"):
        MaskedStream(
            corpus,
            batch_size=2,
            seq_len=5,
            seed=0,
            special=tokenizer.special._replace(mask=4),
            vocab_size=23,
        )


@pytest.mark.parametrize("role", ["bos", "eos"])
def test_a_role_in_every_text_that_is_one_is_refused_when_the_folder_is_loaded(larger, role):
    with_padding(larger, "<pad>")
    path = larger / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {f"{role}_token": IMAGE}))
    with pytest.raises(ConfigError, match=f"{role}_token '<image>'"):
        jf.load(larger)


def test_a_piece_that_the_model_lacks_is_refused_when_the_folder_is_loaded(larger):
    made = tokenizers.train_words([*WORDS[0], "s t u"], 26).to_library()
    made.add_tokens([TOOL])
    made.save(str(larger / "tokenizer.json"))
    with pytest.raises(ConfigError, match="26 ids"):
        jf.load(larger)
