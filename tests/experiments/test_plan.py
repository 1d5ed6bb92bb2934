"""The plan of a training: FLOPs and bytes that can be counted by hand, and what is said of them.

Everything that needs devices runs in one child process with 8 virtual ones, started once.
"""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from experiments import plan, registry
from experiments.harness import cli, planning
from experiments.harness.planning import compiling, parse_target, targets
from experiments.harness.planning.compiling import PlannedProgram, bytes_per_device
from experiments.harness.planning.report import advice, describe, describe_step
from experiments.harness.planning.targets import Target
from experiments.harness.planning.work import work
from experiments.harness.training import Cost
from experiments.harness.training.chips import ACCELERATORS, DEVICE_KINDS, Peak, peak_of
from experiments.harness.training.devices import choose_devices
from experiments.harness.training.flops import causal_flops, masked_flops, seq2seq_cost
from experiments.language_modelling import plan as language_plan
from experiments.language_modelling.objectives import objective_of
from experiments.language_modelling.presets import PRESETS
from experiments.translation import plan as translation_plan
from jaxformer.config import (
    AttentionOptions,
    ExpertOptions,
    FeedForwardOptions,
    TransformerConfig,
)
from jaxformer.errors import ConfigError, MissingExtra
from jaxformer.ops.attention import DeviceInfo
from jaxformer.text.data import MaskedBatch, PairBatch, StreamBatch, plan_buckets
from tests.two_processes import finished, start

TOY = TransformerConfig(vocab_size=7, d_model=3, d_ff=5, num_heads=1, num_decoder_layers=1)
TINY = """
    --name tiny --model.vocab_size 280 --model.d_model 16 --model.d_ff 24 --model.num_heads 4
    --model.num_decoder_layers 1 --model.max_len 23 --training.grad_accumulation 2
"""
LANGUAGE = f"{TINY} --data.batch_size 32 --data.seq_len 19 --optimizer.name adam"
TRANSLATION = f"{TINY} --model.num_encoder_layers 1 --data.batch_tokens 400"


def program(name="step", arguments=13_000, temporary=40_000):
    """A program that needs this memory in bytes."""
    return PlannedProgram(name, arguments, 500, temporary)


def config_of(experiment, words=""):
    return cli.parse(registry.find(experiment).PRESETS, words.split())


def language_config(words=""):
    return config_of("language_modelling", words)


def translation_config(words=""):
    return config_of("translation", words)


def planned_step(config):
    """The plan of a run, and its step."""
    run = planning.plan_run(config, language_plan.planned)
    return run, next(run.programs)


def child():
    """Prints as JSON what this file's tests ask of 8 devices."""
    planning.start_devices(8)
    found = {"strategy": choose_devices("auto", "").num_shards}
    ways = {
        "one": "--strategy single",
        "replicated": "--strategy replicated",
        "fsdp": "--strategy sharded --mesh fsdp=8",
    }
    for name, words in ways.items():
        run, step = planned_step(language_config(f"{LANGUAGE} {words}"))
        found[name] = {
            "arguments": step.arguments,
            "temporary": step.temporary,
            "held": bytes_per_device((run.state.params, run.state.opt_state, run.state.ema)),
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.state.params)),
            "flops": work(step.program).flops,
        }
    print(json.dumps(found))
    plan.main(f"translation {TRANSLATION} --strategy replicated --target h100x8".split())
    for words in (
        "--strategy sharded --mesh data=2,tensor=3 --target h100x8",
        "--strategy sharded --mesh tensor=8",
    ):
        args = f"language_modelling {LANGUAGE} {words}".split()
        print("code", cli.run(lambda args=args: plan.main(args)))


@pytest.fixture(scope="module")
def output():
    """stdout and stderr of `child`, as lines."""
    code = "import runpy; runpy.run_path('tests/experiments/test_plan.py')['child']()"
    (done,) = finished(start("-c", code))
    return done.out.splitlines(), done.err.splitlines()


@pytest.fixture(scope="module")
def eight(output):
    return json.loads(output[0][0])


def test_shared_keys_values_of_another_size_and_gates_are_counted():
    config = replace(
        TOY,
        num_heads=4,
        attention=AttentionOptions(num_kv_heads=2),
        feed_forward=FeedForwardOptions(gated=True),
        head_dim=6,
        value_head_dim=5,
    )
    forward = 2 * (8 * 3 * (4 * 11 + 2 * 11) + 20 * 4 * 11 + 8 * 15 * 3 + 8 * 21)
    assert causal_flops(config, rows=2, length=4) == 3 * forward


