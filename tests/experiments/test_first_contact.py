"""First contact with a device: of two kernels that can compute a call the faster one is taken."""

import textwrap
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.runs.environment import environment_of
from experiments.harness.training import first_contact, kernel_timing
from experiments.harness.training.first_contact import (
    AutoAttention,
    FirstContact,
    is_timed,
    kind_of,
    remembered_kernels,
)
from experiments.harness.training.kernel_timing import Timing, seconds_of, timed_call
from experiments.language_modelling import train
from jaxformer import AttentionMask
from jaxformer.ops.attention import AttentionSpec, DeviceInfo, Kernel, reference
from tests.experiments.tiny_runs import language_config
from tests.two_processes import finished, free_port, start

CALL = AttentionSpec(
    batch=3, queries=37, keys=37, heads=4, kv_heads=2, key_size=8, value_size=8, dtype="float32",
    causal=True,
)  # fmt: skip
GPU = DeviceInfo("gpu", "NVIDIA H200", (9, 0))


def repeated(q, k, v, mask, **options):
    """The reference many times over, which takes as many times as long."""

    def again(total, number):
        return total + reference(q * (1 + 1e-6 * number), k, v, mask, **options), None

    out, _ = jax.lax.scan(again, 0 * q, jnp.arange(40.0))
    return out / 40


def kernels(*functions):
    return tuple(Kernel(f.__name__, f, lambda spec, device: []) for f in functions)


@pytest.fixture
def timed_here(monkeypatch):
    """timed_here(kernel, ...): these are all kernels, and they are timed on this CPU."""

    def put_in(*functions):
        for module in (first_contact, kernel_timing):
            monkeypatch.setattr(module, "KERNELS", kernels(*functions))
        monkeypatch.setattr(first_contact, "is_timed", lambda spec, device: True)
        kernel_timing._agreed_timing.cache_clear()

    yield put_in
    kernel_timing._agreed_timing.cache_clear()


def attend(attention, batch=3):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((batch, 37, n, 8)), jnp.float32) for n in (4, 2, 2))
    mask = AttentionMask(causal=True)
    return attention(q, k, v, mask, scale=0.3), reference(q, k, v, mask, scale=0.3)


def test_a_slow_kernel_that_comes_first_is_not_chosen(timed_here, capsys):
    timed_here(repeated, reference)
    contact = FirstContact()
    out, expected = attend(AutoAttention(contact))
    assert jnp.allclose(out, expected)
    (kind,) = contact.kernels
    assert contact.kernels == {kind: "reference"}
    assert kind.startswith("T=37 S=37 N=4 K=2 H=8 Hv=8 float32 causal on cpu")
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    words = " ".join(said.split())
    assert "reference, by time (repeated " in words and " ms, reference " in words


def test_the_slow_kernel_is_not_chosen_while_a_program_is_traced_and_is_timed_once(
    timed_here, monkeypatch
):
    timed_here(repeated, reference)
    timings = []
    real = kernel_timing.seconds_of
    monkeypatch.setattr(
        kernel_timing, "seconds_of", lambda *given: timings.append(given) or real(*given)
    )
    contact = FirstContact()
    for batch in (3, 3, 5):  # another number of examples is the same kind of call
        jax.jit(partial(attend, AutoAttention(contact)), static_argnums=0)(batch)
    assert [*contact.kernels.values()] == ["reference"]
    assert len(timings) == 1


@pytest.mark.parametrize(
    ("seconds", "choice"),
    [
        ((1.0, 0.96), "first"),
        ((1.0, 0.94), "second"),
        ((1.0, 2.0), "first"),
        ((1.0, np.inf), "first"),
        ((np.inf, 1.0), "second"),
        ((np.inf, np.inf), "first"),
    ],
)
def test_the_order_of_the_table_holds_within_a_margin_of_a_twentieth(seconds, choice):
    assert Timing(CALL, ("first", "second"), seconds).choice == choice


def raising(q, k, v, mask, **options):
    raise NotImplementedError("no room")


def test_a_kernel_that_raises_takes_for_ever():
    slow, broken, fast = seconds_of([repeated, raising, reference], CALL)
    assert broken == np.inf and 0 < fast < slow < 60


