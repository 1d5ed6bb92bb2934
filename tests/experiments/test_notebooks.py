"""The notebooks: each has its output, and its cells run."""

from pathlib import Path

import jax
import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import jaxformer as jf
from experiments.examples.notebooks import alignment_heads
from experiments.examples.notebooks.toy_language import encode_pairs, sentence_pairs
from jaxformer.text.tokenizers import BOS, EOS, PAD, train_words
from jaxformer.training.losses import seq2seq_loss

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {
    path.stem: path for path in sorted((ROOT / "experiments/examples/notebooks").glob("*.ipynb"))
}
MARKS = {"functional_and_pytorch": [pytest.mark.peer]}  # besides slow

RIGHT = {
    "the small mouse loves a horse": "die kleine Maus liebt ein Pferd",
    "today a mouse can see the woman": "heute kann eine Maus die Frau sehen",
    "a big horse finds the dog": "ein großes Pferd findet den Hund",
    "a white child seeks the young man": "ein weißes Kind sucht den jungen Mann",
    "today a small bird hears the small dog": "heute hört ein kleiner Vogel den kleinen Hund",
    "a young child must paint a big dog": "ein junges Kind muss einen großen Hund malen",
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_committed_notebook_has_all_its_output_and_pictures(name):
    path = NOTEBOOKS[name]
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert path.stat().st_size < 400_000
    assert "/home/" not in path.read_text("utf-8")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow, *MARKS.get(name, ())]) for name in NOTEBOOKS],
)
def test_a_notebook_runs(name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    folder = {"metadata": {"path": str(NOTEBOOKS[name].parent)}}
    NotebookClient(notebook, timeout=480, resources=folder).execute()


def test_a_toy_sentence_has_the_right_translation():
    pairs = dict(sentence_pairs(3_000, seed=0))
    assert len(pairs) == 3_000
    assert RIGHT.items() <= pairs.items()
    tokenizer = train_words([text for pair in pairs.items() for text in pair], 200)
    source, target = encode_pairs(list(pairs.items())[:7], tokenizer)
    assert (target[:, 0] == BOS).all()
    for ids in (source, target):
        assert ((ids == EOS).sum(axis=1) == 1).all()
        assert (ids[:, -1] == PAD).any() and (ids[:, -1] == EOS).any()


def test_the_loss_without_a_head_is_that_of_the_model_without_it(random_params, assert_equal):
    sizes = {"d_model": 12, "d_ff": 14, "num_heads": 3, "num_decoder_layers": 2, "max_len": 11}
    model = jf.EncoderDecoder(jf.TransformerConfig(13, **sizes, num_encoder_layers=1))
    source = np.array([[4, 5, 6, EOS, PAD, PAD], [7, 8, 9, 10, 11, EOS]])
    target = np.array([[BOS, 6, 5, EOS, PAD], [BOS, 7, 12, 4, EOS]])
    params = random_params(model, source, target)
    # The second layer attends to one token alone.
    attention = params["decoder"]["blocks_1"]["cross_attention"]
    attention["query"] = jax.tree.map(lambda x: 1e4 * x, attention["query"])
    batch = jf.PairBatch.create(source, target, vocab_size=13)
    loss, effects = alignment_heads.measure(model, params, batch)
    total = jax.jit(seq2seq_loss(model, pad=PAD))
    for layer, head in ((0, 2), (1, 0)):
        pruned = jax.tree.map(np.copy, params)
        block = pruned["decoder"][f"blocks_{layer}"]
        block["cross_attention"]["out"]["kernel"][head] = 0.0
        nats, tokens, *_ = total(pruned, batch, None)
        assert_equal(loss + effects.zero[layer, head], nats / tokens)
    assert np.abs(effects.one_hot[1]).max() < 1e-5 < np.abs(effects.one_hot[0]).max()
    assert np.abs(effects.uniform).min() > 1e-5