def test_a_token_counts_the_experts_that_it_has_chosen_the_shared_one_and_the_router():
    experts = ExpertOptions(7, top_k=2, shared_d_ff=13)
    sparse = replace(TOY, feed_forward=FeedForwardOptions(gated=True, experts=experts))
    positions, layers, width, d_ff = 8, TOY.num_decoder_layers, TOY.d_model, TOY.d_ff
    dense = replace(TOY, feed_forward=FeedForwardOptions(gated=True))
    more = causal_flops(sparse, rows=2, length=4) - causal_flops(dense, rows=2, length=4)
    of_token = 2 * width * (3 * (d_ff * 2 + 13) + 7) - 2 * width * 3 * d_ff
    assert more == 3 * layers * positions * of_token


def test_a_masked_step_sees_all_keys_and_has_heads_at_the_masks():
    config = replace(TOY, num_decoder_layers=0, num_encoder_layers=2)
    blocks = 2 * (8 * 9 * 4 + 32 * 6 + 8 * 15 * 2)
    head = 2 * 3 * (9 + 21)
    assert masked_flops(config, 2, 4, 3) == 3 * 2 * (blocks + head)
    pooled = replace(config, pooler="tanh")
    more = masked_flops(pooled, 2, 4, 3) - masked_flops(config, 2, 4, 3)
    assert more == 3 * 2 * 2 * (9 + 6)


def test_a_token_of_gpt2_costs_six_flops_a_weight_and_half_the_square():
    config = PRESETS["gpt2_124m"].model
    weights = 12 * 12 * 768**2 + 768 * 50_257
    attention = 12 * 3 * 4 * 768 * 1_025 / 2
    assert causal_flops(config, 1, 1_024) == 1_024 * (6 * weights + attention)


def test_no_batch_of_pairs_as_long_as_each_other_is_larger_than_the_planned_one(rng):
    config = translation_config(f"{TRANSLATION} --data.batch_size_multiple 2 --model.max_len 50")
    lengths = rng.integers(1, 51, 300)
    plan = plan_buckets(
        lengths,
        lengths,
        batch_tokens=400,
        buckets=6,
        pad_to_multiple=4,
        batch_size_multiple=4,
        max_len=50,
    )
    source, target, rows = translation_plan.longest(config)
    assert (source, target, rows) == (50, 50, 8)
    assert max(b.source_length * b.target_length * b.batch_size for b in plan) <= 50 * 50 * 8


def test_a_program_says_whether_it_fits_and_the_step_what_it_costs():
    text = describe(program(), "l4", estimate=True)
    assert text == "step                53.50 kB of 21.60 GB that JAX may use on l4: fits"
    large = program(temporary=int(50e9))
    assert describe(large, "l4", estimate=True).endswith("l4: MAY NOT FIT")
    refused = describe(large._replace(shortage="Used 19G of 18G hbm."), "l4").splitlines()
    assert refused[0].endswith("l4: DOES NOT FIT") and refused[1].endswith("Used 19G of 18G hbm.")
    text = describe_step(program(), "l4", Cost(12, int(121e12)), 2, "bfloat16", estimate=True)
    assert "1.210e+14 FLOPs by the equations" in text
    assert "at least 0.5 s, the FLOPs at the peak" in text
    assert "10 tokens per second at an assumed MFU of 40%" in text  # 0.4 * 12 / 0.5


@pytest.mark.parametrize(
    ("program", "words", "shards", "options"),
    [
        (program(temporary=int(15e9)), "", 1, None),  # of 21.6 GB
        # 60 GB in 8 parts are the first below half of 21.6 GB
        (
            program(arguments=int(60e9)),
            "",
            1,
            ["--strategy sharded and an fsdp axis 8 times as long"],
        ),
        (
            program(temporary=int(50e9)),
            "--training.remat all_but_attention --training.loss_chunk 512",
            1,
            ["--training.grad_accumulation 2", "--training.remat blocks", "--model.dtype bfloat16"],
        ),
        (
            program("validation", 0, int(23e9)),
            "--training.grad_accumulation 6",
            4,
            ["--training.grad_accumulation 16", "--training.loss_chunk 1024"],
        ),
        (program("sampling of 3", 0, int(23e9)), "", 1, ["--sampling.max_new_tokens 50"]),
        (program("beam search of 64", 0, int(23e9)), "", 1, ["--translation.batch_size 32"]),
        (program("averaging", int(17e9)), "", 1, None),
    ],
)
def test_a_program_that_does_not_fit_is_named_with_options_of_train(
    program, words, shards, options
):
    make = translation_config if program.name.startswith("beam") else language_config
    sentences = advice(make(words), program, "l4", shards)
    if options is None:
        assert sentences == []
        return
    (sentence,) = sentences
    size = f"{program.memory / 1e9:.2f} GB"
    assert sentence.startswith(f"{program.name} needs {size}: try {' or '.join(options)}")
    for option in options:
        if option.startswith("--training"):
            make(option)  # is one of train's


