"""A run with experts trains with its balance, resumes to the bit, is loaded and continues texts."""

import json

import jaxformer as jf
from experiments.language_modelling import train
from jaxformer.config import ExpertOptions
from tests.experiments.commands import assert_resumes_to_the_bit, metrics_of
from tests.experiments.tiny_runs import language_config


def test_a_run_with_experts_logs_its_balance_resumes_to_the_bit_and_continues_texts(tmp_path):
    experts = ExpertOptions(5, top_k=2, shared_d_ff=7, jitter=0.1, capacity_factor=1.5)
    config = language_config(tmp_path, model__feed_forward__experts=experts, training__balance=0.01)
    whole = train.train(config).folder
    lines = [line for line in metrics_of(whole) if "balance" in line]
    assert lines and all(0.9 < line["balance"] < 5.0 for line in lines)
    stored = json.loads((whole / "config.json").read_text())["model"]["feed_forward"]["experts"]
    assert stored["type"] == "expert_options" and stored["shared_d_ff"] == 7
    assert_resumes_to_the_bit(train, config, whole)
    loaded = jf.load(whole)
    assert loaded.model.config.feed_forward.experts == experts
    greedy = {"temperature": 0.0, "max_new_tokens": 5}
    text = "the sun"
    assert jf.complete(loaded, text, **greedy) == jf.complete(loaded, [text, "a"], **greedy)[0]
