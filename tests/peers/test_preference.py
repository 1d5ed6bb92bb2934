"""Preference tuning equals torch in float64: loss and gradient, on a mesh and of adapters."""

import json
from typing import Any

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxformer.pretrained import load_pretrained, save_pretrained
from jaxformer.pretrained.families import FAMILIES
from jaxformer.pretrained.family import canonical_names
from jaxformer.pretrained.model_specs import param_shapes, spec_of
from jaxformer.pretrained.weight_map import to_jax
from jaxformer.training.lora import merge_adapters
from jaxformer.training.parameters import flatten
from tests.two_processes import finished, start

pytestmark = pytest.mark.peer

BETA = 0.3
SIZES = {"n_embd": 12, "n_head": 4, "n_layer": 2, "n_inner": 20, "n_positions": 13}
SIZES |= {"vocab_size": 23, "bos_token_id": 1, "eos_token_id": 2, "activation_function": "relu"}
B, T = 4, 7

OURS = """
import json, sys
from pathlib import Path
import jax, numpy as np, optax
import jaxformer as jf
from jaxformer.distributed import make_mesh
from jaxformer.training.lora import FROZEN, adapter_loss, add_adapters
from jaxformer.training.parameters import freeze, flatten
from jaxformer.training.preference import PreferenceBatch, preference_loss
from flax.traverse_util import unflatten_dict

jax.config.update("jax_default_matmul_precision", "highest")
folder, beta = Path(sys.argv[1]), float(sys.argv[2])
loaded, arrays = jf.load_pretrained(folder), np.load(folder / "batch.npz")
batch = PreferenceBatch(**{name: arrays[name] for name in PreferenceBatch._fields})
loss, rate = preference_loss(loaded.model, beta=beta), 0.5
found, sums = {}, {}
for mesh in ("", "fsdp=2,tensor=2"):
    devices = jf.sharded(make_mesh(mesh)) if mesh else jf.single()
    devices = devices.for_model(loaded.model)
    for adapters in (False, True):
        params, optimizer, of_params = loaded.params, optax.sgd(rate), loss
        if adapters:
            params = add_adapters(params, jax.random.key(0), rank=2, alpha=3.0,
                                  targets="blocks.*/kernel$", axes=devices.axes)
            leaves, rng = flatten(params), np.random.default_rng(1)
            for path in leaves:  # b is zero before the first step
                if path.endswith("_lora/b"):
                    leaves[path] = 0.2 * rng.normal(size=leaves[path].shape).astype(np.float32)
            params = unflatten_dict(leaves, sep="/")
            optimizer, of_params = freeze(optimizer, FROZEN), adapter_loss(loss)
            np.savez(folder / "adapted.npz", **leaves)
        before = flatten(jax.tree.map(np.array, params))
        state = devices.init(lambda: jf.init_train_state(
            jax.tree.map(jax.numpy.asarray, params), optimizer, jax.random.key(1)))
        state, metrics = devices.step(of_params, optimizer)(state, devices.shard_batch(batch))
        name = f"{mesh or 'one'}/{adapters}"
        after = flatten(devices.gather(state.params))
        found |= {f"{name}/{path}": (before[path] - after[path]) / rate for path in before}
        sums[name] = [float(metrics[key]) for key in ("loss", "tokens", "accuracy", "margin")]
np.savez(folder / "found.npz", **found)
print(json.dumps(sums))
"""


def twin(torch: Any, theirs: Any, batch: dict[str, np.ndarray]) -> tuple[list[float], dict]:
    """The sums of the loss, and the gradient of its mean by the names of the folder's tensors."""
    tokens = torch.tensor(batch["tokens"].reshape(2 * B, T + 1).astype(np.int64))
    log_probs = theirs(tokens[:, :-1]).logits.log_softmax(-1)
    of_labels = log_probs.gather(-1, tokens[:, 1:, None])[..., 0].reshape(B, 2, T)
    answers = (of_labels * torch.tensor(batch["loss_mask"])).sum(-1)
    gains = answers - torch.tensor(batch["reference"], dtype=torch.float64)
    margin = BETA * (gains[:, 0] - gains[:, 1])
    loss = -torch.nn.functional.logsigmoid(margin)
    theirs.zero_grad()
    loss.mean().backward()
    slopes = {name: leaf.grad.numpy() for name, leaf in theirs.named_parameters()}
    sums = loss.sum(), float(B), (margin > 0).sum(), margin.sum()
    return [float(x) for x in sums], slopes


