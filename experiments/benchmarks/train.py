"""Times a training step next to PyTorch's: `python -m experiments.benchmarks.train --preset NAME`.

The peers are the PyTorch reference model and, of a GPT with `--nanogpt FOLDER`, nanoGPT's model
in a checkout, eager and compiled. The larger presets are for one accelerator, with attention
functions in place of peers. Prints a table and writes RUNS/benchmarks/NAME.json.
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

from experiments.benchmarks.timing import Case, MakeCase, TimingConfig, one_by_one, run_tables
from experiments.benchmarks.torch_peers import load_torch, torch_metadata
from experiments.harness import cli
from experiments.harness.training.build import build_model
from experiments.harness.training.chips import peak_of
from experiments.harness.training.flops import causal_flops, seq2seq_flops
from experiments.harness.training.training_config import Remat
from experiments.language_modelling import train as language_modelling
from experiments.language_modelling.presets import (
    gpt2_124m,
    gpt3_xl,
    shakespeare_char,
    shakespeare_char_cpu,
)
from experiments.translation import train as translation
from experiments.translation.presets import multi30k_tiny
from jaxformer.config import TRANSFORMER_BASE, TRANSFORMER_BIG, Checked, Count, TransformerConfig
from jaxformer.distributed import Strategy, single
from jaxformer.errors import ConfigError
from jaxformer.runtime import setup_process
from jaxformer.text.data import PairBatch, StreamBatch
from jaxformer.text.tokenizers import EOS, UNK
from jaxformer.training.optimizer import OptimizerConfig

_LABEL_SMOOTHING = multi30k_tiny.training.label_smoothing


@dataclass(frozen=True, kw_only=True)
class StepWork(Checked):
    """A training step on random tokens, of a GPT or, where there are encoder layers, a translator.

    By default it is nanoGPT's in its CPU configuration.
    """

    model: TransformerConfig = shakespeare_char_cpu.model
    """Sizes of the model."""
    optimizer: OptimizerConfig = shakespeare_char_cpu.optimizer
    """The optimizer; its learning rate is constant."""
    batch_size: Count = 12
    """Sequences of a batch."""
    seq_len: Count = 64
    """Tokens of a sequence, without padding."""
    grad_accumulation: Count = 1
    """Parts of a batch whose gradients are summed one after the other."""
    attention_fn: str = "reference"
    """jaxformer's: reference, blockwise, cudnn, gpu_flash, tpu_flash, or auto."""
    remat: Remat = "none"
    """Activations that jaxformer's backward pass recomputes; blocks saves the most memory."""

    def __post_init__(self):
        self.config()

    @property
    def translates(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return self.model.num_encoder_layers > 0

    @property
    def tokens(self) -> int:
        """The number of tokens that a step predicts."""
        return self.batch_size * self.seq_len

    @property
    def constant(self) -> OptimizerConfig:
        """The optimizer with a constant learning rate."""
        return replace(self.optimizer, schedule="constant", warmup_steps=0, min_lr_ratio=0)

    def config(self) -> Any:
        """The configuration of the experiment's training that has this step."""
        preset: Any = multi30k_tiny if self.translates else shakespeare_char_cpu
        training = replace(
            preset.training,
            grad_accumulation=self.grad_accumulation,
            attention_fn=self.attention_fn,
            remat=self.remat,
        )
        data = preset.data if self.translates else replace(preset.data, seq_len=self.seq_len)
        optimizer = replace(preset.optimizer, **vars(self.constant))
        return replace(preset, model=self.model, data=data, optimizer=optimizer, training=training)

    def random_batch(self, rng: np.random.Generator) -> StreamBatch | PairBatch:
        """A batch of random tokens; a translator's are words, and EOS at the end."""
        rows = self.batch_size
        first_id = 0
        if self.translates:
            first_id = UNK + 1  # after the special tokens

        def random_tokens(length: int) -> np.ndarray:
            return rng.integers(first_id, self.model.vocab_size, (rows, length), np.int32)

        example_ids = np.arange(rows, dtype=np.int32)
        if not self.translates:
            loss_mask = np.ones((rows, self.seq_len), bool)
            return StreamBatch(random_tokens(self.seq_len + 1), loss_mask, example_ids)
        source = random_tokens(self.seq_len)
        target = random_tokens(self.seq_len + 1)
        source[:, -1] = EOS
        target[:, -1] = EOS
        return PairBatch(source, target, example_ids)

    def flops(self) -> int:
        """The FLOPs of a step, counted from the sizes of its matrix products."""
        sizes, rows, length = self.model, self.batch_size, self.seq_len
        if self.translates:
            return seq2seq_flops(sizes, rows, length, length)
        return causal_flops(sizes, rows, length)


@dataclass(frozen=True)
class StepOptions(TimingConfig):
    """A training step, and its timing."""

    name: str = "nanogpt_cpu"
    rounds: Count = 20
    repetitions: Count = 10
    warm_up: Count = 10
    work: StepWork = StepWork()
    """The model and the batch."""
    attention_fns: tuple[str, ...] = ()
    """jaxformer's attention functions, a case each, without peers; none: `work.attention_fn`."""
    nanogpt: Path | None = None
    """Folder of a checkout of nanoGPT. None: nanoGPT is not measured."""

    def __post_init__(self):
        super().__post_init__()
        if self.nanogpt and self.work.translates:
            raise ConfigError(f"nanogpt={self.nanogpt} translates nothing: leave it out")

    def cases(self) -> dict[str, MakeCase]:
        """The function that makes each case."""
        work = self.work
        makes: dict[str, MakeCase] = {}
        if self.attention_fns:
            for name in self.attention_fns:
                makes[name] = partial(jax_step, replace(work, attention_fn=name))
            return makes
        makes["jaxformer"] = partial(jax_step, work)
        if self.nanogpt is not None:
            makes[NANOGPT_COMPILED] = partial(nanogpt_step, work, self.nanogpt, True)
            makes[NANOGPT_EAGER] = partial(nanogpt_step, work, self.nanogpt, False)
        makes[REFERENCE] = partial(torch_step, work)
        return makes


NANOGPT_COMPILED = "nanoGPT, torch.compile"
NANOGPT_EAGER = "nanoGPT, eager"
REFERENCE = "PyTorch reference, eager"
GPT2_WORK = StepWork(
    model=gpt2_124m.model,
    optimizer=replace(gpt2_124m.optimizer, learning_rate=1e-4),
    batch_size=8,
    seq_len=1_024,
    attention_fn="auto",
)
"""A step of GPT-2's model that every accelerator has memory for."""
_PAIRS = replace(GPT2_WORK, batch_size=1_024, seq_len=32)


def _slower(options: StepOptions) -> StepOptions:
    """`options` for steps that take a second on a CPU."""
    return replace(options, rounds=10, repetitions=3, warm_up=3)


def _on_accelerator(
    name: str, work: StepWork, attention_fns: tuple[str, ...] = ("auto",)
) -> StepOptions:
    options = StepOptions(name=name, work=work, warm_up=1, attention_fns=attention_fns)
    return one_by_one(options)


_ALL = (
    StepOptions(),
    _slower(
        StepOptions(
            name="characters_10m",
            work=StepWork(model=shakespeare_char.model, batch_size=4, seq_len=256),
        )
    ),
    _slower(
        StepOptions(
            name="multi30k_tiny",
            work=StepWork(
                model=multi30k_tiny.model,
                optimizer=replace(multi30k_tiny.optimizer, learning_rate=4e-4),
                batch_size=256,
                seq_len=16,
            ),
        )
    ),
    _on_accelerator(
        "gpt2_124m",
        replace(GPT2_WORK, batch_size=512, grad_accumulation=8),
        attention_fns=("auto", "reference"),
    ),
    _on_accelerator("gpt3_xl", replace(GPT2_WORK, model=gpt3_xl.model)),
    _on_accelerator(
        "wmt14_base", replace(_PAIRS, model=replace(TRANSFORMER_BASE, dtype="bfloat16"))
    ),
    _on_accelerator("wmt14_big", replace(_PAIRS, model=replace(TRANSFORMER_BIG, dtype="bfloat16"))),
)
PRESETS = {options.name: options for options in _ALL}


def main(options: StepOptions) -> None:
    """Measures, prints the table and writes the file."""
    work = options.work
    title = f"a step of {work.batch_size} x {work.seq_len} tokens"
    run_tables(options, {title: options.cases()}, (NANOGPT_COMPILED, NANOGPT_EAGER, REFERENCE))
    if not (options.nanogpt or options.attention_fns or work.translates):
        print("not measured: nanoGPT: give the folder of a checkout of nanoGPT, --nanogpt FOLDER")


def random_batches(work: StepWork) -> Iterator[Any]:
    """Yields batches of random tokens: eight batches, repeated."""
    rng = np.random.default_rng(0)
    return itertools.cycle([work.random_batch(rng) for _ in range(8)])


def jax_step(work: StepWork, devices: Strategy | None = None) -> Case:
    """jaxformer's training step on `devices`, all of whose processes call this; None: on one.

    `run()` gives the loss and the norm of the gradient.
    """
    setup = setup_process()
    devices = devices or single(compiler_options=setup.compiler_options)
    config = work.config()
    experiment = translation if work.translates else language_modelling
    model = build_model(config)
    batches = random_batches(work)
    batch = next(batches)
    devices = devices.for_model(model)
    make_state, step = experiment.make_step(config, model, batch, devices)
    state = devices.init(make_state)
    begin = time.perf_counter()
    compiled = step.lower(state, devices.divide(batch)).compile()
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()

    def run() -> tuple[float, float]:
        nonlocal state
        state, metrics = compiled(state, devices.divide(next(batches)))
        return float(metrics["loss"]) / float(metrics["tokens"]), float(metrics["grad_norm"])

    metadata = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "device": jax.devices()[0].device_kind,
        "tuned": str(setup),
        "compile_seconds": round(seconds, 2),
        "temporary_bytes": memory and memory.temp_size_in_bytes,
        "tokens": work.tokens,
        "flops": work.flops(),
        "peak_flops": peak_of(devices, work.model.dtype).total,
    }
    return Case(run, metadata)


