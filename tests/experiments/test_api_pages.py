"""The reference of the package as HTML pages: `python -m experiments.api_pages`."""

import html
import re
import warnings
from pathlib import Path

import pytest

import jaxformer
from experiments.api_pages import PageOptions, main


def shown(path: Path) -> str:
    """The text of a page without code, with one space between words."""
    left_out = r"<(script|style).*?</\1>|<div class=\"pdoc-code.*?</div>|<[^>]+>"
    text = re.sub(left_out, "", path.read_text("utf-8"), flags=re.DOTALL)
    return " ".join(html.unescape(text).split())


@pytest.mark.slow
def test_pages_show_names_shapes_and_fields_without_a_warning_and_load_nothing(tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        main(PageOptions(str(tmp_path)))
    pages = sorted(tmp_path.rglob("*.html"))
    assert capsys.readouterr().out.startswith(f"{len(pages)} pages in {tmp_path}")

    top = tmp_path / "jaxformer.html"
    sections = set(re.findall(r'<section id="(\w+)">', top.read_text("utf-8")))
    assert sections - {"jaxformer"} == set(jaxformer.__all__) - {"__version__"}
    assert 'href="jaxformer/nn.html"' in top.read_text("utf-8")
    assert "a larger one favours longer texts" in shown(top)  # a field's docstring

    attention = shown(tmp_path / "jaxformer" / "nn" / "attention.html")
    assert "def __call__( self, x: Float[Array, 'R T D']," in attention
    assert "AttentionFn = reference)" in attention  # neither an address nor Flax's own fields
    assert not [path for path in pages if "<function" in shown(path)]

    address = r"""(?:src|href)=["'](https?:[^"']+)|@import|url\(http"""
    loaded = {found for path in pages for found in re.findall(address, path.read_text("utf-8"))}
    assert loaded == {"https://pdoc.dev"}  # a link
