"""The example `pmapped`: one step under jit, pmap and shard_map."""

import json

import pytest

from tests.two_processes import finished, start

CODE = """
import json
from experiments.examples import pmapped
print(json.dumps(pmapped.compare(pmapped.PmappedOptions(steps=7, batch_size=10))))
"""


@pytest.mark.long
def test_pmap_and_shard_map_on_four_devices_compute_what_jit_does_on_one():
    (done,) = finished(start("-c", CODE, devices=4))
    losses = json.loads(done.out.splitlines()[-1])
    assert "4 x cpu, 12 rows a step" in done.out
    assert len(losses["jit"]) == 7 and losses["jit"][-1] < losses["jit"][0]
    for name in ("pmap", "shard_map"):
        assert losses[name] == pytest.approx(losses["jit"], rel=1e-6)
