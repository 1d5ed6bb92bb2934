"""The variants of the tables of results are sweeps that can be trained."""

from dataclasses import replace

import pytest

from experiments.harness.cli import config_files
from experiments.language_modelling.presets import python_stdlib, shakespeare_char_cpu
from experiments.language_modelling.variants import scaling, shakespeare_changes
from experiments.sweep import name_cells
from experiments.translation.presets import multi30k_tiny
from experiments.translation.variants import choices_of_the_paper


@pytest.mark.parametrize(
    ("preset", "variants"),
    [
        (shakespeare_char_cpu, shakespeare_changes),
        (python_stdlib, scaling),
        (multi30k_tiny, choices_of_the_paper),
    ],
)
def test_each_variant_is_a_cell_of_its_own_with_valid_settings(preset, variants):
    cells = name_cells(preset, {}, variants(), seeds=2)
    made = [config_files.with_overrides(preset, overrides) for overrides in cells.values()]
    assert len(made) == 2 * len(list(variants()))
    assert len({str(replace(one, name="")) for one in made}) == len(made)
