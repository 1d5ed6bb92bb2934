"""The smallest GPT: from a text to its continuation, with jaxformer and JAX alone; and in NNX."""

import ast
import math
from pathlib import Path

import pytest

from experiments.examples import minimal_gpt, nnx_gpt


@pytest.mark.long
@pytest.mark.parametrize("example", [minimal_gpt, nnx_gpt], ids=["linen", "nnx"])
def test_a_text_is_learned_and_continued_with_its_own_characters(example, tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("sun moon star rain. " * 101, encoding="utf-8")
    args = f"{path} --steps 40 --batch_size 5 --length 19 --d_model 32 --layers 1 --characters 13"
    loss = example.main(args.split())
    assert loss < 0.7 * math.log(11), "a uniform guess among 11 characters is worse"
    generated = capsys.readouterr().out.split("\n\n")[-1].removesuffix("\n")
    assert len(generated) == 19 + 13 and set(generated) <= set("sun moon star rain. ")


def test_it_is_short_and_needs_no_other_module_of_the_experiments():
    source = Path(minimal_gpt.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 120
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    assert not any((node.module or "").startswith("experiments") for node in imports)
