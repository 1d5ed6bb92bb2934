"""Benchmarks: what is measured, in what order, and what is told of it."""

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
    generation_subjects,
    gpt_subjects,
    report,
    seq2seq_subjects,
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
from jaxformer.runtime.concurrency import cpu_count


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

    assert timed(run, wall, cpu)(3) == Cost(wall=4.0, cpu=8.0)


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


def test_a_summary_is_what_can_be_computed_by_hand():
    costs = {
        "ours": [Cost(wall, cpu) for wall, cpu in ((3.0, 5.0), (1.0, 9.0), (2.0, 6.0))],
        "slow": [Cost(8.0, 8.0)] * 3,
        "fast": [Cost(4.0, 4.0)] * 3,
    }
    found = summarise(costs, ("slow", "fast", "absent"))
    assert found["ours"] == Summary(median=2.0, least=1.0, spread=0.5, cpu=6.0, ratio=0.5)
    assert found["slow"].ratio == 2.0 and found["fast"].ratio == 1.0
    assert found["fast"].spread == 0.0


def test_without_a_peer_there_is_no_ratio_and_one_round_has_no_spread():
    found = summarise({"ours": [Cost(3.0, 2.0)]}, ("fast",))
    assert found["ours"] == Summary(median=3.0, least=3.0, spread=0.0, cpu=2.0, ratio=None)


COMPARISON = Comparison(
    measured={
        "ours": Summary(median=0.0125, least=0.01, spread=0.2, cpu=0.02, ratio=0.5),
        "peer": Summary(median=0.025, least=0.024, spread=0.0, cpu=0.03, ratio=1.0),
    },
    facts={"ours": {"parameters": 65}, "peer": {}},
    missing={"other": "torch is needed here"},
)


def test_the_table_has_a_row_for_each_and_a_sentence_for_each_that_is_missing():
    assert report.table(COMPARISON, report.TIMES).splitlines() == [
        "|  | median, ms | least, ms | spread | processors, ms | of the best peer |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| ours | 12.5 | 10.0 | 20% | 20.0 | 0.50 |",
        "| peer | 25.0 | 24.0 | 0% | 30.0 | 1.00 |",
        "not measured: other: torch is needed here",
    ]
    alone = COMPARISON.measured["ours"]._replace(ratio=None)
    assert report.ratio(alone, {}) == "-"


@dataclass(frozen=True)
class Options(TimingConfig):
    name: str = "tiny"
    rounds: int = 3


def test_what_is_printed_is_written_with_options_and_environment(tmp_path, capsys):
    path = report.publish(
        Options(runs=str(tmp_path)),
        {"cores": 7, "torch": None},
        {"a step": COMPARISON},
        report.TIMES,
    )
    said, found = capsys.readouterr().out, json.loads(path.read_text())
    assert path == tmp_path / "benchmarks" / "tiny.json"
    assert report.table(COMPARISON, report.TIMES) in said and "ours: parameters 65" in said
    assert found["options"]["name"] == "tiny" and found["options"]["runs"] == str(tmp_path)
    assert found["comparisons"]["a step"]["measured"]["ours"]["ratio"] == 0.5
    assert found["comparisons"]["a step"]["missing"] == COMPARISON.missing
    assert found["environment"] == {"cores": 7, "torch": None}
    assert said.startswith("cores 7\n")


def test_the_environment_names_processor_and_versions(tmp_path):
    where = environment.environment()
    assert set(where) >= {"date", "cpu", "cores", "load", "python", "jaxlib", "flax", "torch"}
    assert where["jax"] == jax.__version__ and where["cores"] == cpu_count() >= 1
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name : Fast: 7\nmodel name : Slow\n")
    assert environment.cpu_model(info) == "Fast: 7"
    assert environment.cpu_model(tmp_path / "absent")


def test_the_presets_are_the_published_configurations():
    small, characters = (
        train_gpt.PRESETS[name].sizes for name in ("nanogpt_cpu", "characters_10m")
    )
    assert small.config() == PRESETS["shakespeare_char_cpu"].model
    assert (small.rows, small.length) == (12, 64)
    assert characters.config() == PRESETS["shakespeare_char"].model
    assert (characters.rows, characters.length) == (4, 256)


