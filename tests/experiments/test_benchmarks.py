"""Benchmarks: what is measured, in what order, and what is reported of it."""

import itertools
import json
from dataclasses import dataclass, replace

import jax
import pytest

from experiments.benchmarks import (
    attention,
    decode,
    environment,
    generate,
    report,
    train_cases,
    train_gpt,
    train_translation,
)
from experiments.benchmarks.interleaved_timing import (
    Cost,
    Summary,
    TimingConfig,
    measure_in_turn,
    summarise,
    timed,
)
from experiments.benchmarks.subprocesses import Comparison
from experiments.language_modelling.presets import PRESETS
from experiments.translation.presets import multi30k_tiny
from jaxformer.errors import ConfigError
from jaxformer.runtime import cpu_count


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_cost_is_the_mean_of_the_repetitions_on_either_clock():
    wall, cpu = FakeClock(), FakeClock()
    durations = iter([2.0, 3.0, 7.0])

    def run():
        seconds = next(durations)
        wall.now += seconds
        cpu.now += 2 * seconds

    def wait(_):
        wall.now += 3.0

    assert timed(run, wait, wall, cpu)(3) == Cost(wall=5.0, cpu=8.0)


def test_all_are_measured_in_every_round_one_after_the_other():
    calls = []

    def measure_as(name):
        def measure(count):
            calls.append((name, count))
            return Cost(float(len(calls)), 0.5)

        return measure

    costs = measure_in_turn(
        {name: measure_as(name) for name in "abc"}, TimingConfig(rounds=2, repetitions=7)
    )
    assert calls == [(name, 7) for name in "abcabc"]
    assert costs["b"] == [Cost(2.0, 0.5), Cost(5.0, 0.5)]


def test_a_short_case_is_repeated_until_a_round_is_long_enough():
    calls = []

    def measure(count):
        calls.append(count)
        return Cost(0.03, 0.03)

    measure_in_turn({"a": measure}, TimingConfig(rounds=2, repetitions=3, round_seconds=0.2))
    measure_in_turn({"a": measure}, TimingConfig(rounds=1, repetitions=9, round_seconds=0.2))
    assert calls == [1, 7, 7, 1, 9]


def test_a_summary_is_what_can_be_computed_by_hand():
    costs = {
        "jaxformer": [Cost(wall, cpu) for wall, cpu in ((3.0, 5.0), (1.0, 9.0), (2.0, 6.0))],
        "slow": [Cost(8.0, 8.0)] * 3,
        "fast": [Cost(4.0, 4.0)] * 3,
    }
    found = summarise(costs, ("slow", "fast", "absent"))
    assert found["jaxformer"] == Summary(median=2.0, least=1.0, spread=0.5, cpu=6.0, ratio=0.5)
    assert found["slow"].ratio == 2.0 and found["fast"].ratio == 1.0
    assert found["fast"].spread == 0.0


def test_without_a_peer_there_is_no_ratio_and_one_round_has_no_spread():
    found = summarise({"jaxformer": [Cost(3.0, 2.0)]}, ("fast",))
    assert found["jaxformer"] == Summary(median=3.0, least=3.0, spread=0.0, cpu=2.0, ratio=None)


COMPARISON = Comparison(
    measured={
        "jaxformer": Summary(median=0.0125, least=0.01, spread=0.2, cpu=0.02, ratio=0.5),
        "peer": Summary(median=0.025, least=0.024, spread=0.0, cpu=0.03, ratio=1.0),
    },
    metadata={"jaxformer": {"parameters": 65}, "peer": {}},
    missing={"other": "torch is needed here"},
)


def test_the_table_has_a_row_for_each_and_a_sentence_for_each_that_is_missing():
    assert report.table(COMPARISON, report.TIMES | report.PEERS).splitlines() == [
        "|  | median, ms | least, ms | spread | processors, ms | of the best peer |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| jaxformer | 12.5 | 10.0 | 20% | 20.0 | 0.50 |",
        "| peer | 25.0 | 24.0 | 0% | 30.0 | 1.00 |",
        "jaxformer: parameters 65",
        "not measured: other: torch is needed here",
    ]
    alone = COMPARISON.measured["jaxformer"]._replace(ratio=None)
    assert report.PEERS["of the best peer"](alone, {}) == "-"


@dataclass(frozen=True)
class Options(TimingConfig):
    name: str = "tiny"
    rounds: int = 3


def test_what_is_printed_is_written_with_options_and_environment(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report, "environment", lambda: {"cores": 7, "torch": None})
    monkeypatch.setattr(report, "compare", lambda cases, timing, peers: COMPARISON)
    report.run_tables(Options(runs=str(tmp_path)), {"a step": {}}, report.TIMES)
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "benchmarks" / "tiny.json").read_text())
    assert report.table(COMPARISON, report.TIMES) in printed
    assert found["options"]["name"] == "tiny" and found["options"]["runs"] == str(tmp_path)
    assert found["comparisons"]["a step"]["measured"]["jaxformer"]["ratio"] == 0.5
    assert found["comparisons"]["a step"]["missing"] == COMPARISON.missing
    assert found["environment"] == {"cores": 7, "torch": None}
    assert printed.startswith("cores 7\n")


