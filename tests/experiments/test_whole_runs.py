"""Whole runs on simulated pods, from the first step to the export, are those of one device.

A run is trained, validated, its checkpoints are averaged or chosen, it is scored, evaluated by its
command, translates or continues texts, is fine-tuned and exported: on one device, and on 2 of each
of two processes, which see no other device; in the full run also on 8 devices of one process, and
on 2 of each of four processes.
"""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from safetensors.numpy import load_file

from experiments.harness.runs import distributed
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.training import held_out_loss
from experiments.language_modelling import evaluate as language_evaluate
from experiments.language_modelling import export as language_export
from experiments.language_modelling import finetune as language_finetune
from experiments.language_modelling import generate
from experiments.language_modelling import train as language_train
from experiments.language_modelling.presets import LanguageConfig
from experiments.translation import evaluate, export, load_run, scoring, train, translate
from experiments.translation.presets import PRESETS, TranslationConfig
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import seq2seq_loss
from tests.experiments.tiny_runs import WORDS, changed, language_config, translation_config
from tests.two_processes import finished, free_port, start

LAYOUTS = {
    "single": "",
    "replicated": "",
    "fsdp=2,tensor=2": "fsdp=2,tensor=2",
    "fsdp=4,tensor=2": "fsdp=4,tensor=2",
}
SIZES = {"model__d_model": 24, "model__d_ff": 52, "model__num_heads": 4}
PROCESSES: dict[str, Any] = {}
"""The options that join the processes of a pod; none for one process."""
_OF_MARIAN = ("norm", "output", "embeddings", "positions")
LINES = ["sun moon star", "rain", "snow wind rain sun moon", "star star", "hill"]


def begin_translation(folder: Path) -> TranslationConfig:
    """A run in `folder`, and its texts."""
    marian = PRESETS["grammar_marian"]
    kept = {name: getattr(marian.model, name) for name in _OF_MARIAN}
    (folder / "lines.txt").write_text("\n".join(LINES) + "\n")
    return changed(
        translation_config(folder, **SIZES, name="tiny"),
        **{f"model__{name}": part for name, part in kept.items()},
        search=replace(marian.search, beam_size=3, max_new_tokens=5),
        optimizer__total_steps=10,
        optimizer__learning_rate=1e-2,
        training__save_every=5,
        training__evaluate_every=5,
        training__average_checkpoints=2,
        training__grad_accumulation=2,
    )


def finish_translation(config: TranslationConfig, folder: Path, layout: str) -> dict[str, Any]:
    """All that the run writes and prints on the devices of a layout."""
    config = placed(config, folder, layout)
    run = train.train(config).folder
    at = partial(options_of, run=run, layout=layout)
    source, output = folder / "lines.txt", folder / f"{layout}.txt"
    results = written(run) | {"samples": (run / "samples" / "test.tsv").read_text()}
    results["evaluated"] = last_json(printed(evaluate.main, at(evaluate.EvaluateOptions)))
    asked = at(translate.TranslateOptions, input=str(source), output=str(output), n_best=2)
    translate.main(asked)
    results["translated"] = output.read_text()
    loaded = load_run.load_run(run, at(RunOptions))
    text = train.prepare(loaded.config, run).validation
    sums = held_out_loss.loss_sums(seq2seq_loss, loaded, scoring._batches(loaded, text), pad=PAD)
    results["counted"] = sums["tokens"]
    exported = folder / f"{layout}-marian"
    printed(export.main, at(export.ExportOptions, out=str(exported)))
    results["exported"] = tensors(exported)
    pairs = replace(train.PRESETS["translations"], data=config.data)
    results["finetuned"] = tuned(train, pairs, run, folder, layout)
    return results


def begin_language(folder: Path) -> LanguageConfig:
    """A run in `folder`, and its texts."""
    (folder / "c.txt").write_text("\n".join(LINES * 7) + "\n")
    labels = (f"{one[:1]}\t{one} {other}\n" for one, other in pairwise(WORDS))
    (folder / "labels.tsv").write_text("".join(labels))
    return changed(
        language_config(folder, **SIZES, name="tiny"),
        prompts=("sun moon", "rain"),
        sampling__max_new_tokens=5,
        data__test=(str(folder / "c.txt"),),
    )


