"""Runs on several texts with shares: what is read how often, resumed, measured, and refused."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.harness.runs.shares import shares_of
from experiments.language_modelling import evaluate, prepare, train
from jaxformer.errors import ConfigError
from jaxformer.text import tokenizers
from tests.experiments.commands import call, metrics_of
from tests.experiments.tiny_runs import WORDS, language_config
from tests.text.test_id_files import write_llm_c
from tests.two_processes import finished, start


def mixed_config(folder: Path, name: str = "mixed", **changes):
    """A run on a.txt, on b.txt in reverse order, and on records."""
    records = [json.dumps({"text": " ".join(WORDS[i:] + WORDS[:i])}) for i in range(7)]
    (folder / "c.jsonl").write_text("\n".join(records) + "\n")
    names = [str(folder / name) for name in ("a.txt=0.5", "b.txt=0.3", "c.jsonl=0.2")]
    changes = {"data__train": tuple(names), "data__batch_size": 4} | changes
    return language_config(folder, name=name, **changes)


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory):
    """The folder of a finished run on three texts, its configuration, and what it wrote."""
    folder = tmp_path_factory.mktemp("mixture")
    config = mixed_config(folder)
    done = call(train, config)
    assert done.code == 0, done.err
    return Path(config.runs) / "language_modelling" / "mixed", config, done


def test_the_log_says_how_often_each_text_was_read_and_each_validates_by_itself(mixed_run):
    folder, config, done = mixed_run
    for name, share in (("a.txt", "0.5"), ("b.txt", "0.3"), ("c.jsonl", "0.2")):
        pattern = rf"{name}: {share} of the rows, read (\d\.\d\d) times in 4 steps"
        assert len(re.findall(pattern, done.out)) == 2  # before the training, and after it
    lines = metrics_of(folder, "validation_loss")
    assert [line["step"] for line in lines] == [2, 4]
    prepared = prepare.prepare(config, folder)
    for line in lines:
        losses = {name: line[f"validation_{name}.loss"] for name in ("a.txt", "b.txt", "c.jsonl")}
        counts = [len(text.validation.tokens.ids) for text in prepared.mixture]
        assert min(losses.values()) < line["validation_loss"] < max(losses.values())
        assert min(counts) > 2 and len(set(losses.values())) == 3
        for text in prepared.mixture:
            stream = prepared.batches.sources[text.name]
            rows = round(line[f"{text.name}.passes"] * stream.rows_per_epoch)
            assert abs(rows - line["step"] * 4 * text.share) < 1


def test_a_run_on_a_mixture_resumes_with_the_same_batches(mixed_run, tmp_path):
    folder, config, _ = mixed_run
    copy = shutil.copytree(folder, folder.parent / "resumed")
    last = max(path for path in (copy / "checkpoints").iterdir() if path.name.isdigit())
    shutil.rmtree(last)
    again = call(train, replace(config, name="resumed"))
    assert again.code == 0 and "from step 2 to 4" in again.out, again.err
    assert metrics_of(copy) == metrics_of(folder)


def config_with_ids(folder: Path, name: str, **changes):
    """A run on a.txt and on two shards of ids, made with the tokenizer of the run `mixed`."""
    config = mixed_config(folder, name=name)
    path = Path(config.runs) / "language_modelling" / "mixed" / "tokenizer" / "tokenizer.json"
    tokenizer = tokenizers.load(path)
    for shard, count in enumerate((40, 23)):
        ids = np.concatenate([tokenizer.encode(" ".join(WORDS[shard:])) + [2]] * count)
        write_llm_c(folder / f"ids_{shard}.bin", ids)
    changes |= {"data__document_id": 2, "data__tokenizer": str(path)}
    return mixed_config(
        folder,
        name=name,
        data__train=(config.data.train[0], f"{folder}/ids_*.bin=0.5"),
        **changes,
    )


TRAIN = """
import sys
from pathlib import Path
from experiments.harness import cli
from experiments.language_modelling import train
from tests.experiments.test_mixtures import config_with_ids, mixed_config
folder, name, strategy = sys.argv[1:]
make = config_with_ids if name.startswith("ids") else mixed_config
config = make(Path(folder), name=name, strategy=strategy)
sys.exit(cli.run(lambda: train.main(config)))
"""


@pytest.mark.long
@pytest.mark.parametrize("has_ids", [pytest.param(False, marks=pytest.mark.slow), True])
def test_four_devices_go_on_with_the_mixture_that_one_device_began(mixed_run, has_ids):
    one, config, _ = mixed_run
    texts, name = Path(config.runs).parent, "four"
    if has_ids:
        done, name = call(train, config_with_ids(texts, "ids")), "ids-four"
        assert done.code == 0 and "ids_*.bin: 0.5 of the rows" in done.out, done.err
        one = one.parent / "ids"
    four = shutil.copytree(one, one.parent / name)
    saved = (four / "checkpoints").iterdir()
    shutil.rmtree(max(path for path in saved if path.name.isdigit()))
    (done,) = finished(start("-c", TRAIN, texts, name, "replicated", devices=4))
    assert "from step 2 to 4" in done.out
    for line, other in zip(metrics_of(one), metrics_of(four), strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-5, err_msg=name)


def test_a_mixture_of_a_run_is_measured_by_its_parts(mixed_run):
    folder, _, _ = mixed_run
    done = call(evaluate, {"--run": folder, "--part": "validation"})
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    kept = json.loads((folder / "scores.json").read_text())
    assert found["nats"] == kept["nats"] and found["text_sha256"] == kept["text_sha256"]
    assert found["validation-2.loss"] == kept["b.txt.loss"]


def test_text_and_ids_are_mixed_and_the_ids_need_their_tokenizer(mixed_run, tmp_path):
    folder, _, _ = mixed_run
    tokenizer = prepare.load_tokenizer(folder)
    ids = np.concatenate([tokenizer.encode(" ".join(WORDS)) + [2]] * 40)
    write_llm_c(tmp_path / "ids_0.bin", ids)
    config = mixed_config(tmp_path, data__document_id=2)
    texts = (*config.data.train[:2], f"{tmp_path}/ids_*.bin=1")
    data = replace(config.data, train=texts)
    with pytest.raises(ConfigError, match="tokenizer='bpe' .*ids_0.bin"):
        prepare.prepare(replace(config, data=data), tmp_path / "run")
    data = replace(data, tokenizer=str(folder / "tokenizer" / "tokenizer.json"))
    prepared = prepare.prepare(replace(config, data=data), tmp_path / "run")
    assert [text.name for text in prepared.mixture] == ["a.txt", "b.txt", "ids_*.bin"]
    assert prepared.mixture[2].train.amount is None
    assert prepared.batches.batch(0).segments is not None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.txt=0.5", "b.txt"], "b.txt"),
        (["a.txt=0.5", "a.txt=0.5"], "a text of a.txt, a.txt"),
        (["a.txt=0", "b.txt=1"], "share of a.txt is 0.0"),
        (["a.txt=1", "b.txt=inf"], "share of b.txt is inf"),
    ],
)
def test_shares_of_part_of_the_texts_are_refused(names, message):
    with pytest.raises(ConfigError, match=message):
        shares_of(names)


def test_a_file_whose_name_looks_like_a_share_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a=0.5").write_text("sun\n")
    assert shares_of(["a=0.5"]) == {}
    assert shares_of(["b=0.5"]) == {"b": 0.5}
    assert shares_of(["lr=x.txt", "hf:a/b@train"]) == {}


def test_validation_files_belong_to_the_texts_in_their_order(tmp_path):
    config = mixed_config(tmp_path)
    one = replace(config.data, validation=(str(tmp_path / "a.txt"),))
    with pytest.raises(ConfigError, match="3 training texts"):
        prepare.prepare(replace(config, data=one), tmp_path / "run")
    names = tuple(str(tmp_path / name) for name in ("b.txt", "a.txt", "a.txt"))
    prepared = prepare.prepare(
        replace(config, data=replace(config.data, validation=names)), tmp_path / "run"
    )
    first, second, third = prepared.mixture
    assert first.validation.tokens.ids[:].tolist() == second.train.tokens.ids[:].tolist()
    assert second.validation.tokens.fingerprint == third.validation.tokens.fingerprint
