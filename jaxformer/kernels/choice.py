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

_MANY_WEIGHTS = 2**28  # 1 GiB in float32, which each layer keeps for its backward pass
_MANY_ON_CPU = 2**26


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

    cuDNN on an NVIDIA GPU and splash attention on a TPU go before the two that can do everything,
    `reference` and `blockwise`. Between these memory decides: from 2^28 weights B N T S on it is
    `blockwise`, on a CPU from 2^26 on, where it is about as fast. Forward and backward pass of 2
    rows, 4 heads of 64, float32, in ms (two cores shared with other work, least of at least 5;
    JAX 0.10.2 with the options of `runtime.tune`):

        causal, T = S =     64    256    512   1024   2048   4096   2048 without a direction
        reference         1.18   13.7   28.1    119    333   1162                        288
        blockwise         1.35   14.0   42.9    135    403   1019                        493
        xla               1.05   16.3   52.9    199    893      -                        778

    On a GPU and a TPU nothing has been measured yet. `xla` is never taken.
    """
    machine = Machine.here() if machine is None else machine
    refusals = {name: refuse(call, machine) for name, refuse in _REFUSALS.items()}
    why_not = {name: "; it ".join(found) for name, found in refusals.items() if found}
    able = [name for name in ("cudnn", "pallas") if name not in why_not]
    if able:
        taken = able[0]
        reason = f"written for {machine.platform}s and able to do all that the call asks"
        slower = f"can, but {taken} is written for this device"
        why_not |= dict.fromkeys(("reference", "blockwise"), slower)
    else:
        taken, other, reason = _plain(call, machine)
        why_not[other] = f"can, but {taken} goes before it: {reason}"
    why_not.setdefault("xla", "computes what reference does, with its memory and no faster")
    others = {name: why_not[name] for name in KERNELS if name != taken}
    return Choice(call, machine, taken, reason, others)


def _plain(call: Call, machine: Machine) -> tuple[str, str, str]:
    """Of the two kernels that can do everything: the one to take, the other, and the reason."""
    bound = _MANY_ON_CPU if machine.platform == "cpu" else _MANY_WEIGHTS
    counted = f"B times N times T times S is {call.weights:,}"
    if call.weights < bound:
        return "reference", "blockwise", f"{counted}, below {bound:,}"
    return "blockwise", "reference", f"{counted}, at least {bound:,}"


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
