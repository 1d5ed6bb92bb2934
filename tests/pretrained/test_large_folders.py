"""A folder in several files, read onto a mesh of simulated devices tensor by tensor."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxformer as jf
from tests.pretrained.models import LLAMA, decoder
from tests.two_processes import finished, start

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
    sizes = {"d_model": 256, "d_ff": 688, "num_heads": 4, "head_dim": None}
    for name, ids in (("large", 16411), ("small", 11)):
        model = decoder(LLAMA, **sizes, vocab_size=ids, attention__num_kv_heads=None)
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
    (done,) = finished(start("-c", _READ, folder / "large", folder / "small", devices=8))
    above, shards, sums, types = json.loads(done.out.splitlines()[-1])
    assert above < 0.5 * 16411 * 256 * 2
    assert types == ["bfloat16"]
    assert [32] in [shape[-1:] for shape in shards.values()]
    whole = jf.load_pretrained(folder / "large").params
    expected = [np.abs(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(whole)]
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(whole)} == {"float32"}