def test_batches_are_random_tokens_of_the_asked_shape_and_come_again():
    sizes = gpt_subjects.Sizes(vocab_size=7, length=5, rows=3)
    drawn = list(itertools.islice(sizes.batches(), 16))
    assert all(batch.tokens.shape == (3, 6) and batch.loss_mask.shape == (3, 5) for batch in drawn)
    assert {int(token) for batch in drawn for token in batch.tokens.flat} == set(range(7))
    assert (drawn[0].tokens == drawn[8].tokens).all() and (drawn[0].tokens != drawn[1].tokens).any()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: train_gpt.TrainOptions(attention_fn="fast"), "attention_fn='fast'"),
        (lambda: train_gpt.TrainOptions(repetitions=0), "repetitions=0, but it must be at"),
        (
            lambda: gpt_subjects.Sizes(d_model=7, num_heads=2),
            "d_model=7 is not divisible by num_heads=2",
        ),
        (lambda: gpt_subjects.Sizes(dropout_rate=1.0), "dropout_rate=1.0, but it lies in"),
        (lambda: decode.DecodeOptions(rounds=0), "rounds=0, but it must be at least 1"),
        (lambda: decode.Work(vocab_size=6), "vocab_size=6 leaves no 4 words .* at least 7"),
        (lambda: train_translation.TranslationOptions(attention_fn="fast"), "attention_fn='fast'"),
        (lambda: train_translation.TranslationOptions(rounds=0), "rounds=0, but it must be"),
        (lambda: seq2seq_subjects.Sizes(vocab_size=4), "vocab_size=4, but it must be at least 5"),
        (lambda: seq2seq_subjects.Sizes(dropout_rate=1.0), "dropout_rate=1.0, but it lies in"),
        (
            lambda: generation_subjects.Work(prompt=256),
            "prompt=256 fills the context of model.length=256 tokens",
        ),
        (
            lambda: generation_subjects.Work(temperature=-1.0),
            "temperature=-1.0, but it must be at least 0",
        ),
        (lambda: generate.GenerateOptions(rows=()), "rows=.* give at least one"),
        (lambda: generate.GenerateOptions(rows=(7, 0)), "rows=0, but it must be at least 1"),
        (
            lambda: attention.AttentionOptions(attention_fns=("xla", "fast")),
            "has 'fast': choose among",
        ),
        (lambda: attention.AttentionOptions(lengths=()), "lengths=.* give at least one"),
        (lambda: attention.AttentionOptions(lengths=(7, 0)), "length=0, but it must be at least 1"),
    ],
)
def test_options_that_measure_nothing_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_without_a_checkout_of_nanogpt_only_its_rows_are_absent(monkeypatch, tmp_path):
    asked = train_gpt.subjects(train_gpt.TrainOptions())
    assert list(asked) == ["ours", "PyTorch reference, eager"]
    given = train_gpt.subjects(train_gpt.TrainOptions(nanogpt=tmp_path))
    assert set(given) == {"ours", *train_gpt.PEERS}

    seen = []
    monkeypatch.setattr(train_gpt, "compare", lambda *_, **__: COMPARISON)
    monkeypatch.setattr(train_gpt.report, "publish", lambda *given: seen.append(given[2]))
    train_gpt.main(train_gpt.TrainOptions())
    ((found,),) = [list(one.values()) for one in seen]
    assert found.missing["nanoGPT"].endswith("--nanogpt FOLDER")
    assert found.missing["other"] == "torch is needed here"


def test_a_folder_without_nanogpts_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no model.py: give the folder of a checkout"):
        gpt_subjects.load_nanogpt(tmp_path)
    (tmp_path / "model.py").write_text("class GPT:\n    pass\n")
    with pytest.raises(ConfigError, match="defines no GPT and GPTConfig: give the folder"):
        gpt_subjects.load_nanogpt(tmp_path)


def test_attention_at_each_length_has_each_attention_function_and_pytorch(monkeypatch):
    asked, seen = [], []

    def compared(makes, timing, peers):
        asked.append((list(makes), {make.args[-1] for make in makes.values()}))
        return COMPARISON

    monkeypatch.setattr(attention, "compare", compared)
    monkeypatch.setattr(attention.report, "publish", lambda *given: seen.append(given[2]))
    options = attention.AttentionOptions(attention_fns=("xla",), lengths=(7, 1_300), heads=3)
    attention.main(options)
    assert [names for names, _ in asked] == [["xla", "PyTorch SDPA"]] * 2
    shapes = [attention.Shape(heads=3, length=length) for length in (7, 1_300)]
    assert [shape for _, shape in asked] == [{shape} for shape in shapes]
    assert [list(found) for found in seen] == [["T = S = 7", "T = S = 1,300"]]
    assert attention.temporary(COMPARISON.measured["ours"], {"temporary_bytes": 2_500_000}) == "2.5"
    assert attention.temporary(COMPARISON.measured["peer"], {}) == "-"


