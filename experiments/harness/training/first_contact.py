"""A device that this run meets for the first time: attention and products compared, recorded."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from jaxformer import __version__, storage
from jaxformer.ops.attention import ATTENTION_FNS, Selection
from jaxformer.ops.attention.spec import AttentionSpec
from jaxformer.ops.first_contact import Verdict, compare, compare_products, small_call

VERDICTS: list[Verdict] = []
"""The comparisons of this process, for env.json."""


_NEXT = "the next attention function is taken"
_NO_OTHER = (
    "nothing replaces a product: update the driver, unset XLA_FLAGS, or give --model.dtype float32"
)


def accept(selection: Selection) -> bool:
    """Whether the selected function agrees with `reference` on this process's devices.

    Of several processes all have to agree. What is only compiled for devices that are not here is
    accepted.
    """
    if selection.device.platform != jax.local_devices()[0].platform:
        return True
    call = selection.name, small_call(selection.spec), selection.device.kind
    with ThreadPoolExecutor(1) as pool:  # this thread is tracing a program
        return pool.submit(_agrees, *call).result()


def check_products(dtype: str) -> bool:
    """Whether products with weights in `dtype` agree with float64 on all processes' devices."""
    return _agrees("products", dtype, jax.local_devices()[0].device_kind)


@cache
def _agrees(name: str, call: AttentionSpec | str, kind: str) -> bool:
    known, key = _Known(), f"{kind}; jax {jax.__version__}; {__version__}; {name}; {call}"
    failure = known.read().get(key)
    if failure is not None:
        verdict = Verdict(name, call, failure, 0.0)
    elif isinstance(call, str):
        verdict = compare_products(call)
    else:
        verdict = compare(name, ATTENTION_FNS[name], call)
    VERDICTS.append(verdict)
    known.write(key, verdict.failure)
    failed = np.array([bool(verdict.failure)])
    if distributed.is_several():
        failed = multihost_utils.process_allgather(failed).ravel()
    if failed.any():
        first = f"{name} of process {np.argmax(failed)} differ from those of {verdict.truth}"
        advice = _NO_OTHER if isinstance(call, str) else _NEXT
        display.say(f"{verdict if verdict.failure else first}; {advice}")
    return not failed.any()


class _Known:
    """Failures by call, in the folder of compiled programs; nothing is kept where there is none."""

    def __init__(self) -> None:
        folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        self._path = Path(folder) / "first_contact.json" if folder else None

    def read(self) -> dict[str, str]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            return dict(json.loads(self._path.read_text(encoding="utf-8")))
        except ValueError:
            return {}  # a damaged file costs a comparison

    def write(self, key: str, failure: str) -> None:
        if self._path is None or not distributed.is_first() or key in self.read():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        storage.write(self._path, json.dumps(self.read() | {key: failure}, indent=1).encode())
