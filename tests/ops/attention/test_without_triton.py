"""A JAX that no longer has Pallas' Triton backend."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxformer.errors import ConfigError
from jaxformer.ops.attention import AttentionSpec, DeviceInfo, choose, gpu_flash, kernel
from jaxformer.ops.masks import AttentionMask

BACKEND = "jax.experimental.pallas.triton"
HOPPER = DeviceInfo("gpu", "NVIDIA H100", (9, 0))
AMPERE = DeviceInfo("gpu", "NVIDIA A100", (8, 0))
SIZES = {"heads": 12, "kv_heads": 12, "key_size": 64, "value_size": 64, "dtype": "bfloat16"}
BERT = AttentionSpec(batch=128, queries=512, keys=512, dropout=0.1, **SIZES)
PACKED = AttentionSpec(batch=64, queries=1024, keys=1024, causal=True, segments=True, **SIZES)


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, BACKEND, None)  # importing it raises


@pytest.mark.parametrize(
    ("spec", "device", "with_it", "without_it"),
    [
        (BERT, HOPPER, "gpu_flash", "blockwise"),
        (replace(BERT, batch=3), HOPPER, "gpu_flash", "reference"),
        (PACKED, AMPERE, "gpu_flash", "blockwise"),
        (PACKED, HOPPER, "cudnn", "cudnn"),
        (replace(PACKED, dtype="float32"), HOPPER, "gpu_flash", "blockwise"),
    ],
)
def test_where_triton_is_missing_the_next_function_computes_the_call(
    spec, device, with_it, without_it, request
):
    assert choose(spec, device).name == with_it
    request.getfixturevalue("without_triton")
    assert choose(spec, device).name == without_it


def test_gpu_flash_says_that_triton_is_missing(without_triton, monkeypatch):
    monkeypatch.setattr(kernel.DeviceInfo, "current", classmethod(lambda cls: AMPERE))
    q = jnp.zeros((2, 32, 1, 16), jnp.bfloat16)
    with pytest.raises(ConfigError, match="gpu_flash .*Triton"):
        gpu_flash(q, q, q, AttentionMask(), scale=1.0)


ONE_OF_EACH_FAMILY = "multi30k_tiny", "language shakespeare_char", "language bert_base"


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ONE_OF_EACH_FAMILY, marks=pytest.mark.long, id="one of each family"),
        pytest.param((), marks=pytest.mark.slow, id="all"),
    ],
)
def test_presets_are_imported_trained_and_decoded_without_triton(names):
    command = [sys.executable, "-m", "tests.without_triton", *names]
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.endswith(" presets\n")