def test_the_sources_are_words():
    work = decode.Work(vocab_size=11, rows=3, source=5)
    assert work.sources().shape == (3, 5)
    assert 2 <= work.sources().min() and work.sources().max() < work.start == 10


def test_the_generated_text_fills_the_character_model():
    work = generation_subjects.Work(rows=3)
    assert work.model.config() == replace(
        PRESETS["shakespeare_char"].model, dropout_rate=0.0, attention_dropout_rate=0.0
    )
    assert work.prompts().shape == (3, 16) and work.new_tokens == 240
    assert set(work.prompts().flat) <= set(range(65))
    leaves = jax.tree.leaves(generation_subjects.weights(work.model))
    assert sum(leaf.size for leaf in leaves) == 10_745_088


def test_texts_at_each_number_of_rows_are_compared_and_must_be_the_same(monkeypatch):
    asked, seen = [], []

    def compared(makes, timing, peers):
        asked.append((list(makes), [make.args for make in makes.values()]))
        facts = {name: {"checksum": "1a", "tokens": 24} for name in makes}
        return COMPARISON._replace(facts=facts)

    monkeypatch.setattr(generate, "compare", compared)
    monkeypatch.setattr(generate.report, "publish", lambda *given: seen.append(given[2:]))
    options = generate.GenerateOptions(rows=(1, 7))
    generate.main(options)
    one, seven = options.works()
    assert [work.rows for work in (one, seven)] == [1, 7]
    names = ["ours", *generate.PEERS]
    assert asked == [(names, [(work,), (work,), (work, 1)]) for work in (one, seven)]
    ((found, columns),) = seen
    assert list(found) == ["1 x 240 tokens", "7 x 240 tokens"]
    assert columns["tokens a second"](COMPARISON.measured["ours"], {"tokens": 24}) == "1920"

    other = COMPARISON._replace(facts={"ours": {"checksum": "1a"}, "peer": {"checksum": "2b"}})
    with pytest.raises(RuntimeError, match="texts differ.*: ours 1a, peer 2b"):
        generate.check_texts(other)
    monkeypatch.setattr(generate, "compare", lambda *_, **__: other)
    with pytest.raises(RuntimeError, match="texts differ"):
        generate.main(options)
    assert len(seen) == 2
    generate.main(replace(options, work=replace(options.work, temperature=0.8)))


def test_the_translator_is_that_of_the_preset_and_its_batches_are_full_of_words():
    sizes = seq2seq_subjects.Sizes()
    assert sizes.config() == multi30k_tiny.model
    assert sizes.label_smoothing == multi30k_tiny.training.label_smoothing
    assert (sizes.rows, sizes.length, sizes.tokens) == (256, 16, 4_096)
    small = replace(sizes, vocab_size=7, rows=3, length=5)
    drawn = list(itertools.islice(small.batches(), 16))
    assert all((b.source.shape, b.target.shape) == ((3, 5), (3, 6)) for b in drawn)
    words = [word for batch in drawn for side in batch[:2] for word in side[:, :-1].flat]
    assert set(words) == {4, 5, 6}
    assert all((side[:, -1] == 2).all() for batch in drawn for side in batch[:2])
    assert (drawn[0].source == drawn[8].source).all()
    assert (drawn[0].source != drawn[1].source).any()


def test_the_table_of_translators_tells_target_tokens_a_second(monkeypatch):
    seen = []
    monkeypatch.setattr(
        train_translation, "compare", lambda makes, *_, **__: (list(makes), COMPARISON)
    )
    monkeypatch.setattr(train_translation.report, "publish", lambda *given: seen.append(given[2:]))
    options = train_translation.TranslationOptions(sizes=seq2seq_subjects.Sizes(rows=3, length=5))
    train_translation.main(options)
    ((found, columns),) = seen
    assert found == {
        "a step of 3 x 5 target tokens": (["ours", *train_translation.PEERS], COMPARISON)
    }
    told = columns["target tokens a second"](COMPARISON.measured["ours"], {})
    assert told == f"{15 / 0.0125:.0f}"