def test_the_environment_names_processor_and_versions(tmp_path):
    where = environment.environment()
    assert set(where) >= {"date", "cpu", "cores", "load", "python", "jaxlib", "flax", "torch"}
    assert where["jax"] == jax.__version__ and where["cores"] == cpu_count() >= 1
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name : Fast: 7\nmodel name : Slow\n")
    assert environment.cpu_model(info) == "Fast: 7"
    assert environment.cpu_model(tmp_path / "absent")


def test_the_presets_are_the_published_configurations():
    small, characters = (train_gpt.PRESETS[name].work for name in ("nanogpt_cpu", "characters_10m"))
    assert small.model == PRESETS["shakespeare_char_cpu"].model
    assert (small.batch_size, small.seq_len) == (12, 64)
    assert (characters.batch_size, characters.seq_len) == (4, 256)
    settings = small.optimizer
    assert (settings.schedule, settings.learning_rate) == ("constant", 1e-3)
    assert settings.warmup_steps == 0
    assert (settings.b2, settings.weight_decay, settings.grad_clip_norm) == (0.99, 0.1, 1.0)


def gpt_work(vocab_size=7):
    model = replace(PRESETS["shakespeare_char_cpu"].model, vocab_size=vocab_size)
    return train_cases.GPTWork(model=model, batch_size=3, seq_len=5)


def test_batches_are_random_tokens_of_the_asked_shape_and_repeat_after_eight():
    batches = list(itertools.islice(train_cases.random_batches(gpt_work()), 16))
    assert all(batch.tokens.shape == (3, 6) for batch in batches)
    assert all(batch.loss_mask.shape == (3, 5) for batch in batches)
    assert {int(token) for batch in batches for token in batch.tokens.flat} == set(range(7))
    assert (batches[0].tokens == batches[8].tokens).all()
    assert (batches[0].tokens != batches[1].tokens).any()


TRANSLATOR = multi30k_tiny.model
CHARACTERS = PRESETS["shakespeare_char"].model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: train_cases.GPTWork(attention_fn="fast"), "attention_fn='fast'"),
        (lambda: train_cases.GPTWork(seq_len=65), "seq_len=65 is more than model.max_len=64"),
        (lambda: train_cases.GPTWork(batch_size=0), "batch_size=0, but it must be at least 1"),
        (lambda: train_gpt.TrainOptions(repetitions=0), "repetitions=0, but it must be at"),
        (lambda: decode.DecodeOptions(rounds=0), "rounds=0, but it must be at least 1"),
        (
            lambda: decode.DecodeWork(replace(decode.MARIAN_BASE, vocab_size=6)),
            "vocab_size=6 leaves no 4 words .* at least 7",
        ),
        (lambda: decode.DecodeWork(source_len=33), "max_len=33 is less than .* at least 34"),
        (
            lambda: train_cases.TranslationWork(model=replace(TRANSLATOR, vocab_size=4)),
            "vocab_size=4 has no word .* at least 5",
        ),
        (
            lambda: generate.GenerateWork(CHARACTERS, prompt_len=256),
            "prompt_len=256 fills the context of model.max_len=256 tokens",
        ),
        (
            lambda: generate.GenerateWork(temperature=-1.0),
            "temperature=-1.0, but it must be at least 0",
        ),
        (lambda: generate.GenerateOptions(batch_sizes=()), "batch_sizes=.* give at least one"),
        (
            lambda: generate.GenerateOptions(batch_sizes=(7, 0)),
            "batch_size=0, but it must be at least 1",
        ),
        (
            lambda: attention.AttentionOptions(attention_fns=("blockwise", "fast")),
            "has 'fast': choose among",
        ),
        (lambda: attention.AttentionOptions(seq_lens=()), "seq_lens=.* give at least one"),
        (
            lambda: attention.AttentionOptions(seq_lens=(7, 0)),
            "seq_len=0, but it must be at least 1",
        ),
    ],
)
def test_options_that_measure_nothing_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_without_a_checkout_of_nanogpt_only_its_rows_are_absent(monkeypatch, tmp_path, capsys):
    asked = train_gpt.cases(train_gpt.TrainOptions())
    assert list(asked) == ["jaxformer", "PyTorch reference, eager"]
    given = train_gpt.cases(train_gpt.TrainOptions(nanogpt=tmp_path))
    assert set(given) == {"jaxformer", *train_gpt.PEERS}
    monkeypatch.setattr(report, "compare", lambda *_, **__: COMPARISON)
    train_gpt.main(train_gpt.TrainOptions(runs=str(tmp_path)))
    assert capsys.readouterr().out.endswith("--nanogpt FOLDER\n")


