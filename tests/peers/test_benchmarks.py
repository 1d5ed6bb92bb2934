"""Cases that are measured next to each other do the same work. Run with `-m peer`; needs torch."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.benchmarks import attention, decode, greedy_text, torch_peers, train
from experiments.language_modelling.presets import shakespeare_char_cpu
from experiments.translation.presets import multi30k_tiny

pytestmark = pytest.mark.peer


def gpt(layers, d_model, vocab_size, max_len):
    sizes = {"d_model": d_model, "d_ff": 4 * d_model, "vocab_size": vocab_size}
    sizes |= {"num_decoder_layers": layers, "num_heads": 2, "max_len": max_len}
    return replace(shakespeare_char_cpu.model, **sizes)


WORK = train.StepWork(model=gpt(1, 10, 13, 7), batch_size=3, seq_len=7)
TRANSLATOR = train.StepWork(
    model=replace(
        multi30k_tiny.model,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        d_model=12,
        d_ff=20,
        vocab_size=13,
        dropout_rate=0.0,
    ),
    batch_size=3,
    seq_len=7,
)
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
    for module in (torch_peers, decode):
        monkeypatch.setattr(module, "cpu_count", lambda: 1)


@pytest.mark.parametrize("work", [WORK, TRANSLATOR], ids=["gpt", "translator"])
def test_our_step_and_the_reference_are_of_equal_models_on_equal_batches(work):
    ours, theirs = train.jax_step(work), train.torch_step(work)
    assert ours.metadata["parameters"] == theirs.metadata["parameters"]
    assert theirs.metadata["threads"] == 1 and ours.metadata["tuned"].startswith("cpu")
    losses = np.array([[ours.run()[0], theirs.run()] for _ in range(41)])
    # Random tokens: eight batches of them are soon known in part, and a translator's seventh token
    # is always the end.
    np.testing.assert_allclose(losses[0], np.log(13), atol=0.05 if work is WORK else 1.0)
    assert (losses[-8:].mean(0) < losses[:8].mean(0) - 0.05).all()


def test_the_step_of_a_checkout_of_nanogpt_learns_and_prints_nothing(tmp_path, capsys):
    (tmp_path / "model.py").write_text(CHECKOUT)
    case = train.nanogpt_step(WORK, tmp_path, compiled=False)
    losses = [case.run() for _ in range(161)]
    assert losses[-1] < losses[0] - 0.05 and case.metadata == {
        "parameters": 169,
        "threads": 1,
        "tokens": 21,
    }
    assert capsys.readouterr().out == ""


def test_all_three_decoders_find_the_same_texts_of_the_whole_length(tmp_path):
    sizes = {"vocab_size": 29, "d_model": 16, "d_ff": 20, "num_heads": 2}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    model = replace(decode.MARIAN_BASE, **sizes, **layers)
    work = decode.DecodeWork(model, batch_size=3, source_len=5, target_len=7)
    decode.write_model(work, tmp_path / "marian")
    ours = decode.jax_search(work, tmp_path / "marian").run()
    assert ours.shape == (3, 7) and 0 < ours.min() and ours.max() < work.pad
    theirs = decode.transformers_search(work, tmp_path / "marian")
    assert theirs.run().tolist() == ours.tolist()
    expected = {"threads": 1, "tokens": 21, "first_tokens": ours[:, :4].tolist()}
    assert theirs.metadata.items() >= expected.items()
    pytest.importorskip("ctranslate2", reason="needs the extra peers")
    converted = decode.ctranslate2_search(work, tmp_path / "marian")
    assert converted.run().tolist() == ours.tolist()


def test_an_attention_function_and_pytorch_differentiate_the_same_attention(assert_equal):
    shape = attention.Shape(2, 7, num_heads=3, head_dim=5)
    case = attention.jax_attention("reference", shape)
    _, ours = case.run()
    theirs = attention.torch_attention(shape).run()
    assert case.metadata["temporary_bytes"] > 0
    for given, expected in zip(theirs, ours, strict=True):
        assert_equal(given.numpy().swapaxes(1, 2), expected, 1e-4)


@pytest.mark.parametrize("prompt", [1, 5])
def test_the_greedy_text_is_what_the_pytorch_reference_finds_likeliest(torch, prompt):
    work = greedy_text.GreedyText(gpt(2, 16, 29, 19), batch_size=3, prompt_len=prompt)
    case = greedy_text.jax_sample(work)
    written = case.run()
    assert written.shape == (3, 19 - prompt) and len(np.unique(written)) > 3
    assert case.metadata["tokens"] == written.size
    from experiments.torch_reference import weights
    from experiments.torch_reference.gpt import GPT

    reference = GPT(work.model).eval()
    weights.load_params(greedy_text.params_of(work.model), reference, work.model)
    text = torch.tensor(np.concatenate([work.prompts(), written], axis=1))
    likeliest = reference(text[:, :-1]).argmax(-1)[:, prompt - 1 :]
    assert likeliest.tolist() == written.tolist()
