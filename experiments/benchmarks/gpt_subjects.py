"""Training steps of one GPT: ours, the PyTorch reference model's and nanoGPT's."""

import contextlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from experiments.benchmarks.environment import load_torch, torch_facts
from experiments.benchmarks.subprocesses import Subject
from experiments.harness import run_folder
from jaxformer.config import TransformerConfig, check_at_least
from jaxformer.errors import ConfigError
from jaxformer.ops.attention import ATTENTION_FNS
from jaxformer.text.data import StreamBatch
from jaxformer.training.losses import Loss
from jaxformer.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Sizes:
    """A GPT without biases, with d_ff = 4 x `d_model`, and its batch."""

    num_layers: int = 4
    """Number of layers."""
    num_heads: int = 4
    """Number of attention heads."""
    d_model: int = 128
    """Size of a token's vector."""
    vocab_size: int = 65
    """Number of token ids."""
    length: int = 64
    """Tokens in a row, and the model's context."""
    rows: int = 12
    """Batch size."""
    dropout_rate: float = 0.0
    """Dropout of sub-layers and of attention weights."""

    def __post_init__(self):
        check_at_least(self, 1, "num_layers", "num_heads", "vocab_size", "length", "rows")
        self.config()

    def config(self) -> TransformerConfig:
        """Returns the configuration of our model and of the PyTorch reference model."""
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
        """Yields batches of random tokens: eight batches, repeated."""
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
    grad_clip_norm=1.0,
)
"""nanoGPT's settings for characters, with a constant learning rate."""

AttentionName = Literal["reference", "blockwise", "xla", "cudnn", "tpu_splash"]


def ours(sizes: Sizes, attention_fn: AttentionName) -> Subject:
    """Our training step, compiled with the options of `setup_process`."""
    from jaxformer.nn.models import DecoderOnly
    from jaxformer.training.losses import causal_loss

    model, batches = DecoderOnly(sizes.config(), ATTENTION_FNS[attention_fn]), sizes.batches()
    tokens = next(batches).tokens[:2, :-1]
    return training_step(model, (tokens,), batches, causal_loss(model), LEARNING)


def training_step(
    model: Any,
    inputs: tuple[Any, ...],
    batches: Iterator[Any],
    loss: Loss,
    learning: OptimizerConfig,
) -> Subject:
    """A compiled training step of `model`, which is initialised with `inputs`."""
    import jax

    from jaxformer.runtime import setup
    from jaxformer.training.optimizer import make_optimizer
    from jaxformer.training.train_step import init_train_state, make_train_step

    setup_info, optimizer = setup.setup_process(), make_optimizer(learning)
    params = jax.jit(model.init)(jax.random.key(0), *inputs)["params"]
    state = init_train_state(params, optimizer, jax.random.key(1))
    step = make_train_step(loss, optimizer)
    compiled = jax.jit(step, donate_argnums=0, compiler_options=setup_info.compiler_options)

    def run() -> float:
        nonlocal state
        state, metrics = compiled(state, next(batches))
        return float(metrics["loss"]) / float(metrics["tokens"])

    facts = {"parameters": run_folder.count(params), "device": jax.devices()[0].device_kind}
    return Subject(run, facts | {"tuned": str(setup_info)})


def torch_reference(sizes: Sizes) -> Subject:
    """The training step of the PyTorch reference model, eager, with PyTorch's fused AdamW."""
    torch = load_torch()
    from experiments.torch_reference.gpt import GPT

    torch.manual_seed(0)
    return torch_training_step(GPT(sizes.config()), sizes.batches(), LEARNING)


def torch_training_step(model: Any, batches: Iterator[Any], learning: OptimizerConfig) -> Subject:
    """The training step of a PyTorch `model` that has a method `loss`."""
    from experiments.torch_reference.trainer import Trainer

    trainer = Trainer(model, learning)

    def run() -> float:
        metrics = trainer.step(next(batches))
        return metrics["loss"] / metrics["tokens"]

    return Subject(run, torch_facts(model))


def nanogpt(sizes: Sizes, folder: Path, compiled: bool) -> Subject:
    """The step of nanoGPT's `train.py` with the model in `folder`, a checkout of nanoGPT.

    `compiled`: with torch.compile. Raises `ConfigError` for a folder without that model.
    """
    torch = load_torch()
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
    return Subject(_nanogpt_step(torch, model, forward, optimizer, sizes), torch_facts(model))


def _nanogpt_step(
    torch: ModuleType, model: Any, forward: Any, optimizer: Any, sizes: Sizes
) -> Callable[[], float]:
    batches = sizes.batches()

    def run() -> float:
        tokens = torch.tensor(next(batches).tokens, dtype=torch.int64)
        _, loss = forward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LEARNING.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


def load_nanogpt(folder: Path) -> ModuleType:
    """Returns nanoGPT's module `model`; raises `ConfigError` for a folder without it."""
    path = folder / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(
            f"nanogpt={folder} has no model.py: give the folder of a checkout of nanoGPT"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise ConfigError(
            f"{path} defines no GPT and GPTConfig: give the folder of a checkout of nanoGPT"
        )
    return module
