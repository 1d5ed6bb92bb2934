"""The sizes of all sections, for a GPU (`FULL`) and for a test on a CPU (`SMALL`)."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from experiments.benchmarks.gpu import attention_lengths, decoding, train_steps
from experiments.benchmarks.gpu.attention_lengths import Lengths
from experiments.benchmarks.gpu.sections import Section
from experiments.benchmarks.gpu.timing import matrix_rate
from experiments.benchmarks.gpu.train_steps import Training
from experiments.benchmarks.translation_subjects import Dtype, Work
from jaxformer.config import TRANSFORMER_BASE, TRANSFORMER_BIG, TransformerConfig

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
    embedding_norm=True,
    initializer="scaled_normal",
    dtype="bfloat16",
)
"""The model of modded-nanogpt's third track (`train_gpt_simple.py`), with these differences.

ReLU is not squared; queries and keys have no norm; rotary positions turn all pairs of a head, not
half of them; logits have no soft cap at 15; the optimizer is AdamW.
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


class Sizes(NamedTuple):
    """The sizes of all sections.

    `big_gpt` is tried with remat and each of `rows` until one fits in memory, and without remat and
    each of `kept_rows`. `seconds` is how long matrix products and searches are repeated; `block`
    is the larger block size of `blockwise`.
    """

    matrix: int
    gpt: Training
    big_gpt: Training
    rows: tuple[int, ...]
    kept_rows: tuple[int, ...]
    base: Training
    big: Training
    decode: Work
    decode_dtype: Dtype
    lengths: Lengths
    block: int
    seconds: float


FULL = Sizes(
    matrix=8_192,
    gpt=Training(TRACK_3, rows=512, length=1_024, grad_accumulation=8),
    big_gpt=Training(GPT_1_3B, rows=64, length=1_024, remat=True),
    rows=(64, 32, 16),
    kept_rows=(24, 16, 8),
    base=Training(replace(TRANSFORMER_BASE, dtype="bfloat16"), rows=1_024, length=32),
    big=Training(replace(TRANSFORMER_BIG, dtype="bfloat16"), rows=1_024, length=32),
    decode=Work(rows=128),
    decode_dtype="bfloat16",
    lengths=Lengths(
        tuple(2**power for power in range(10, 16)), tokens=2**15, heads=16, head_dim=128
    ),
    block=1_024,
    seconds=4.0,
)
"""The sizes for an H200."""


def _small(training: Training) -> Training:
    model = training.model
    small: dict[str, Any] = {"vocab_size": 41, "d_model": 16, "d_ff": 24, "num_heads": 2}
    layers: dict[str, Any] = {
        "num_encoder_layers": min(model.num_encoder_layers, 1),
        "num_decoder_layers": min(model.num_decoder_layers, 1),
    }
    model = replace(model, **small, **layers)
    rows = 2 * training.grad_accumulation
    return replace(training, model=model, rows=rows, length=16, seconds=0.0)


SMALL = Sizes(
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
"""The same programs in small sizes."""


def sections(sizes: Sizes) -> list[Section]:
    """Returns the sections, most important first; weights are about seconds on an H200."""
    lengths = sizes.lengths

    def gpts(remat: bool, counts: tuple[int, ...]) -> dict[str, partial]:
        wanted = [replace(sizes.big_gpt, remat=remat, rows=rows) for rows in counts]
        found = {f"{one.rows} rows": partial(train_steps.train_gpt, one) for one in wanted}
        least = replace(wanted[-1], attention_fn="reference")
        return found | {f"{least.rows} rows, reference": partial(train_steps.train_gpt, least)}

    def attend(name: str, weight: float) -> Section:
        return _once(f"attention_{name}", weight, partial(attention_lengths.ours, name, lengths))

    translator, both = train_steps.train_translator, (sizes.decode, sizes.seconds)
    ours = partial(decoding.ours, sizes.decode, sizes.decode_dtype, sizes.seconds)
    return [
        _once("matrix_rate", 30, partial(matrix_rate, sizes.matrix, sizes.seconds)),
        Section("train_124m", 90, _with_fallback(train_steps.train_gpt, sizes.gpt)),
        Section("train_1_3b_kept", 90, gpts(False, sizes.kept_rows)),
        Section("train_1_3b_remat", 90, gpts(True, sizes.rows)),
        Section("train_transformer_base", 50, _with_fallback(translator, sizes.base)),
        Section("train_transformer_big", 60, _with_fallback(translator, sizes.big)),
        _once("decode_base", 40, ours),
        _once("decode_base_ctranslate2", 30, partial(decoding.ctranslate2, *both)),
        attend("cudnn", 25),
        _once("attention_pytorch", 20, partial(attention_lengths.scaled_dot_product, lengths)),
        _once(
            "attention_blockwise_large",
            30,
            partial(attention_lengths.ours, "blockwise", lengths, sizes.block),
        ),
        attend("xla", 25),
        attend("reference", 25),
        attend("blockwise", 40),
    ]


def _with_fallback(measure: train_steps.Train, wanted: Training) -> dict[str, partial]:
    """Tries the chosen attention function, then `reference`."""
    names = wanted.attention_fn, "reference"
    return {name: partial(measure, replace(wanted, attention_fn=name)) for name in names}


def _once(name: str, weight: float, measurement: partial) -> Section:
    return Section(name, weight, {"once": measurement})
