"""Attention on a device that this run meets for the first time: compared, said, recorded."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import jax

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from jaxformer import __version__
from jaxformer.ops.attention import ATTENTION_FNS, Selection
from jaxformer.ops.attention.first_contact import Verdict, compare, small_call
from jaxformer.ops.attention.spec import AttentionSpec

VERDICTS: list[Verdict] = []
"""The comparisons of this process, for env.json."""


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


@cache
def _agrees(name: str, call: AttentionSpec, kind: str) -> bool:
    known, key = _Known(), f"{kind}; jax {jax.__version__}; {__version__}; {name}; {call}"
    failure = known.read().get(key)
    if failure is None:
        verdict = compare(name, ATTENTION_FNS[name], call)
        VERDICTS.append(verdict)
        failure = verdict.failure
        if failure:
            display.say(f"{verdict}; the next attention function is taken")
        known.write(key, failure)
    return distributed.everywhere(not failure)


class _Known:
    """Failures by call, in the folder of compiled programs; nothing is kept where there is none."""

    def __init__(self) -> None:
        folder = jax.config.read("jax_compilation_cache_dir")
        self._path = Path(folder) / "first_contact.json" if folder else None

    def read(self) -> dict[str, str]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            return dict(json.loads(self._path.read_text(encoding="utf-8")))
        except ValueError:
            return {}  # a damaged file costs a comparison

    def write(self, key: str, failure: str) -> None:
        if self._path is None or not distributed.is_first():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(self.read() | {key: failure}, indent=1), encoding="utf-8")
        unfinished.replace(self._path)
