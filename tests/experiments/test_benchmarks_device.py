"""The check of a device: what agrees is timed, what does not is named and ends with code 1."""

import json
from dataclasses import replace

import pytest

from experiments.benchmarks import decode, device, train
from experiments.harness import cli
from jaxformer.errors import ConfigError
from jaxformer.ops.attention import reference
from tests.two_processes import ended, start

HERE = "tests.experiments.test_benchmarks_device"


def scaled(*args, **options):
    return 1.01 * reference(*args, **options)


def louder(*args, **options):
    return 1.1 * reference(*args, **options)


def raising(*args, **options):
    raise NotImplementedError("no room for this shape")


def written(tmp_path):
    """The checks in the file of a small check."""
    return json.loads((tmp_path / "benchmarks" / "device_small.json").read_text())["checks"]


def checked(tmp_path, **fields):
    """The exit code of a small check."""
    options = replace(device.PRESETS["small"], runs=str(tmp_path), **fields)
    return cli.run(lambda: device.main(options))


@pytest.mark.long
def test_a_kernel_that_is_wrong_and_one_that_raises_have_failed_and_the_others_are_measured(
    tmp_path, capsys
):
    names = f"{HERE}:scaled", f"{HERE}:raising", "blockwise", "tpu_flash"
    assert checked(tmp_path, only=("attention", "products"), attention_fns=names) == 1
    out, err = capsys.readouterr()
    table = out[out.index("check ") :].splitlines()
    assert max(map(len, table)) <= 80 and "error: 2 of 5 checks failed" in err
    outcomes = {line[:20].strip(): line[20:].split() for line in table[1:6]}
    assert [words[0] for words in outcomes.values()] == ["FAILED", "FAILED", *["ok"] * 3]
    assert list(outcomes) == [
        "scaled", "raising", "attention blockwise", "products bfloat16", "products float32"
    ]  # fmt: skip
    said = " ".join(" ".join(table[6:]).split())
    assert f"FAILED attention {HERE}:scaled: causal: values differ by 1.0e-02 of the" in said
    assert f"{HERE}:raising: causal: raised NotImplementedError: no room for this shape" in said
    assert said.endswith("for other devices: tpu_flash")
    rows = written(tmp_path)
    assert [bool(row["failure"]) for row in rows] == [True, True, False, False, False]
    assert set().union(*(row["numbers"] for row in rows)) == {"kinds", "ms", "TFLOP/s"}
    assert all(number > 0 for row in rows for number in row["numbers"].values())


def test_numbers_are_on_record_when_a_later_check_is_cut_off(tmp_path, monkeypatch):
    def cut_off(dtype, options):
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "products", cut_off)
    names = ("blockwise",)
    assert checked(tmp_path, only=("attention", "products"), attention_fns=names) != 0
    (row,) = written(tmp_path)
    assert row["check"] == "attention blockwise"
    assert row["numbers"].keys() == {"kinds", "ms", "TFLOP/s"}


def numbers(tmp_path):
    """Check and unit of each number that was written."""
    return {(row["check"], unit) for row in written(tmp_path) for unit in row["numbers"]}


@pytest.mark.long
def test_a_decoding_step_is_timed(tmp_path, capsys):
    assert checked(tmp_path, only=("decoding",)) == 0
    assert "FAILED" not in capsys.readouterr().out
    assert numbers(tmp_path) == {("decoding step", "ms"), ("decoding step", "tokens/s")}


@pytest.mark.long
def test_a_step_with_wrong_attention_has_other_losses():
    options = device.PRESETS["small"]
    model = replace(options.work.model, dtype="float32")
    work = replace(options.work, attention_fn=f"{HERE}:louder", model=model)
    wrong = replace(options, work=work)
    with pytest.raises(device.CaseFailed, match="losses"):
        device.training(wrong, device.single())


@pytest.mark.long
def test_collectives_and_a_step_on_eight_devices_agree_with_one_and_are_timed(tmp_path):
    words = "-m experiments.benchmarks.device --preset small --only collectives training"
    words += f" --strategy sharded --mesh data=2,fsdp=2,tensor=2 --runs {tmp_path}"
    (done,) = ended(start(*words.split(), devices=8))
    lines = [line.split() for line in done.out.splitlines() if "=2  " in line or "step " in line]
    outcomes = {(words[0], words[1]): words[2] for words in lines if words[2] in ("ok", "FAILED")}
    axes, names = ("data", "fsdp", "tensor"), device.COLLECTIVES
    expected = {(name, f"{axis}=2"): "ok" for axis in axes for name in names}
    assert done.code == 0 and outcomes == expected | {("training", "step"): "ok"}, done
    assert numbers(tmp_path) >= {("training step", "ms"), ("training step", "tokens/s")}


def test_an_unknown_check_is_refused():
    with pytest.raises(ConfigError, match="'speed'"):
        device.DeviceOptions(only=("speed",))
    with pytest.raises(ConfigError, match="'wide'"):
        device.DeviceOptions(kinds=("wide",))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_124m", "gpt3_xl", "wmt14_base", "wmt14_big"])
def test_every_preset_for_an_accelerator_runs_small(name):
    options = train.PRESETS[name]
    small = {"vocab_size": 41, "d_model": 16, "d_ff": 24, "num_heads": 2}
    small["num_encoder_layers"] = min(options.work.model.num_encoder_layers, 1)
    small["num_decoder_layers"] = 1
    rows = 2 * options.work.grad_accumulation
    work = replace(
        options.work, model=replace(options.work.model, **small), batch_size=rows, seq_len=16
    )
    for make in replace(options, work=work).cases().values():
        case = make()
        assert min(case.run()) > 0 and case.metadata["flops"] > 0


@pytest.mark.peer
def test_the_searches_of_the_gpu_run_small(torch, tmp_path):
    pytest.importorskip("ctranslate2", reason="needs the extra peers")
    model = replace(decode.MARIAN_BASE, vocab_size=41, d_model=16, d_ff=24, num_heads=2)
    model = replace(model, num_encoder_layers=1, num_decoder_layers=1)
    work = decode.DecodeWork(model, batch_size=3, source_len=5, target_len=5)
    decode.write_model(work, tmp_path / "marian")
    ours, theirs = decode.cases(work, tmp_path / "marian", "gpu").values()
    assert ours().metadata["tokens"] == 15 and theirs.args[2:] == ("cuda", "float16")
