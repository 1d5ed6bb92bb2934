"""Folders that mean harm: each is refused with the reason, soon, and nothing else is read."""

import json
import os
import pickle
import shutil
import struct
import sys
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxformer.config import (
    EmbeddingOptions,
    FeedForwardOptions,
    Learned,
    NormOptions,
    TransformerConfig,
)
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import DecoderOnly
from jaxformer.pretrained import load_pretrained, save_pretrained
from jaxformer.text import tokenizers

CONFIG = TransformerConfig(
    vocab_size=7,
    d_model=6,
    d_ff=5,
    num_heads=3,
    num_decoder_layers=1,
    max_len=11,
    norm=NormOptions(placement="pre", eps=1e-5),
    feed_forward=FeedForwardOptions("gelu_tanh"),
    embeddings=EmbeddingOptions(tied="output", scale=False),
    positions=Learned(),
)
INDEX = "model.safetensors.index.json"

opened: list[str] = []


@pytest.fixture(scope="module")
def whole(random_params, tmp_path_factory):
    """A folder with nothing wrong; to load it imports what is imported at the first use."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    model = DecoderOnly(CONFIG)
    save_pretrained(folder, model, random_params(model, np.ones((2, 3), int)))
    # A hook stays for good.
    sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == "open" else None)
    load_pretrained(folder)
    assert str(folder / "model.safetensors") in opened
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of the whole folder, beside which lies another file."""
    (tmp_path / "outside.safetensors").write_bytes(b"a secret")
    return shutil.copytree(whole, tmp_path / "model")


@pytest.fixture
def refused(folder, tmp_path):
    """Loads the folder, which must be refused within seconds without a look outside of it."""

    def check(error, reason):
        opened.clear()
        start = time.process_time()
        with pytest.raises(error, match=reason):
            load_pretrained(folder)
        assert time.process_time() - start < 5.0, "what a header claims must not be computed with"
        ours = [path for path in opened if path.startswith(str(tmp_path))]
        assert [path for path in ours if not path.startswith(str(folder))] == []

    return check


