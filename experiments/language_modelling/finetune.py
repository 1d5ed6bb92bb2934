"""Learn a task: `python -m experiments.language_modelling.finetune --preset NAME --init_from RUN`.

RUN may also be a folder of transformers. The same command again resumes. Everything is kept in
runs/finetuning/NAME. Without files, classification asks which of ten packages a snippet of the
standard library is from.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.harness import cli, training
from experiments.harness.cli import display
from experiments.harness.runs import distributed, sample_tables
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.run_folder import TrainResult, read_result
from experiments.harness.runs.shared_inputs import described_lines
from experiments.harness.training.rows import Rows, choose, predict
from experiments.language_modelling import finetune_start
from experiments.language_modelling.finetune_presets import PRESETS, FinetuneConfig
from experiments.language_modelling.prepare import tokenizer_digest
from experiments.language_modelling.tasks import TASKS, Encoded, Scored
from jaxformer.distributed import Strategy, assert_processes_agree
from jaxformer.errors import ConfigError
from jaxformer.text.tokenizers import Tokenizer

EXPERIMENT = "finetuning"


def main(config: FinetuneConfig) -> None:
    """The command."""
    train(config)


class Prepared(NamedTuple):
    """The examples as rows of ids."""

    facts: Any
    """What the rows depend on besides the examples: the labels, or the chat template."""
    batches: Rows
    parts: dict[str, Encoded]
    """validation and, where there is one, test."""


def make_init_and_step(
    config: FinetuneConfig, model: Any, batch: Any, devices: Strategy
) -> training.InitAndStep:
    """The function that makes the first state, and the compiled step on batches like `batch`."""
    task = TASKS[config.task.kind]
    loss = training.build_loss(config.training, task.loss)(model)
    return training.init_and_step(config, model, loss, task.inputs(batch), devices)


def train(
    config: FinetuneConfig,
    *,
    loggers: Iterable[Logger] = (),
    make_step: Callable[..., Any] = make_init_and_step,
    **values: Any,
) -> TrainResult:
    """Learns the task from the newest checkpoint on, and scores the result on the test examples.

    `values` and `loggers` are as those of `language_modelling.train`.
    """
    config, kind = training.with_values(config, **values), TASKS[config.task.kind]
    sizes = finetune_start.with_start
    with training.open_run(EXPERIMENT, config, kind.SCORES, loggers, sizes) as run:
        tokenizer = finetune_start.prepare_tokenizer(run.config, run.folder)
        data = prepare(run.config, run.folder, tokenizer)
        backbone = training.build_model(run.config, has_head=True, contact=run.contact)
        model = kind.make_model(run.config, backbone, data.facts)
        outputs = jax.jit(kind.outputs(model))

        def scored(params: Any, text: Encoded) -> Scored:
            size = run.config.data.batch_size
            return kind.score(
                run.config, predict(outputs, params, text.examples, size), text, data.facts
            )

        def evaluate(params: Any, step: int) -> training.EvaluationResult:
            scores = scored(params, data.parts["validation"]).scores
            return training.EvaluationResult({name: scores[name[11:]] for name in kind.SCORES})

        task = training.Task(
            model=model,
            make_step=make_step,
            batches=data.batches,
            evaluate=evaluate,
            read_start=partial(finetune_start.read_weights, run.config),
            origin={"tokenizer": tokenizer_digest(run.folder)},
        )
        run, state, step = training.start(run, task)
        training.fit(run, step, state, task)
        params = training.choose_weights(run, task)
        name = "test" if "test" in data.parts else "validation"
        score(run, name, scored(params, data.parts[name]), data.parts[name])
    return read_result(run.folder)


def prepare(config: FinetuneConfig, folder: Path, tokenizer: Tokenizer) -> Prepared:
    """Reads the examples; without files to validate with, each tenth is set aside."""
    kind, data = TASKS[config.task.kind], config.data
    files = {"train": data.train, "validation": data.validation, "test": data.test}
    if not data.train and config.task.kind != "classification":
        raise ConfigError(f"task.kind={config.task.kind!r} needs files: give --data.train FILE")
    with distributed.together():
        items = {
            part: [item for path in paths for item in kind.read(config, path)]
            for part, paths in files.items()
        }
        if not data.train:
            items |= {part: kind.built_in(part) for part in ("train", "test")}
        if not items["validation"]:
            every = min(10, len(items["train"]))
            items["validation"] = items["train"][every - 1 :: every]
            items["train"] = [x for i, x in enumerate(items["train"], 1) if i % every]
        facts = kind.facts(config, folder, tokenizer, items["train"])
        if distributed.is_first():
            kind.write_facts(folder, facts)
        encode = partial(kind.encode, config, tokenizer, facts=facts)
        encoded = {part: encode(some) for part, some in items.items() if some}
    assert_processes_agree({f"the {part} examples": _described(x) for part, x in items.items()})
    train = encoded.pop("train").examples
    seed, labels = config.training.seed, getattr(train, "labels", np.zeros((0, 2)))
    chosen = choose(
        len(train.example_ids), config.task.num_examples, seed, labels if labels.ndim == 1 else None
    )
    display.say(f"{len(chosen):,} rows to learn from")
    return Prepared(facts, Rows(train, chosen, data.batch_size, seed), encoded)


def _described(items: list[Any]) -> str:
    return described_lines([repr(item) for item in items])


def score(run: training.OpenRun, name: str, scored: Scored, text: Encoded) -> None:
    """Writes and shows the scores of the part `name`, and a table of its examples."""
    if distributed.is_first():
        end = "-losses" if "nats" in scored.table else ""
        table = {column: list(cells) for column, cells in scored.table.items()}
        sample_tables.write_table(run.folder / "samples" / f"{name}{end}.tsv", table)
    digest = sample_tables.lines_digest([repr(item) for item in text.items])
    run.write_scores({"text": name, "text_sha256": digest, **scored.scores})
    said = "  ".join(f"{key} {value:.4g}" for key, value in scored.scores.items())
    display.say(f"{name}, {len(text.items):,} examples: {said}")
    display.say("\n" + training.describe_folder(run.folder, {}, [("language_modelling.export",)]))


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment=EXPERIMENT)
