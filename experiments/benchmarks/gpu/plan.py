"""What is measured on a GPU, and the same in a size for a processor's minute."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from experiments.benchmarks.gpu import arithmetic, attention, decoding, training
from experiments.benchmarks.gpu.attention import Lengths
from experiments.benchmarks.gpu.sections import Section
from experiments.benchmarks.gpu.training import Training
from experiments.benchmarks.translators import Work
from jaxformer.config import TransformerConfig, transformer_base, transformer_big

TRACK_3 = TransformerConfig(
    vocab_size=50_304,
    d_model=768,
    d_ff=3_072,
    num_heads=6,
    num_decoder_layers=12,
    max_len=1_024,
    positions="rotary",
    norm="rms",
    norm_placement="pre",
    activation="relu",
    tied_embeddings="none",
    output_bias=True,
    scale_embeddings=False,
    normalize_embeddings=True,
    initializer="scaled_normal",
    dtype="bfloat16",
)
"""The model of modded-nanogpt's third track (`train_gpt_simple.py`), as far as a config says it.

Its layers, sizes, biases, rotary positions and RMSNorms, also after the embedding. Different here:
ReLU is not squared, queries and keys have no norm, half of their pairs are not left unturned,
logits are not bent at 15, and its matrices learn by an orthogonalising rule where ours is AdamW.
"""

GPT_1_3B = TransformerConfig(
    vocab_size=50_304,
    d_model=2_048,
    d_ff=8_192,
    num_heads=16,
    num_decoder_layers=24,
    max_len=1_024,
    positions="rotary",
    norm_placement="pre",
    activation="gelu_tanh",
    use_bias=False,
    tied_embeddings="output",
    scale_embeddings=False,
    initializer="scaled_normal",
    dtype="bfloat16",
)
"""A GPT of 1.31 billion parameters."""


class Plan(NamedTuple):
    """The sizes of everything that is measured.

    `big_gpt` is tried with each of `rows` until one fits, its blocks computed a second time; and
    with each of `kept_rows`, when all is kept for the backward pass. `seconds` is how long products
    and searches are repeated, `block` the larger one of `blockwise`.
    """

    matrix: int
    gpt: Training
    big_gpt: Training
    rows: tuple[int, ...]
    kept_rows: tuple[int, ...]
    base: Training
    big: Training
    decode: Work
    decode_dtype: str
    lengths: Lengths
    block: int
    seconds: float


FULL = Plan(
    matrix=8_192,
    gpt=Training(TRACK_3, rows=512, length=1_024, accumulation=8),
    big_gpt=Training(GPT_1_3B, rows=64, length=1_024, remat=True),
    rows=(64, 32, 16),
    kept_rows=(24, 16, 8),
    base=Training(replace(transformer_base, dtype="bfloat16"), rows=1_024, length=32),
    big=Training(replace(transformer_big, dtype="bfloat16"), rows=1_024, length=32),
    decode=Work(rows=128),
    decode_dtype="bfloat16",
    lengths=Lengths(
        tuple(2**power for power in range(10, 16)), tokens=2**15, heads=16, head_dim=128
    ),
    block=1_024,
    seconds=4.0,
)
"""That of the H200."""


def _small(training: Training) -> Training:
    model = training.model
    sizes = {"vocab_size": 41, "d_model": 16, "d_ff": 24, "num_heads": 2}
    layers = {
        "num_encoder_layers": min(model.num_encoder_layers, 1),
        "num_decoder_layers": min(model.num_decoder_layers, 1),
    }
    model = replace(model, **sizes, **layers)
    rows = 2 * training.accumulation
    return replace(training, model=model, rows=rows, length=16, seconds=0.0)


SMALL = Plan(
    matrix=64,
    gpt=_small(FULL.gpt),
    big_gpt=_small(FULL.big_gpt),
    rows=(2,),
    kept_rows=(2,),
    base=_small(FULL.base),
    big=_small(FULL.big),
    decode=Work(vocab_size=29, d_model=16, d_ff=20, num_heads=2, num_layers=1, rows=3, target=5),
    decode_dtype="bfloat16",
    lengths=Lengths((16, 32), tokens=32, heads=2, head_dim=8, seconds=0.0),
    block=8,
    seconds=0.0,
)
"""The same programs, small."""


def sections(plan: Plan) -> list[Section]:
    """What is measured, in order, most wanted first; weights are about seconds on the H200."""
    lengths = plan.lengths

    def gpts(remat: bool, counts: tuple[int, ...]) -> dict[str, partial]:
        wanted = [replace(plan.big_gpt, remat=remat, rows=rows) for rows in counts]
        found = {f"{one.rows} rows": partial(training.train_gpt, one) for one in wanted}
        least = replace(wanted[-1], kernel="reference")
        return found | {f"{least.rows} rows, reference": partial(training.train_gpt, least)}

    def attend(name: str, weight: float) -> Section:
        return _once(f"attention_{name}", weight, partial(attention.kernel, name, lengths))

    translator, both = training.train_translator, (plan.decode, plan.seconds)
    ours = partial(decoding.ours, plan.decode, plan.decode_dtype, plan.seconds)
    return [
        _once("matrix_rate", 30, partial(arithmetic.matrix_rate, plan.matrix, plan.seconds)),
        Section("train_124m", 90, _kernels(training.train_gpt, plan.gpt)),
        Section("train_1_3b_kept", 90, gpts(False, plan.kept_rows)),
        Section("train_1_3b_remat", 90, gpts(True, plan.rows)),
        Section("train_transformer_base", 50, _kernels(translator, plan.base)),
        Section("train_transformer_big", 60, _kernels(translator, plan.big)),
        _once("decode_base", 40, ours),
        _once("decode_base_ctranslate2", 30, partial(decoding.ctranslate2, *both)),
        attend("cudnn", 25),
        _once("attention_pytorch", 20, partial(attention.scaled_dot_product, lengths)),
        _once(
            "attention_blockwise_large",
            30,
            partial(attention.kernel, "blockwise", lengths, plan.block),
        ),
        attend("xla", 25),
        attend("reference", 25),
        attend("blockwise", 40),
    ]


def _kernels(measure: training.Train, wanted: Training) -> dict[str, partial]:
    """With the kernel that is chosen by itself, and if that fails with `reference`."""
    names = wanted.kernel, "reference"
    return {name: partial(measure, replace(wanted, kernel=name)) for name in names}


def _once(name: str, weight: float, measurement: partial) -> Section:
    return Section(name, weight, {"once": measurement})
