"""A training step of one GPT: ours, that of the PyTorch twin, and that of nanoGPT."""

import contextlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from experiments import runs
from experiments.benchmarks import pytorch
from experiments.benchmarks.children import Subject
from jaxformer.config import ConfigError, TransformerConfig, check_least
from jaxformer.data import StreamBatch
from jaxformer.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Sizes:
    """A GPT without biases, its feed-forward layers 4 x `d_model` wide, and the batch it learns."""

    num_layers: int = 4
    num_heads: int = 4
    d_model: int = 128
    vocab_size: int = 65
    length: int = 64
    rows: int = 12
    dropout_rate: float = 0.0

    def __post_init__(self):
        check_least(self, 1, "num_layers", "num_heads", "vocab_size", "length", "rows")
        self.config()

    def config(self) -> TransformerConfig:
        """The model as ours and the twin's are made of it."""
        return TransformerConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            d_ff=4 * self.d_model,
            num_heads=self.num_heads,
            num_decoder_layers=self.num_layers,
            max_len=self.length,
            positions="learned",
            norm_placement="pre",
            norm_eps=1e-5,
            activation="gelu",
            use_bias=False,
            tied_embeddings="output",
            scale_embeddings=False,
            initializer="scaled_normal",
            dropout_rate=self.dropout_rate,
            attention_dropout_rate=self.dropout_rate,
        )

    def batches(self) -> Iterator[StreamBatch]:
        """Random tokens; the same few batches again and again."""
        rng = np.random.default_rng(0)
        shape = self.rows, self.length + 1
        valid, row = np.ones((self.rows, self.length), bool), np.arange(self.rows, dtype=np.int32)
        drawn = [rng.integers(0, self.vocab_size, shape, np.int32) for _ in range(8)]
        return itertools.cycle([StreamBatch(tokens, valid, row, None, None) for tokens in drawn])


LEARNING = OptimizerConfig(
    schedule="constant",
    learning_rate=1e-3,
    warmup_steps=0,
    b2=0.99,
    eps=1e-8,
    weight_decay=0.1,
    clip_norm=1.0,
)
"""nanoGPT's for characters, at a rate that stays."""


def ours(sizes: Sizes, attention: str) -> Subject:
    """Our step: compiled with the options of `runtime.tune`, its state donated."""
    import jax

    from jaxformer import kernels, runtime
    from jaxformer.losses import causal_loss
    from jaxformer.models import DecoderOnly
    from jaxformer.optimizer import make_optimizer
    from jaxformer.training import init_state, make_train_step

    tuning = runtime.tune()
    batches, model = sizes.batches(), DecoderOnly(sizes.config(), kernels.get(attention))
    optimizer = make_optimizer(LEARNING)
    params = jax.jit(model.init)(jax.random.key(0), next(batches).tokens[:2, :-1])["params"]
    state = init_state(params, optimizer, jax.random.key(1))
    step = make_train_step(causal_loss(model), optimizer)
    compiled = jax.jit(step, donate_argnums=0, compiler_options=tuning.options)

    def run() -> float:
        nonlocal state
        state, metrics = compiled(state, next(batches))
        return float(metrics["loss"])

    device = jax.devices()[0].device_kind
    return Subject(run, {"parameters": runs.count(params), "device": device, "tuned": str(tuning)})


def twin(sizes: Sizes) -> Subject:
    """The step of our PyTorch twin, eager, with PyTorch's fused AdamW."""
    torch = pytorch.load()
    from experiments.pytorch_twin.gpt import GPT
    from experiments.pytorch_twin.trainer import Trainer

    torch.manual_seed(0)
    trainer, batches = Trainer(GPT(sizes.config()), LEARNING), sizes.batches()
    return Subject(lambda: trainer.step(next(batches)), pytorch.facts(trainer.model))


def nanogpt(sizes: Sizes, folder: Path, compiled: bool) -> Subject:
    """The step of nanoGPT's `train.py` on the model of its checkout in `folder`, on a CPU.

    `compiled`: through torch.compile. Raises `ConfigError` for a folder without that model.
    """
    torch = pytorch.load()
    code = load_nanogpt(folder)
    torch.manual_seed(0)
    shape = {"n_layer": sizes.num_layers, "n_head": sizes.num_heads, "n_embd": sizes.d_model}
    shape |= {"block_size": sizes.length, "vocab_size": sizes.vocab_size}
    with open(os.devnull, "w", encoding="utf-8") as silence, contextlib.redirect_stdout(silence):
        model = code.GPT(code.GPTConfig(**shape, dropout=sizes.dropout_rate, bias=False))
        betas = LEARNING.b1, LEARNING.b2
        optimizer = model.configure_optimizers(
            LEARNING.weight_decay, LEARNING.learning_rate, betas, "cpu"
        )
    forward = torch.compile(model) if compiled else model
    return Subject(_nanogpt_step(torch, model, forward, optimizer, sizes), pytorch.facts(model))


def _nanogpt_step(
    torch: ModuleType, model: Any, forward: Any, optimizer: Any, sizes: Sizes
) -> Callable[[], float]:
    batches = sizes.batches()

    def run() -> float:
        tokens = torch.tensor(next(batches).tokens, dtype=torch.int64)
        _, loss = forward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LEARNING.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


def load_nanogpt(folder: Path) -> ModuleType:
    """nanoGPT's module `model`; `ConfigError` for a folder without it."""
    path = folder / "model.py"
    if not path.is_file():
        raise ConfigError(
            f"nanogpt={folder} has no model.py: give the folder of a checkout of nanoGPT"
        )
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise ConfigError(
            f"{path} defines no GPT and GPTConfig: give the folder of a checkout of nanoGPT"
        )
    return module
