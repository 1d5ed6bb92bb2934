"""Checks the shapes in the signatures of the package at every call.

Importing this module before the package does it. A letter stands for one length within a call.
Types other than those of arrays are left to pyright.
"""

import types
import typing
from collections.abc import Callable
from functools import wraps
from inspect import isclass, isfunction, signature
from typing import Any

from jaxtyping import AbstractArray, AnnotationError, install_import_hook

enabled = True  # conftest.py says for which tests


def check_shapes(function: Callable) -> Callable:
    """`function`, which raises `TypeError` for an array of another shape than its signature's."""
    if not isfunction(function):
        return function
    hints = {name: hint for name, hint in function.__annotations__.items() if _has_array(hint)}
    if not hints:
        return function
    parameters = signature(function)

    @wraps(function)
    def checked(*args, **kwargs):
        result = function(*args, **kwargs)
        if not enabled:
            return result
        given = parameters.bind(*args, **kwargs).arguments
        for name, value in (given | {"return": result}).items():
            if name in hints and not _fits(value, hints[name]):
                raise TypeError(f"{function.__qualname__}: {name} is not {hints[name]}")
        return result

    return checked


def _has_array(hint: Any) -> bool:
    return _is_array(hint) or any(map(_has_array, typing.get_args(hint)))


def _is_array(hint: Any) -> bool:
    return isclass(hint) and issubclass(hint, AbstractArray)


def _fits(value: Any, hint: Any) -> bool:
    """True if the arrays in `value` have the shapes in `hint`."""
    if _is_array(hint):
        try:
            return not hasattr(value, "shape") or isinstance(value, hint.dtype[Any, hint.dim_str])
        except AnnotationError:  # such as T+1 where no argument has T
            return True
    options, kind = typing.get_args(hint), typing.get_origin(hint)
    if kind in (typing.Union, types.UnionType):
        arrays = [option for option in options if _has_array(option)]
        return not arrays or value is None or any(_fits(value, option) for option in arrays)
    if kind is tuple and isinstance(value, tuple):
        rest = options[1:] == (...,)
        return all(map(_fits, value, options[:1] * len(value) if rest else options))
    if kind in (list, dict) and isinstance(value, kind):
        values = value.values() if isinstance(value, dict) else value
        return all(_fits(each, options[-1]) for each in values)
    return True


install_import_hook("jaxformer", "tests.shapes.check_shapes")
