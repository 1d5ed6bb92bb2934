"""Chat templates: what they write, and where the answers are in it."""

import json

import pytest

from experiments.language_modelling.finetune_presets import PRESETS
from experiments.language_modelling.tasks import chat
from experiments.language_modelling.tasks.chat_template import (
    PLAIN_TEMPLATE,
    ChatTemplate,
    load_template,
)
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.tokenizers import train_words

CHATML = """{% for message in messages %}
<|{{ message.role }}|>
{% if message.role == "assistant" %}{% generation %}{{ message.content }}<end>{% endgeneration %}
{% else %}{{ message.content }}<end>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}"""
MESSAGES = [
    {"role": "user", "content": "sun"},
    {"role": "assistant", "content": "moon"},
    {"role": "user", "content": "star"},
    {"role": "assistant", "content": "rain\n"},
]


@pytest.fixture
def tokenizer():
    return train_words(["sun moon"], 11)


def test_answers_are_all_that_follows_the_prompt_for_one():
    text, spans = ChatTemplate(CHATML, {}).answers(MESSAGES)
    assert [text[slice(*span)] for span in spans] == ["moon<end>", "rain\n<end>"]
    assert text.startswith("<|user|>\nsun<end>\n<|assistant|>\nmoon<end>")


def test_special_tokens_are_those_of_the_folder(tmp_path, tokenizer):
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    names |= {"unk_token": "<unk>", "mask_token": ""}
    assert load_template(tmp_path, tokenizer) == ChatTemplate(PLAIN_TEMPLATE, names)
    config = {"chat_template": "{{ eos_token }}{{ bos_token }}", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_template(tmp_path, tokenizer).render([]) == "</s><bos>"
    several = [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load_template(tmp_path, tokenizer).source == "y"
    (tmp_path / "chat_template.jinja").write_text("z")
    assert load_template(tmp_path, tokenizer).source == "z"
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match="list"):
        load_template(tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("{% for x %}", ConfigError, "the chat template, line 1:"),
        ("{{ date.name }}", ConfigError, "uses an undefined name"),
        ("{{ raise_exception('no system') }}", DataError, "refuses the messages: no system"),
        ("{{ messages.append(1) }}", DataError, "refuses the messages"),
    ],
)
def test_a_template_that_fails_is_refused(source, error, message):
    with pytest.raises(error, match=message):
        ChatTemplate(source, {}).render(MESSAGES)


SPACED = """
{{ bos_token }}
{% for message in messages %}
    {% if message.role == "assistant" %}
        {{ "It says:\n" + message.content + "<end>" }}
    {% else %}
        {{ "Asked: " + message.content + "\n" }}
    {% endif %}
{% endfor %}
TAIL
{% if add_generation_prompt %}
    {{ "It says:\n" }}
{% endif %}
"""


@pytest.mark.parametrize("tail", ["", "\n", "\n \n", "{{ '\n' }}"])
@pytest.mark.parametrize("count", [2, 4])
def test_answers_are_found_where_white_space_follows_the_last_message(tail, count):
    template = ChatTemplate(SPACED.replace("TAIL", tail), {"bos_token": "<s>"})
    text, spans = template.answers(MESSAGES[:count])
    assert text == template.render(MESSAGES[:count])
    expected = ["moon<end>\n", "rain\n<end>\n"][: count // 2]
    assert [text[slice(*span)] for span in spans] == expected


def test_white_space_of_an_answer_is_in_it():
    template = ChatTemplate(SPACED.replace("TAIL", "\n"), {})
    spaced = [MESSAGES[0], {"role": "assistant", "content": "  two\n\nlines\n\n"}]
    text, ((start, end),) = template.answers(spaced)
    assert text[start:end] == "  two\n\nlines\n\n<end>\n"


def test_tools_and_documents_are_none_and_null_fields_are_absent():
    source = "{{ tools is none }} {{ documents is none }} {{ messages[0].name is defined }}"
    assert ChatTemplate(source, {}).render([{"role": "user", "name": None}]) == "True True False"


def test_tojson_takes_the_arguments_of_transformers():
    source = "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"
    text = ChatTemplate(source, {}).render([{"role": "user", "content": "ü"}])
    assert text == '{"content":"\\u00fc","role":"user"}'
    indented = ChatTemplate("{{ messages | tojson(indent=1) }}", {}).render([{"role": "user"}])
    assert indented == '[\n {\n  "role": "user"\n }\n]'


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_a_conversation_with_tools_is_refused_as_no_template_is_given_them(name, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES, name: None}) + "\n")
    assert chat.read(PRESETS["chat"], str(path)) == [MESSAGES]
    path.write_text(json.dumps({"messages": MESSAGES, name: [{"name": "search"}]}) + "\n")
    with pytest.raises(DataError, match=f"x.jsonl:1: .*{name}"):
        chat.read(PRESETS["chat"], str(path))


def test_a_template_that_drops_earlier_answers_is_refused():
    source = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="message 2"):
        ChatTemplate(source, {}).answers(MESSAGES)


def test_characters_of_other_languages_and_of_html_stay():
    template = ChatTemplate("{{ messages[0].content | tojson }}", {})
    assert template.render([{"role": "user", "content": "<ü>"}]) == '"<ü>"'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "x.jsonl:2"),
        ("[]", "x.jsonl:2: needed .*messages"),
        ('{"messages": [{"role": "user"}]}', "x.jsonl:2: needed .*messages"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "2: no message has the role assistant",
        ),
    ],
)
def test_lines_without_a_conversation_are_refused(line, message, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n\n")
    assert chat.read(PRESETS["chat"], str(path)) == [MESSAGES]
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n" + line)
    with pytest.raises(DataError, match=message):
        chat.read(PRESETS["chat"], str(path))
