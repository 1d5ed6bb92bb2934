"""The command `plan` with a TPU's own compiler."""

import re
from pathlib import Path

import pytest

from experiments import plan, registry
from experiments.harness import cli, planning
from experiments.harness.planning.flash_kernels import seen_pairs
from experiments.harness.planning.targets import TPUS
from experiments.harness.planning.work import work
from tests.evidence import records

pytestmark = pytest.mark.compiler

TINY = """
    language_modelling --name tiny --compiler tpu --target {target}
    --model.vocab_size 512 --model.d_model 128
    --model.d_ff 256 --model.num_heads 2 --model.num_decoder_layers 2 --model.max_len 256
    --model.dtype bfloat16 --training.grad_accumulation 3 --training.attention_fn auto
    --data.batch_size {rows} --data.seq_len 256
"""


def report(capsys, target, rows, words=""):
    arguments = f"{TINY.format(target=target, rows=rows)} {words}".split()
    code = cli.run(lambda: plan.main(arguments))
    said = capsys.readouterr()
    assert code == 0, said.err
    lines = [line for line in said.out.splitlines()[1:] if not line.startswith("change: ")]
    assert max(map(len, lines)) <= 80
    return said.out


def test_a_chip_is_planned_with_flash_attention(tpu_devices, capsys):
    text = report(capsys, "v5e", 6)
    assert "compiled is not run" in text
    assert "that JAX may use on v5e: fits" in text
    assert "  attention         tpu_flash, for" in text
    assert re.search(r"flash attention   [\d.e-]+ s, the schedules of its kernels", text)
    assert "attention kernels" not in text
    assert "not cpu" not in text, "attention is chosen for the chip, also in the search"
    assert "  collectives       none" in text
    (mfu,) = re.findall(r"MFU (\d+\.\d)%", text)
    assert 0.0 < float(mfu) < 100.0


def test_the_collectives_of_a_mesh_are_in_the_report(tpu_devices, capsys):
    text = report(capsys, "v5e:2x2", 12, "--strategy sharded --mesh data=2,fsdp=2")
    assert "on 4 x v5e, data=2,fsdp=2" in text
    assert re.search(r"all-gather bf16", text)
    assert re.search(r"(all-reduce|reduce-scatter) \S+: \S+ times", text)


def test_of_two_slices_only_the_gradient_of_a_chip_goes_from_one_to_the_other(tpu_devices, capsys):
    words = "--strategy sharded --mesh data=2,fsdp=4 --training.grad_accumulation 1"
    text = report(capsys, "2xv5e:2x2", 16, words)
    (parameters,) = re.findall(r"parameters +([\d,]+);", text)
    of_step = text.partition("work per step")[0]
    (sent,) = re.findall(r"([\d.]+) kB between slices per device", of_step)
    quarter = int(parameters.replace(",", "")) * 4 / 4  # bytes of float32
    assert quarter < float(sent) * 1e3 < 1.5 * quarter  # vectors are not divided


def test_the_other_programs_of_a_run_compile_for_four_chips(tpu_devices, capsys):
    text = report(capsys, "v5e:2x2", 12, "--strategy replicated --sampling.max_new_tokens 7")
    step, others = text.split("validation  ")
    assert re.search(r"attention +tpu_flash, for", others) and "FIT" not in text
    assert re.search(r"all-reduce \S+: ", others), "of the sums"
    assert re.search(r"sampling of \d .*\n(?:  .*\n)+?  attention +tpu_decode, for", others)
    assert re.search(r"averaging +\S+ [kM]B of", others)


