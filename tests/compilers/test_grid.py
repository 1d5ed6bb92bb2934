"""Cells of the grid, compiled: what each program sends, computes, keeps and reads.

Run with `pytest -m compiler` on Python 3.12, with the extra `compilers` for the cells of TPUs and
`cuda13` for those of GPUs.
"""

from importlib.util import find_spec

import pytest

from tests.compilers.grid.cells import cover, table
from tests.compilers.grid.compiling import compile_cell
from tests.compilers.grid.results import MOST, above_need, line

pytestmark = pytest.mark.compiler


@pytest.mark.parametrize("cell", cover(table()), ids=str)
def test_a_program_takes_little_more_than_it_needs(cell):
    compiler = "jax_cuda13_plugin" if cell.machine == "h100" else "libtpu"
    if find_spec(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    result = compile_cell(cell)
    assert not result.error
    assert not above_need(result), f"above {MOST}: {line(result)}"