def test_a_quick_estimate_is_a_share_of_what_this_compiler_needs_also_with_a_soft_cap(monkeypatch):
    words = "--data.batch_size 2 --model.attention.softcap 5.0 --training.grad_accumulation 1"
    config = language_config(f"{LANGUAGE} {words}")
    _, step = planned_step(config)
    (call,) = step.attention
    assert call.name == "reference" and call.spec.softcap == 5.0
    # the program has the flops of the equations, and those above the diagonal
    flops = work(step.program).flops
    assert 1.0 < flops / language_plan.cost_of(config).flops < 1.5
    monkeypatch.setattr(compiling, "TPU_SHARE", 1.0)
    _, whole = planned_step(config)
    assert step.temporary == int(0.42 * whole.temporary) > 0
    assert step.arguments == whole.arguments


def test_a_target_says_its_devices_or_has_as_many_as_the_mesh():
    assert parse_target("v5e:2x3") == Target("v5e", 6, "2x3")
    assert parse_target("3xv5e:2x4") == Target("v5e", 24, "2x4", slices=3)
    assert parse_target("h200x16") == Target("h200", 16, "")
    assert parse_target("h100").devices_of(12, "sharded") == 12
    assert parse_target("a100_pcie_40gbx3") == Target("a100_pcie_40gb", 3, "")
    # each of the two cores of a chip is a device
    assert parse_target("tpu7x") == Target("tpu7x", 0, "")
    assert parse_target("2xtpu7x:2x3x1") == Target("tpu7x", 24, "2x3x1", slices=2)
    assert parse_target("h100x5").devices_of(1, "replicated") == 5
    with pytest.raises(ConfigError, match="3 devices.*strategy='single'"):
        parse_target("h100x3").devices_of(1, "single")


@pytest.mark.parametrize(
    ("compiler", "target", "module", "package"),
    [
        ("tpu", "v5e", "libtpu", "pip install .*libtpu"),
        ("cuda", "h100", "jax_cuda", r"pip install 'jax\[cuda13\]'"),
    ],
)
def test_a_compiler_that_is_not_installed_is_named(monkeypatch, compiler, target, module, package):
    find = targets.find_spec
    monkeypatch.setattr(targets, "find_spec", lambda n: None if n.startswith(module) else find(n))
    with pytest.raises(MissingExtra, match=package):
        words = f"language_modelling {LANGUAGE} --compiler {compiler} --target {target}"
        plan.main(words.split())


def test_jax_that_has_started_cannot_have_more_devices():
    jax.devices()
    with pytest.raises(ConfigError, match="7919 devices"):
        planning.start_devices(7_919)


@pytest.mark.long
def test_what_is_divided_takes_less_memory_and_work_on_each_device(eight):
    one, copies, parts = (eight[name] for name in ("one", "replicated", "fsdp"))
    assert one["held"] == copies["held"] > 12 * one["parameters"]  # and two moments, in float32
    # biases, norms and the counters stay whole
    assert one["held"] / 8 < parts["held"] < one["held"] / 5
    assert parts["arguments"] < one["arguments"] / 5
    assert parts["parameters"] == one["parameters"]
    for rows in (copies, parts):
        assert rows["temporary"] < one["temporary"] / 2
        assert one["flops"] / 9 < rows["flops"] < one["flops"] / 3
    assert eight["strategy"] == 8, "without a strategy all devices are used"


@pytest.mark.long
def test_the_command_prints_the_plan_and_refuses_what_does_not_divide(output):
    text = "\n".join(output[0])
    assert "tiny: a step of 368 tokens on 8 x h100, replicated" in text
    assert "that JAX may use on h100: fits" in text
    assert "0.42 of what XLA's CPU compiler needs" in text
    assert [line for line in output[0] if line.startswith("code")] == 2 * ["code 2"]
    places, heads = (line for line in output[1] if line.startswith("error: "))
    assert "data=2 x fsdp=1 x sequence=1 x tensor=3 needs 6 devices, but there are 8" in places
    assert "tensor=8 does not divide" in heads


@pytest.mark.slow
def test_256_devices_are_planned_on_one_processor():
    words = f"{LANGUAGE} --data.batch_size 256 --strategy sharded --mesh data=8,fsdp=16,tensor=2"
    (done,) = finished(start("-m", "experiments.plan", "language_modelling", *words.split()))
    assert "on 256 x h100, data=8,fsdp=16,tensor=2" in done.out