@pytest.mark.slow  # minutes of libtpu
def test_the_step_of_gpt2_has_the_cycles_of_its_record_within_half_a_percent(tpu_devices):
    """A regression of the program is seen here; no TPU has run it."""
    config = registry.find("language_modelling").PRESETS["gpt2_124m"]
    (devices,) = tpu_devices("v5e:1x1")[:1]
    run = planning.plan_run(config, registry.planned("language_modelling"), [devices])
    step = next(run.programs)
    specs = [call.spec for call in step.attention]
    cycles = planning.step_time(step.program, "v5e", specs).cycles
    lines = records.read(Path("experiments/benchmarks") / records.FILE)
    (known,) = (
        line.score
        for line in lines
        if line.table == "compiled_growth" and line.metric == "M cycles" and "GPT-2" in line.system
    )
    assert cycles / config.training.parts / 1e6 == pytest.approx(known, rel=0.005)
    time = planning.step_time(step.program, "v5e", specs, step.schedules)
    assert time.attention_bound == 0
    # bundles of the two kernels in 12 layers, read from their schedules by hand
    attention = time.attention * TPUS["v5e"].clock / config.training.parts / 12
    assert attention == pytest.approx(625e3 + 1_130e3, rel=0.1)
    # the equations' products; attention is in kernels
    weights = 12 * 12 * 768**2 + 768 * 50_257
    assert work(step.program).flops == pytest.approx(6 * weights * 480 * 1_024, rel=0.02)


def test_the_programs_of_a_run_of_bert_base_fit_with_flash_attention(tpu_devices, capsys):
    words = """
        language_modelling --preset bert_base --compiler tpu --target v5e:2x2
        --strategy replicated --model.num_encoder_layers 1 --model.vocab_size 3001
        --data.batch_size 8 --training.grad_accumulation 1
    """
    assert cli.run(lambda: plan.main(words.split())) == 0
    text = capsys.readouterr().out
    assert "that JAX may use on v5e: fits" in text and "FIT" not in text
    assert set(re.findall(r"^  attention +(\w+), for", text, re.MULTILINE)) == {"tpu_flash"}
    assert re.findall(r"^(\w+) .* that JAX may use", text, re.MULTILINE) == [
        "step",
        "validation",
        "averaging",
    ]


def test_each_program_that_does_not_fit_is_said_with_what_to_change(tpu_devices, capsys):
    words = "--training.attention_fn reference --training.grad_accumulation 1"
    text = report(capsys, "v5e", 60_000, words)
    assert re.search(r"step +[\d.]+ [GT]B of 16.91 GB .* v5e: DOES NOT FIT\n  refused", text)
    assert re.search(r"change: step needs \S+ [GT]B: try --training.grad_accum", text)
    assert re.search(r"validation +\S+ [GT]B of .*: DOES NOT FIT", text)
    assert re.search(r"change: validation needs \S+ [GT]B: try --training.grad_accum", text)
    assert re.search(r"averaging +\S+ [kM]B of", text)


SIZES = """
    --model.vocab_size 2048 --model.d_model 256 --model.d_ff 1024 --model.num_heads 4
    --model.max_len 512 --model.dtype bfloat16 --model.dropout_rate 0
    --training.grad_accumulation 1 --training.attention_fn auto --optimizer.name adam
"""
FAMILIES = {
    "gpt": "language_modelling --model.num_decoder_layers 1 "
    "--data.batch_size 16 --data.seq_len 512",
    "bert": "language_modelling --preset bert_tiny --model.num_encoder_layers 1 "
    "--data.batch_size 16 --data.seq_len 512",
    "translator": "translation --model.num_encoder_layers 1 --model.num_decoder_layers 1 "
    "--data.batch_tokens 8192",
}


@pytest.mark.parametrize("mesh", ["data=1", "data=2,fsdp=2", "tensor=4", "fsdp=2,sequence=2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_has_the_flops_of_the_equations_in_each_family_and_mesh(tpu_devices, family, mesh):
    words = f"{FAMILIES[family]} {SIZES} --strategy sharded --mesh {mesh}".split()
    experiment, config, *_ = registry.parse(words, plan.PlanOptions(), "a test")
    training = registry.planned(experiment.__name__)
    devices = tpu_devices("v5e:2x2")[: 1 if mesh == "data=1" else 4]
    step = next(planning.plan_run(config, training, devices).programs)
    assert {call.name for call in step.attention} == {"tpu_flash"}
    # One layer of each kind: the calls differ, and their products are in kernels.
    rows = training.batch(config).example_ids.size
    pairs = rows * sum(seen_pairs(call.spec) for call in step.attention)
    attention = 3 * 4 * pairs * config.model.d_model
    products = len(devices) * work(step.program).flops
    assert products == pytest.approx(training.cost(config).flops - attention, rel=0.02)
