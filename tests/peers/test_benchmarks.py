"""Those that are measured beside each other do the same work. Run with `-m peer`; needs torch."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.benchmarks import (
    attention,
    environment,
    generation_subjects,
    gpt_subjects,
    seq2seq_subjects,
    translation_subjects,
)

pytestmark = pytest.mark.peer

SIZES = gpt_subjects.Sizes(num_layers=1, num_heads=2, d_model=10, vocab_size=13, length=7, rows=3)
CHECKOUT = """
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
        print("number of parameters")

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        assert (weight_decay, betas, device_type) == (0.1, (0.9, 0.99), "cpu")
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas)

    def forward(self, tokens, labels):
        logits = self.table(tokens)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""


@pytest.fixture(autouse=True)
def one_thread(torch, monkeypatch):
    for module in (environment, translation_subjects):
        monkeypatch.setattr(module, "cpu_count", lambda: 1)


def test_our_step_and_the_reference_are_of_equal_models_on_equal_batches():
    ours = gpt_subjects.ours(SIZES, "reference")
    theirs = gpt_subjects.torch_reference(SIZES)
    assert ours.facts["parameters"] == theirs.facts["parameters"]
    assert theirs.facts["threads"] == 1 and ours.facts["tuned"].startswith("cpu")
    losses = [(ours.run(), theirs.run()) for _ in range(41)]
    # random tokens cost ln 13 to guess; eight batches of them are soon known in part
    np.testing.assert_allclose(losses[0], np.log(13), atol=0.05)
    assert max(losses[-1]) < np.log(13) - 0.05


def test_the_step_of_a_checkout_of_nanogpt_learns_and_prints_nothing(tmp_path, capsys):
    (tmp_path / "model.py").write_text(CHECKOUT)
    subject = gpt_subjects.nanogpt(SIZES, tmp_path, compiled=False)
    losses = [subject.run() for _ in range(161)]
    assert losses[-1] < losses[0] - 0.05 and subject.facts == {"parameters": 169, "threads": 1}
    assert capsys.readouterr().out == ""


def test_all_three_decoders_find_the_same_texts_of_the_whole_length(tmp_path):
    work = translation_subjects.Work(
        vocab_size=29, d_model=16, d_ff=20, num_heads=2, num_layers=1, rows=3, source=5, target=7
    )
    translation_subjects.write_model(work, tmp_path / "marian")
    ours = translation_subjects.our_decode(work, tmp_path / "marian")()
    assert ours.shape == (3, 7) and 0 < ours.min() and ours.max() < work.start
    theirs = translation_subjects.transformers(work, tmp_path / "marian")
    assert theirs.run().tolist() == ours.tolist()
    assert theirs.facts == {"threads": 1, "begins": ours[:, :4].tolist()}
    pytest.importorskip("ctranslate2", reason="needs the extra peers")
    converted = translation_subjects.ctranslate2(work, tmp_path / "marian")
    assert converted.run().tolist() == ours.tolist()


def test_an_attention_function_and_pytorch_differentiate_the_same_attention(assert_equal):
    shape = attention.Shape(rows=2, heads=3, head_dim=5, length=7)
    subject = attention.ours("reference", shape)
    _, ours = subject.run()
    theirs = attention.scaled_dot_product(shape).run()
    assert subject.facts["temporary_bytes"] > 0
    for given, expected in zip(theirs, ours, strict=True):
        assert_equal(given.numpy().swapaxes(1, 2), expected, 1e-4)


@pytest.mark.parametrize("prompt", [1, 5])
def test_our_text_and_that_of_the_pytorch_loop_are_the_likeliest_tokens(torch, prompt):
    model = gpt_subjects.Sizes(num_layers=2, num_heads=2, d_model=16, vocab_size=29, length=19)
    work = generation_subjects.Work(model=model, rows=3, prompt=prompt)
    ours, theirs = generation_subjects.our_write(work), generation_subjects.torch_loop(work)
    written = ours()
    assert written.shape == (3, 19 - prompt) and len(np.unique(written)) > 3
    assert theirs.run().tolist() == theirs.run().tolist() == written.tolist()
    assert theirs.facts["threads"] == 1 and theirs.facts["tokens"] == written.size
    reference = generation_subjects.reference_of(model).eval()
    text = torch.tensor(np.concatenate([work.prompts(), written], axis=1))
    likeliest = reference(text[:, :-1]).argmax(-1)[:, prompt - 1 :]
    assert likeliest.tolist() == written.tolist()


