"""The start of several processes, which arguments are refused, and what must be equal."""

import signal
import socket
import time
from typing import Any

import jax
import pytest

from jaxformer.distributed import initialize
from jaxformer.errors import ConfigError
from tests.two_processes import Ended, ended, finished, free_port, start

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:1234", None, None), "num_processes=None, process_id=None"),
        (("localhost", 2, 0), "coordinator='localhost'"),
        (("localhost:", 2, 0), "coordinator='localhost:'"),
        (("host:99999", 2, 1), "coordinator='host:99999'"),
        (("host:0", 2, 0), "coordinator='host:0'"),
        (("localhost:1234", 0, 0), "process_id=0"),
        (
            ("localhost:1234", 2, 2),
            "process_id=2",
        ),
    ],
)
def test_an_impossible_start_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        initialize(*arguments)


def test_a_start_without_a_cluster_is_refused():
    done = begun(())
    assert "ConfigError: no cluster was found in the environment" in done.err
    assert "give coordinator=HOST:PORT, num_processes and process_id" in done.err


@pytest.mark.parametrize("number", [0, 1])
def test_a_start_that_nobody_answers_says_so_and_ends_with_a_sentence(number):
    address = f"127.0.0.1:{free_port()}"
    awaited = f"process 0 at {address}" if number else f"the others at {address}"
    done = begun((address, 2, number), timeout=12)
    assert f"waiting for {awaited} (10 of 12 seconds)" in done.err
    assert f"ConfigError: waited 12 seconds for {awaited}: start all proc" in done.err
    assert done.code == 1


def test_a_port_that_is_in_use_is_refused_by_its_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"coordinator={address}"):
            initialize(address, 2, 0)


def test_a_host_that_nobody_knows_is_refused_by_its_address():
    done = begun(("no-such-host.invalid:1234", 2, 1), timeout=2)
    assert "the host of coordinator=no-such-host.invalid:1234 is not known" in done.err
    assert done.code == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_waiting_for_a_coordinator_can_be_stopped(number):
    code = "from jaxformer.distributed import initialize; print('waits', flush=True); "
    call = f"initialize('127.0.0.1:{free_port()}', 2, 1)"
    process = start(
        "-c", "import signal; signal.signal(2, signal.default_int_handler); " + code + call
    )
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    time.sleep(2.0)
    process.send_signal(number)
    (done,) = ended(process, timeout=10)
    assert done.code in (-number, 1), done


DIFFERENT = """
import sys
import jax
from jaxformer.distributed import assert_processes_agree, initialize
from jaxformer.errors import ConfigError

address, number, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
initialize(address, count, number)
last = number == count - 1
assert_processes_agree({"seed": 3, "the file a.en": "7 lines"})
for values in (
    {"seed": 3, "the file a.en": "6 lines" if last else "7 lines"},
    {"seed": 3} if last else {"seed": 3, "the file a.en": "7 lines"},
):
    try:
        assert_processes_agree(values)
    except ConfigError as error:
        print(f"= {error}")
"""


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_with_different_values_each_say_what_differs_and_where(count):
    address, last = f"127.0.0.1:{free_port()}", count - 1
    starts = [start("-c", DIFFERENT, address, number, count) for number in range(count)]
    for number, done in enumerate(finished(*starts, timeout=120)):
        _, values, names = done.out.split("= ")
        assert values.startswith(
            "the processes do not agree on the file a.en: "
            f"process {last} differs from process 0; process {number} of {count} has "
            f"the file a.en='{6 if number == last else 7} lines'"
        )
        assert f"different things: process {last} differs from process 0" in names
        assert f"process {number} of {count}, seed" in names


def begun(arguments: tuple[Any, ...], **options: int) -> Ended:
    """The outcome of a process that only starts."""
    code = "from jaxformer.distributed import initialize; initialize(*{!r}, **{!r})"
    (done,) = ended(start("-c", code.format(arguments, options)), timeout=60)
    return done


def test_a_start_after_the_first_computation_is_refused():
    jax.block_until_ready(jax.numpy.ones(2))
    with pytest.raises(RuntimeError, match="must be called before any JAX calls"):
        initialize("127.0.0.1:1", 1, 0)
