"""Checks the shapes in the signatures of the package at every call.

Importing this module before the package does it. A letter stands for one length within a call.
Types other than those of arrays are left to pyright. A call whose arrays have the shapes and types
of an earlier one is not checked again: most of a test's calls trace the same layers once more.
"""

import ast
import sys
import types
import typing
from collections.abc import Callable
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from inspect import isclass, signature
from typing import Any

from jaxtyping import AbstractArray, AnnotationError, TypeCheckError, jaxtyped

enabled = True  # conftest.py says for which tests


def check_shapes(function: Callable) -> Callable:
    """`function`, which refuses an array of another shape than its signature's."""
    hints = {name: hint for name, hint in function.__annotations__.items() if _has_array(hint)}
    if not hints:
        return function
    bind, seen = signature(function).bind, set()

    def check(given: dict[str, Any]) -> None:
        arrays = {name: given[name] for name in hints if name in given}
        shapes = tuple((name, _shapes(value)) for name, value in arrays.items())
        if shapes in seen:
            return
        with jaxtyped("context"):
            for name, value in arrays.items():
                if not _fits(value, hints[name]):
                    raise TypeCheckError(f"{function.__qualname__}: {name} is not {hints[name]}")
        seen.add(shapes)

    @wraps(function)
    def checked(*args, **kwargs):
        if not enabled:
            return function(*args, **kwargs)
        given = bind(*args, **kwargs).arguments
        check(given)
        result = function(*args, **kwargs)
        check(given | {"return": result})
        return result

    return checked


def _shapes(value: Any) -> Any:
    """What `_fits` reads of a value: the shapes and dtypes of its arrays, and where None is."""
    if hasattr(value, "shape"):
        return (*value.shape, str(value.dtype))
    if isinstance(value, dict):
        return tuple((name, _shapes(each)) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_shapes, value))
    return None if value is None else type(value)


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


class _Decorate(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list.append(ast.Name("_check_shapes", ast.Load()))
        return node


class _Loader(SourceFileLoader):
    def path_stats(self, path: Any) -> Any:
        raise OSError("the decorated bytecode is not kept: other processes would load it")

    def source_to_code(self, data: Any, path: Any, **options: Any) -> types.CodeType:
        tree = ast.fix_missing_locations(_Decorate().visit(ast.parse(data)))
        return super().source_to_code(tree, path, **options)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["_check_shapes"] = check_shapes
        super().exec_module(module)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "jaxformer":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)