def torch_step(work: StepWork) -> Case:
    """The training step of the PyTorch reference model, eager, with PyTorch's fused AdamW."""
    torch = load_torch()
    from experiments.torch_reference.gpt import GPT
    from experiments.torch_reference.trainer import Trainer
    from experiments.torch_reference.transformer import Transformer

    torch.manual_seed(0)
    model: Any
    if work.translates:
        model = Transformer(work.model, _LABEL_SMOOTHING)
    else:
        model = GPT(work.model)
    trainer = Trainer(model, work.constant)
    batches = random_batches(work)

    def run() -> float:
        metrics = trainer.step(next(batches))
        return metrics["loss"] / metrics["tokens"]

    return Case(run, torch_metadata(model) | {"tokens": work.tokens})


def nanogpt_step(work: StepWork, folder: Path, compiled: bool) -> Case:
    """The step of nanoGPT's `train.py` with the model in `folder`, a checkout of nanoGPT.

    `compiled`: with torch.compile. Raises `ConfigError` for a folder without that model.
    """
    torch = load_torch()
    code = load_nanogpt(folder)
    torch.manual_seed(0)
    sizes = work.model
    learning = work.constant
    config = code.GPTConfig(
        n_layer=sizes.num_decoder_layers,
        n_head=sizes.num_heads,
        n_embd=sizes.d_model,
        block_size=sizes.max_len,
        vocab_size=sizes.vocab_size,
        dropout=sizes.dropout_rate,
        bias=False,
    )
    with open(os.devnull, "w", encoding="utf-8") as silence, contextlib.redirect_stdout(silence):
        model = code.GPT(config)
        betas = learning.b1, learning.b2
        optimizer = model.configure_optimizers(
            learning.weight_decay, learning.learning_rate, betas, "cpu"
        )
    forward = torch.compile(model) if compiled else model
    batches = random_batches(work)

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


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
