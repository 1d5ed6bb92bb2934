"""The comparison of a device with the truth is said, recorded and remembered."""

import json

import jax
import pytest

from experiments.harness.training import first_contact
from experiments.harness.training.first_contact import VERDICTS, accept, check_products
from jaxformer.ops.attention import AttentionSpec, DeviceInfo
from jaxformer.ops.attention.selection import Selection

SIZES = dict(batch=2, queries=257, keys=257, heads=3, kv_heads=3, key_size=5, value_size=5)
CALL = AttentionSpec(**SIZES, dtype="float32", causal=True)


@pytest.fixture
def remembered(tmp_path):
    """The file that remembers comparisons, in a new folder of compiled programs."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    first_contact._agrees.cache_clear()
    yield tmp_path / "first_contact.json"
    jax.config.update("jax_compilation_cache_dir", before)
    first_contact._agrees.cache_clear()
    VERDICTS.clear()  # the runs of other tests record what their process has compared


def test_a_product_that_differs_is_said_with_advice_and_recorded_at_each_start(remembered, capsys):
    assert check_products("float32") and capsys.readouterr().out == ""
    assert VERDICTS[-1].failure == "" and VERDICTS[-1].seconds > 0.0
    (key,) = json.loads(remembered.read_text())
    remembered.write_text(json.dumps({key: "logits_matmul: dx differ by 1.0e-01"}))
    for _ in range(2):
        first_contact._agrees.cache_clear()  # as another start
        assert not check_products("float32") and VERDICTS[-1].seconds == 0.0
        said = capsys.readouterr().out
        assert said.startswith("products in float32 on a small call: logits_matmul: dx differ by")
        assert "nothing replaces a product: update the driver, unset XLA_FLAGS, or give" in said


def test_an_attention_function_that_raises_here_is_said_and_not_accepted(remembered, capsys):
    here = DeviceInfo.current()
    selection = Selection(CALL, here, "tpu_flash", "selected on purpose", {})
    assert not accept(selection)
    said = capsys.readouterr().out
    assert "tpu_flash on a small call: raised ConfigError" in said
    assert said.endswith("the next attention function is taken\n")
    assert accept(Selection(CALL, DeviceInfo("tpu", "TPU v5e"), "tpu_flash", "not here", {}))
