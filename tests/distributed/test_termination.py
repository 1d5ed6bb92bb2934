"""What a signal does to one of several processes: it ends those that wait, not those that save."""

import signal
import subprocess
import textwrap
import time
from pathlib import Path

import numpy
import pytest

from jaxformer.checkpoint import Checkpoints
from tests.two_processes import ended, free_port, start

pytestmark = pytest.mark.long

_BEGINNING = """
    import signal, sys, time
    import jax, numpy as np
    from pathlib import Path
    from jax.experimental import multihost_utils
    from jaxformer.checkpoint import Checkpoints
    from jaxformer.distributed import Termination, initialize

    folder, address = Path(sys.argv[1]), sys.argv[2]
    number, count = map(int, sys.argv[3:])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    initialize(address, count, number)

    def tell(name):
        (folder / f"{name}{number}").touch()

    def exchange():
        multihost_utils.process_allgather(np.ones(3))
"""


def begun(code: str, folder: Path, count: int = 2) -> list[subprocess.Popen]:
    """`count` processes that run `code`."""
    code = textwrap.dedent(_BEGINNING) + textwrap.dedent(code)
    address = f"127.0.0.1:{free_port()}"
    return [start("-c", code, folder, address, number, count) for number in range(count)]


def wait_for(path: Path, *processes: subprocess.Popen) -> None:
    while not path.exists():
        assert all(process.poll() is None for process in processes), ended(*processes)
        time.sleep(0.05)


def seconds_to_end(process: subprocess.Popen, number: int) -> float:
    begun = time.monotonic()
    process.send_signal(number)
    process.wait(timeout=60)
    return time.monotonic() - begun


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_waits_for_another_ends_on_a_signal(tmp_path, number):
    code = """
        with Termination():
            exchange()
            tell("waits")
            if number == 0:
                exchange()
            time.sleep(100)
    """
    first, second = begun(code, tmp_path)
    wait_for(tmp_path / "waits0", first, second)
    wait_for(tmp_path / "waits1", first, second)
    time.sleep(1.0)
    assert seconds_to_end(first, number) < 15
    second.kill()
    assert ended(first, second)[0].code == 128 + number


def test_a_second_signal_ends_a_process_at_once(tmp_path):
    code = """
        from jaxformer.distributed import termination

        termination._UNWINDING = 1000.0
        with Termination():
            exchange()
            tell("waits")
            if number == 0:
                exchange()
            time.sleep(100)
    """
    first, second = begun(code, tmp_path)
    wait_for(tmp_path / "waits0", first, second)
    time.sleep(1.0)
    first.send_signal(signal.SIGTERM)
    time.sleep(2.0)
    assert first.poll() is None
    assert seconds_to_end(first, signal.SIGTERM) < 5
    second.kill()
    assert ended(first, second)[0].code == 128 + signal.SIGTERM


LOOP = """
    from jaxformer.distributed import termination

    termination._STEP = 2.0
    with Termination() as termination, Checkpoints(folder / "saved") as checkpoints:
        with termination.requests(lambda: checkpoints.is_saving) as asked:
            for step in range(1, 10_000):
                exchange()
                time.sleep(0.01)
                if step == 7:
                    tell("trains")
                {in_step}
                if asked():
                    checkpoints.save(step, {{"w": np.full((5, 3), step)}})
                    checkpoints.wait()
                    print("saved", step)
                    break
        raise SystemExit(128 + (termination.number or signal.SIGTERM))
"""


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_signal_to_one_stops_all_loops_after_the_same_step(tmp_path, count):
    processes = begun(LOOP.format(in_step="pass"), tmp_path, count)
    wait_for(tmp_path / "trains0", *processes)
    processes[-1].send_signal(signal.SIGINT)
    outcomes = ended(*processes, timeout=60)
    assert [outcome.code for outcome in outcomes] == [143] * (count - 1) + [130], outcomes
    (step,) = {int(outcome.out.split("saved ")[1]) for outcome in outcomes}
    assert Checkpoints(tmp_path / "saved").newest_step() == step > 7


def test_a_loop_whose_step_another_process_does_not_join_ends_without_saving(tmp_path):
    stuck = "number == 1 and step == 11 and (tell('leaves'), time.sleep(100))"
    first, second = begun(LOOP.format(in_step=stuck), tmp_path)
    wait_for(tmp_path / "leaves1", first, second)
    time.sleep(1.0)
    assert seconds_to_end(first, signal.SIGTERM) < 10
    second.kill()
    outcome = ended(first, second)[0]
    assert outcome.code == 143
    assert outcome.err.count("SIGTERM: the step has not ended, so another process") == 1
    assert Checkpoints(tmp_path / "saved").newest_step() is None


def test_a_process_that_saves_while_it_waits_is_left_to_save(tmp_path):
    """The save is slow: it takes longer than a step may after a signal."""
    in_step = """
                if step == 11:
                    from jaxformer.checkpoint import manifest
                    commit = manifest.commit
                    def slowly(*args):
                        tell("saves")
                        time.sleep(6.0)
                        commit(*args)
                    manifest.commit = slowly
                    checkpoints.save(step, {"w": np.full((5, 3), step)})
                    if number == 1:
                        time.sleep(100)
    """
    first, second = begun(LOOP.format(in_step=in_step.strip()), tmp_path)
    wait_for(tmp_path / "saves0", first, second)
    time.sleep(0.5)
    assert 3 < seconds_to_end(first, signal.SIGTERM) < 15
    second.kill()
    assert ended(first, second)[0].code == 143
    checkpoints = Checkpoints(tmp_path / "saved")
    assert checkpoints.newest_step() == 11
    state, _ = checkpoints.restore({"w": numpy.zeros((5, 3), int)})
    assert state["w"].tolist() == [[11] * 3] * 5
