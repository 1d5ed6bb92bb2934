"""A state that a device has no memory for is refused before anything is made."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest

from jaxformer.distributed import device_memory, single
from jaxformer.errors import ConfigError


def test_a_state_larger_than_its_device_is_refused_before_it_is_made(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="39 TB"):
        single().init(lambda: {"w": jnp.zeros((400_009, 400_009, 61))})
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(device_memory, "_LIMITS", (limit, tmp_path / "absent"))
    state = lambda: {"params": jnp.zeros((7, 13)), "rng": jax.random.key(3)}  # noqa: E731
    for text, said in (("363\n", "needs 372 bytes .* has 363 bytes"), ("372\n", ""), ("max", "")):
        limit.write_text(text)
        with pytest.raises(ConfigError, match=said) if said else nullcontext():
            single().init(state)
