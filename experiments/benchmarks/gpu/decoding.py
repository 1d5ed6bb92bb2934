"""Beam search by a base-size model: ours in bfloat16, CTranslate2 in float16."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.benchmarks import translation_subjects
from experiments.benchmarks.gpu.timing import measure
from experiments.benchmarks.translation_subjects import Dtype, Work
from jaxformer import optional_dependencies


def ours(work: Work, dtype: Dtype, seconds: float) -> Iterator[tuple[str, Any]]:
    """Our `beam_search` in `dtype`."""
    import jax

    yield "device", jax.devices()[0].device_kind
    yield "dtype", dtype
    with TemporaryDirectory() as place:
        folder = Path(place) / "marian"
        translation_subjects.write_model(work, folder)
        decode = translation_subjects.our_decode(work, folder, dtype)
    yield from _speed(decode, work, seconds)


def ctranslate2(work: Work, seconds: float) -> Iterator[tuple[str, Any]]:
    """CTranslate2 with the same weights, in float16 on a GPU and in float32 elsewhere."""
    library = optional_dependencies.load("ctranslate2")
    device, dtype = ("cuda", "float16") if library.get_cuda_device_count() else ("cpu", "float32")
    yield "device", device
    yield "dtype", dtype
    yield "ctranslate2", library.__version__
    with TemporaryDirectory() as place:
        folder = Path(place) / "marian"
        translation_subjects.write_model(work, folder)
        subject = translation_subjects.ctranslate2(work, folder, device, dtype)
    yield from _speed(subject.run, work, seconds)


def _speed(decode: Callable[[], Any], work: Work, seconds: float) -> Iterator[tuple[str, Any]]:
    found = measure(decode, lambda _: None, seconds=seconds)
    yield from found.facts().items()
    yield "begins", decode()[:3, :4].tolist()
    yield "tokens_per_second", work.rows * work.target / found.median
