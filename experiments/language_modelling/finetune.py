"""Learn a task: `python -m experiments.language_modelling.finetune --preset NAME --init_from RUN`.

RUN may also be a folder of transformers. The same command again resumes. Everything is kept in
runs/finetuning/NAME. Without files, classification asks which of ten packages a snippet of the
standard library is from.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.harness import cli, training
from experiments.harness.cli import display
from experiments.harness.runs import distributed, sample_tables
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.overlap import count_overlap, describe_overlap
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
    """The facts that rows depend on besides the examples: the labels, or the chat template."""
    batches: Rows
    splits: dict[str, Encoded]
    """validation and, where there is one, test."""

    def rows(self) -> dict[str, Any]:
        """The rows of train, validation and test."""
        held_out = {split: encoded.examples for split, encoded in self.splits.items()}
        return {"train": self.batches.examples, **held_out}

    def with_rows(self, rows: Mapping[str, Any]) -> "Prepared":
        """The same examples with other `rows`."""
        splits = {
            split: encoded._replace(examples=rows[split]) for split, encoded in self.splits.items()
        }
        batches = self.batches._replace(examples=rows["train"])
        return self._replace(batches=batches, splits=splits)


Outputs = Callable[[Any, Any], jax.Array]
"""A compiled function of (params, batch): what the model says of each row."""


def make_step(
    config: FinetuneConfig, model: Any, batch: Any, devices: Strategy
) -> training.InitAndStep:
    """The function that makes the first state, and the compiled step on batches like `batch`."""
    kind = TASKS[config.task.kind]
    loss = training.build_loss(config.training, kind.loss)(model, **kind.loss_options(config.task))
    return training.gradient_step(config, model, loss, kind.inputs(batch), devices)


def train(
    config: FinetuneConfig,
    *,
    loggers: Iterable[Logger] = (),
    make_step: training.MakeStep = make_step,
    **values: Any,
) -> TrainResult:
    """Learns the task from the newest checkpoint on, and scores the result on the test examples.

    `values` and `loggers` are as in `language_modelling.train`.
    """
    config = training.with_values(config, **values)
    kind = TASKS[config.task.kind]
    parent = finetune_start.with_start
    with training.open_run(EXPERIMENT, config, kind.scores, loggers, parent) as run:
        tokenizer = finetune_start.prepare_tokenizer(run.config, run.folder)
        data = prepare(run.config, run.folder, tokenizer)
        backbone = training.build_model(run.config, has_head=True, contact=run.contact)
        model = kind.make_model(run.config, backbone, data.facts)
        if kind.with_start is not None:
            data = data.with_rows(kind.with_start(run, model, data.rows()))
        outputs = jax.jit(kind.outputs(model))
        task = training.Task(
            model=model,
            make_step=make_step,
            batches=data.batches,
            evaluate=partial(evaluate, outputs, data),
            read_start=finetune_start.read_weights,
            evaluates_adapters=True,
            origin={"tokenizer": tokenizer_digest(run.folder)},
        )
        run, step, state = training.start(run, task)
        training.fit(run, step, state, task)
        params = training.choose_weights(run, task)
        score(outputs, data, run, params)
    return read_result(run.folder)


def prepare(config: FinetuneConfig, folder: Path, tokenizer: Tokenizer) -> Prepared:
    """Reads the examples; without files to validate with, each tenth is set aside."""
    kind, data = TASKS[config.task.kind], config.data
    with display.phase("reading the examples"), distributed.together():
        items = read_items(config)
        facts = kind.facts(config, folder, tokenizer, items["train"])
        if distributed.is_first():
            kind.write_facts(folder, facts)
        encoded = {
            split: kind.encode(config, tokenizer, examples, facts)
            for split, examples in items.items()
            if examples
        }
    assert_processes_agree({f"the {split} examples": _described(x) for split, x in items.items()})
    train = encoded.pop("train").examples
    labels = getattr(train, "labels", None)
    if labels is not None and labels.ndim != 1:  # a label for each token: nothing to balance
        labels = None
    seed = config.training.seed
    chosen = choose(len(train.example_ids), config.task.num_examples, seed, labels)
    display.say(f"{len(chosen):,} rows to learn from")
    for line in _describe_overlap(items):
        display.say(line)
    return Prepared(facts, Rows(train, chosen, data.batch_size, seed), encoded)


def _describe_overlap(items: Mapping[str, list[Any]]) -> list[str]:
    """A line for each held-out part with examples of training, or of validation."""
    held_out = {name: list(map(repr, items[name])) for name in ("validation", "test")}
    sizes = {name: len(examples) for name, examples in held_out.items()}
    trained = count_overlap(map(repr, items["train"]), held_out)
    validated = count_overlap(held_out["validation"], {"test": held_out["test"]})
    return [
        *describe_overlap(trained, sizes, "examples"),
        *describe_overlap(validated, sizes, "examples", "validated on"),
    ]


def _described(items: list[Any]) -> str:
    return described_lines([repr(item) for item in items])


def read_items(config: FinetuneConfig) -> dict[str, list[Any]]:
    """The examples of train, validation and test; `ConfigError` where files are needed."""
    kind, data = TASKS[config.task.kind], config.data
    if not data.train and kind.built_in is None:
        raise ConfigError(f"task.kind={config.task.kind!r} needs files: give --data.train FILE")
    files = {"train": data.train, "validation": data.validation, "test": data.test}
    items = {
        split: [item for path in paths for item in kind.read(config, path)]
        for split, paths in files.items()
    }
    if not data.train and kind.built_in is not None:
        items["train"] = kind.built_in("train")
        items["test"] = kind.built_in("test")
    if not items["validation"]:
        every = min(10, len(items["train"]))
        items["validation"] = items["train"][every - 1 :: every]
        items["train"] = [x for i, x in enumerate(items["train"], 1) if i % every]
    return items


def evaluate(
    outputs: Outputs, data: Prepared, run: training.OpenRun, params: Any, step: int
) -> training.EvaluationResult:
    """The scores of the validation examples."""
    scores = scored(outputs, data, run, params, "validation").scores
    names = TASKS[run.config.task.kind].scores
    return training.EvaluationResult(
        {name: scores[name.removeprefix("validation_")] for name in names}
    )


def scored(
    outputs: Outputs, data: Prepared, run: training.OpenRun, params: Any, split: str
) -> Scored:
    """The scores of the examples of `split`."""
    kind, text = TASKS[run.config.task.kind], data.splits[split]
    found = predict(outputs, params, text.examples, run.config.data.batch_size)
    return kind.score(run.config, found, text, data.facts)


def score(outputs: Outputs, data: Prepared, run: training.OpenRun, params: Any) -> None:
    """Writes and shows the scores of the test examples, and a table of them."""
    name = "test" if "test" in data.splits else "validation"
    text = data.splits[name]
    result = scored(outputs, data, run, params, name)
    if distributed.is_first():
        end = "-losses" if "nats" in result.table else ""
        table = {column: list(cells) for column, cells in result.table.items()}
        sample_tables.write_table(run.folder / "samples" / f"{name}{end}.tsv", table)
    digest = sample_tables.lines_digest([repr(item) for item in text.items])
    run.write_scores({"text": name, "text_sha256": digest, **result.scores})
    shown = "  ".join(f"{key} {value:.4g}" for key, value in result.scores.items())
    display.say(f"{name}, {len(text.items):,} examples: {shown}")
    display.say("\n" + training.describe_folder(run.folder, {}, [("language_modelling.export",)]))


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment=EXPERIMENT)