def test_a_choice_that_is_remembered_is_taken_without_timing(timed_here, monkeypatch, capsys):
    timed_here(repeated, reference)
    monkeypatch.setattr(kernel_timing, "seconds_of", raising)
    contact = FirstContact(kernels={kind_of(CALL, DeviceInfo.current()): "repeated"})
    attention = AutoAttention(contact)
    attend(attention)
    assert [name for name, _ in attention.calls] == ["repeated"]
    assert "repeated, as before" in " ".join(capsys.readouterr().out.split())


def test_nothing_is_timed_on_a_cpu_nor_in_decoding_nor_for_devices_that_are_not_here(monkeypatch):
    assert not is_timed(CALL, DeviceInfo.current())
    assert not is_timed(CALL, GPU), "it is compiled for only"
    here = [type("Device", (), {"platform": "gpu"})]
    monkeypatch.setattr(first_contact.jax, "local_devices", lambda: here)
    assert is_timed(CALL, GPU)
    for decoding in ({"from_cache": True}, {"offset": None}):
        assert not is_timed(AttentionSpec(**{**vars(CALL), **decoding}), GPU)


def test_a_call_is_timed_with_its_lengths_and_with_fewer_rows_and_heads_where_it_is_long():
    assert timed_call(CALL) == CALL
    long = AttentionSpec(
        **{**vars(CALL), "batch": 64, "queries": 8192, "keys": 8192, "heads": 32, "kv_heads": 8}
    )
    call = timed_call(long)
    assert (call.queries, call.keys) == (8192, 8192)
    assert (call.batch, call.heads, call.kv_heads) == (1, 32, 8)
    longer = AttentionSpec(**{**vars(long), "queries": 131_072, "keys": 131_072})
    assert (timed_call(longer).heads, timed_call(longer).kv_heads) == (4, 1)


def test_the_first_choice_of_a_run_stays():
    starts = [
        {"time": "1"},
        {"attention_kernels": {"a": "cudnn"}},
        {"attention_kernels": {"a": "gpu_flash", "b": "blockwise"}},
    ]
    known = remembered_kernels({"earlier": starts, "attention_kernels": {"c": "cudnn"}})
    assert known == {"a": "cudnn", "b": "blockwise", "c": "cudnn"}
    assert remembered_kernels({}) == {}


@pytest.mark.long
def test_a_resumed_run_keeps_its_kernel_and_env_json_says_it(timed_here, monkeypatch, tmp_path):
    def config(steps):
        changes = {"training__attention_fn": "auto", "optimizer__schedule": "constant"}
        return language_config(tmp_path, **changes, optimizer__total_steps=steps)

    timed_here(repeated, reference)
    monkeypatch.setattr(kernel_timing, "seconds_of", lambda functions, call: [1.0, 2.0])
    folder = train.train(config(2)).folder
    first = environment_of(folder).read(earlier=list)["attention_kernels"]
    assert {*first.values()} == {"repeated"}
    kernel_timing._agreed_timing.cache_clear()
    monkeypatch.setattr(kernel_timing, "seconds_of", lambda functions, call: [2.0, 1.0])
    train.train(config(4))
    environment = environment_of(folder).read(earlier=list)
    assert len(environment["earlier"]) == 1
    assert first.items() <= environment["attention_kernels"].items()
    assert {*environment["attention_kernels"].values()} == {"repeated"}
    # another run of this process chooses by its own time
    other = train.train(replace(config(2), name="other")).folder
    kernels = environment_of(other).read(earlier=list)["attention_kernels"]
    assert {*kernels.values()} == {"reference"}


PROCESS = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from experiments.harness.training import first_contact, kernel_timing
from tests.experiments import test_first_contact as tests
for module in (first_contact, kernel_timing):
    module.KERNELS = tests.kernels(tests.repeated, tests.reference)
first_contact.is_timed = lambda spec, device: True
mine = [[2.0, 1.0], [1.0, 2.0]][jax.process_index()]
kernel_timing.seconds_of = lambda functions, call: mine
contact = first_contact.FirstContact()
first_contact.AutoAttention(contact).choose(tests.CALL)
print(*contact.kernels.values())
"""


@pytest.mark.long
def test_two_processes_take_the_choice_of_the_first(tmp_path):
    script = tmp_path / "process.py"
    script.write_text(textwrap.dedent(PROCESS))
    address = f"localhost:{free_port()}"
    first, second = finished(*(start(script, address, number) for number in (0, 1)))
    assert first.out.splitlines()[-1] == second.out.splitlines()[-1] == "reference"
    assert "by time" in " ".join(first.out.split()) and "by time" not in second.out