def finish_language(config: LanguageConfig, folder: Path, layout: str) -> dict[str, Any]:
    """All that the run writes and prints on the devices of a layout."""
    run = language_train.train(placed(config, folder, layout)).folder
    at = partial(options_of, run=run, layout=layout)
    results = written(run) | {"samples": (run / "samples" / "prompts.txt").read_text()}
    losses = (run / "samples" / "test-losses.tsv").read_text().splitlines()[1:]
    results["losses"] = [[*map(float, line.split("\t"))] for line in losses]
    results["evaluated"] = last_json(
        printed(language_evaluate.main, at(language_evaluate.EvaluateOptions, stride=7))
    )
    asked = at(generate.GenerateOptions, text=tuple(LINES), max_new_tokens=3, temperature=0.0)
    results["generated"] = printed(generate.main, asked)
    exported = folder / f"{layout}-exported"
    printed(language_export.main, at(language_export.ExportOptions, out=str(exported)))
    results["exported"] = tensors(exported)
    labels = (str(folder / "labels.tsv"),)
    task = changed(
        language_finetune.PRESETS["classification"],
        data__train=labels,
        data__validation=labels,
        data__test=labels,
        data__seq_len=17,
        data__batch_size=5,
        task__num_examples=0,
        training__lora_rank=2,
    )
    results["finetuned"] = tuned(language_finetune, task, run, folder, layout)
    return results


def placed(config: Any, folder: Path, layout: str) -> Any:
    """The run `config` in `folder`, on the devices of a layout."""
    mesh = LAYOUTS[layout]
    strategy = "sharded" if mesh else layout
    changes = {"runs": str(folder / layout), "strategy": strategy, "mesh": mesh}
    return replace(config, **changes, **PROCESSES)


def options_of(kind: Any, run: Path, layout: str, **settings: Any) -> Any:
    """The options `kind` of a command on `run`, on the devices of a layout.

    Several processes take a copy of the weights on each device unless a mesh is given.
    """
    mesh = LAYOUTS[layout]
    if layout == "replicated" and jax.process_count() == 1:
        mesh = f"data={jax.device_count()}"
    return kind(run=str(run), mesh=mesh, **settings, **PROCESSES)


def tuned(command: Any, config: Any, run: Path, folder: Path, layout: str) -> dict[str, Any]:
    """What three steps of a fine-tuning of `run` write."""
    steps = {"optimizer__warmup_steps": 1, "optimizer__total_steps": 3}
    config = changed(config, name="tuned", init_from=str(run), **steps)
    place = command.train(placed(config, folder, layout)).folder
    return written(place) | {"samples": (place / "samples" / "test.tsv").read_text()}


def written(run: Path) -> dict[str, Any]:
    """The metrics of a run but its speed, its scores, the steps of its weights, and its files."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    varying = ("tokens_per_second", "data_wait", "padding")  # empty rows are padding too
    names = ("scores.json", "weights.json")
    numbers = {name: json.loads((run / name).read_text()) for name in names}
    aside = ("checkpoints", "tensorboard")
    paths = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    return {
        **{name: {k: v for k, v in x.items() if k != "crc32"} for name, x in numbers.items()},
        "metrics": [{k: v for k, v in line.items() if k not in varying} for line in lines],
        "files": sorted(str(path) for path in paths if path.parts[0] not in aside),
        "events": len(list((run / "tensorboard").iterdir())),
    }


def printed(main: Any, options: Any) -> str:
    """The output of a command; "" in all processes but the first."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(options)
    return out.getvalue()


def last_json(text: str) -> dict[str, Any]:
    found = json.loads(text.splitlines()[-1]) if text else {}
    return {name: value for name, value in found.items() if name != "run"}


def tensors(folder: Path) -> dict[str, float]:
    """The sum of the squares of each tensor.

    Biases of keys are left out: their gradient is 0 but for rounding, which Adam makes large.
    """
    leaves = load_file(folder / "model.safetensors").items()
    return {k: float((x.astype("float64") ** 2).sum()) for k, x in leaves if "k_proj.bias" not in k}


class Pod(NamedTuple):
    """Processes that train as one. That layouts compute the same steps is tested of the package."""

    processes: int
    devices: int
    """Of each process."""
    runs: str
    """The kind and the layout of each run."""


