"""Benchmarks: what is measured, in what order, and what is told of it."""

import json
import os
from dataclasses import dataclass
from functools import partial

import pytest

from experiments.benchmarks import environment, report
from experiments.benchmarks.alternate import Cost, Summary, alternate, summarise, timed
from experiments.benchmarks.children import Comparison, Subject, compare
from jaxformer.config import ConfigError
from jaxformer.extras import MissingExtra


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

    costs = alternate({name: measure_as(name) for name in "abc"}, rounds=2, count=7)
    assert calls == [(name, 7) for name in "abcabc"]
    assert costs["b"] == [Cost(2.0, 0.5), Cost(5.0, 0.5)]


@pytest.mark.parametrize(("rounds", "count"), [(0, 3), (3, 0)])
def test_measuring_nothing_is_refused(rounds, count):
    with pytest.raises(ConfigError, match=f"rounds={rounds} of {count} .*: give 1 or more"):
        alternate({"a": lambda count: Cost(1.0, 1.0)}, rounds=rounds, count=count)


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


def working(number):
    return Subject(lambda: None, {"number": number, "process": os.getpid()})


def refusing():
    raise ConfigError("size=7 is odd")


def lacking():
    raise MissingExtra("torch is needed here")


def dying():
    os._exit(7)


def dying_later():
    return Subject(partial(os._exit, 9), {})


def test_each_is_made_in_a_process_of_its_own_and_what_cannot_be_made_is_told():
    makes = {"ours": partial(working, 3), "peer": partial(working, 5)}
    makes |= {"refusing": refusing, "lacking": lacking, "dying": dying}
    found = compare(makes, peers=("peer",), rounds=2, count=3, warm_up=1)
    assert list(found.measured) == ["ours", "peer"] and found.measured["peer"].ratio == 1.0
    assert [found.facts[name]["number"] for name in ("ours", "peer")] == [3, 5]
    processes = {os.getpid(), *(facts["process"] for facts in found.facts.values())}
    assert len(processes) == 3
    assert found.missing == {
        "refusing": "size=7 is odd",
        "lacking": "torch is needed here",
        "dying": "its process ended with code 7",
    }


def test_a_process_that_ends_while_it_is_measured_ends_the_comparison():
    with pytest.raises(RuntimeError, match="its process ended with code 9"):
        compare({"ours": dying_later}, peers=(), rounds=1, count=1, warm_up=0)


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
class Options:
    runs: str
    name: str = "tiny"
    rounds: int = 3


def test_what_is_printed_is_written_with_options_and_environment(tmp_path, capsys):
    path = report.publish(Options(str(tmp_path)), {"a step": COMPARISON}, report.TIMES)
    said, found = capsys.readouterr().out, json.loads(path.read_text())
    assert path == tmp_path / "benchmarks" / "tiny.json"
    assert report.table(COMPARISON, report.TIMES) in said and "ours: parameters 65" in said
    assert found["options"] == {"runs": str(tmp_path), "name": "tiny", "rounds": 3}
    assert found["comparisons"]["a step"]["measured"]["ours"]["ratio"] == 0.5
    assert found["comparisons"]["a step"]["missing"] == COMPARISON.missing
    assert found["environment"]["cores"] >= 1 and f"cores {found['environment']['cores']}" in said


def test_the_environment_names_processor_and_versions(tmp_path):
    where = environment.environment()
    assert set(where) >= {"date", "cpu", "cores", "load", "python", "jax", "jaxlib", "flax"}
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name : Fast: 7\nmodel name : Slow\n")
    assert environment.cpu_model(info) == "Fast: 7"
    assert environment.cpu_model(tmp_path / "absent")
