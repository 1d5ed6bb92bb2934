"""Times a training step beside PyTorch's: `python -m experiments.benchmarks.train --preset NAME`.

The peers of a GPT are the PyTorch reference model and, with `--nanogpt FOLDER`, nanoGPT's model
from a checkout, eager and compiled; those of the translator multi30k_tiny are the reference and
`torch.nn.Transformer`. Prints a table and writes RUNS/benchmarks/NAME.json.
"""

import contextlib
import importlib.util
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import report
from experiments.benchmarks.report import load_torch, torch_metadata
from experiments.benchmarks.timing import Case, MakeCase, TimingConfig
from experiments.harness import cli
from experiments.harness.runs import run_folder
from experiments.harness.training.build import build_model, init_params
from experiments.harness.training.flops import causal_flops, seq2seq_flops
from experiments.harness.training.training_config import Remat, TrainingConfig
from experiments.harness.training.utilization import peak_of
from experiments.language_modelling.presets import shakespeare_char, shakespeare_char_cpu
from experiments.translation.presets import multi30k_tiny
from jaxformer.config import TransformerConfig, check_at_least
from jaxformer.distributed import single
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import parameter_axes
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.runtime import setup_process
from jaxformer.text.data import PairBatch, StreamBatch
from jaxformer.text.tokenizers import EOS, PAD, UNK
from jaxformer.training.losses import Loss, causal_loss, seq2seq_loss
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.train_step import TrainState, init_train_state

_FIRST_WORD = UNK + 1  # the first id that is no special token


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """A training step on random tokens."""

    model: TransformerConfig
    """Sizes of the model."""
    optimizer: OptimizerConfig
    """The optimizer."""
    batch_size: int
    """Sequences of a batch."""
    seq_len: int
    """Tokens of a sequence, without padding."""
    grad_accumulation: int = 1
    """Parts of a batch whose gradients are summed one after the other."""
    attention_fn: str = "reference"
    """jaxformer's: reference, blockwise, cudnn, gpu_flash, tpu_flash, tpu_splash, or auto."""
    remat: Remat = "none"
    """Activations that jaxformer's backward pass recomputes; blocks saves the most memory."""
    own_model: str = ""
    """Your own model as package.module:name in place of jaxformer's; empty: the library's."""

    def __post_init__(self):
        check_at_least(self, 1, "batch_size", "seq_len")
        self.training()

    @property
    def tokens(self) -> int:
        """The number of tokens that a step predicts."""
        return self.batch_size * self.seq_len

    def training(self) -> TrainingConfig:
        """The settings by which the experiments build their models."""
        return TrainingConfig(
            grad_accumulation=self.grad_accumulation,
            attention_fn=self.attention_fn,
            remat=self.remat,
            model=self.own_model,
        )


def constant(optimizer: OptimizerConfig, learning_rate: float) -> OptimizerConfig:
    """`optimizer` with a constant learning rate."""
    return replace(
        optimizer, schedule="constant", learning_rate=learning_rate, warmup_steps=0, min_lr_ratio=0
    )


@dataclass(frozen=True, kw_only=True)
class GPTWork(StepWork):
    """A training step of a GPT; by default nanoGPT's in its CPU configuration."""

    model: TransformerConfig = shakespeare_char_cpu.model
    optimizer: OptimizerConfig = constant(shakespeare_char_cpu.optimizer, 1e-3)
    batch_size: int = 12
    seq_len: int = 64

    def random_batch(self, rng: np.random.Generator) -> StreamBatch:
        """A batch of random tokens."""
        shape = self.batch_size, self.seq_len
        tokens = rng.integers(0, self.model.vocab_size, (shape[0], shape[1] + 1), np.int32)
        return StreamBatch(tokens, np.ones(shape, bool), _ids(shape[0]), None, None)

    def build(self) -> tuple[Any, Loss, int]:
        """jaxformer's model, its loss, and the FLOPs of a step."""
        model: Any = build_model(DecoderOnly, self.model, self.training())
        return model, causal_loss(model), causal_flops(self.model, self.batch_size, self.seq_len)


