"""Many devices compute what one computes; what each holds and what they tell each other.

Everything that needs devices is in `layouts` and runs in one child process with 8 virtual ones,
started once.
"""

import json
import math
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxformer.distributed import (
    make_mesh,
    parse_mesh,
    sharded,
    single,
)
from jaxformer.distributed.mesh import MESH_AXES, count_slices
from jaxformer.distributed.torus import line_stages, torus_stages
from jaxformer.errors import ConfigError
from tests.distributed.layouts import (
    DIVISIONS,
    LOOKUP_MESHES,
    MUON_MESHES,
    MUON_SHAPES,
    ODD_LAYOUTS,
    OTHERS,
    PLACES,
    SEPARATE_DIMENSIONS,
    muon_update,
    toy_batch,
    toy_loss,
    toy_state,
)
from tests.made_once import made_once
from tests.two_processes import finished, start

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def computed(tmp_path_factory, worker_id) -> dict[str, np.ndarray]:
    folder = made_once(tmp_path_factory, "strategies", compute_in_child, worker_id)
    with np.load(folder / "out.npz") as saved:
        return dict(saved)


def compute_in_child(folder: Path) -> None:
    code = (
        "import jax, sys; from tests import conftest; conftest.be_strict();"
        "from tests.distributed import layouts; layouts.compute(sys.argv[1])"
    )
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    finished(start("-c", code, folder / "out.npz", devices=8, environment={"XLA_FLAGS": flags}))


def part(computed: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key[len(prefix) :]: computed[key] for key in computed if key.startswith(prefix)}


