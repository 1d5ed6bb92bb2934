"""Folders of small models of all families, written once."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxformer.nn.heads import Classifier
from jaxformer.nn.models import DecoderOnly
from jaxformer.pretrained import save_pretrained
from tests.pretrained.models import MODELS, inputs_of


@pytest.fixture(scope="package")
def filled(random_params):
    """A model of `MODELS` with random parameters; those without a place in a folder are zero."""

    def fill(name):
        _, model = MODELS[name]
        params = random_params(model, *inputs_of(model))
        if isinstance(model, Classifier) and isinstance(model.backbone, DecoderOnly):
            params["head"]["bias"] *= 0.0
        return model, params

    return fill


@pytest.fixture(scope="package")
def saved(filled, tmp_path_factory):
    """The folder with one of `MODELS`, which is written once."""
    root = tmp_path_factory.mktemp("saved")

    def write(name):
        if not (root / name).exists():
            save_pretrained(root / name, *filled(name), family=MODELS[name][0])
        return root / name

    return write


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the folder with one of `MODELS`, to be changed."""
    return lambda name: shutil.copytree(saved(name), tmp_path / "saved")


@pytest.fixture(scope="package")
def change():
    """Changes a folder's config.json; None takes a key out."""

    def write(folder, **settings):
        path = folder / "config.json"
        content = json.loads(path.read_text()) | settings
        kept = {key: value for key, value in content.items() if value is not None}
        path.write_text(json.dumps(kept))

    return write


@pytest.fixture(scope="package")
def rewrite():
    """Gives a folder's tensors to `edit` and writes what it makes of them."""

    def write(folder, edit):
        path = folder / "model.safetensors"
        tensors = edit(load_file(path))
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)

    return write
