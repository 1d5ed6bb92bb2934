"""Two processes of two devices each, over loopback, are one process of four."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.distributed import (
    assert_processes_agree,
    initialize,
    make_mesh,
    replicated,
    sharded,
)
from jaxformer.errors import ConfigError
from jaxformer.training.parameters import flatten
from tests.distributed.test_strategies import (
    WRITER,
    causal_loss,
    recorded_adam,
    relative,
    state_maker,
    texts,
)

pytestmark = pytest.mark.long


def work(path: str, address: str, processes: str, index: str) -> None:
    """Runs in each child: trains, and writes the results."""
    if int(processes) > 1:
        initialize(address, int(processes), int(index), timeout=60)
    out: dict[str, Any] = {"devices": jax.device_count(), "local": jax.local_device_count()}
    assert_processes_agree({"seed": 1, "data": "abc"})
    try:
        assert_processes_agree({"seed": 1, "data": f"of {index}", "steps": 3})
    except ConfigError as error:
        out["disagreement"] = str(error)
    out["batches"] = [gathered_batches(devices) for devices in (replicated(), mesh_of_all())]
    devices, optimizer = mesh_of_all(), recorded_adam()
    state = devices.init(state_maker(WRITER, optimizer))
    step = devices.step(loss_with_rows, optimizer, grad_accumulation=2, ema_decay=0.9)
    for number in range(60):
        state, metrics = step(state, devices.shard_batch(own_rows(devices, texts(number))))
        if number == 0:
            gradient = flatten(devices.gather(state.opt_state[0]))
            out["rows"] = float(metrics["rows"])
    np.savez(path, facts=json.dumps(out), **gradient, **ended(devices, state))


def loss_with_rows(params: Any, batch: Any, rng: Any) -> Any:
    """The loss of the writer, and how many rows it was computed on."""
    return *causal_loss(WRITER)(params, batch, rng), {"rows": jax.numpy.float32(len(batch[0]))}


def ended(devices: Any, state: Any) -> dict[str, np.ndarray]:
    return {f"end/{path}": leaf for path, leaf in flatten(devices.gather(state)).items()}


def mesh_of_all() -> Any:
    return sharded(make_mesh("data=2,tensor=2")).for_model(WRITER)


def own_rows(devices: Any, batch: Any) -> Any:
    """What this process has of a batch, a half where there are two; it could not give the rest."""
    rows = devices.local_rows(len(batch.example_ids))
    assert len(rows) * jax.process_count() == len(batch.example_ids)
    return jax.tree.map(lambda leaf: leaf[rows], batch)


def gathered_batches(devices: Any) -> list[bool]:
    """Whether each batch comes back whole from the devices, each of which holds its share."""
    found = []
    for number in range(3):
        batch = texts(number)
        placed = devices.shard_batch(own_rows(devices, batch))
        shares = {leaf.addressable_shards[0].data.size / leaf.size for leaf in placed}
        whole = (
            np.array_equal(given.reshape(leaf.shape), leaf)
            for given, leaf in zip(devices.gather(placed), batch, strict=True)
        )
        found.append(all(whole) and shares == {1 / devices.num_shards})
    return found


def begin(folder: Path, processes: int, devices: int) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    root = Path(__file__).parents[2]
    code = (
        "import jax, sys; from tests import conftest; conftest.be_strict();"
        f"jax.config.update('jax_num_cpu_devices', {devices});"
        "from tests.distributed import test_processes; test_processes.work(*sys.argv[1:])"
    )
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0",
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder / f"{processes}_{index}.npz"), address]
            + [str(processes), str(index)],
            cwd=root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{processes}_{index}.log").open("w"),
        )
        for index in range(processes)
    ]


def loaded(path: Path) -> dict[str, np.ndarray]:
    assert path.exists(), path.with_suffix(".log").read_text()[-4000:]
    with np.load(path) as saved:
        return dict(saved)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("machines")


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, np.ndarray]:
    """One process with four devices."""
    (process,) = begin(folder, 1, 4)
    process.wait(120)
    return loaded(folder / "1_0.npz")


@pytest.fixture(scope="module")
def together(folder) -> list[dict[str, np.ndarray]]:
    """Two processes with two devices each."""
    processes = begin(folder, 2, 2)
    try:
        for process in processes:
            process.wait(180)
    finally:
        for process in processes:
            process.kill()
    return [loaded(folder / f"2_{index}.npz") for index in range(2)]


def facts(saved: dict[str, np.ndarray]) -> dict[str, Any]:
    return json.loads(str(saved["facts"]))


def test_two_processes_see_the_devices_of_both(alone, together):
    assert [facts(alone)[name] for name in ("devices", "local")] == [4, 4]
    for saved in together:
        assert [facts(saved)[name] for name in ("devices", "local")] == [4, 2]


def test_a_global_batch_is_the_same_however_many_processes_hold_it(alone, together):
    for saved in (alone, *together):
        assert facts(saved)["batches"] == [[True] * 3] * 2


def test_two_processes_compute_the_gradient_of_one(alone, together):
    expected = {key: alone[key] for key in alone if key != "facts" and not key.startswith("end/")}
    assert len(expected) > 5
    for saved in together:
        assert relative({key: saved[key] for key in expected}, expected) < 1e-6


def test_auxiliary_sums_are_added_over_processes(alone, together):
    assert [facts(saved)["rows"] for saved in (alone, *together)] == [16.0] * 3


def test_after_sixty_steps_two_processes_hold_the_bytes_of_one(alone, together):
    ends = [key for key in alone if key.startswith("end/")]
    assert "end/rng" in ends and "end/ema/embedding/table" in ends
    for saved in together:
        assert all(saved[key].tobytes() == alone[key].tobytes() for key in ends)


def test_processes_that_differ_in_a_setting_are_told_which(alone, together):
    assert "disagreement" not in facts(alone)
    for index, saved in enumerate(together):
        message = facts(saved)["disagreement"]
        assert "do not agree on data" in message and "steps" not in message
        assert f"process {index} of 2 has data='of {index}'" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:1234", None, None), "num_processes=None, process_id=None: give all three"),
        (("localhost", 2, 0), "coordinator='localhost' is not an address: give HOST:PORT"),
        (("localhost:1234", 0, 0), "process_id=0 is not one of num_processes=0: give a number"),
        (
            ("localhost:1234", 2, 2),
            "process_id=2 is not one of num_processes=2: give a number",
        ),
    ],
)
def test_an_impossible_start_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        initialize(*arguments)


def test_a_start_without_a_cluster_is_refused():
    done = begun(())
    assert "ConfigError: no cluster was found in the environment" in done.stderr
    assert "give coordinator=HOST:PORT, num_processes and process_id" in done.stderr


def test_a_start_that_nobody_answers_ends_in_time():
    done = begun(("127.0.0.1:1", 2, 1), timeout=3)
    assert done.returncode != 0 and "DEADLINE_EXCEEDED" in done.stderr


def begun(arguments: tuple[Any, ...], **options: int) -> subprocess.CompletedProcess:
    """The outcome of a process that only starts."""
    code = "from jaxformer.distributed import initialize; initialize(*{!r}, **{!r})"
    return subprocess.run(
        [sys.executable, "-c", code.format(arguments, options)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_start_after_the_first_computation_is_refused():
    jax.block_until_ready(jax.numpy.ones(2))
    with pytest.raises(RuntimeError, match="must be called before any JAX calls"):
        initialize("127.0.0.1:1", 1, 0)
