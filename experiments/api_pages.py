"""Writes the reference of `jaxformer` as HTML pages: `python -m experiments.api_pages`.

The pages come from docstrings, need no network and have a search box.
"""

import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from flax import linen as nn
from optax import OptState

import jaxformer
from experiments.harness import cli
from jaxformer import optional_dependencies

_PREFIXES = re.compile(r"\b(jaxtyping|typing|(jax\.)?jaxlib\._jax)\.|(?<=\boptax\.)_src\.base\.")
_QUOTED = re.compile(r"<(?:function (<lambda>|\w+)[^>]*|class '(.*)')>")
_SHOWN = {"__init__", "__call__", "__and__"}
_FLAX_FIELDS = {"parent", "name", "scope"}

_TEMPLATE = """
{% extends "default/module.html.jinja2" %}
{% block nav_submodules %}
    {% set inner = all_modules | submodules(module.modulename) %}
    {% if inner %}
        <h2>Submodules</h2>
        <ul>
            {% for name, link in inner %}<li><a href="{{ link }}">{{ name }}</a></li>{% endfor %}
        </ul>
    {% endif %}
{% endblock %}
{% macro is_public(doc) %}{% if doc | is_ours %}true{% endif %}{% endmacro %}
{% macro annotation(var) -%}
    <span class="annotation">{{ var.annotation_str | readable | escape | linkify }}</span>
{%- endmacro %}
{% macro default_value(var) -%}
    {%- if var.default_value_str %}
        {% set value = var.default_value_str | readable | escape %} =
        {% if value | length > 100 %}<details><summary>value</summary>{% endif %}
        <span class="default_value">{{ value | linkify }}</span>
        {% if value | length > 100 %}</details>{% endif %}
    {%- endif -%}
{%- endmacro %}
"""


@dataclass(frozen=True)
class PageOptions:
    """Where the pages go."""

    output: str = "build/api"
    """The folder for the pages; pages that are there are written anew."""


class _Text(str):
    """What `inspect` prints as it is."""

    __repr__ = str.__str__


def main(options: PageOptions) -> None:
    """Writes the pages and prints how many, and the first one."""
    output = Path(options.output)
    count = write_pages(output)
    print(f"{count} pages in {output}; open {output / 'jaxformer.html'}")


def write_pages(output: Path) -> int:
    """Writes a page for each module of the package; returns how many."""
    pdoc = optional_dependencies.load("pdoc")
    _configure(pdoc.render)
    for name in jaxformer.__all__:  # pdoc reads a module's dictionary, which fills at first use
        setattr(jaxformer, name, getattr(jaxformer, name))
    found = pkgutil.walk_packages(jaxformer.__path__, "jaxformer.")
    names = ["jaxformer", *(module.name for module in found)]
    modules = {name: pdoc.doc.Module.from_name(name) for name in names}
    with warnings.catch_warnings():
        # a name inside the type of optax's states
        warnings.filterwarnings("ignore", ".*Import of ArrayTree failed")
        pages = {name: pdoc.render.html_module(page, modules) for name, page in modules.items()}
        files = {f"{name.replace('.', '/')}.html": page for name, page in pages.items()}
        files["search.js"] = pdoc.render.search_index(modules)
    for name, text in files.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(text, encoding="utf-8")
    return len(pages)


def _configure(render: Any) -> None:
    """Gives pdoc our template and what the template calls."""
    jinja2 = optional_dependencies.load("jinja2")
    ours = jinja2.DictLoader({"module.html.jinja2": _TEMPLATE})
    render.env.loader = jinja2.ChoiceLoader([ours, render.env.loader])
    printed = render.env.filters["format_signature"]
    render.env.filters |= {
        "format_signature": lambda signature, colon: printed(_readable_signature(signature), colon),
        "is_ours": _is_ours,
        "readable": _readable,
        "submodules": _submodules,
    }


def _submodules(modules: Iterable[str], module: str) -> list[tuple[str, str]]:
    """The name of each module directly in `module`, and its address seen from `module`'s page."""
    names = [name.removeprefix(f"{module}.") for name in modules if name.startswith(f"{module}.")]
    last = module.rpartition(".")[2]
    return [(name, f"{last}/{name}.html") for name in names if "." not in name]


def _is_ours(doc: Any) -> bool:
    """Whether a page shows `doc`: it is public, and neither Flax's nor the default of a field."""
    if doc.name.startswith("_") and doc.name not in _SHOWN:
        return False
    if doc.kind == "function" and getattr(doc.obj, "__name__", doc.name) != doc.name:
        return False
    owner = doc.qualname.rpartition(".")[0]
    cls = attrgetter(owner)(sys.modules[doc.modulename]) if owner else object
    return not (issubclass(cls, nn.Module) and doc.name in _FLAX_FIELDS | vars(nn.Module).keys())


def _readable(text: str) -> str:
    """An annotation or a default as the source writes it."""
    text = text.replace(inspect.formatannotation(OptState), "optax.OptState")
    return _PREFIXES.sub("", _QUOTED.sub(r"\1\2", text))


def _readable_signature(signature: inspect.Signature) -> inspect.Signature:
    """`signature` with readable types and defaults, without the fields that Flax adds."""

    def text(value: Any, printed: Callable[[Any], str]) -> Any:
        return value if value is inspect.Parameter.empty else _Text(_readable(printed(value)))

    def shown(parameter: inspect.Parameter) -> inspect.Parameter:
        annotation = text(parameter.annotation, inspect.formatannotation)
        return parameter.replace(annotation=annotation, default=text(parameter.default, repr))

    fields = signature.parameters
    flax = _FLAX_FIELDS if "parent" in fields else set()
    ours = [shown(field) for name, field in fields.items() if name not in flax]
    result = text(signature.return_annotation, inspect.formatannotation)
    return signature.replace(parameters=ours, return_annotation=result)


if __name__ == "__main__":
    cli.start(main, {"default": PageOptions()}, __doc__)
