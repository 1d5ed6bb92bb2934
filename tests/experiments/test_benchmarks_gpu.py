"""What is measured on a GPU: its sizes, its clock, its file, and the same programs in small."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks.gpu import __main__ as gpu
from experiments.benchmarks.gpu import attention_lengths, sizes, timing, train_steps
from experiments.benchmarks.gpu.attention_lengths import Lengths
from experiments.benchmarks.gpu.timing import Timing, measure
from experiments.harness import cli
from jaxformer.config import TRANSFORMER_BIG
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_pace_is_the_median_of_rounds_after_a_warm_up():
    clock, log = FakeClock(), []
    durations = iter([50.0, 9.0, 0.05, *[0.05] * 8, *[0.07] * 4, *[0.06] * 4])

    def start():
        log.append("start")
        return next(durations)

    def wait(seconds):
        log.append("wait")
        clock.now += seconds * (4 if log[-5:-1] == ["start"] * 4 else 1)

    found = measure(start, wait, seconds=0.5, clock=clock)
    assert log[:5] == ["start", "start", "wait", "start", "wait"]
    assert log[5:] == (["start"] * 4 + ["wait"]) * 3
    assert (found.rounds, found.count) == (3, 4)
    assert found.median == pytest.approx(0.05) and found.least == pytest.approx(0.05)
    assert Timing(0.0125, 0.01, 3, 4).facts() == {
        "ms": 12.5,
        "least_ms": 10.0,
        "rounds": 3,
        "repetitions": 4,
    }


def test_a_short_repetition_has_as_many_rounds_as_fill_the_time():
    clock = FakeClock()

    def start():
        clock.now += 0.125

    found = measure(start, lambda _: None, seconds=5.0, clock=clock)
    assert found == Timing(0.125, 0.125, rounds=20, count=2)


def shapes_of(config):
    tokens = jnp.ones((1, 4), jnp.int32)
    made = jax.eval_shape(lambda: DecoderOnly(config).init(jax.random.key(0), tokens))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made))


def test_the_models_are_as_large_as_they_are_called():
    d, vocab = 768, 50_304
    matrices = 12 * 12 * d**2 + 2 * vocab * d
    biases = 12 * (4 * d + 4 * d + d) + vocab
    assert shapes_of(sizes.TRACK_3) == matrices + biases + (2 * 12 + 2) * d
    assert 1.30e9 < shapes_of(sizes.GPT_1_3B) < 1.32e9
    full = sizes.FULL
    assert (full.gpt.tokens, full.gpt.rows // full.gpt.grad_accumulation) == (524_288, 64)
    assert full.big.model.d_model == TRANSFORMER_BIG.d_model and full.big.tokens == 2**15
    models = [t.model for t in (full.gpt, full.big_gpt, full.base, full.big)]
    assert {model.dtype for model in models} == {"bfloat16"}
    assert full.lengths.lengths == (1_024, 2_048, 4_096, 8_192, 16_384, 32_768)


def test_small_and_full_have_the_same_sections():
    small, full = (sizes.sections(given) for given in (sizes.SMALL, sizes.FULL))
    assert [section.name for section in small] == [section.name for section in full]
    assert len({section.name for section in full}) == len(full) == 14
    attempts = {section.name: list(section.attempts) for section in full}
    assert attempts["train_124m"] == ["auto", "reference"]
    assert attempts["train_1_3b_remat"] == ["64 rows", "32 rows", "16 rows", "16 rows, reference"]
    (kept, remat), reference = (
        [dict(map(lambda s: (s.name, s.attempts), full))[name] for name in names]
        for names in (("train_1_3b_kept", "train_1_3b_remat"), ("train_124m",))
    )
    assert [one.args[0].rows for one in kept.values()] == [24, 16, 8, 8]
    assert {one.args[0].remat for one in kept.values()} == {False}
    assert {one.args[0].remat for one in remat.values()} == {True}
    assert [one.args[0].attention_fn for one in reference[0].values()] == ["auto", "reference"]


def test_the_rate_of_attention_counts_seven_products_of_what_is_seen():
    lengths = Lengths((4, 16), tokens=8, heads=3, head_dim=5)
    assert [lengths.rows(length) for length in lengths.lengths] == [2, 1]
    told = lengths.facts(4, Timing(1e-6, 1e-6, 3, 1))
    assert told["teraflops"] == pytest.approx(2 * 3 * 10 * 7 * 2 * 5 / 1e-6 / 1e12)
    assert told["rows"] == 2 and told["ms"] == pytest.approx(1e-3)


def test_products_and_attention_run_here_and_what_cannot_is_told():
    found = dict(timing.matrix_rate(8, 0.0))
    assert found["size"] == 8 and min(found[f"{t}_teraflops"] for t in ("bfloat16", "float32")) > 0
    lengths = Lengths((4, 8), tokens=8, heads=2, head_dim=8, seconds=0.0)
    told = dict(attention_lengths.ours("blockwise", lengths, 4))
    assert told["block"] == 4 and told["4"]["rows"] == 2 and told["8"]["temporary_bytes"] > 0
    refused = dict(attention_lengths.ours("cudnn", lengths))
    assert all(
        refused[n]["failed"].startswith("ConfigError: the cudnn attention function") for n in "48"
    )


@pytest.mark.slow
def test_a_training_tells_its_speed_and_learns_its_batch():
    found = dict(train_steps.train_gpt(sizes.SMALL.gpt))
    assert found["tokens_per_second"] == pytest.approx(16 * 16 / found["ms"] * 1e3)
    assert found["teraflops"] > 0 and found["attention"] == ["reference"]
    before, after = found["loss_before_and_after"]
    assert after < before == pytest.approx(math.log(41), abs=0.5)


ENTRY = {"attempt": "auto", "seconds": 7.0}


def test_shares_of_the_matrix_rate_are_told_where_both_are_known():
    found = {
        "matrix_rate": ENTRY | {"bfloat16_teraflops": 800.0},
        "train": ENTRY | {"teraflops": 440.0},
        "attention": ENTRY | {"4": {"ms": 2.0, "teraflops": 1.0}},
    }
    shared = gpu.with_shares(found)
    assert shared["train"]["share"] == 0.55 and "share" not in shared["attention"]
    assert gpu.with_shares({"train": found["train"]}) == {"train": found["train"]}


def test_a_line_tells_the_speed_the_lengths_and_the_failure():
    entry = ENTRY | {"tokens_per_second": 512_345.6, "share": 0.55, "loss": 3.0}
    assert (
        gpu.line("train", entry) == "train (auto, 7.0 s): tokens_per_second 5.123e+05, share 0.55"
    )
    entry = ENTRY | {"4": {"ms": 2.0}, "8": {"failed": "no memory"}, "failed": "auto: killed"}
    told = "attention (auto, 7.0 s): T=4 2 ms, T=8 no memory, FAILED: auto: killed"
    assert gpu.line("attention", entry) == told


def test_the_file_is_written_after_every_section(monkeypatch, tmp_path, capsys):
    path, seen = tmp_path / "benchmarks" / "mine.json", []

    def run_all(wanted, seconds, save):
        seen.append(([section.name for section in wanted], seconds))
        save({"matrix_rate": ENTRY | {"bfloat16_teraflops": 2.0}})
        seen.append(json.loads(path.read_text())["sections"])
        save({"matrix_rate": ENTRY | {"bfloat16_teraflops": 2.0}, "b": ENTRY | {"failed": "odd"}})

    monkeypatch.setattr(gpu, "run_all", run_all)
    asked = ["--small", "--minutes", "2", "--runs", str(tmp_path), "--name", "mine"]
    asked += ["--only", "attention_xla", "matrix_rate"]
    gpu.main(cli.parse({"default": gpu.GpuOptions()}, asked))
    assert seen[0] == (["matrix_rate", "attention_xla"], 120.0) and list(seen[1]) == ["matrix_rate"]
    written = json.loads(path.read_text())
    assert written["small"] is True and written["sections"]["b"]["failed"] == "odd"
    assert {"date", "jax", "torch"} <= set(written["environment"])
    assert "b (auto, 7.0 s): FAILED: odd" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"only": ("decode",)}, "no section 'decode': choose among matrix_rate, train_124m"),
        ({"minutes": 0}, "minutes=0 measures nothing: give more than 0"),
    ],
)
def test_what_measures_nothing_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        gpu.GpuOptions(**options)


PEERS = ("decode_base_ctranslate2", "attention_pytorch")


def check(section):
    """All that the section's first attempt yields, in this process."""
    found = dict(next(iter(section.attempts.values()))())
    assert "device" in found
    lengths = [found[str(length)] for length in sizes.SMALL.lengths.lengths if str(length) in found]
    if section.name == "attention_cudnn":
        assert all("needs an NVIDIA GPU" in one["failed"] for one in lengths)
    elif lengths:
        assert all(one["teraflops"] > 0 for one in lengths)
    elif section.name != "matrix_rate":
        assert found["tokens_per_second"] > 0


SMALL = [section for section in sizes.sections(sizes.SMALL) if section.name not in PEERS]


@pytest.mark.slow
@pytest.mark.parametrize("section", SMALL, ids=lambda section: section.name)
def test_every_section_runs_small(section):
    check(section)


@pytest.mark.peer
@pytest.mark.parametrize("name", PEERS)
def test_every_section_of_the_peers_runs_small(torch, name):
    pytest.importorskip("ctranslate2", reason="needs the extra peers")
    check({section.name: section for section in sizes.sections(sizes.SMALL)}[name])
