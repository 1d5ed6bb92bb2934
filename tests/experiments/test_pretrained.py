"""Other people's folders in the commands: in place of a run, and as a run's beginning."""

import base64
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import runs
from experiments.harness.training import initialization
from experiments.harness.training.build import build_model
from experiments.harness.training.first_contact import AutoAttention
from experiments.language_modelling import generate, load_run, plan, train
from experiments.language_modelling.finetune_presets import PRESETS as TASK_PRESETS
from experiments.language_modelling.finetune_start import read_weights, with_start
from experiments.language_modelling.presets import PRESETS, DataConfig
from experiments.language_modelling.tasks.rows import row_tokenizer
from jaxformer import pipelines
from jaxformer.config import with_fields
from jaxformer.distributed import single
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import Classifier, MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.ops.attention import DeviceInfo, auto_attention
from jaxformer.pretrained import is_pretrained, load_pretrained, save_pretrained
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS
from tests.pretrained.models import GPT2, PLAIN_BERT, inputs_of

GPT = with_fields(GPT2, {"vocab_size": 31, "max_len": 17, "num_decoder_layers": 1})
BERT = with_fields(PLAIN_BERT, {"vocab_size": 31, "max_len": 17, "num_encoder_layers": 1})
MODELS = {
    "gpt": DecoderOnly(GPT),
    "bert": MaskedLanguageModel(BERT),
    "encoder": EncoderOnly(BERT),
    "classifier": Classifier(EncoderOnly(replace(BERT, pooler="tanh")), 3),
}


@pytest.fixture(scope="module")
def folder(random_params, tmp_path_factory):
    """The folder of one of `MODELS`, with a tokenizer of fewer tokens than the model has rows."""
    root = tmp_path_factory.mktemp("theirs")
    words = ["sun moon star rain snow wind hill lake tree bird fish sand"]
    tokenizer = tokenizers.train_words(words, 29, special_tokens=MASKED_SPECIAL_TOKENS)
    assert tokenizer.vocab_size == 17

    def write(name):
        if not (root / name).exists():
            params = random_params(MODELS[name], *inputs_of(MODELS[name]))
            save_pretrained(root / name, MODELS[name], params, tokenizer)
        return root / name

    return write


def test_a_prompt_is_continued_to_any_of_the_ends_that_the_folder_states(folder, capsys, tmp_path):
    shutil.copytree(folder("gpt"), tmp_path / "gpt")
    words = f"--run {tmp_path}/gpt --max_new_tokens 4 --temperature 0.0 --text"
    parse = partial(generate.parse, [*words.split(), "sun moon"])  # reads the folder's settings
    options, loaded = parse(), load_pretrained(tmp_path / "gpt")
    complete = partial(pipelines.complete_with_details, loaded, "sun moon")
    free = complete(*replace(options, eos=()).settings)
    assert len(free.ids) == 4 and not free.ended
    generate.main(replace(options, eos=()))
    assert capsys.readouterr().out == f"sun moon{free.text}\n"
    last = free.ids[1]
    ended = complete(*replace(options, eos=(16, last)).settings)
    assert ended.ids == free.ids[: free.ids.index(last) + 1] and ended.ended
    said = json.loads((tmp_path / "gpt" / "config.json").read_text())
    generation_config = tmp_path / "gpt" / "generation_config.json"
    generation_config.write_text(json.dumps(said | {"eos_token_id": [16, last]}))
    generate.main(parse())
    assert capsys.readouterr().out == f"sun moon{ended.text}\n"
    generation_config.write_text(json.dumps({"eos_token_id": [16, 31]}))
    with pytest.raises(ConfigError, match="eos_token_id=31"):
        parse()


@pytest.mark.parametrize("name", ["gpt", "bert", "encoder"])
def test_a_folder_of_theirs_has_a_page(folder, name, tmp_path, capsys):
    output = tmp_path / "page.html"
    runs.main(["page", str(folder(name)), "--output", str(output), "--text", "sun <mask> star"])
    text = output.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    (view,) = json.loads(data)[0]["views"]
    (layer,) = view["weights"]
    width = len(view["keys"])
    assert len(layer) == 5
    assert width > 3 if name == "gpt" else width == 5, "attention over what a decoder wrote, too"
    for head in layer:
        percents = np.frombuffer(base64.b64decode(head), np.uint8).astype(int)
        assert (abs(percents.reshape(width, width).sum(axis=-1) - 100) <= 3).all()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(load_pretrained(folder(name)).params))
    assert f"<td>all</td><td>{parameters:,}</td>" in text
    assert "a folder of transformers: it has no scores" in text and "missing" not in text
    assert (">prompt</th>" in text) == (name != "encoder")


def test_a_page_of_a_folder_of_theirs_needs_a_text(folder):
    with pytest.raises(ConfigError, match="without prompts.*--text"):
        runs.main(["page", str(folder("gpt"))])


