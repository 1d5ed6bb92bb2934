import importlib
import subprocess
import sys

import pytest

import jaxformer
from jaxformer import extras

LATE = ["orbax", "grain", "tokenizers", "tyro", "matplotlib", "torch", "transformers", "sacrebleu"]
LATE += ["safetensors", "huggingface_hub"]


def loaded_after(*lines: str) -> set[str]:
    """The top-level packages in a fresh interpreter after running `lines`."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", "\n".join([*lines, report])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_else():
    loaded = loaded_after("import jaxformer")
    assert "jaxformer" in loaded
    assert loaded & {"jax", "flax", "optax", "numpy", *LATE} == set()


def test_asking_for_a_model_loads_only_what_models_need():
    loaded = loaded_after("from jaxformer import EncoderDecoder, transformer_base")
    assert "flax" in loaded
    assert loaded & set(LATE) == set()


def test_text_is_handled_without_jax():
    loaded = loaded_after("import jaxformer.data, jaxformer.metrics, jaxformer.tokenizers")
    assert "numpy" in loaded
    assert loaded & {"jax", "flax", *LATE} == set()


@pytest.mark.parametrize("name", jaxformer.__all__)
def test_every_public_name_can_be_asked_for(name):
    value = getattr(jaxformer, name)
    if hasattr(value, "__module__"):
        assert value.__module__.startswith("jaxformer.")


def test_the_public_names_are_listed_and_few():
    assert dir(jaxformer) == jaxformer.__all__ == sorted(set(jaxformer.__all__))
    assert 25 <= len(jaxformer.__all__) <= 47


def test_an_unknown_name_is_refused_by_name():
    with pytest.raises(AttributeError, match="'jaxformer' has no attribute 'Transformer'"):
        _ = jaxformer.Transformer


def test_a_module_can_be_imported_by_its_name():
    from jaxformer import masks

    assert masks is importlib.import_module("jaxformer.masks")


@pytest.mark.parametrize(
    ("name", "extra"),
    [("torch", "peers"), ("tyro", "experiments"), ("sentencepiece", "subwords")],
)
def test_what_is_not_installed_is_named_with_its_extra(name, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(extras.MissingExtra, match=rf"{name} is needed.*jaxformer\[{extra}\]"):
        extras.load(name)


@pytest.mark.parametrize("letter", "B T S N K H D F V".split())
def test_the_letters_of_the_shapes_are_explained_at_the_door(letter):
    assert f" {letter} " in jaxformer.__doc__.replace("\n", " ")