def in_parts(folder, name="part-1.safetensors", weight_map=None):
    """Renames the tensors' file, and writes the index that leads to it."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    places = dict.fromkeys(tensors, name) if weight_map is None else weight_map
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return places


def write_raw(folder, header, data=b"", size=None):
    """Writes a file in the form of safetensors by hand."""
    size = len(header) if size is None else size
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + header + data)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd.safetensors",
        "part/../../outside.safetensors",
        "..\\outside.safetensors",
        "part-1.safetensors\0",
        ".part.safetensors",
        "part-1.bin",
        "",
        "a" * 300 + "/b.safetensors",
        7,
        None,
        ["part-1.safetensors"],
    ],
)
def test_an_index_names_files_of_its_folder_alone(folder, refused, name):
    in_parts(folder, name)
    refused(DataError, "is not the name of a safetensors file in this folder")


@pytest.mark.parametrize("places", [None, [], {}, "part-1.safetensors"])
def test_an_index_says_where_each_tensor_is(folder, refused, places):
    in_parts(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    refused(DataError, "weight_map must say where each tensor is")


def test_an_index_and_its_files_list_the_same_tensors(folder, refused):
    places = in_parts(folder)
    assert load_pretrained(folder).params
    for changed in (places | {"more": "part-1.safetensors"}, dict(list(places.items())[1:])):
        (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
        refused(DataError, "is in only one of the files and .*index.json")
    (folder / INDEX).write_text(json.dumps({"weight_map": places | {"more": "x.safetensors"}}))
    refused(DataError, "x.safetensors: cannot be read")


FILES = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def complete(folder):
    tokenizers.train_characters(["abc"]).save(folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_not_followed(complete, tmp_path, refused, name):
    (complete / name).rename(tmp_path / "elsewhere")
    (complete / name).symlink_to(tmp_path / "elsewhere")
    refused(DataError, f"{name} leads out of its folder")


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_nothing_or_to_itself_is_refused(complete, refused, name):
    (complete / name).unlink()
    (complete / name).symlink_to("nothing")
    refused(DataError, f"{name}: cannot be read")
    (complete / name).unlink()
    (complete / name).symlink_to(name)
    refused(DataError, f"{name}: cannot be read")


@pytest.mark.parametrize("name", FILES)
def test_only_regular_files_are_read(complete, refused, name):
    (complete / name).unlink()
    os.mkfifo(complete / name)  # to open it would wait for ever
    refused(DataError, f"{name} is not a regular file")
    (complete / name).unlink()
    (complete / name).mkdir()
    refused(DataError, f"{name} is not a regular file")


def test_links_within_the_folder_and_to_a_hubs_blobs_are_followed(folder, tmp_path):
    (folder / "config.json").rename(folder / "facts.json")
    (folder / "config.json").symlink_to("facts.json")
    load_pretrained(folder)
    cache = tmp_path / "models--someone--tiny"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "1a2b").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).resolve().rename(cache / "blobs" / name)
        (cache / "snapshots" / "1a2b" / name).symlink_to(f"../../blobs/{name}")
    load_pretrained(cache / "snapshots" / "1a2b")


@pytest.mark.parametrize("size", [2**60, 2**64 - 1, 17 * 2**20])
def test_a_header_of_absurd_size_is_not_read(folder, refused, size):
    write_raw(folder, b"{}", size=size)
    refused(DataError, "model.safetensors: not a whole safetensors file")


HEADERS = {
    "shorter than it says": (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 99),
    "no JSON": (b"{not json}", None),
    "offsets past the end": (b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}', None),
    "overlapping offsets": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        None,
    ),
    "offsets backwards": (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', None),
    "a shape too large": (
        b'{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,4]}}',
        None,
    ),
    "nesting": (b'{"a":' * 100_000, None),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_damaged_header_is_refused(folder, refused, kind):
    header, size = HEADERS[kind]
    write_raw(folder, header, bytes(4), size)
    refused(DataError, "model.safetensors: not a whole safetensors file")


@pytest.mark.parametrize("beside", ["tokenizer_config.json", "target_vocab.json"])
@pytest.mark.parametrize("name", ["source.spm", "target.spm", "vocab.json", "beside"])
def test_no_file_of_a_tokenizer_may_lead_out_of_the_folder(folder, tmp_path, refused, name, beside):
    for file in ("source.spm", "target.spm", "vocab.json", beside):
        (folder / file).write_text("{}")
    name = beside if name == "beside" else name
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    refused(DataError, f"{name} leads out of its folder")


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.model"])
def test_no_model_of_sentencepiece_may_lead_out_of_the_folder(folder, tmp_path, refused, name):
    (tmp_path / "elsewhere").write_bytes(b"")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    refused(DataError, f"{name} leads out of its folder")


def test_a_file_cut_short_is_refused(folder, refused):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 5, 60, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(DataError, "model.safetensors: not a whole safetensors file")


class Harm:
    """What a pickle may hold: a call that is made when it is read."""

    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_a_pickle_is_never_read_whatever_its_name(folder, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    harm = pickle.dumps(Harm())
    (folder / "model.safetensors").write_bytes(harm)
    refused(DataError, "not a whole safetensors file")
    with zipfile.ZipFile(folder / "model.safetensors", "w") as file:
        file.writestr("archive/data.pkl", harm)
    refused(DataError, "not a whole safetensors file")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(DataError, "can run code .* write its tensors with safetensors")
    assert not (tmp_path / "harmed").exists()


def test_a_folder_without_weights_or_config_says_so(folder, refused):
    (folder / "model.safetensors").unlink()
    refused(DataError, "has neither model.safetensors nor model.safetensors.index.json")
    (folder / "config.json").unlink()
    refused(DataError, "config.json: cannot be read")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 200_000, "not a whole JSON file"),
        (b'{"n_layer":' * 200_000, "not a whole JSON file"),
        (b'{"n_layer": 1', "not a whole JSON file"),
        (b"\xff\xfe", "not a whole JSON file"),
        (b'{"n_layer": ' + b"9" * 10_000 + b"}", "not a whole JSON file"),
        (b"[1]", "must hold an object, got list"),
        (b" " * (2**24 + 1), "has 16,777,217 bytes, but at most 16,777,216 are read"),
    ],
)
def test_a_config_that_is_none_is_refused(folder, refused, text, reason):
    (folder / "config.json").write_bytes(text)
    refused(DataError, reason)


@pytest.mark.parametrize(
    ("settings", "error", "reason"),
    [
        ({"n_layer": 10**7}, ConfigError, "asks for 10,000,000 layers, but the weights"),
        ({"n_layer": 10**9}, ConfigError, "n_layer=1000000000, but it must be a whole number"),
        ({"n_embd": 2**24, "n_head": 2**23}, DataError, "but .* is needed"),
        ({"n_inner": 2**24, "n_positions": 2**24}, DataError, "but .* is needed"),
        ({"vocab_size": 2**24}, DataError, "wte.weight is .7, 6., but .16777216, 6. is needed"),
    ],
)
def test_nothing_is_allocated_for_what_a_config_claims(folder, refused, settings, error, reason):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    tracemalloc.start()
    try:
        refused(error, reason)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * 2**20


def test_a_tokenizer_that_is_none_is_refused(folder, refused):
    path = folder / "tokenizer.json"
    path.write_bytes(b'{"a":' * 1_000_000)
    refused(DataError, "tokenizer.json: not a whole tokenizer.json")
    with path.open("wb") as file:
        file.truncate(2**28)
    refused(DataError, "tokenizer.json has 268,435,456 bytes, but at most 134,217,728")


def test_damaged_numbers_are_refused(folder, refused):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.wte.weight"][3, 2] = np.nan
    save_file(tensors, path)
    refused(DataError, "transformer.wte.weight holds numbers that are not finite")


def test_a_head_of_absurd_size_is_refused(folder, refused):
    path = folder / "config.json"
    said = json.loads(path.read_text()) | {"architectures": ["GPT2ForSequenceClassification"]}
    path.write_text(json.dumps(said))
    write_raw(
        folder, b'{"score.weight":{"dtype":"F32","shape":[99999999999,0],"data_offsets":[0,0]}}'
    )
    refused(ConfigError, "score.weight=99999999999, but it must be a whole number from 0 to 16,7")
