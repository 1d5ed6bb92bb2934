"""Learn to summarise or translate: `python -m experiments.translation.finetune --init_from RUN`.

The encoder-decoder of a run, or of a folder of transformers (T5, BART, Marian), learns the pairs
of --data.train.source, and its search is scored by ROUGE or BLEU on those of --data.test.source.
The same command again resumes. Everything is kept in runs/finetuning/NAME.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import cli, training
from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.run_folder import TrainResult, read_result
from experiments.harness.training import initialization
from experiments.harness.training.rows import Rows, choose
from experiments.harness.training.training_config import text_cache
from experiments.translation import scoring
from experiments.translation.corpus import Text, open_corpus
from experiments.translation.finetune_presets import PRESETS, FinetuneConfig
from experiments.translation.scoring import search_of
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines.batching import pad_right
from jaxformer.pipelines.translation import first_ids, source_ids, with_target_language
from jaxformer.pretrained import Loaded, load_without_weights
from jaxformer.text import tokenizers
from jaxformer.text.data import PairBatch
from jaxformer.training.losses import seq2seq_loss

EXPERIMENT = "finetuning"
SCORES = {
    "rouge": ("validation_rougeLsum", "validation_rouge1", "validation_rouge2"),
    "bleu": ("validation_bleu", "validation_chrf"),
}


def main(config: FinetuneConfig) -> None:
    """The command."""
    train(config)


def make_init_and_step(
    config: FinetuneConfig, model: Any, batch: PairBatch, devices: Strategy
) -> training.InitAndStep:
    """The function that makes the first state, and the compiled step on batches like `batch`."""
    loss = training.build_loss(config.training, seq2seq_loss)(
        model, pad=config.translation.pad, label_smoothing=config.training.label_smoothing
    )
    inputs = batch.source, batch.target[:, :-1]
    return training.init_and_step(config, model, loss, inputs, devices)


def train(
    config: FinetuneConfig,
    *,
    loggers: Iterable[Logger] = (),
    make_step: Callable[..., Any] = make_init_and_step,
    **values: Any,
) -> TrainResult:
    """Learns the pairs from the newest checkpoint on, and scores the result on the test pairs.

    `values` and `loggers` are as those of `translation.train`.
    """
    config, names = training.with_values(config, **values), SCORES[config.task.metric]
    with training.open_run(EXPERIMENT, config, names, loggers, with_start) as run:
        config = run.config
        loaded = load_tokenizers(config, run.folder)
        train_text, validation, test = read_texts(config)
        pairs, seed = encode(loaded, train_text), config.training.seed
        chosen = choose(len(pairs.example_ids), config.task.num_examples, seed)

        def evaluate(params: Any, step: int) -> training.EvaluationResult:
            tuned = replace(loaded, params=params)
            scores, hypotheses = scoring.evaluate(tuned, validation, config.search)
            numbers = {f"validation_{k}": x for k, x in scores.items() if isinstance(x, float)}
            samples = scoring.chosen_samples(validation, hypotheses)
            return training.EvaluationResult(numbers, samples)

        task = training.Task(
            model=loaded.model,
            make_step=make_step,
            batches=Rows(pairs, chosen, config.task.batch_size, seed),
            evaluate=evaluate,
            read_start=lambda devices: initialization.load_start(config, devices).params,
            origin={"tokenizer": tokenizers.digest(run.folder / "tokenizer")},
        )
        run, state, step = training.start(run, task)
        training.fit(run, step, state, task)
        params = training.choose_weights(run, task, names[0])
        name, text = ("test", test) if test.source else ("validation", validation)
        tuned = replace(loaded, params=params)
        scores, hypotheses = scoring.evaluate(tuned, text, config.search)
        if distributed.is_first():
            scoring.write_samples(run.folder, name, text, hypotheses)
        run.write_scores(scoring.facts_to_repeat(config, name, text) | scores)
        display.say(scoring.describe_scores(name, scores, hypotheses, text.target))
        next_ones = [(f"translation.{command}",) for command in ("translate", "export")]
        display.say("\n" + training.describe_folder(run.folder, {}, next_ones))
    return read_result(run.folder)


def with_start(config: FinetuneConfig) -> FinetuneConfig:
    """`config` with the model and the search of what it starts from; dropout and dtype stay.

    Raises `ConfigError` for a run that starts from nothing, or from another kind of model.
    """
    loaded = load_without_weights(initialization.start_folder(config, EXPERIMENT))
    model = loaded.model
    if not isinstance(model, EncoderDecoder):
        name = type(model).__name__
        raise ConfigError(f"{config.init_from} holds a {name}, which does not translate")
    if loaded.tokenizer is None:
        raise ConfigError(f"{config.init_from} has no tokenizer.json: write one there")
    search, translation = search_of(loaded)
    search = replace(search, beam_size=config.task.beam_size or search.beam_size)
    sizes = initialization.with_sizes(config.model, model.config)
    translation = replace(translation, prefix=config.task.prefix)
    return replace(config, model=sizes, search=search, translation=translation)


def load_tokenizers(config: FinetuneConfig, folder: Path) -> Loaded:
    """The model of the run in `folder`, with the tokenizers that are copied there at first."""
    place = folder / "tokenizer"
    with distributed.together():
        if distributed.is_first() and not (place / "target.json").exists():
            start = load_without_weights(initialization.start_folder(config, EXPERIMENT))
            place.mkdir(parents=True, exist_ok=True)
            if start.tokenizer is not start.target_tokenizer:
                start.tokenizer.save(place / "source.json")
            start.target_tokenizer.save(place / "target.json")
    target = tokenizers.load(place / "target.json")
    is_joint = not (place / "source.json").exists()
    source = target if is_joint else tokenizers.load(place / "source.json")
    settings = config.search, config.translation
    return Loaded(training.build_model(config), None, source, target, settings, config)


def read_texts(config: FinetuneConfig) -> list[Text]:
    """The pairs to learn from, to validate and to test with."""
    with distributed.together():
        corpus = open_corpus(config.data, text_cache(config))
        held_out = (corpus.validation, corpus.test)
        return [corpus.train(), *(scoring.scored_text(config, text) for text in held_out)]


def encode(loaded: Loaded, text: Text) -> PairBatch:
    """The pairs as ids; a pair without a source is left out.

    Each side has the ids before and after it that the model's search uses, also where it is cut.
    """
    search, settings = with_target_language(loaded.target_tokenizer, *search_of(loaded))
    limit, task = loaded.model.config.max_len, loaded.config.task
    first = first_ids(loaded.tokenizer)
    if search.forced_bos is not None:
        first = [search.forced_bos]
    longest = min(task.source_len, limit), min(task.target_len, limit)
    sources = source_ids(text.source, loaded.tokenizer, search, settings)
    sources = [_cut(ids, longest[0]) for ids in sources]
    targets = [
        [settings.bos, *_cut([*first, *ids, search.eos[0]], longest[1])]
        for ids in loaded.target_tokenizer.encode_batch(text.target)
    ]
    pairs = [pair for pair in zip(sources, targets, strict=True) if pair[0]]
    source, target = (
        pad_right(side, len(side), length, settings.pad)
        for side, length in zip(zip(*pairs, strict=True), (longest[0], longest[1] + 1), strict=True)
    )
    return PairBatch(source, target, np.arange(len(pairs), dtype=np.int32))


def _cut(ids: list[int], length: int) -> list[int]:
    """At most `length` of `ids`, with the last one of them, which ends the text."""
    return ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment=EXPERIMENT)
