"""Compilers of accelerators that are not here: devices of a topology, and what programs contain."""

import os
import re
from collections import Counter
from importlib.util import find_spec

import jax
import pytest

# libtpu reads them when it is loaded: no metadata server is asked, several processes may load it.
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@pytest.fixture(autouse=True)
def precision_of_users():
    """Products as users' programs have them; the other tests ask for exact ones."""
    with jax.default_matmul_precision("default"):
        yield


@pytest.fixture(scope="session")
def tpu_devices():
    """tpu_devices("v5e:4x4") -> the devices of that topology, to compile for."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'jaxformer[compilers]' (Python 3.12)")
    from jax.experimental import topologies

    os.environ.update(LIBTPU)

    def devices(name: str) -> list[jax.Device]:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)

    return devices


def counts(compiled: jax.stages.Compiled) -> Counter[str]:
    """How often each collective and each Mosaic kernel stands in a compiled program."""
    kinds = r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
    text = compiled.as_text() or ""
    found = Counter(match[0] for match in re.findall(kinds, text))
    found["kernels"] = text.count('custom_call_target="tpu_custom_call"')
    return found