def test_a_command_says_what_it_does_not_take(folder, random_params, tmp_path):
    with pytest.raises(ConfigError, match="encoder without a head"):
        generate.main(generate.GenerateOptions(run=str(folder("encoder"))))
    with pytest.raises(ConfigError, match="Classifier"):
        generate.main(generate.GenerateOptions(run=str(folder("classifier"))))
    with pytest.raises(ConfigError, match="--text"):
        generate.main(generate.GenerateOptions(run=str(folder("bert"))))
    model = MODELS["gpt"]
    save_pretrained(tmp_path / "bare", model, random_params(model, np.ones((2, 3), int)))
    with pytest.raises(ConfigError, match="bare .*tokenizer"):
        load_run.load_run(tmp_path / "bare")


def test_a_model_without_a_chat_template_is_not_asked_by_one_of_ours(folder):
    run = str(folder("gpt"))
    with pytest.raises(ConfigError, match=f"{run} has no chat template.*--preset chat"):
        generate.main(generate.parse(["--run", run, "--text", "sun", "--chat"]))


@pytest.mark.parametrize("words", ["--chat", "--temperature 0.3", "--stop a"])
def test_a_masked_model_of_theirs_is_not_asked_to_continue(folder, words):
    with pytest.raises(ConfigError, match="masked model"):
        generate.parse(["--run", str(folder("bert")), *words.split()])


def test_a_folder_that_is_no_model_of_theirs_is_taken_for_a_run(folder, tmp_path):
    assert is_pretrained(folder("gpt"))
    assert not is_pretrained(tmp_path / "absent")
    for text in ("{}", "not json", '{"name": "tiny", "model": {}}'):
        (tmp_path / "config.json").write_text(text)
        assert not is_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="config.json: model.d_ff"):
        load_run.load_run(tmp_path)


@pytest.mark.parametrize("name", ["bert", "encoder"])
def test_an_encoder_of_theirs_reads_a_text_between_its_begin_and_end(folder, name):
    found = load_run.load_run(folder(name))
    (sun,) = found.tokenizer.encode("sun")
    preset = TASK_PRESETS["pairs"]
    short = replace(preset, init_from=str(folder(name)), data=DataConfig(seq_len=5))
    config = with_start(short)
    assert row_tokenizer(config, found.tokenizer).encode("sun").ids == [1, sun, 2, 0, 0]
    assert "embedding" in read_weights(SimpleNamespace(config=config, devices=single()))["backbone"]


def begun_from(folder, **changes):
    """A run that begins with the weights in `folder`."""
    config = replace(PRESETS["python_stdlib"], data=DataConfig(batch_size=2, seq_len=13))
    return replace(config, init_from=str(folder), **changes)


def test_the_sizes_and_the_tokenizer_are_those_of_the_weights(folder):
    path = folder("gpt")
    given = begun_from(path)
    given = replace(given, model=replace(given.model, dropout_rate=0.3, dtype="bfloat16"))
    config = load_run.with_pretrained_sizes(given)
    assert (config.model.d_model, config.model.vocab_size, config.model.max_len) == (10, 31, 17)
    assert (config.model.dropout_rate, config.model.dtype) == (0.3, "bfloat16")
    assert config.data == replace(given.data, tokenizer=str(path))
    assert load_run.with_pretrained_sizes(replace(given, init_from="")) == replace(
        given, init_from=""
    )


def test_kernels_of_a_folder_of_theirs_are_compared_where_they_are_for_one_kind_of_device(
    folder, monkeypatch
):
    path = folder("gpt")
    assert load_run.load_run(path).model.attention_fn is auto_attention
    monkeypatch.setattr(DeviceInfo, "current", lambda: DeviceInfo("tpu", "TPU v5 lite"))
    assert load_run.load_run(path).model.attention_fn == AutoAttention()


def test_weights_of_another_objective_or_too_short_a_context_are_refused(folder):
    with pytest.raises(ConfigError, match="MaskedLanguageModel"):
        load_run.with_pretrained_sizes(begun_from(folder("bert")))
    with pytest.raises(ConfigError, match="seq_len=18 .*max_len=17"):
        load_run.with_pretrained_sizes(
            begun_from(folder("gpt"), data=DataConfig(batch_size=2, seq_len=18))
        )


def begun(config, init, devices, run_folder):
    """The first state of a new run with `config`."""
    no_checkpoints = SimpleNamespace(steps=lambda: [])
    run = SimpleNamespace(
        config=config, devices=devices, checkpoints=no_checkpoints, folder=run_folder
    )
    return initialization.first_state(run, SimpleNamespace(read_start=None), init)


def test_a_run_begins_with_the_weights(folder, tmp_path):
    path = folder("gpt")
    given = begun_from(path)
    given = replace(given, training=replace(given.training, ema_decay=0.5))
    config, devices = load_run.with_pretrained_sizes(given), single()
    make_state, _ = train.make_step(config, build_model(config), plan.batch_of(config), devices)
    state = begun(config, make_state, devices, tmp_path)
    expected = load_pretrained(path).params
    for tree in (state.params, state.ema):
        jax.tree.map(np.testing.assert_array_equal, tree, expected)
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.ema), strict=True):
        assert one.unsafe_buffer_pointer() != other.unsafe_buffer_pointer()