PODS = {
    "one device": Pod(1, 1, "translation:single language:single"),
    "8 devices": Pod(1, 8, "language:fsdp=4,tensor=2"),
    "2 x 2 devices": Pod(2, 2, "translation:fsdp=2,tensor=2 language:replicated"),
    "4 x 2 devices": Pod(4, 2, "translation:fsdp=4,tensor=2 language:replicated"),
}


def begin(folder: Path, pod: Pod) -> list[subprocess.Popen]:
    """The processes of a pod, which write the results of their runs to `folder`."""
    for kind in ("translation", "language"):
        (folder / kind).mkdir(parents=True)
    port = free_port() if pod.processes > 1 else 0
    words = [__file__, folder, pod.runs, port, pod.processes]
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return [
        start(*words, index, devices=pod.devices, environment=quick)
        for index in range(pod.processes)
    ]


def results(folder: Path, pods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The results of each pod by the names of its runs, which are made in `folder`."""
    folders = {pod: folder / pod for pod in pods}
    processes = [process for pod, folder in folders.items() for process in begin(folder, PODS[pod])]
    finished(*processes, timeout=1_200)
    return {
        pod: {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
        for pod, folder in folders.items()
    }


def differences(found: Any, expected: Any, name: str) -> Iterator[str]:
    """The names of numbers that differ by more than 1e-6, relatively, and of what is not equal."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in found.keys() | expected.keys():
            yield from differences(found.get(key), expected.get(key), f"{name}/{key}")
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, pair in enumerate(zip(found, expected, strict=True)):
            yield from differences(*pair, f"{name}/{index}")
    elif isinstance(found, float):
        # The norm of a gradient is that of a state some steps after the first.
        if found != pytest.approx(expected, rel=1e-5 if name.endswith("grad_norm") else 1e-6):
            yield f"{name} is {found} for {expected}"
    elif found != expected:
        yield f"{name} is {found} for {expected}"


@pytest.mark.slow
def test_a_whole_run_on_many_devices_writes_and_prints_what_one_device_does(tmp_path):
    pods = ["8 devices", "2 x 2 devices", "4 x 2 devices"]
    found = results(tmp_path, ["one device", *pods])
    expected = {name.split(":")[0]: run for name, run in found.pop("one device").items()}
    assert {pod: {*runs} for pod, runs in found.items()} == {
        pod: {*PODS[pod].runs.split()} for pod in pods
    }
    for pod, runs in found.items():
        for case, run in runs.items():
            kind = case.split(":")[0]
            assert len(run) >= 8 and run.keys() <= expected[kind].keys()
            alone = {name: expected[kind][name] for name in run}
            assert not [*differences(run, alone, f"{pod}, {case}")]
            assert_each_item_is_scored_once(kind, run)


def assert_each_item_is_scored_once(kind: str, run: dict[str, Any]) -> None:
    """Asserts that no line or token is left out or counted twice where rows are divided."""
    if kind == "translation":
        assert run["counted"] == 3 * (3 + 1)  # three lines of three words, each with its end
        rows = [row.split("\t") for row in run["samples"].splitlines()[1:]]
        assert [source for source, *_ in rows] == ["sun sun sun", "sun sun moon"]
        numbers = [line.split("\t")[0] for line in run["translated"].splitlines()]
        assert numbers == [str(number) for number in range(1, 6) for _ in range(2)]
    else:
        tokens = run["scores.json"]["tokens"]
        assert tokens == sum(count for _, count in run["losses"]) == run["evaluated"]["tokens"]


if __name__ == "__main__":
    target, work = Path(sys.argv[1]), sys.argv[2]
    port, count, number = map(int, sys.argv[3:])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    if count > 1:
        address = f"127.0.0.1:{port}"
        PROCESSES |= {"coordinator": address, "num_processes": count, "process_id": number}
    with distributed.joined(RunOptions(**PROCESSES)):
        runs = {"translation": begin_translation, "language": begin_language}
        runs = {kind: begin(target / kind) for kind, begin in runs.items()}
        distributed.wait("texts")  # every process has written the same ones
        finish = {"translation": finish_translation, "language": finish_language}
        for case in work.split():
            kind, layout = case.split(":")
            found = finish[kind](runs[kind], target / kind, layout)
            if distributed.is_first():
                (target / f"{case}.json").write_text(json.dumps(found))