def relative(given: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert given.keys() == expected.keys()
    size = sum(np.sum(np.float64(leaf) ** 2) for leaf in expected.values())
    return float(np.sqrt(sum(np.sum((given[k] - expected[k]) ** 2.0) for k in given) / size))


@pytest.mark.parametrize(("case", "name"), OTHERS)
def test_every_layout_computes_the_gradient_of_one_device(computed, case, name):
    expected = part(computed, f"{case}/one/gradient/")
    assert relative(part(computed, f"{case}/{name}/gradient/"), expected) < 1e-6


@pytest.mark.parametrize(("case", "name"), OTHERS)
def test_a_state_starts_with_the_same_bytes_wherever_it_is_made(computed, case, name):
    given, expected = (part(computed, f"{case}/{where}/start/") for where in (name, "one"))
    assert given.keys() == expected.keys()
    assert all(given[key].tobytes() == expected[key].tobytes() for key in expected)


@pytest.mark.parametrize(("case", "name"), PLACES)
def test_a_state_stays_where_it_was_made_and_one_program_serves_all_steps(computed, case, name):
    facts = json.loads(str(computed[f"{case}/{name}/facts"]))
    # Of the random numbers of a state, JAX's kernel serves one device alone.
    assert facts == {"compiled": 1, "stays": True, "as_abstract": True, "kernel": name == "one"}


@pytest.mark.parametrize("name", ["replicated", "partitioned", "explicit"])
def test_scalars_and_nothing_may_be_in_a_batch_under_any_mesh_set_outside(computed, name):
    given, expected = (part(computed, f"toy/{where}/") for where in (name, "one"))
    start = np.asarray(toy_state().params["table"])
    assert relative({"": given["table"] - start}, {"": expected["table"] - start}) < 1e-6
    np.testing.assert_allclose(given["sums"], expected["sums"], rtol=1e-6)
    labels = toy_batch().tokens[:, 1:]
    assert given["sums"][1:].tolist() == [np.sum(labels != 0), np.sum(labels)]


def test_states_and_batches_are_the_same_on_1_2_4_and_8_devices(computed):
    found = json.loads(str(computed["moves"]))
    # [same state, same batch, rows on a device, share of the embedding on a device]
    assert found == {
        "data=1": [True, True, [16], 1.0],
        "fsdp=2": [True, True, [8], 0.5],
        "data=2,tensor=2": [True, True, [8], 0.5],
        "data=2,fsdp=4": [True, True, [2], 1.0],
    }


TABLE, KERNEL = 22 * 10, 10 * 10


@pytest.mark.parametrize("name", ["replicated", "data=4"])
def test_a_data_parallel_step_adds_up_the_gradient_once_and_moves_nothing_else(computed, name):
    found = json.loads(str(computed["collectives"]))[name]
    assert found == [["all-reduce", False, KERNEL], ["all-reduce", False, TABLE]]


@pytest.mark.parametrize(("gather_at", "in_loop"), [("step", False), ("use", True)])
def test_a_sharded_step_gathers_parameters_and_scatters_their_gradient(
    computed, gather_at, in_loop
):
    found = json.loads(str(computed["collectives"]))[f"data=2,fsdp=2: {gather_at}"]
    assert found == [
        ["all-gather", in_loop, KERNEL],
        ["all-gather", in_loop, TABLE],
        ["all-reduce", False, KERNEL // 2],  # over data, of what fsdp has divided
        ["all-reduce", False, TABLE // 2],
        ["reduce-scatter", in_loop, KERNEL // 2],
        ["reduce-scatter", in_loop, TABLE // 2],
    ]


def test_a_scan_over_layers_gathers_one_layer_at_a_time(computed):
    given, expected = (part(computed, f"scanned/{name}/params/") for name in ("use", "one"))
    assert relative(given, expected) < 1e-6
    layer, layers = 10 * 14, 3 * 10 * 14
    found = json.loads(str(computed["scanned/use/collectives"]))
    assert {tuple(each) for each in found} == {
        ("all-gather", True, layer),
        ("reduce-scatter", True, layer // 2),
        ("all-reduce", False, layers // 2),
    }


@pytest.mark.parametrize(("name", "sizes"), [("plane", [120, 30]), ("cube", [120, 60, 30])])
def test_a_gradient_is_summed_along_one_axis_of_a_torus_after_the_other(computed, name, sizes):
    np.testing.assert_allclose(computed[f"torus/{name}"], computed["torus/expected"], atol=1e-5)
    found = json.loads(str(computed[f"torus/{name}/collectives"]))
    assert found == [["reduce-scatter", size] for size in sizes]


@pytest.mark.parametrize("at", ["step", "use"])
@pytest.mark.parametrize("name", DIVISIONS)
def test_the_gradient_of_a_parameter_that_two_axes_divide_is_that_of_one_device(computed, name, at):
    np.testing.assert_allclose(
        computed[f"divided/{name}/{at}"], computed["divided/expected"], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("at", ["step", "use"])
@pytest.mark.parametrize("name", SEPARATE_DIMENSIONS)
def test_a_parameter_and_its_gradient_move_with_the_division_along_the_other_axes(
    computed, name, at
):
    whole = 16 * 24 * 8
    sizes = parse_mesh(DIVISIONS[name][0])
    others = sizes["sequence"] * sizes["tensor"]
    gathered = [["all-gather", whole // others]]
    if sizes["sequence"] > 1:
        gathered.append(["all-gather", whole // sizes["tensor"]])
    part = whole // others // sizes["fsdp"]
    summed = [["all-reduce", part]] if sizes["data"] > 1 else []
    expected = sorted([*gathered, ["reduce-scatter", part], *summed])
    assert json.loads(str(computed[f"divided/{name}/{at}/collectives"])) == expected


@pytest.mark.parametrize("name", MUON_MESHES)
def test_muon_is_that_of_one_device_and_devices_share_its_matrices(computed, name):
    expected = part(computed, "muon/one/params/")
    assert relative(part(computed, f"muon/{name}/params/"), expected) < 1e-6
    sent, flops = json.loads(str(computed[f"muon/{name}/facts"]))
    _, flops_of_one = json.loads(str(computed["muon/one/facts"]))
    matrices = sum(map(math.prod, MUON_SHAPES.values()))
    sent_by_gradient = 0 if "fsdp" not in name else matrices + matrices // parse_mesh(name)["fsdp"]
    assert sent - sent_by_gradient < 1.25 * matrices
    assert flops < 0.2 * flops_of_one


def test_muon_exchanges_nothing_between_slices(computed):
    """It gathered its shares between them too, over the network of hosts."""
    zeros = {name: jnp.zeros(shape) for name, shape in MUON_SHAPES.items()}
    mesh = AbstractMesh((4, 2, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 4)
    groups = {}
    for slices in (1, 2, 4):
        with jax.sharding.use_abstract_mesh(mesh):
            update = jax.make_jaxpr(partial(muon_update, slices=slices))(zeros)
        groups[slices] = set(re.findall(r"axis_index_groups=(\S.*?)\n", str(update)))
    along_fsdp = "((0, 1),)"
    assert groups == {
        1: {"((0, 1, 2, 3),)", along_fsdp},
        2: {"((0, 1), (2, 3))", along_fsdp},
        4: {along_fsdp},
    }
    shared, of_slices = (part(computed, f"muon/slices/{slices}/") for slices in (1, 2))
    assert relative(of_slices, shared) < 1e-6


@pytest.mark.parametrize("name", ODD_LAYOUTS)
def test_a_vocabulary_that_tensor_does_not_divide_trains_as_on_one_device(computed, name):
    given, expected = computed[f"odd/{name}/table"], computed["odd/one/table"]
    np.testing.assert_allclose(given, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ODD_LAYOUTS)
def test_each_device_keeps_a_part_of_a_table_whose_vocabulary_is_whole(computed, name):
    sizes = parse_mesh(name.partition(":")[0])
    assert computed[f"odd/{name}/kept"] == 21 * 12 // max(sizes["tensor"], 2)
    sent = json.loads(str(computed[f"odd/{name}/collectives"]))
    whole_tables = [kind for kind, size, _ in sent if size >= 21 * 12 and kind != "all-gather"]
    # One sum of the gradient along tensor in each part; along data only parts are added up.
    assert len(whole_tables) <= 1


def test_a_gradient_is_added_up_in_float32_along_sequence(computed):
    assert np.all(computed["along sequence"] == 257.0)


@pytest.mark.parametrize("name", LOOKUP_MESHES)
def test_rows_of_a_divided_table_are_those_of_a_whole_one(computed, name):
    np.testing.assert_array_equal(computed[f"lookup/{name}/rows"], computed["lookup/rows"])
    gradient = computed[f"lookup/{name}/gradient"]
    np.testing.assert_allclose(gradient, computed["lookup/gradient"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LOOKUP_MESHES)
def test_each_device_gets_the_rows_of_its_own_positions_alone(computed, name):
    sizes = parse_mesh(name)
    positions = 2 * 8 // sizes["sequence"]
    found = {
        kind: json.loads(str(computed[f"lookup/{name}/{kind}/collectives"]))
        for kind in ("rows", "gradient")
    }
    assert found["rows"] == [["reduce-scatter", positions * 10 // sizes["tensor"]]]
    sums = [["all-reduce", 44 * 10 // sizes["tensor"]]] if sizes["sequence"] > 1 else []
    assert found["gradient"] == [["all-gather", positions * 10], *sums]


@pytest.mark.parametrize("places", [[()] * 4, [(0, 1), (0, 2), (0, 0)], [(0, 0), (1, 1), (0, 1)]])
def test_devices_on_one_line_or_on_none_are_summed_in_one_stage(places):
    assert line_stages(places) == ()


@pytest.mark.parametrize(("block", "times"), [("encoder", 2), ("decoder", 3)])
def test_two_devices_that_share_a_block_speak_as_often_forward_as_backward(computed, block, times):
    forward, both = json.loads(str(computed["collectives"]))[block]
    activations = 4 * 3 * 10
    assert forward == [activations] * times
    # XLA on a CPU sends the gradients of query, key and value side by side; elsewhere it adds them
    assert len(both) >= 2 * times and set(both) == {activations}


def test_another_time_to_gather_is_refused():
    with pytest.raises(ConfigError, match="gather_at='epoch'.*'step'.*'use'"):
        single().step(toy_loss, optax.sgd(1.0), gather_at="epoch")


def test_a_mesh_is_read_from_text():
    one = dict.fromkeys(("data", "fsdp", "sequence", "tensor"), 1)
    assert parse_mesh("data=2, fsdp=3,tensor=5") == one | {"data": 2, "fsdp": 3, "tensor": 5}
    assert parse_mesh("tensor=4,sequence=3") == one | {"tensor": 4, "sequence": 3}
    assert parse_mesh("") == one


@dataclass(frozen=True)
class Chip:
    """A TPU's chip, of which there is none here."""

    slice_index: int
    coords: tuple[int, ...]


CHIPS = [Chip(index, (x, y, 0)) for index in (1, 0) for x in (0, 1) for y in (0, 1, 2)]


def test_only_the_data_axis_goes_from_one_slice_to_the_other():
    mesh = make_mesh("data=2,fsdp=6", CHIPS)
    assert [[chip.slice_index for chip in row] for row in mesh.devices[..., 0, 0]] == [
        [0] * 6,
        [1] * 6,
    ]
    assert torus_stages(mesh) == (((0, 3), (1, 4), (2, 5)), ((0, 1, 2), (3, 4, 5)))
    with pytest.raises(ConfigError, match="data=3"):
        make_mesh("data=3,fsdp=4", CHIPS)


def test_the_slices_along_data_are_counted():
    assert count_slices(make_mesh("data=2,fsdp=6", CHIPS)) == 2
    assert count_slices(make_mesh("data=12", CHIPS)) == 2
    assert count_slices(make_mesh("data=6", CHIPS[:6])) == 1
    alternating = [chip for pair in zip(CHIPS[:6], CHIPS[6:], strict=True) for chip in pair]
    mesh = Mesh(np.array(alternating).reshape(6, 2, 1, 1), MESH_AXES)
    assert count_slices(mesh) == 1, "each part along data has chips of both"
    assert count_slices(make_mesh("data=1", jax.devices()[:1])) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=2", "'model'"),
        ("data", "'data' has no size: give data=N"),
        ("data=two", "'data=two'"),
        ("data=0", "'data=0'"),
        ("data=2,data=2", "'data' appears twice"),
        (
            "data=2,fsdp=3",
            "6 devices",
        ),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(text, jax.devices()[:1])


def test_a_mesh_with_other_axes_is_refused():
    with pytest.raises(ConfigError, match="batch"):
        sharded(jax.make_mesh((1,), ("batch",)))


def test_rows_that_do_not_divide_among_devices_are_refused(computed):
    messages = json.loads(str(computed["toy/refused"]))
    need = "need a multiple of {}: change one of the three"
    assert messages == 2 * [
        "tokens has 16 rows, but 4 shards x grad_accumulation=3 " + need.format(12),
        "tokens has 6 rows, but 4 shards x grad_accumulation=1 " + need.format(4),
    ]


def test_a_product_with_the_hessian_is_the_same_where_devices_share_a_block(computed):
    one, two = computed["hessian/one"], computed["hessian/two"]
    assert np.linalg.norm(two - one) < 1e-5 * np.linalg.norm(one)
    assert np.linalg.norm(one) > 0.1