def machine_of(*kinds):
    """Devices of a run that call themselves so."""
    named = np.array([SimpleNamespace(device_kind=kind) for kind in kinds])
    return SimpleNamespace(mesh=SimpleNamespace(devices=named))


def test_a_peak_is_that_of_all_devices_by_their_own_name_and_none_for_an_unknown_kind():
    peak = peak_of(machine_of("NVIDIA H200", "NVIDIA H200"), "bfloat16")
    assert peak == Peak("NVIDIA H200", 2, "bfloat16", 989.5e12)
    assert peak.total == 1_979e12
    assert "/ seconds / (2 x 989.5 TFLOP/s, NVIDIA H200, bfloat16)" in str(peak)
    assert peak_of(machine_of("NVIDIA A100-SXM4-40GB"), "float32").total == 156e12
    for kinds in (("cpu",), ("NVIDIA GeForce RTX 3090",), ("NVIDIA L4", "NVIDIA H200")):
        peak = peak_of(machine_of(*kinds), "bfloat16")
        assert peak.each is peak.total is None
        assert str(peak).startswith("no mfu: the peak FLOP/s of ") and kinds[0] in str(peak)


def places(*shape):
    return np.zeros(shape, np.int32)


def test_a_placed_batch_costs_what_its_rows_do_however_they_are_divided():
    causal = objective_of(language_config()).flops
    masked = objective_of(language_config("--preset bert_tiny")).flops
    # as on one device, and as on two that each hold their rows
    for rows in ((4,), (2, 2)):
        text = StreamBatch(places(*rows, 6), places(*rows, 5), places(*rows), None, None)
        # [20, 3] x [3, 3] four times; 4 x (1+2+3+4+5) pairs; 3 -> 5 -> 3; 3 -> 7
        assert causal(TOY, text) == 3 * 2 * (20 * 36 + 60 * 6 + 20 * 30 + 20 * 21)
        hidden = MaskedBatch(*[places(*rows, 5)] * 3, *[places(*rows, 2)] * 3, *[places(*rows)] * 2)
        reader = replace(TOY, num_decoder_layers=0, num_encoder_layers=1)
        # 4 x 5 x 5 pairs; 4 x 2 places to fill
        assert masked(reader, hidden) == 3 * 2 * (20 * 36 + 100 * 6 + 20 * 30 + 8 * (9 + 21))
        pairs = PairBatch(places(*rows, 5), places(*rows, 5), places(*rows))
        translator = replace(TOY, num_encoder_layers=1)
        encoder = 20 * 36 + 100 * 6 + 20 * 30
        decoder = 16 * 36 + 40 * 6 + 9 * (2 * 16 + 2 * 20) + 80 * 6 + 16 * 30
        assert seq2seq_cost(translator, pairs).flops == 3 * 2 * (encoder + decoder + 16 * 21)


@pytest.mark.parametrize("name", targets.GPUS)
def test_a_gpu_that_is_compiled_for_is_the_one_of_the_data_sheet(name):
    known, text = ACCELERATORS[name], targets.GPUS[name].read_text(encoding="utf-8")
    facts = dict(re.findall(r"^ +(\w+): (.+)$", text, re.MULTILINE))
    assert DEVICE_KINDS[facts["name"].strip('"')] == name
    assert float(facts["memory_bandwidth"]) == pytest.approx(known.bandwidth, rel=0.01)
    assert float(facts["device_memory_size"]) == pytest.approx(known.memory, rel=0.08)
    # products of the matrix units: multiply-adds of a core, in a cycle, for each of its CUDA cores
    rate = int(facts["core_count"]) * int(facts["fpus_per_core"]) * float(facts["clock_rate_ghz"])
    assert 3.9 <= known.bfloat16 / (2 * rate * 1e9) <= 32
    assert known.float32 == pytest.approx(known.bfloat16 / 2, rel=0.01)
    assert known.share == cli.GPU_MEMORY_SHARE
    of_cuda = text.split("cuda_compute_capability {")[1].split("}")[0]
    numbers = dict(re.findall(r"(\w+): (\d+)", of_cuda))
    device = jax.sharding.AbstractDevice(facts["name"].strip('"'), 1, "gpu")
    mesh = AbstractMesh((1,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        capability = int(numbers["major"]), int(numbers.get("minor", 0))
        assert DeviceInfo.current().capability == capability


def test_all_machines_but_tpus_and_a_cpu_can_be_compiled_for():
    assert {*ACCELERATORS} == {*targets.GPUS, *targets.TPUS, "cpu"}
    assert {*DEVICE_KINDS.values()} == {*targets.GPUS, *targets.TPUS}