def of_ours(loaded: Any, folder: Any, slopes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The slopes by the paths of our parameters."""
    family = FAMILIES["gpt2"]
    rows = family.weight_map(
        spec_of(loaded.model), json.loads((folder / "config.json").read_text())
    )
    names = canonical_names(family, slopes)
    return to_jax(rows, param_shapes(loaded.model), names, lambda name: slopes[names[name]])


def test_preference_loss_and_gradient_are_those_of_torch_in_float64(
    torch, transformers, tmp_path, rng
):
    torch.manual_seed(3)
    zero = {f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **zero))
    with torch.no_grad():
        for leaf in theirs.parameters():
            leaf += 0.3 * torch.randn(leaf.shape)
    theirs.save_pretrained(tmp_path)
    batch = {
        "tokens": rng.integers(1, 23, (B, 2, T + 1)).astype(np.int32),
        "loss_mask": np.arange(T) >= rng.integers(2, 5, (B, 2, 1)),
        "reference": (rng.normal(size=(B, 2)) - 12.0).astype(np.float32),
        "example_ids": np.arange(B, dtype=np.int32),
    }
    np.savez(tmp_path / "batch.npz", **batch)
    (done,) = finished(start("-c", OURS, str(tmp_path), str(BETA), devices=4))
    sums, found = json.loads(done.out), np.load(tmp_path / "found.npz")
    loaded = load_pretrained(tmp_path)
    expected_sums, slopes = twin(torch, theirs.double().eval(), batch)
    expected = of_ours(loaded, tmp_path, slopes)
    for mesh in ("one", "fsdp=2,tensor=2"):
        np.testing.assert_allclose(sums[f"{mesh}/False"], expected_sums, rtol=1e-5)
        for path, slope in expected.items():
            scale = max(1.0, abs(slope).max())
            given = found[f"{mesh}/False/{path}"]
            np.testing.assert_allclose(given / scale, slope / scale, atol=1e-5, err_msg=path)

    # The slope of W + s a b by a is s G b', and by b it is s a' G, for the slope G by the whole.
    leaves = dict(np.load(tmp_path / "adapted.npz"))
    merged = merge_adapters(unflatten_dict(leaves, sep="/"))
    save_pretrained(tmp_path / "merged", loaded.model, merged, family="gpt2")
    whole = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "merged", **zero)
    expected_sums, slopes = twin(torch, whole.double().eval(), batch)
    by_whole = of_ours(loaded, tmp_path, slopes)
    for mesh in ("one", "fsdp=2,tensor=2"):
        np.testing.assert_allclose(sums[f"{mesh}/True"], expected_sums, rtol=1e-5)
        trained = [path for path in leaves if path.endswith("_lora/a")]
        assert len(trained) == 12
        for path in trained:
            stem = path.removesuffix("_lora/a")
            a, b, scale = (np.float64(leaves[f"{stem}_lora/{x}"]) for x in ("a", "b", "scale"))
            slope = by_whole[stem].reshape(len(a), -1)
            for name, wanted in (("a", scale * slope @ b.T), ("b", scale * a.T @ slope)):
                given = found[f"{mesh}/True/{stem}_lora/{name}"]
                most = max(1.0, abs(wanted).max())
                np.testing.assert_allclose(given / most, wanted / most, atol=1e-5, err_msg=path)
        for path in set(leaves) - {x for x in leaves if "_lora/" in x}:
            assert not np.any(found[f"{mesh}/True/{path}"]), path
    assert flatten(loaded.params).keys() == expected.keys()