@dataclass(frozen=True, kw_only=True)
class TranslationWork(StepWork):
    """A training step of a translator; by default that of the preset multi30k_tiny."""

    model: TransformerConfig = multi30k_tiny.model
    optimizer: OptimizerConfig = constant(
        multi30k_tiny.optimizer, multi30k_tiny.optimizer.learning_rate / 10
    )
    batch_size: int = 256
    seq_len: int = 16
    label_smoothing: float = multi30k_tiny.training.label_smoothing
    """Share of each label's probability that is spread over the vocabulary."""

    def random_batch(self, rng: np.random.Generator) -> PairBatch:
        """A batch of random words; each sequence ends with EOS."""

        def random_words(length: int) -> np.ndarray:
            shape = self.batch_size, length
            words = rng.integers(_FIRST_WORD, self.model.vocab_size, shape, np.int32)
            words[:, -1] = EOS
            return words

        source, target = random_words(self.seq_len), random_words(self.seq_len + 1)
        return PairBatch(source, target, _ids(self.batch_size))

    def build(self) -> tuple[Any, Loss, int]:
        """jaxformer's model, its loss, and the FLOPs of a step."""
        model: Any = build_model(EncoderDecoder, self.model, self.training())
        loss = seq2seq_loss(model, pad=PAD, label_smoothing=self.label_smoothing)
        return model, loss, seq2seq_flops(self.model, self.batch_size, self.seq_len, self.seq_len)


@dataclass(frozen=True)
class GPTOptions(TimingConfig):
    """The training of a GPT, and its timing."""

    name: str = "nanogpt_cpu"
    rounds: int = 20
    repetitions: int = 10
    warm_up: int = 10
    work: GPTWork = GPTWork()
    """The model and the batch."""
    nanogpt: Path | None = None
    """Folder of a checkout of nanoGPT. None: nanoGPT is not measured."""

    def cases(self) -> dict[str, MakeCase]:
        """The function that makes each case."""
        makes: dict[str, MakeCase] = {"jaxformer": partial(jax_step, self.work)}
        if self.nanogpt is not None:
            for name, compiled in zip(NANOGPT, (True, False), strict=True):
                makes[name] = partial(nanogpt_step, self.work, self.nanogpt, compiled)
        return makes | {REFERENCE: partial(torch_step, self.work)}


@dataclass(frozen=True)
class TranslationOptions(TimingConfig):
    """The training of a translator, and its timing."""

    name: str = "train_translation"
    rounds: int = 10
    repetitions: int = 3
    warm_up: int = 3
    work: TranslationWork = TranslationWork()
    """The model and the batch."""

    def cases(self) -> dict[str, MakeCase]:
        """The function that makes each case; a model of your own has no peers."""
        makes: dict[str, MakeCase] = {"jaxformer": partial(jax_step, self.work)}
        if self.work.own_model:
            return makes
        makes[REFERENCE] = partial(torch_step, self.work)
        return makes | {TORCH_NN: partial(torch_step, self.work, torch_nn=True)}


NANOGPT = "nanoGPT, torch.compile", "nanoGPT, eager"
REFERENCE, TORCH_NN = "PyTorch reference, eager", "torch.nn.Transformer, eager"
PRESETS: dict[str, GPTOptions | TranslationOptions] = {
    "nanogpt_cpu": GPTOptions(),
    "characters_10m": GPTOptions(
        name="characters_10m",
        work=GPTWork(model=shakespeare_char.model, batch_size=4, seq_len=256),
        rounds=10,
        repetitions=3,
        warm_up=3,
    ),
    "multi30k_tiny": TranslationOptions(),
}


def main(options: GPTOptions | TranslationOptions) -> None:
    """Measures, prints the table and writes the file."""
    work = options.work
    title = f"a step of {work.batch_size} x {work.seq_len} tokens"
    report.run_tables(options, {title: options.cases()}, (*NANOGPT, REFERENCE, TORCH_NN))
    if isinstance(options, GPTOptions) and options.nanogpt is None:
        print("not measured: nanoGPT: give the folder of a checkout of nanoGPT, --nanogpt FOLDER")


def random_batches(work: GPTWork | TranslationWork) -> Iterator[Any]:
    """Yields batches of random tokens: eight batches, repeated."""
    rng = np.random.default_rng(0)
    return itertools.cycle([work.random_batch(rng) for _ in range(8)])


