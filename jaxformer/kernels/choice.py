"""Which kernel a call gets, and why the others were not taken."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxformer.dropout import Dropout
from jaxformer.kernels.blockwise import blockwise
from jaxformer.kernels.call import Call, Machine
from jaxformer.kernels.cudnn import cudnn, cudnn_refusals
from jaxformer.kernels.pallas import pallas, pallas_refusals
from jaxformer.kernels.reference import reference
from jaxformer.kernels.xla import xla, xla_refusals
from jaxformer.masks import Mask

Kernel = Callable[..., jax.Array]

KERNELS: dict[str, Kernel] = {
    "reference": reference,
    "xla": xla,
    "blockwise": blockwise,
    "cudnn": cudnn,
    "pallas": pallas,
}

_REFUSALS = {"xla": xla_refusals, "cudnn": cudnn_refusals, "pallas": pallas_refusals}

# Measured: see `choose`.
_LONG_ON_CPU = 512 * 512
_MANY_WEIGHTS = 2**28


@dataclass(frozen=True)
class Choice:
    """The `kernel` that a `call` gets on a `machine`, the `reason`, and why none of the `others`.

    As text it is the explanation: a line for the kernel taken and one for each other.
    """

    call: Call
    machine: Machine
    kernel: str
    reason: str
    others: dict[str, str]

    def __str__(self) -> str:
        lines = [
            f"attention {self.call} on {self.machine}",
            f"  taken: {self.kernel}, {self.reason}",
        ]
        lines += [f"  not {name}: it {why}" for name, why in self.others.items()]
        return "\n".join(lines)


def choose(call: Call, machine: Machine | None = None) -> Choice:
    """The best kernel of those that can compute `call` on `machine` (None: this one).

    cuDNN on an NVIDIA GPU and splash attention on a TPU go before the others, which can do
    everything: `blockwise` for many weights, `reference` for few. On a CPU that is a matter of
    time. Forward and backward pass of 2 rows, 4 heads of 64, float32, in ms of processor time on
    two cores (the least of several):

        T = S                     64     256    1024    2048

    On a GPU and a TPU, where nothing has been measured yet, it is one of memory: from 2^28 weights
    (1 GiB in float32) on. `xla` is never chosen: it computes what `reference` does, not faster.
    """
    machine = Machine.here() if machine is None else machine
    refusals = {name: refuse(call, machine) for name, refuse in _REFUSALS.items()}
    others = {name: "; it ".join(found) for name, found in refusals.items() if found}
    others.setdefault("xla", "computes what reference does, and not faster")
    for name in ("cudnn", "pallas"):
        if name not in others:
            reason = f"written for {machine.platform}s and able to do all that the call asks"
            slower = f"can, but {name} is written for this device"
            plain = dict.fromkeys(("reference", "blockwise"), slower)
            return Choice(call, machine, name, reason, plain | others)
    name, other, reason = _plain(call, machine)
    why = f"can, but {name} goes before it: {reason}"
    return Choice(call, machine, name, reason, {other: why} | others)


def _plain(call: Call, machine: Machine) -> tuple[str, str, str]:
    """Of the two kernels that can do everything: the one to take, the other, and the reason."""
    if machine.platform == "cpu":
        size, bound = call.queries * call.keys, _LONG_ON_CPU
        counted = "T times S"
    else:
        size, bound = call.weights, _MANY_WEIGHTS
        counted = "B times N times T times S"
    if size < bound:
        return "reference", "blockwise", f"{counted} is {size:,}, below {bound:,}"
    return "blockwise", "reference", f"{counted} is {size:,}, at least {bound:,}"


def explain(call: Call, machine: Machine | None = None) -> str:
    """What `choose` takes for `call` on `machine` (None: this one), and why it takes no other."""
    return str(choose(call, machine))


class Auto:
    """A kernel that takes for each call the one which `choose` names, while it is traced.

    `taken` is what it took so far, by call. `tell` is given the choice whenever a kernel is taken
    that was not taken before.

        kernel = Auto(tell=print)
        model = DecoderOnly(config, kernel)
    """

    def __init__(self, tell: Callable[[Choice], object] | None = None):
        self.taken: dict[Call, Choice] = {}
        self._tell = tell

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Mask,
        *,
        scale: float,
        bias: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        """Attention [B, T, N, Hv] by the kernel chosen."""
        choice = self._choose(Call.of(q, k, v, mask, bias, dropout))
        return KERNELS[choice.kernel](q, k, v, mask, scale=scale, bias=bias, dropout=dropout)

    def _choose(self, call: Call) -> Choice:
        if call in self.taken:
            return self.taken[call]
        choice = choose(call)
        known = {earlier.kernel for earlier in self.taken.values()}
        self.taken[call] = choice
        if self._tell is not None and choice.kernel not in known:
            self._tell(choice)
        return choice
