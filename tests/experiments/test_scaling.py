"""The law of scaling is found from trainings that follow it, and its best size is the best."""

import numpy as np
import pytest

from experiments.language_modelling.scaling import Law, Training, draw, fit
from jaxformer.errors import DataError

LAW = Law(1.7, 40.0, 0.34, 110.0, 0.28)


def trainings(law):
    sizes = (3.1e5, 7.3e5, 1.9e6, 4.7e6, 1.1e7)
    tokens = (1.3e6, 7.1e6, 3.7e7)
    return [Training(n, d, law.loss(n, d), f"{n:.0f}") for n in sizes for d in tokens]


@pytest.mark.long  # a search from 81 starts
def test_the_law_that_made_the_losses_is_fitted():
    for given, fitted in zip(LAW, fit(trainings(LAW)), strict=True):
        assert fitted == pytest.approx(given, rel=0.02)


def test_no_other_size_has_a_lower_loss_for_the_same_flops():
    flops = 3e14
    best = LAW.best_parameters(flops)
    losses = [LAW.loss(n, flops / (6 * n)) for n in best * np.array([0.7, 0.97, 1.0, 1.03, 1.4])]
    assert min(losses) == losses[2]


def test_five_trainings_do_not_determine_five_constants():
    with pytest.raises(DataError, match="needs 6 trainings, but 5"):
        fit(trainings(LAW)[:5])


def test_the_figure_has_a_line_for_each_size_and_the_law():
    axes = draw(trainings(LAW), LAW).axes[0]
    assert [len(line.get_xdata()) for line in axes.lines] == [3, 3, 3, 3, 3, 50]
