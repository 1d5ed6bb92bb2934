"""Beam search by a base-size model: ours in bfloat16, CTranslate2 in float16."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.benchmarks import translators
from experiments.benchmarks.gpu.clock import pace
from experiments.benchmarks.translators import Decode, Work
from jaxformer import extras


def ours(work: Work, dtype: str, seconds: float) -> Iterator[tuple[str, Any]]:
    """`beam_search` of the model with weights and numbers of `dtype`."""
    import jax

    yield "device", jax.devices()[0].device_kind
    yield "dtype", dtype
    with TemporaryDirectory() as place:
        folder = Path(place) / "marian"
        translators.write_model(work, folder)
        decode = translators.our_decode(work, folder, dtype)
    yield from _speed(decode, work, seconds)


def ctranslate2(work: Work, seconds: float) -> Iterator[tuple[str, Any]]:
    """CTranslate2 with the same weights; in float32 where it sees no GPU."""
    library = extras.load("ctranslate2")
    device, dtype = ("cuda", "float16") if library.get_cuda_device_count() else ("cpu", "float32")
    yield "device", device
    yield "dtype", dtype
    yield "ctranslate2", library.__version__
    with TemporaryDirectory() as place:
        folder = Path(place) / "marian"
        translators.write_model(work, folder)
        subject = translators.ctranslate2(work, folder, device, dtype)
    yield from _speed(subject.run, work, seconds)


def _speed(decode: Decode, work: Work, seconds: float) -> Iterator[tuple[str, Any]]:
    found = pace(decode, lambda _: None, seconds=seconds)
    yield from found.facts().items()
    yield "begins", decode()[:3, :4].tolist()
    yield "tokens_per_second", work.rows * work.target / found.median
