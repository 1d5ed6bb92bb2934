"""The cells of the grid that are compiled in each run, and what a few of them need, by hand."""

from itertools import chain

import pytest

from tests.compilers.grid.cells import Cell, cover, table
from tests.compilers.grid.needs import needs

LAYER = 4 * 512 * 512 + 2 * 512 * 1024
TABLES = 2048 * 512 + 2048 * 512  # of tokens and of positions
VECTORS = 2 * (4 * 512 + 512 + 1024 + 2 * 2 * 512) + 2 * 512  # of two layers, and the last norm
HIDDEN = 16 * 256 * 512 * 2  # bytes of all rows
STATISTICS = 3 * 2 * 16 * 256 * 4


def test_forty_cells_hold_every_pair_of_family_program_mesh_and_machine():
    cells = table()
    chosen = cover(cells)
    assert len(chosen) <= 40 and {*chosen} <= {*cells}
    assert {*chain(*(cell.pairs for cell in chosen))} == {*chain(*(cell.pairs for cell in cells))}
    assert {cell.gather_at for cell in chosen} == {"step", "use"}


def test_along_fsdp_matrices_are_gathered_in_16_bits_and_scattered_in_32():
    cell = Cell("gpt", "train", "fsdp", "v5e")
    vectors = 2 * 4 * VECTORS * 3 / 4
    assert needs(cell).sent == 6 * (2 * LAYER + TABLES) * 3 / 4 + vectors
    # Layers that are computed again gather again what they gather where it is used.
    again = 2 * 2 * LAYER * 3 / 4
    assert needs(cell._replace(gather_at="use")).sent - needs(cell).sent == again
    assert needs(cell._replace(program="validate")).sent == 2 * (2 * LAYER + TABLES) * 3 / 4


def test_along_tensor_each_sub_layer_gathers_and_adds_up_its_positions():
    cell = Cell("gpt", "validate", "tensor", "v5e")
    # Two layers with two sub-layers, the looked-up table, and the input of the logits.
    assert needs(cell).sent == ((2 * 2 * 2 + 2) * HIDDEN + STATISTICS) * 3 / 4
    # All products are divided by all devices.
    assert needs(cell).flops == 2 * 16 * 256 * (2 * LAYER + 512 * 2048) / 4


@pytest.mark.parametrize(("mesh", "parts"), [("1", 1), ("fsdp", 4), ("tensor", 4), ("sequence", 4)])
def test_a_token_reads_weights_and_cache_once(mesh, parts):
    needed = needs(Cell("llama", "decode 32", mesh, "v5e"))
    layer = 2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1024
    weights = 2 * (2 * layer + 512 * 2048) / parts
    heads = parts if mesh in ("tensor", "sequence") else 1
    cache = 2 * 2 * 2 * 32 * 2048 * 4 * 64 / heads
    # Written, and read for the sum of exponentials and for the rest.
    scores = 3 * 2 * 4 * 32 * 8 * 2048 / heads
    logits = 3 * 4 * 32 * 2048 / (parts if mesh == "tensor" else 1)
    assert needed.read == weights + cache + scores + logits