def test_a_folder_without_nanogpts_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no model.py: give the folder of a checkout"):
        train_cases.load_nanogpt(tmp_path)
    (tmp_path / "model.py").write_text("class GPT:\n    pass\n")
    with pytest.raises(ConfigError, match="defines no GPT and GPTConfig: give the folder"):
        train_cases.load_nanogpt(tmp_path)


def tables_of(monkeypatch, tmp_path, main, options):
    """What `main` gives to `compare`: for each table the arguments of its cases."""
    asked = []

    def compared(cases, timing, peers):
        assert set(peers) <= set(cases)
        asked.append({name: make.args for name, make in cases.items()})
        return COMPARISON._replace(metadata={name: {"checksum": "1a"} for name in COMPARISON[0]})

    monkeypatch.setattr(report, "compare", compared)
    main(replace(options, runs=str(tmp_path)))
    return asked


def test_attention_at_each_length_has_each_attention_function_and_pytorch(monkeypatch, tmp_path):
    options = attention.AttentionOptions(
        attention_fns=("blockwise",), seq_lens=(7, 1_300), num_heads=3, dtype="bfloat16"
    )
    asked = tables_of(monkeypatch, tmp_path, attention.main, options)
    shapes = [attention.Shape(1, n, 3, dtype="bfloat16") for n in (7, 1_300)]
    assert asked == [
        {"blockwise": ("blockwise", shape), "PyTorch SDPA": (shape,)} for shape in shapes
    ]
    (column,) = report.MEMORY.values()
    summary = COMPARISON.measured["jaxformer"]
    assert column(summary, {"temporary_bytes": 2_500_000}) == "2.5" and column(summary, {}) == "-"


def test_the_sources_are_words():
    work = decode.DecodeWork(replace(decode.MARIAN_BASE, vocab_size=11), batch_size=3, source_len=5)
    assert work.sources().shape == (3, 5)
    assert 2 <= work.sources().min() and work.sources().max() < work.pad == 10


def test_the_generated_text_fills_the_character_model():
    work = generate.GenerateWork(batch_size=3)
    assert work.prompts().shape == (3, 16) and work.new_tokens == 240
    assert set(work.prompts().flat) <= set(range(65))
    leaves = jax.tree.leaves(generate.random_params(work.model))
    assert sum(leaf.size for leaf in leaves) == 10_745_088


def test_texts_of_each_batch_size_are_compared_and_must_be_the_same(monkeypatch, tmp_path):
    options = generate.GenerateOptions(batch_sizes=(1, 7))
    asked = tables_of(monkeypatch, tmp_path, generate.main, options)
    works = [generate.GenerateWork(batch_size=size) for size in (1, 7)]
    names = ["jaxformer", *generate.PEERS]
    arguments = [[(work,), (work,), (work, 1)] for work in works]
    assert asked == [dict(zip(names, given, strict=True)) for given in arguments]
    (column,) = report.TOKENS.values()
    assert column(COMPARISON.measured["jaxformer"], {"tokens": 24}) == "1,920"

    checksums = {"jaxformer": {"checksum": "1a"}, "peer": {"checksum": "2b"}}
    other = COMPARISON._replace(metadata=checksums)
    with pytest.raises(RuntimeError, match="texts differ.*: jaxformer 1a, peer 2b"):
        generate.check_texts(other)
    monkeypatch.setattr(report, "compare", lambda *_, **__: other)
    options = replace(options, runs=str(tmp_path))
    with pytest.raises(RuntimeError, match="texts differ"):
        generate.main(options)
    generate.main(replace(options, work=replace(options.work, temperature=0.8)))


def test_the_translator_is_that_of_the_preset_and_its_batches_are_full_of_words(
    monkeypatch, tmp_path
):
    work = train_cases.TranslationWork()
    assert work.model == multi30k_tiny.model
    assert (work.batch_size, work.seq_len, work.tokens) == (256, 16, 4_096)
    assert (work.label_smoothing, work.optimizer.learning_rate) == (0.1, 4e-4)
    small = train_cases.TranslationWork(
        model=replace(TRANSLATOR, vocab_size=7), batch_size=3, seq_len=5
    )
    batches = list(itertools.islice(train_cases.random_batches(small), 16))
    assert all((b.source.shape, b.target.shape) == ((3, 5), (3, 6)) for b in batches)
    words = [word for batch in batches for side in batch[:2] for word in side[:, :-1].flat]
    assert set(words) == {4, 5, 6}
    assert all((side[:, -1] == 2).all() for batch in batches for side in batch[:2])
    assert (batches[0].source == batches[8].source).all()
    assert (batches[0].source != batches[1].source).any()
    options = train_translation.TranslationOptions(work=small)
    (asked,) = tables_of(monkeypatch, tmp_path, train_translation.main, options)
    assert asked == dict.fromkeys(["jaxformer", *train_translation.PEERS], (small,))
