"""Learn to summarise or translate: `python -m experiments.translation.finetune --run RUN`.

The encoder-decoder of a run, or of a folder of transformers (T5, BART, Marian), learns the pairs
of --train.source. Its search is scored by ROUGE or BLEU on those of --test.source, before and
after.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import cli
from experiments.harness.runs import distributed
from experiments.harness.runs.decoding_options import DecodingOptions
from experiments.harness.runs.run_files import write_lines
from experiments.harness.training import finetuning
from experiments.harness.training.finetuning import (
    Examples,
    LabelledBatch,
    check_count,
    make_trainer,
    padded,
    result_folder,
)
from experiments.harness.training.training_config import OptimizerConfig, text_cache
from experiments.translation.corpus import Text, open_corpus, read_files
from experiments.translation.evaluate import score_summaries
from experiments.translation.load_run import Translator, load_run, load_translator
from experiments.translation.presets import Files
from jaxformer.config import Fraction, Natural, Range, Seed
from jaxformer.errors import ConfigError
from jaxformer.pipelines import translate
from jaxformer.pipelines.translation import first_ids, source_ids
from jaxformer.pretrained import is_pretrained, save_pretrained
from jaxformer.pretrained.saving import check_savable
from jaxformer.text.data import PairBatch
from jaxformer.text.metrics import score_translations
from jaxformer.training.losses import Loss, seq2seq_loss


@dataclass(frozen=True)
class FinetuneOptions(finetuning.FinetuneOptions):
    """The run, the pairs of texts, and how to learn from them."""

    run: str = "runs/translation/grammar"
    """The folder of a run, or of pretrained weights."""
    train: Files = Files()
    """Files to learn from; none: the training text of the run."""
    test: Files = Files()
    """Files to test with; none: the test text of the run."""
    num_test: Natural = 0
    """Pairs to test with, the first ones; 0: all."""
    prefix: str = ""
    """Written before each source, such as the "summarize: " of T5."""
    source_len: Annotated[int, Range(3)] = 128
    """Longest source in tokens; the rest of a longer one is cut off."""
    target_len: Annotated[int, Range(3)] = 64
    """Longest target in tokens; the rest of a longer one is cut off."""
    label_smoothing: Fraction = 0.0
    """Share of the probability that is spread over all tokens."""
    metric: Literal["rouge", "bleu"] = "rouge"
    """rouge: ROUGE-1, -2 and -L of summaries. bleu: cased BLEU and chrF of translations."""
    language: str = ""
    """Code of the language of the targets, which chooses the words that BLEU counts (zh, ja, ko);
    empty: words with spaces between them."""
    beam_size: Natural = 0
    """Beam size of the test; 0: that of the run or folder."""
    seed: Seed = 0
    """Seed of the chosen pairs, the order of the batches, and dropout."""
    optimizer: OptimizerConfig = OptimizerConfig(
        schedule="linear",
        learning_rate=3e-4,
        warmup_steps=20,
        total_steps=300,
        min_lr_ratio=0.0,
        grad_clip_norm=1.0,
        weight_decay=0.01,
    )
    """The optimizer, and how many steps it takes."""

    def __post_init__(self):
        super().__post_init__()
        if bool(self.train.source) != bool(self.test.source):
            raise ConfigError(
                f"pairs are needed to learn from and to test with, but train.source="
                f"{self.train.source!r} and test.source={self.test.source!r} were given: give both"
            )


PRESETS = {
    "summaries": FinetuneOptions(),
    "translations": replace(FinetuneOptions(), metric="bleu"),
}


@distributed.joins
def main(options: FinetuneOptions) -> None:
    """Prints the scores before and after, and writes them to finetune.json."""
    sides = options.train, options.test
    files = [name for side in sides for name in (side.source, side.target)]
    folder = result_folder(options, "translation", *files)
    decoding = DecodingOptions(beam_size=options.beam_size)
    loaded = load_translator(options.folder, options, decoding)
    if options.save:
        check_savable(loaded.model)
    train, test = read_texts(options)
    scores = {"before": score(options, loaded, test)[0]}
    print(f"before: {describe(scores['before'])}; {len(train.source)} pairs", flush=True)
    loaded = replace(loaded, params=fine_tune(options, loaded, train))
    scores["after"], hypotheses = score(options, loaded, test)
    print(f"after {options.optimizer.total_steps} steps: {describe(scores['after'])}")
    if options.save:
        save(options, loaded)
    if distributed.is_first():
        folder.mkdir(parents=True, exist_ok=True)
        record = {"options": asdict(options), **scores}
        (folder / "finetune.json").write_text(json.dumps(record, indent=2) + "\n")
        if options.output:
            write_lines(options.output, hypotheses)


def read_texts(options: FinetuneOptions) -> tuple[Text, Text]:
    """The pairs to learn from and to test with, each source after the prefix.

    Raises `ConfigError` for pretrained weights without files, and for a `num_train` above the
    number of pairs.
    """
    if options.train.source:
        parts = read_files(options.train), read_files(options.test)
    elif is_pretrained(options.run):
        raise ConfigError(f"{options.run} has no text: give --train.source and --test.source")
    else:
        config = load_run(options.folder, options).config
        corpus = open_corpus(config.data, text_cache(config))
        parts = corpus.train(), corpus.test if corpus.test.source else corpus.validation
    train, test = (
        Text([options.prefix + line for line in part.source], list(part.target))
        for part in parts
        if part is not None
    )
    check_count(options, len(train.source), "pairs")
    return train, Text(*(side[: options.num_test or None] for side in test))


def encode(options: FinetuneOptions, loaded: Translator, text: Text) -> Examples:
    """The pairs as ids: `tokens` are the sources, `labels` [N, T + 1] the targets.

    Each side has the ids before and after it that the model's search uses, also where it is cut.
    """
    search, settings = loaded.settings
    limit = loaded.model.config.max_len
    first = first_ids(loaded.tokenizer)
    if search.forced_bos is not None:
        first = [search.forced_bos]
    longest = min(options.source_len, limit), min(options.target_len, limit)
    sources = source_ids(text.source, loaded.tokenizer, search, settings)
    sources = [_cut(ids, longest[0]) for ids in sources]
    targets = [
        [settings.bos, *_cut([*first, *ids, search.eos[0]], longest[1])]
        for ids in loaded.target_tokenizer.encode_batch(text.target)
    ]
    pairs = [pair for pair in zip(sources, targets, strict=True) if pair[0]]
    labels = np.full((len(pairs), longest[1] + 1), settings.pad, np.int32)
    for row, (_, ids) in zip(labels, pairs, strict=True):
        row[: len(ids)] = ids
    return padded([ids for ids, _ in pairs], labels, settings.pad, longest[0])


def fine_tune(options: FinetuneOptions, loaded: Translator, text: Text) -> Any:
    """The parameters after the last step, adapters merged; `Diverged` where they are not finite."""
    trainer = make_trainer(options, _pair_loss(options, loaded), loaded.model)
    examples, rng = encode(options, loaded, text), jax.random.key(options.seed)
    return trainer.train(loaded.params, examples, options.seed, rng)


def score(
    options: FinetuneOptions, loaded: Translator, text: Text
) -> tuple[dict[str, Any], list[str]]:
    """The scores of what the model makes of the sources, and its texts; a long source is cut."""
    limit = min(options.source_len, loaded.model.config.max_len)
    tokenizer = loaded.tokenizer
    ids = source_ids(text.source, tokenizer, *loaded.settings)
    lines = [
        line if len(row) <= limit else tokenizer.decode(row[: limit - 1])
        for line, row in zip(text.source, ids, strict=True)
    ]
    hypotheses = [best[0].text for best in translate(loaded, lines, details=True)]
    if options.metric == "rouge":
        return score_summaries(hypotheses, text.target), hypotheses
    return score_translations(hypotheses, text.target, options.language)._asdict(), hypotheses


def describe(scores: dict[str, Any]) -> str:
    """The numbers of `scores` with their names."""
    return "  ".join(f"{name} {x:.2f}" for name, x in scores.items() if isinstance(x, float))


def save(options: FinetuneOptions, loaded: Translator) -> None:
    """Writes the model as a folder of transformers, with the ids that its search uses."""
    search, settings = loaded.settings
    ids = {"decoder_start_token_id": settings.bos, "pad_token_id": settings.pad}
    ids |= {"eos_token_id": search.eos[0]}
    model, params, tokenizer = loaded.model, loaded.params, loaded.tokenizer
    save_pretrained(options.save, model, params, tokenizer, token_ids=ids, generation=search)


def _pair_loss(options: FinetuneOptions, loaded: Translator) -> Loss:
    pad = loaded.settings[1].pad
    loss = seq2seq_loss(loaded.model, pad=pad, label_smoothing=options.label_smoothing)

    def of_batch(params: Any, batch: LabelledBatch, rng: jax.Array | None) -> Any:
        target = jnp.where(batch.loss_mask[:, None], batch.labels, pad)
        return loss(params, PairBatch(batch.tokens, target, batch.example_ids), rng)

    return of_batch


def _cut(ids: list[int], length: int) -> list[int]:
    """At most `length` of `ids`, with the last one of them, which ends the text."""
    return ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
