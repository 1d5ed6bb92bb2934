"""First contact with devices: what is selected for them is compared and timed before it is used."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import jax

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.training.device_check import CheckResult, accept
from experiments.harness.training.kernel_timing import time_kernels
from jaxformer.ops.attention import KERNELS, AttentionSpec, DeviceInfo, Kernel, explain


@dataclass
class FirstContact:
    """A run's assumptions about its devices; env.json keeps them."""

    checks: list[CheckResult] = field(default_factory=list)
    """The comparisons with the reference."""
    kernels: dict[str, str] = field(default_factory=dict)
    """The kernel of attention of each kind of call, see `kind_of`, that was chosen by time."""

    def facts(self) -> dict[str, Any]:
        """Its fields in env.json, without empty ones."""
        checks = "; ".join(map(str, self.checks))
        facts = {"device_check": checks, "attention_kernels": dict(self.kernels)}
        return {name: fact for name, fact in facts.items() if fact}


def remembered_kernels(environment: Mapping[str, Any]) -> dict[str, str]:
    """The kernels of attention that the starts of a run have chosen, by an env.json.

    The first choice stays, so that a run never changes its kernel.
    """
    kernels: dict[str, str] = {}
    for start in (*environment.get("earlier", ()), environment):
        kernels = start.get("attention_kernels", {}) | kernels
    return kernels


def kind_of(spec: AttentionSpec, device: DeviceInfo) -> str:
    """A kind of calls on a kind of device: all of a call but the number of its examples."""
    return f"{str(spec).partition(' ')[2]} on {device}"


@dataclass(frozen=True)
class AutoAttention:
    """Attention by a kernel that agrees with `reference` here, of the two first the faster one.

    On a CPU, and in decoding, it is the first one. Prints its choices, once each.
    """

    contact: FirstContact = field(default_factory=FirstContact, compare=False, repr=False)
    """The comparisons and choices of the run, to which it adds its own."""
    calls: list[tuple[str, AttentionSpec]] = field(default_factory=list, compare=False)
    """The kernel of each different call so far."""

    def __call__(self, q, k, v, mask, *, scale, bias=None, dropout=None, softcap=None):
        options = {"bias": bias, "dropout": dropout, "softcap": softcap}
        spec = AttentionSpec.create(q, k, v, mask, **options)
        kernel = self.choose(spec)
        if (kernel.name, spec) not in self.calls:
            self.calls.append((kernel.name, spec))
        return kernel.compute(q, k, v, mask, scale=scale, **options)

    def choose(self, spec: AttentionSpec) -> Kernel:
        """The kernel of a call on the current devices."""
        device = DeviceInfo.current()
        able = (kernel for kernel in KERNELS if self._can_compute(kernel, spec, device))
        if not is_timed(spec, device):
            kernel = next(able)
            self._say(kernel.name, lambda: explain(spec, device, self._accepts(spec)))
            return kernel
        kind = kind_of(spec, device)
        name = self.contact.kernels.get(kind)
        known = next((kernel for kernel in KERNELS if kernel.name == name), None)
        if known is not None and self._can_compute(known, spec, device):
            self._say(known.name, lambda: f"attention {spec} on {device}: {name}, as before")
            return known
        first, *others = islice(able, 2)
        if not others:
            self._say(first.name, lambda: explain(spec, device, self._accepts(spec)))
            return first
        timing = time_kernels((first.name, others[0].name), spec)
        self.contact.kernels[kind] = timing.choice
        sentence = f"attention {spec} on {device}: {timing.choice}, by time ({timing})"
        self._say(timing.choice, lambda: sentence)
        return first if timing.choice == first.name else others[0]

    def _accepts(self, spec: AttentionSpec) -> Any:
        return partial(accept, spec, checks=self.contact.checks)

    def _can_compute(self, kernel: Kernel, spec: AttentionSpec, device: DeviceInfo) -> bool:
        if kernel.why_not(spec, device):
            return False
        return kernel.device is None or accept(spec, kernel, self.contact.checks)

    def _say(self, name: str, sentence: Any) -> None:
        if name not in dict(self.calls) and distributed.is_first():
            print(display.wrapped(sentence()), flush=True)


def is_timed(spec: AttentionSpec, device: DeviceInfo) -> bool:
    """Whether kernels are timed for a call: not on a CPU, not in decoding, only on what is here."""
    is_decoding = spec.from_cache or spec.has_traced_offset
    is_here = device.platform == jax.local_devices()[0].platform
    return device.platform != "cpu" and is_here and not is_decoding
