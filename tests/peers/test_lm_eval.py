"""lm-evaluation-harness: our adapter and its own backend of transformers give the same answers."""

import copy
import json
import random

import pytest

import jaxformer as jf
from jaxformer.text.data import read_lines

pytestmark = pytest.mark.peer

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra peers")

TASK = {
    "task": "sentence_ends",
    "dataset_path": "json",
    "test_split": "train",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


def models_of_the_harness(folder):
    """The model in `folder` as two models of the harness: ours, and its own."""
    from lm_eval.models.huggingface import HFLM

    from experiments.examples.lm_eval_adapter import JaxformerLM

    options = {"dtype": "float32", "device": "cpu", "batch_size": 8}
    return JaxformerLM(jf.load(folder)), HFLM(pretrained=str(folder), **options)


@pytest.fixture(scope="module")
def backends(shallow_smollm2_folder):
    return models_of_the_harness(shallow_smollm2_folder)


@pytest.fixture(scope="module")
def halves(real_data):
    """200 English sentences, each in two halves."""
    lines = read_lines(real_data / "multi30k" / "test_2016_flickr.en.gz")[:200]
    words = [line.split(" ") for line in lines]
    return [(" ".join(x[: len(x) // 2]), " ".join(x[len(x) // 2 :])) for x in words]


def limit_length(backends, length, monkeypatch):
    """Makes texts of more than `length` tokens too long for both models."""
    ours, theirs = backends
    monkeypatch.setattr(ours, "max_length", length)
    monkeypatch.setattr(theirs, "_max_length", length)


def ask(kind, *arguments):
    """Requests of the harness with these arguments."""
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i)
        for i, each in enumerate(arguments)
    ]


def answers_to_questions(backends, halves, folder):
    """The task of `halves` done by both models of the harness: what it reports of each."""
    draw = random.Random(0)
    with (folder / "questions.jsonl").open("w") as file:
        for i, (begun, end) in enumerate(halves):
            ends = draw.sample([other for j, (_, other) in enumerate(halves) if j != i], 3)
            place = draw.randrange(4)
            ends.insert(place, end)
            row = {"question": begun, "choices": ends, "answer": place}
            file.write(json.dumps(row) + "\n")
    files = {"data_files": str(folder / "questions.jsonl"), "cache_dir": str(folder)}
    task = TASK | {"dataset_kwargs": files}
    return [
        lm_eval.simple_evaluate(model=backend, tasks=[task], bootstrap_iters=0)
        for backend in backends
    ]


def assert_same_answers(found, count, assert_equal):
    """The sums and the choices of both are equal in `count` questions."""
    ours, theirs = (each["samples"]["sentence_ends"] for each in found)
    assert len(ours) == len(theirs) == count
    for one, other in zip(ours, theirs, strict=True):
        sums = [[answer[0][0] for answer in each["resps"]] for each in (one, other)]
        assert_equal(*sums, tolerance=1e-4)
        greedy = [[answer[0][1] for answer in each["resps"]] for each in (one, other)]
        assert greedy[0] == greedy[1]
        assert (one["acc"], one["acc_norm"]) == (other["acc"], other["acc_norm"])
    accuracies = [each["results"]["sentence_ends"]["acc,none"] for each in found]
    assert accuracies[0] == accuracies[1]


def test_questions_have_the_same_sums_and_choices(backends, halves, tmp_path, assert_equal):
    found = answers_to_questions(backends, halves[:11], tmp_path)
    assert_same_answers(found, 11, assert_equal)


@pytest.mark.slow
def test_a_published_model_answers_200_questions_alike_and_knows_most(
    smollm2_folder, halves, tmp_path, assert_equal
):
    found = answers_to_questions(models_of_the_harness(smollm2_folder), halves, tmp_path)
    assert_same_answers(found, 200, assert_equal)
    assert found[0]["results"]["sentence_ends"]["acc,none"] > 0.4  # by chance 0.25


def test_texts_are_scored_in_the_same_windows(backends, halves, monkeypatch, assert_equal):
    texts = [" ".join(half) for half in halves[:3]]
    texts.append(" ".join(texts * 2))
    limit_length(backends, 37, monkeypatch)
    ours, theirs = (
        backend.loglikelihood_rolling(ask("loglikelihood_rolling", *[(text,) for text in texts]))
        for backend in backends
    )
    assert_equal(ours, theirs, tolerance=1e-4)


def test_texts_end_where_the_task_says(backends, halves):
    settings = {"until": ["\n", ","], "max_gen_toks": 12, "do_sample": False}
    others = {"until": ["."], "max_gen_toks": 9}
    asked = [(begun, dict(settings)) for begun, _ in halves[:4]]
    asked += [(begun, dict(others)) for begun, _ in halves[4:7]]
    ours, theirs = (
        backend.generate_until(ask("generate_until", *copy.deepcopy(asked))) for backend in backends
    )
    assert ours == theirs and any(ours)


def test_a_text_without_a_context_and_one_that_is_too_long_are_scored_alike(
    backends, halves, monkeypatch, assert_equal
):
    long = " ".join(" ".join(half) for half in halves[:5])
    asked = [("", halves[0][0]), (long, " in the rain"), (long, " at night"), ("A man ", "sits")]
    limit_length(backends, 29, monkeypatch)
    ours, theirs = (backend.loglikelihood(ask("loglikelihood", *asked)) for backend in backends)
    assert_equal([each[0] for each in ours], [each[0] for each in theirs], tolerance=1e-4)
    assert [each[1] for each in ours] == [each[1] for each in theirs]
