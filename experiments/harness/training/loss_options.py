"""The options of a run that a loss is made with: only those that are set, and that it takes."""

import inspect
from collections.abc import Callable, Mapping

from jaxformer.errors import ConfigError
from jaxformer.training.losses import Loss


def nonzero_options(
    make_loss: Callable[..., Loss], options: Mapping[str, float]
) -> dict[str, float]:
    """The `options` that are not 0, so that a loss needs no argument for what nobody asks of it.

    Raises `ConfigError` for one that `make_loss` has no argument for.
    """
    parameters = inspect.signature(make_loss).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    chosen = {name: value for name, value in options.items() if value}
    for name, value in chosen.items():
        if name not in parameters and not takes_any:
            loss = getattr(make_loss, "func", make_loss).__name__  # of a partial
            raise ConfigError(
                f"{name}={value} was given, but the loss {loss} has no argument {name}: give "
                f"{name}=0 in the options of training, or a loss that takes it"
            )
    return chosen
