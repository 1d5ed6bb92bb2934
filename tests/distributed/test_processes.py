"""The start of several processes: which arguments are refused, and when."""

from typing import Any

import jax
import pytest

from jaxformer.distributed import initialize
from jaxformer.errors import ConfigError
from tests.two_processes import Ended, ended, start

pytestmark = pytest.mark.long


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
    assert "ConfigError: no cluster was found in the environment" in done.err
    assert "give coordinator=HOST:PORT, num_processes and process_id" in done.err


def test_a_start_that_nobody_answers_ends_in_time():
    done = begun(("127.0.0.1:1", 2, 1), timeout=3)
    assert done.code != 0 and "DEADLINE_EXCEEDED" in done.err


def begun(arguments: tuple[Any, ...], **options: int) -> Ended:
    """The outcome of a process that only starts."""
    code = "from jaxformer.distributed import initialize; initialize(*{!r}, **{!r})"
    (done,) = ended(start("-c", code.format(arguments, options)), timeout=60)
    return done


def test_a_start_after_the_first_computation_is_refused():
    jax.block_until_ready(jax.numpy.ones(2))
    with pytest.raises(RuntimeError, match="must be called before any JAX calls"):
        initialize("127.0.0.1:1", 1, 0)