def test_drawn_texts_come_again_and_follow_the_temperature(torch):
    model = gpt_subjects.Sizes(num_layers=1, num_heads=2, d_model=16, vocab_size=29, length=19)
    work = generation_subjects.Work(model=model, rows=3, prompt=5, temperature=1e-4)
    cold = generation_subjects.our_write(work)(), generation_subjects.torch_write(work)()
    likeliest = generation_subjects.our_write(replace(work, temperature=0.0))()
    assert all((text == likeliest).all() for text in cold)
    warm = replace(work, temperature=1.0)
    ours, theirs = generation_subjects.our_write(warm), generation_subjects.torch_write(warm)
    assert (ours() == ours()).all() and (ours() != likeliest).any()
    assert (theirs() != likeliest).any()


TRANSLATOR = seq2seq_subjects.Sizes(
    num_layers=2,
    num_heads=2,
    d_model=12,
    d_ff=20,
    vocab_size=13,
    dropout_rate=0.0,
    rows=3,
    length=7,
)


def test_the_steps_of_all_three_translators_are_of_equal_models_on_equal_batches():
    ours = seq2seq_subjects.ours(TRANSLATOR, "reference")
    subjects = [ours]
    subjects += [
        make(TRANSLATOR) for make in (seq2seq_subjects.torch_reference, seq2seq_subjects.torch_nn)
    ]
    assert len({subject.facts["parameters"] for subject in subjects}) == 1
    assert subjects[1].facts["threads"] == subjects[2].facts["threads"] == 1
    losses = np.array([[subject.run() for subject in subjects] for _ in range(41)])
    # what comes next is random, except that the seventh of a row is its end
    assert (abs(losses[0] - losses[0].mean()) < 1.0).all()
    assert (losses[-8:].mean(0) < losses[:8].mean(0) - 0.05).all()


def test_the_translator_of_torch_nn_is_the_reference(torch, assert_equal):
    from experiments.benchmarks.torch_translator import Translator
    from experiments.torch_reference import torch_modules, weights
    from experiments.torch_reference.transformer import Transformer
    from experiments.torch_reference.weight_map import to_jax

    config = replace(TRANSLATOR, dropout_rate=0.3).config()
    theirs, reference = Translator(config, 0.1), Transformer(config, 0.1)
    state = {name: x.numpy() for name, x in theirs.transformer.state_dict().items()}
    params = to_jax(state, torch_modules.transformer(state, config.num_heads, norm_first=True))
    params["embedding"] = {"table": theirs.embedding.weight.detach().numpy()}
    weights.load_params(params, reference, config)
    batch = next(TRANSLATOR.batches())
    batch = batch._replace(
        source=np.where(batch.example_ids[:, None] == 1, [1] * 4 + [0] * 3, batch.source)
    )
    losses = [model.eval().loss(batch)[0].item() for model in (theirs, reference)]
    assert_equal(*losses)
    dropped = [layer for layer in theirs.modules() if isinstance(layer, torch.nn.Dropout)]
    kept = [module for module in reference.modules() if isinstance(module, torch.nn.Dropout)]
    active = [sum(module.p == 0.3 for module in modules) for modules in (dropped, kept)]
    # the reference's encoder and decoder drop out of their inputs by one module, as torch's does
    assert active[0] == active[1] == 1 + 2 * 2 + 2 * 3
    attentions = [m for m in theirs.modules() if isinstance(m, torch.nn.MultiheadAttention)]
    assert [module.dropout for module in attentions] == [0.0] * 6
