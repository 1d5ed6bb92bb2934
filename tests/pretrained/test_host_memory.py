"""The memory that a process needs to load, average and export a model of four times its budget.

A child process with eight simulated devices measures itself: the peak of its resident memory, less
what it had before and the arrays that lie on the devices afterwards, because on a CPU the devices'
memory is the host's. glibc is told to give freed memory back at once.
"""

import json

import pytest

from tests.two_processes import finished, start

_CHILD = """
import gc, json, re, sys
from dataclasses import replace
from pathlib import Path
import jax, numpy as np
import jaxformer as jf
from jaxformer.distributed import make_mesh, sharded

sizes = {"vocab_size": 101, "d_model": 768, "d_ff": 6144, "num_heads": 8, "max_len": 32}
folder, devices = Path(sys.argv[1]), sharded(make_mesh("fsdp=8"))


def resident(field):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\\s+(\\d+) kB", status)[1]) * 1024


def above(work):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = resident("VmRSS")
    result = work()
    return resident("VmHWM") - before - sum(leaf.nbytes for leaf in jax.tree.leaves(result))


def measure(name, layers):
    config = replace(jf.GPT2, **sizes, num_decoder_layers=layers)
    model, rng = jf.DecoderOnly(config), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.ones((1, 2), int))["params"]
    run, strategy = jf.Checkpoints(folder / name / "run"), devices.for_model(model)
    for step in (1, 2):
        params = jax.tree.map(lambda leaf: rng.random(leaf.shape, np.float32), shapes)
        run.save(step, {"params": params})
    run.close()
    numbers = {"model": sum(leaf.nbytes for leaf in jax.tree.leaves(params))}
    del params
    tree = {}
    def put(params):
        tree.update(params)
        return tree
    def sums():
        return [float(np.abs(np.asarray(leaf)).sum()) for leaf in jax.tree.leaves(tree)]
    numbers["averaging"] = above(
        lambda: put(run.average_params([1, 2], shardings=strategy.shardings))
    )
    numbers["exporting"] = above(lambda: jf.save_pretrained(folder / name / "out", model, tree))
    exported = sums()
    tree.clear()
    numbers["loading"] = above(
        lambda: put(jf.load_pretrained(folder / name / "out", strategy=strategy).params)
    )
    np.testing.assert_allclose(sums(), exported, rtol=1e-6)
    return numbers


measure("shallow", 1)  # imports and compiles what is needed
print(json.dumps(measure("deep", 5)))
"""
LARGEST = 4 * 768 * 6144
BUDGET = 3 * LARGEST


@pytest.mark.slow
def test_no_more_than_the_largest_tensor_is_on_the_host_besides_the_model(tmp_path):
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    (done,) = finished(start("-c", _CHILD, tmp_path, devices=8, environment=returned))
    numbers = json.loads(done.out.splitlines()[-1])
    assert numbers.pop("model") >= 4 * BUDGET
    assert numbers["loading"] < 0.6 * LARGEST, "each device's part is read alone"
    assert {name: size for name, size in numbers.items() if size > 1.2 * LARGEST} == {}
