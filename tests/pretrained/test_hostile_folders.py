"""Folders that are damaged or mean harm: each is refused with the reason, and soon."""

import json
import os
import pickle
import re
import shutil
import struct
import tracemalloc

import pytest
from safetensors.numpy import load_file

from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained import load, load_pretrained

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of a folder with nothing wrong."""
    return shutil.copytree(saved("gpt2"), tmp_path / "model")


def refused(folder, error, reason):
    with pytest.raises(error, match=reason):
        load_pretrained(folder)


def in_parts(folder):
    """Renames the tensors' file, and writes the index that leads to it."""
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    files = dict.fromkeys(names, "part-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return files


@pytest.mark.parametrize(
    "files", [None, [], {}, {"a": "../part-1.safetensors"}, {"a": "x/../../y"}, {"a": 7}]
)
def test_an_index_names_files_of_its_folder_alone(folder, files):
    in_parts(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    refused(folder, DataError, "weight_map must name the file of each tensor")


def test_an_index_and_its_files_list_the_same_tensors(folder):
    files = in_parts(folder)
    assert load_pretrained(folder).params
    for changed in (files | {"more": "part-1.safetensors"}, dict(list(files.items())[1:])):
        (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
        refused(folder, DataError, "is in only one of the files and .*index.json")
    (folder / INDEX).write_text(json.dumps({"weight_map": files | {"more": "x.safetensors"}}))
    refused(folder, DataError, "x.safetensors: not a whole safetensors file")


HEADERS = {
    "absurd size": (b"{}", 2**64 - 1),
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
def test_a_damaged_header_is_refused(folder, kind):
    header, size = HEADERS[kind]
    size = len(header) if size is None else size
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + header + bytes(4))
    refused(folder, DataError, "model.safetensors: not a whole safetensors file")


class Harm:
    """An object whose pickle holds a call that is made when it is read."""

    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_a_pickle_is_never_read_whatever_its_name(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").write_bytes(pickle.dumps(Harm()))
    refused(folder, DataError, "not a whole safetensors file")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, DataError, "can run code .* write its tensors with safetensors")
    assert not (tmp_path / "harmed").exists()


def test_a_folder_without_weights_or_config_says_so(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, DataError, "has neither model.safetensors nor model.safetensors.index.json")
    (folder / "config.json").unlink()
    refused(folder, DataError, "config.json: cannot be read")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 200_000, "not a whole JSON file"),
        (b'{"n_layer": 1', "not a whole JSON file"),
        (b"\xff\xfe", "not a whole JSON file"),
        (b"[1]", "must hold an object, got list"),
    ],
)
def test_a_config_that_is_none_is_refused(folder, text, reason):
    (folder / "config.json").write_bytes(text)
    refused(folder, DataError, reason)


@pytest.mark.parametrize(
    ("settings", "error", "reason"),
    [
        ({"n_layer": 10**7}, ConfigError, "asks for 10,000,000 layers, but the weights"),
        ({"n_layer": 10**9}, ConfigError, "n_layer=1000000000, but it must be a whole number"),
        ({"n_embd": 2**24, "n_head": 2**23}, DataError, "but .* is needed"),
        ({"n_inner": 2**24, "n_positions": 2**24}, DataError, "but .* is needed"),
        ({"vocab_size": 2**24}, DataError, "wte.weight is .23, 10., but .16777216, 10. is needed"),
    ],
)
def test_nothing_is_allocated_for_what_a_config_claims(folder, change, settings, error, reason):
    change(folder, **settings)
    tracemalloc.start()
    try:
        refused(folder, error, reason)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * 2**20


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model-Q4_K_M.gguf", "model-Q4_K_M.gguf is weights of llama.cpp, .*gguf_file="),
        ("model.onnx", "model.onnx is a compiled graph"),
        ("tf_model.h5", "tf_model.h5 is weights of TensorFlow, .*from_tf=True"),
        ("flax_model.msgpack", "flax_model.msgpack is weights of Flax, .*from_flax=True"),
    ],
)
def test_weights_of_another_program_are_named_with_what_reads_them(folder, name, reason):
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, DataError, f"has neither model.safetensors nor .*: {reason}")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=f"neither a run nor a folder of transformers: {reason}"):
        load(folder)


def test_a_vocabulary_of_tiktoken_is_named_and_not_left_out(folder):
    (folder / "qwen.tiktoken").write_bytes(b"IQ== 0\n")
    refused(folder, DataError, "only in qwen.tiktoken, a vocabulary of tiktoken.*AutoTokenizer")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="qwen.tiktoken "):
        load(folder)


@pytest.mark.parametrize(
    ("prefix", "cure"),
    [
        ("_orig_mod.", "torch.compile; save model._orig_mod"),
        ("module.", "DistributedDataParallel; save model.module"),
        ("base_model.model.", r"peft; save model.merge_and_unload\(\)"),
        ("module._orig_mod.", "DistributedDataParallel; save model.module"),
    ],
)
def test_weights_of_a_wrapped_model_are_named_with_the_cure(folder, rewrite, prefix, cure):
    rewrite(folder, lambda tensors: {prefix + name: x for name, x in tensors.items()})
    refused(
        folder, DataError, f"{re.escape(prefix)}.* begins with '.*', which is written by .*{cure}"
    )
