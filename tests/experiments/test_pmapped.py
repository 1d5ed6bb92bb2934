"""The example `pmapped`: one step under jit, pmap and shard_map."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import json
from experiments.examples import pmapped
print(json.dumps(pmapped.compare(pmapped.PmappedOptions(steps=7, batch_size=10))))
"""


@pytest.mark.long
def test_pmap_and_shard_map_on_four_devices_compute_what_jit_does_on_one():
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    losses = json.loads(done.stdout.splitlines()[-1])
    assert "4 x cpu, 12 rows a step" in done.stdout
    assert len(losses["jit"]) == 7 and losses["jit"][-1] < losses["jit"][0]
    for name in ("pmap", "shard_map"):
        assert losses[name] == pytest.approx(losses["jit"], rel=1e-6)
