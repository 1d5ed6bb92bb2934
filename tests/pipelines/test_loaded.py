"""What `load` returns, or a hand builds, is the first argument of every pipeline."""

import dataclasses
import json
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.errors import ConfigError, DataError
from jaxformer.pipelines import Completion, TextEmbeddings, stream
from jaxformer.text.metrics import Likelihood
from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS, train_characters, train_words

LINE, LINES = "a bad cab", ["a bad cab", "deaf", "fed"]
SIZES = jf.TransformerConfig(16, d_model=14, d_ff=22, num_heads=2, max_len=29)
MODELS = {
    "writer": (jf.DecoderOnly, {"num_decoder_layers": 1}),
    "translator": (jf.EncoderDecoder, {"num_decoder_layers": 1, "num_encoder_layers": 1}),
    "filler": (jf.MaskedLanguageModel, {"num_encoder_layers": 1}),
}


@pytest.fixture(scope="module")
def systems(random_params):
    """Name -> a model with random parameters and a tokenizer of as many ids."""
    words = train_words(["a bad cab deaf fed the bed"], 13, special_tokens=MASKED_SPECIAL_TOKENS)
    built = {}
    for name, (kind, layers) in MODELS.items():
        tokenizer = words if name == "filler" else train_characters(["abcdef "])
        sizes = dataclasses.replace(SIZES, vocab_size=tokenizer.vocab_size, **layers)
        model, ids = kind(sizes), jnp.ones((2, 3), jnp.int32)
        inputs = (ids, ids) if name == "translator" else (ids,)
        built[name] = jf.Loaded(model, random_params(model, *inputs), tokenizer)
    return built


CALLS = [
    ("translator", jf.translate, LINE, str),
    ("writer", jf.complete, LINE, str),
    ("writer", jf.score, LINE, float),
    ("writer", jf.embed, LINE, np.ndarray),
    ("filler", jf.fill_mask, "a <mask> cab", str),
]
DETAILS = {
    jf.translate: (jf.translate_with_details, list),
    jf.complete: (jf.complete_with_details, Completion),
    jf.score: (jf.score_with_details, Likelihood),
    jf.embed: (jf.embed_with_details, TextEmbeddings),
    jf.fill_mask: (jf.fill_mask_with_details, list),
}
ALL = pytest.mark.parametrize(
    ("name", "use", "line", "kind"), CALLS, ids=[use.__name__ for _, use, _, _ in CALLS]
)


@ALL
def test_one_text_gives_its_result_and_a_list_of_one_the_list_of_it(systems, name, use, line, kind):
    loaded = systems[name]
    options = {"max_new_tokens": 5} if use is jf.complete else {}
    alone, within = use(loaded, line, **options), use(loaded, iter([line]), **options)
    assert isinstance(alone, kind) and len(within) == 1
    np.testing.assert_array_equal(within[0], alone)
    with_details, kind_of_details = DETAILS[use]
    (whole,) = with_details(loaded, (line,), **options)
    assert isinstance(with_details(loaded, line, **options), kind_of_details)
    brief = {
        jf.translate: lambda: whole[0].text,
        jf.complete: lambda: whole.text,
        jf.score: lambda: -whole.nats,
        jf.embed: lambda: whole.vector,
        jf.fill_mask: lambda: line.replace("<mask>", whole[0][0].text),
    }
    np.testing.assert_array_equal(brief[use](), alone)


@ALL
def test_a_mistake_of_a_beginner_is_answered_with_what_to_do(systems, name, use, line, kind):
    loaded, other = systems[name], systems["filler" if name == "writer" else "writer"]
    if use is jf.embed:
        other = systems["translator"]
    with pytest.raises(ConfigError, match=r"'runs/a'.*jf.load"):
        use("runs/a", line)
    with pytest.raises(ConfigError, match=r"jf.Loaded\(model, params, tokenizer\)"):
        use(loaded.model, line)
    with pytest.raises(ConfigError, match="but this needs "):
        use(other, line)
    with pytest.raises(DataError, match="empty"):
        use(loaded, [])
    with pytest.raises(DataError, match="(text|prompt) 2.* NoneType"):
        use(loaded, [line, None])
    for given, kind in ((5, "int"), ({line}, "set"), ({line: line}, "dict")):
        with pytest.raises(DataError, match=str(kind)):
            use(loaded, given)
    table = type("DataFrame", (list,), {"columns": ["text"]})
    with pytest.raises(DataError, match="DataFrame"):
        use(loaded, table(["text"]))
    for array in (np.array(line), jnp.array(3)):
        with pytest.raises(DataError, match="without dimensions"):
            use(loaded, array)
    with pytest.raises(ConfigError, match="tokenizer"):
        use(jf.Loaded(loaded.model, loaded.params), line)
    large = train_characters(["abcdefghijklmnopq"])
    for tokenizers in ((large, loaded.tokenizer), (loaded.tokenizer, large)):
        with pytest.raises(ConfigError, match="21 ids"):
            use(jf.Loaded(loaded.model, loaded.params, *tokenizers), line)


@pytest.mark.parametrize("name", ["tokenizer", "target_tokenizer"])
def test_a_tokenizer_of_another_library_is_refused_where_a_system_is_built(name):
    with pytest.raises(ConfigError, match=f"^{name} is a .*object"):
        jf.Loaded(jf.DecoderOnly(SIZES), {}, **{name: object()})


