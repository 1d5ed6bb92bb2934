"""A folder in several files, read onto a mesh of simulated devices tensor by tensor."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxformer as jf

_READ = """
import json, sys, tracemalloc
import jax
import numpy as np
import jaxformer as jf
from jaxformer.distributed import make_mesh, sharded
from jaxformer.pretrained.loading import load_pretrained

load_pretrained(sys.argv[2])  # imports what is needed
strategy = sharded(make_mesh("fsdp=8"))
tracemalloc.start()
params = load_pretrained(sys.argv[1], strategy=strategy).params
kept, peak = tracemalloc.get_traced_memory()
leaves = jax.tree_util.tree_leaves_with_path(params)
shards = {str(path): leaf.addressable_shards[0].data.shape for path, leaf in leaves}
sums = [float(np.abs(np.asarray(leaf, np.float64)).sum()) for _, leaf in leaves]
types = sorted({str(leaf.dtype) for _, leaf in leaves})
print(json.dumps([peak - kept, shards, sums, types]))
"""


@pytest.fixture
def folder(tmp_path, random_params):
    """A Llama of bfloat16 in four files, and one that is much smaller."""
    config = replace(
        jf.TransformerConfig(16411, d_model=256, d_ff=688, num_heads=4, num_decoder_layers=2),
        norm=jf.NormOptions("rms", placement="pre"),
        feed_forward=jf.FeedForwardOptions("silu", gated=True),
        embeddings=jf.EmbeddingOptions(tied="none", scale=False),
        positions=jf.Rotary(),
        use_bias=False,
    )
    for name, sizes in (("large", config), ("small", replace(config, vocab_size=11))):
        model = jf.DecoderOnly(sizes)
        params = random_params(model, np.ones((2, 3), np.int32))
        jf.save_pretrained(tmp_path / name, model, params)
    large = tmp_path / "large"
    tensors = load_file(large / "model.safetensors")
    (large / "model.safetensors").unlink()
    parts = {name: f"model-{i % 4}.safetensors" for i, name in enumerate(tensors)}
    for file in set(parts.values()):
        halves = {
            name: value.astype(ml_dtypes.bfloat16)
            for name, value in tensors.items()
            if parts[name] == file
        }
        save_file(halves, large / file)
    index = {"metadata": {}, "weight_map": parts}
    (large / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.long
def test_the_host_never_holds_a_whole_tensor_and_the_devices_hold_their_parts(folder):
    words = [sys.executable, "-c", _READ, str(folder / "large"), str(folder / "small")]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | flags)
    assert done.returncode == 0, done.stderr
    above, shards, sums, types = json.loads(done.stdout.splitlines()[-1])
    assert above < 0.5 * 16411 * 256 * 2
    assert types == ["bfloat16"]
    assert [32] in [shape[-1:] for shape in shards.values()]
    whole = jf.load_pretrained(folder / "large").params
    expected = [np.abs(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(whole)]
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(whole)} == {"float32"}
