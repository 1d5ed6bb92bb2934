"""The variants of the tables of results are sweeps that can be trained."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from experiments.harness.cli import config_files
from experiments.harness.results.sweeping import name_cells
from experiments.language_modelling.presets import shakespeare_char_cpu
from experiments.language_modelling.variants import shakespeare_changes
from experiments.translation.presets import multi30k_tiny
from experiments.translation.variants import choices_of_the_paper
from jaxformer.nn.models import DecoderOnly, EncoderDecoder


def sizes_of(config):
    """The number of parameters."""
    tokens = jnp.ones((1, 3), int)
    if config.model.num_encoder_layers:
        model, inputs = EncoderDecoder(config.model), (tokens, tokens)
    else:
        model, inputs = DecoderOnly(config.model), (tokens,)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    ("preset", "variants"),
    [(shakespeare_char_cpu, shakespeare_changes), (multi30k_tiny, choices_of_the_paper)],
)
def test_each_variant_is_a_cell_of_its_own_with_valid_settings(preset, variants):
    cells = name_cells(preset, variants(), seeds=2)
    made = [config_files.with_overrides(preset, overrides) for overrides in cells.values()]
    assert len(made) == 2 * len(list(variants()))
    assert len({str(replace(one, name="")) for one in made}) == len(made)


def test_no_change_of_the_shakespeare_model_adds_parameters():
    sizes = [
        sizes_of(config_files.with_overrides(shakespeare_char_cpu, one))
        for one in shakespeare_changes()
    ]
    assert sizes == [804_096, 795_904, 795_904, 803_072, 803_072, 803_072, 798_928]