def jax_step(work: GPTWork | TranslationWork) -> Case:
    """jaxformer's training step, compiled with the options of `setup_process`."""
    setup = setup_process()
    devices, batches = single(compiler_options=setup.compiler_options), random_batches(work)
    model, loss, flops = work.build()
    tokens = np.zeros((2, work.seq_len), np.int32)
    inputs = [tokens] if isinstance(work, GPTWork) else [tokens, tokens]
    optimizer = make_optimizer(work.optimizer, axes=parameter_axes(model, *inputs))

    def make_state() -> TrainState:
        params = init_params(model, jax.random.key(0), *inputs)
        return init_train_state(params, optimizer, jax.random.key(1))

    state = devices.init(make_state)
    step = devices.step(loss, optimizer, grad_accumulation=work.grad_accumulation)
    begin = time.perf_counter()
    compiled = step.lower(state, devices.shard_batch(next(batches))).compile()
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()

    def run() -> float:
        nonlocal state
        state, metrics = compiled(state, devices.shard_batch(next(batches)))
        return float(metrics["loss"]) / float(metrics["tokens"])

    metadata = {
        "parameters": run_folder.count(state.params),
        "device": jax.devices()[0].device_kind,
        "tuned": str(setup),
        "compile_seconds": round(seconds, 2),
        "temporary_bytes": memory and memory.temp_size_in_bytes,
        "tokens": work.tokens,
        "flops": flops,
        "peak_flops": peak_of(devices, work.model.dtype).total,
    }
    return Case(run, metadata)


def torch_step(work: GPTWork | TranslationWork, torch_nn: bool = False) -> Case:
    """The training step of the PyTorch reference model, eager, with PyTorch's fused AdamW.

    With `torch_nn` the model is `torch.nn.Transformer` between embeddings and output.
    """
    torch = load_torch()
    from experiments.benchmarks.torch_translator import Translator
    from experiments.torch_reference.gpt import GPT
    from experiments.torch_reference.trainer import Trainer
    from experiments.torch_reference.transformer import Transformer

    torch.manual_seed(0)
    if isinstance(work, GPTWork):
        model: Any = GPT(work.model)
    else:
        model = (Translator if torch_nn else Transformer)(work.model, work.label_smoothing)
    trainer, batches = Trainer(model, work.optimizer), random_batches(work)

    def run() -> float:
        metrics = trainer.step(next(batches))
        return metrics["loss"] / metrics["tokens"]

    return Case(run, torch_metadata(model) | {"tokens": work.tokens})


def nanogpt_step(work: GPTWork, folder: Path, compiled: bool) -> Case:
    """The step of nanoGPT's `train.py` with the model in `folder`, a checkout of nanoGPT.

    `compiled`: with torch.compile. Raises `ConfigError` for a folder without that model.
    """
    torch, code = load_torch(), load_nanogpt(folder)
    torch.manual_seed(0)
    sizes, learning = work.model, work.optimizer
    shape = {"n_layer": sizes.num_decoder_layers, "n_head": sizes.num_heads}
    shape |= {"n_embd": sizes.d_model, "block_size": sizes.max_len, "vocab_size": sizes.vocab_size}
    with open(os.devnull, "w", encoding="utf-8") as silence, contextlib.redirect_stdout(silence):
        model = code.GPT(code.GPTConfig(**shape, dropout=sizes.dropout_rate, bias=False))
        betas = learning.b1, learning.b2
        optimizer = model.configure_optimizers(
            learning.weight_decay, learning.learning_rate, betas, "cpu"
        )
    forward, batches = torch.compile(model) if compiled else model, random_batches(work)

    def run() -> float:
        tokens = torch.tensor(next(batches).tokens, dtype=torch.int64)
        _, loss = forward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), learning.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Case(run, torch_metadata(model) | {"tokens": work.tokens})


def load_nanogpt(folder: Path) -> ModuleType:
    """nanoGPT's module `model`; `ConfigError` for a folder without it."""
    path = folder / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(
            f"nanogpt={folder} has no model.py: give the folder of a checkout of nanoGPT"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ids(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
