"""Folders of small models of all families, written once."""

import json
import shutil
from functools import cache

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

from jaxformer.pretrained import save_pretrained
from jaxformer.pretrained.model_specs import param_shapes, spec_of
from tests.made_once import made_once
from tests.pretrained.models import MODELS, SHADOWED


@pytest.fixture(scope="package")
def filled():
    """A model of `MODELS` with random parameters; those without a place in a folder are zero."""

    @cache
    def params_of(name):
        rng, params = np.random.default_rng(0), {}
        for path, shape in param_shapes(MODELS[name][1]).items():
            center = 1.0 if path.endswith("scale") else 0.0
            params[path] = (center + 0.3 * rng.standard_normal(shape)).astype(np.float32)
        if spec_of(MODELS[name][1]).kind == "decoder_classifier":
            params["head/bias"] *= 0.0
        return params

    def fill(name):
        params = {path: leaf.copy() for path, leaf in params_of(name).items()}
        return MODELS[name][1], unflatten_dict(params, sep="/")

    return fill


@pytest.fixture(scope="package")
def saved(filled, tmp_path_factory, worker_id):
    """The folder with one of `MODELS`, which is written once."""

    def write(name):
        family, _ = MODELS[name]
        named = family if family in SHADOWED else None

        def save(folder):
            save_pretrained(folder / "model", *filled(name), family=named)

        return made_once(tmp_path_factory, f"saved {name}", save, worker_id) / "model"

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
