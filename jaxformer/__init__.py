"""Functional Transformers in JAX and Flax: encoder-decoder, GPT and BERT from one set of modules.

The letters of every shape: B batch, T query length, S key length, N heads, K key/value heads,
H head size, D d_model, F d_ff, V vocabulary size. Beside them: W beams of a sentence, R = B x W
rows, L the room of a cache, P masked positions, Hv the size of a head's values, E experts, k the
experts of a token.

A public name is imported when it is first used: `import jaxformer` alone loads nothing else.
`help(jaxformer.NAME)` shows one with an example.
"""

import ast
import importlib
import textwrap
from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def _public_names() -> dict[str, dict[str, str]]:
    """{title of a group: {public name: its module}}, as `__init__.pyi` imports them."""
    groups: dict[str, dict[str, str]] = {}
    source = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Expr):
            title = ast.literal_eval(statement.value)
            groups[title] = {}
        elif isinstance(statement, ast.ImportFrom):
            groups[title] |= {name.name: str(statement.module) for name in statement.names}
    return groups


_GROUPS = _public_names()
_MODULE_OF = {name: module for group in _GROUPS.values() for name, module in group.items()}
_FOLDERS = {module.split(".")[1] for module in _MODULE_OF.values()}

for _title, _group in _GROUPS.items():
    _names = textwrap.fill(", ".join(_group), 72, initial_indent="  ", subsequent_indent="  ")
    __doc__ = f"{__doc__}\n{_title}:\n{_names}\n"

__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"jaxformer.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # looked up once
    return value


def __dir__() -> list[str]:
    return __all__