@ALL
def test_a_parameter_that_is_no_array_is_named_with_its_class(systems, name, use, line, kind):
    loaded = systems[name]

    class Tensor:
        dtype, shape, ndim = "torch.float32", (3, 5), 2

    leaves, tree = jax.tree.flatten(loaded.params)
    for odd in (Tensor(), "a", 0.5):
        params = jax.tree.unflatten(tree, [*leaves[:-1], odd])
        message = f"the parameter [a-z_/0-9]+ is a .*{type(odd).__name__}, but must be an array"
        with pytest.raises(ConfigError, match=message):
            use(dataclasses.replace(loaded, params=params), line)
    arrays = jax.tree.map(np.asarray, loaded.params)
    use(
        dataclasses.replace(loaded, params=arrays),
        line,
        **({"max_new_tokens": 3} if use is jf.complete else {}),
    )


def test_settings_of_the_value_are_the_defaults_and_a_call_changes_them(systems):
    loaded = systems["translator"]
    options, search = TranslationOptions(max_extra_tokens=3), SearchConfig(beam_size=3)
    three = dataclasses.replace(loaded, settings=(options, search))

    def chosen(loaded, *settings, **changes):
        return loaded.choose_settings(settings, changes, SearchConfig, TranslationOptions)

    assert chosen(three) == chosen(loaded, options, search) == [search, options]
    assert chosen(loaded, beam_size=3, max_extra_tokens=3) == [search, options]
    assert chosen(three, beam_size=2) == [SearchConfig(beam_size=2), options]
    assert chosen(three, SearchConfig()) == [SearchConfig(), options]
    whole = jf.translate_with_details(three, LINES)
    assert [len(found) for found in whole] == [3, 3, 3]
    assert jf.translate_with_details(loaded, LINES, beam_size=3, max_extra_tokens=3) == whole


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ((), {"beams": 2}, "'beams'"),
        ((), {"beam_size": 0}, "beam_size=0"),
        ((SamplingConfig(),), {}, "is not a setting of this call: give a SearchConfig or Translat"),
        ((SearchConfig(), SearchConfig(beam_size=3)), {}, "SearchConfig"),
    ],
)
def test_a_setting_of_another_call_is_refused_with_those_of_this_one(
    systems, settings, changes, message
):
    with pytest.raises(ConfigError, match=message):
        jf.translate(systems["translator"], LINE, *settings, **changes)


def test_a_value_shows_its_sizes_and_not_its_parameters(systems):
    assert repr(systems["filler"]).startswith("Loaded(MaskedLanguageModel of ")
    assert repr(systems["filler"]).endswith(" parameters, a tokenizer of 12 ids)")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, random_params):
    """A folder of transformers with a decoder."""
    sizes = {"vocab_size": 264, "d_model": 10, "d_ff": 40, "num_heads": 2, "max_len": 29}
    model = jf.DecoderOnly(dataclasses.replace(jf.GPT2, **sizes, num_decoder_layers=1))
    params = random_params(model, jnp.ones((2, 3), jnp.int32))
    path = tmp_path_factory.mktemp("saved") / "gpt"
    jf.save_pretrained(path, model, params, jf.train_bpe(["a bad cab"], 264))
    return path


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the folder whose generation_config.json has `settings`."""

    def write(settings):
        path = shutil.copytree(saved, tmp_path / "gpt", dirs_exist_ok=True)
        (path / "generation_config.json").write_text(json.dumps(settings))
        return path

    return write


SETTINGS = SamplingConfig, CompletionOptions


def test_a_folder_completes_by_its_own_settings_and_without_any_takes_the_likeliest_token(folder):
    drawn = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 7, "stop_strings": "zz"}
    loaded = jf.load(folder(drawn | {"eos_token_id": [3, 5], "suppress_tokens": [11]}))
    sampling, options = loaded.choose_settings((), {}, *SETTINGS)
    assert sampling == SamplingConfig(
        max_new_tokens=7, temperature=1.5, top_k=50, suppress_tokens=(11,)
    )
    assert options == CompletionOptions(eos=(3, 5), stop=("zz",))
    plain = jf.load(folder({"eos_token_id": 3}))
    greedy = {"temperature": 0.0, "max_new_tokens": 14, "eos": (3,)}
    assert jf.complete(plain, LINE) == jf.complete(
        dataclasses.replace(plain, settings=()), LINE, **greedy
    )
    assert "".join(x for _, x in stream(plain, LINE)) == jf.complete(plain, LINE)


def test_settings_that_are_not_supported_are_refused_only_where_they_are_used(folder):
    loaded = jf.load(folder({"num_beams": 4}))
    assert jf.embed(loaded, LINES).shape == (3, 10)
    with pytest.raises(ConfigError, match="num_beams=4 "):
        jf.complete(loaded, LINE)
    loaded.choose_settings((SamplingConfig(), CompletionOptions()), {}, *SETTINGS)


def test_a_loaded_model_needs_its_folder_no_longer(folder):
    path = folder({"eos_token_id": 3, "max_new_tokens": 5})
    (path / "modules.json").write_text(
        json.dumps(
            [
                {"path": "", "type": "sentence_transformers.models.Transformer"},
                {"path": "pooling", "type": "sentence_transformers.models.Pooling"},
            ]
        )
    )
    (path / "pooling").mkdir(exist_ok=True)
    (path / "pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    loaded = jf.load(path)
    text, vector = jf.complete(loaded, LINE), jf.embed(loaded, LINE)
    shutil.rmtree(path)
    assert jf.complete(loaded, LINE) == text
    np.testing.assert_array_equal(jf.embed(loaded, LINE), vector)
    assert jf.complete(pickle.loads(pickle.dumps(loaded)), LINE) == text
