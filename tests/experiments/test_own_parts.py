"""A block, attention function, position scheme, loss and schedule of a user, in every command.

What a run was trained with is what every later command uses: to the bit the logits of the model
that was trained, applied to the same parameters.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from experiments import plan
from experiments.harness import cli
from experiments.harness.runs.run_files import read_table
from experiments.language_modelling import evaluate
from experiments.language_modelling import load_run as language_run
from experiments.language_modelling import prepare as language_prepare
from experiments.language_modelling import train as language_train
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.translation import evaluate as score_text
from experiments.translation import load_run as translation_run
from experiments.translation import train as translation_train
from experiments.translation import translate
from experiments.translation.presets import PRESETS as TRANSLATION_PRESETS
from jaxformer import pipelines
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.pipelines.batching import pad_right
from jaxformer.text.data import PairBatch
from jaxformer.text.tokenizers import BOS, EOS, PAD
from jaxformer.training.losses import causal_loss, seq2seq_loss
from tests.experiments import own_parts
from tests.experiments.commands import metrics_of
from tests.experiments.tiny_runs import WORDS

pytestmark = pytest.mark.long

HERE = "tests.experiments.own_parts"
OWN = f"""--training.block {HERE}:OwnBlock --training.attention_fn {HERE}:cosine_attention
    --model.positions {HERE}:OwnPositions"""
SIZES = """
    --name own --model.d_model 14 --model.d_ff 22 --model.num_heads 2
    --model.num_decoder_layers 1 --optimizer.name adam
    --optimizer.schedule constant --optimizer.learning_rate 0.1 --optimizer.warmup_steps 1
    --optimizer.total_steps 7 --training.save_every 5 --training.evaluate_every 5
"""
LANGUAGE = f"""{SIZES} {OWN} --model.vocab_size 283 --model.max_len 23 --data.seq_len 19
    --data.batch_size 3 --training.average_checkpoints 2 --sampling.max_new_tokens 11
    --completion.overflow refuse --prompts sun
"""
TRANSLATION = f"""{SIZES} {OWN} --model.vocab_size 283 --model.max_len 31
    --model.num_encoder_layers 1 --data.batch_tokens 128 --data.buckets 1
    --training.average_checkpoints 1 --training.metrics {HERE}:words
"""
PARTS = own_parts.cosine_attention, own_parts.OwnBlock


def called(main, *words):
    """The output of a command; it must end well."""
    done = cli.run(main)
    assert done == 0, words


def lines_of(rng, count):
    return [" ".join(rng.choice(WORDS, rng.integers(2, 7))) for _ in range(count)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Files of lines to train on and to validate, and labelled ones."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(5)
    for name, count in (("train", 83), ("validation", 7)):
        lines = lines_of(rng, count)
        (folder / f"{name}.en").write_text("\n".join(lines) + "\n")
        (folder / f"{name}.de").write_text("\n".join(line[::-1] for line in lines) + "\n")
        labelled = (f"{line.split()[0] < 'n'}\t{line}\n" for line in lines)
        (folder / f"{name}.tsv").write_text("".join(labelled))
    return folder


@pytest.fixture(scope="module")
def language(text, tmp_path_factory):
    """A causal run with a block and an attention function of its own, and the model it trained."""
    runs = tmp_path_factory.mktemp("runs")
    data = f"--data.train {text}/train.en --data.validation {text}/validation.en --runs {runs}"
    words = f"{LANGUAGE} {data}".split()
    config = cli.parse(LANGUAGE_PRESETS, words)
    called(lambda: language_train.main(config), words)
    loaded = language_run.load_run(runs / "language_modelling" / "own")
    model = DecoderOnly(loaded.model.config, *PARTS)
    folder = runs / "language_modelling" / "own"
    return SimpleNamespace(folder=folder, words=words, config=config, loaded=loaded, model=model)


@pytest.fixture(scope="module")
def translation(text, tmp_path_factory):
    """The same of a translation."""
    runs = tmp_path_factory.mktemp("runs")
    parts = (
        f"--data.{part}.{side} {text}/{part}.{suffix}"
        for part in ("train", "validation")
        for side, suffix in (("source", "en"), ("target", "de"))
    )
    words = f"{TRANSLATION} --runs {runs} {' '.join(parts)}".split()
    config = cli.parse(TRANSLATION_PRESETS, words)
    called(lambda: translation_train.main(config), words)
    folder = runs / "translation" / "own"
    loaded = translation_run.load_run(folder)
    model = EncoderDecoder(loaded.model.config, *PARTS)
    return SimpleNamespace(folder=folder, words=words, config=config, loaded=loaded, model=model)


def same_logits(run, *inputs):
    """The loaded model is the trained one, and the library's own is another."""
    apply = {"params": run.loaded.params}
    expected = np.asarray(run.model.apply(apply, *inputs))
    np.testing.assert_array_equal(run.loaded.model.apply(apply, *inputs), expected)
    plain = type(run.model)(run.model.config).apply(apply, *inputs)
    assert np.abs(plain - expected).max() > 1e-2, "or this proves nothing"


def likelihood(run, params, name):
    """Nats and tokens of the part `name` of a causal run's text, by the model that was trained."""
    text = language_prepare.open_encoded(run.folder, name, run.loaded.tokenizer)
    judged = language_train.objective(run.config)
    sums = [
        jax.jit(causal_loss(run.model))(params, batch, None)
        for batch in judged.iterate_once(text.tokens, run.loaded.tokenizer, run.config, 19)
    ]
    return [sum(map(float, column)) for column in zip(*sums, strict=True)]


def test_the_record_names_what_a_run_was_built_with(language, translation):
    for run in (language, translation):
        config = json.loads((run.folder / "config.json").read_text())
        training = config["training"]
        assert training["block"] == f"{HERE}:OwnBlock"
        assert training["attention_fn"] == f"{HERE}:cosine_attention"
        assert config["model"]["positions"]["type"] == f"{HERE}:OwnPositions"


def test_a_loaded_model_has_the_logits_of_the_trained_one(language, translation, rng):
    source, target = (rng.integers(4, 283, (2, length), np.int32) for length in (7, 11))
    same_logits(language, target)
    same_logits(translation, source, target)


def test_a_language_model_is_validated_selected_and_scored_as_it_was_trained(language, capsys):
    checkpoints = Checkpoints(language.folder / "checkpoints")
    (validation,) = metrics_of(language.folder, "validation_loss")
    nats, tokens = likelihood(language, checkpoints.restore_params(5), "validation")
    assert validation["step"] == 5 and validation["validation_loss"] == nats / tokens
    chosen = json.loads((language.folder / "weights.json").read_text())
    nats, tokens = likelihood(language, language.loaded.params, "validation")
    assert chosen["validation_loss"] == nats / tokens
    options = evaluate.EvaluateOptions(run=str(language.folder), part="train")
    called(lambda: evaluate.main(options))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = likelihood(language, language.loaded.params, "train")
    assert [found["nats"], found["tokens"]] == expected


def test_a_plan_counts_the_parameters_of_the_block_given(language, translation, capsys):
    for experiment, run in (("language_modelling", language), ("translation", translation)):
        words = ["--experiment", experiment, *run.words]
        config = cli.parse(plan.presets_of(experiment), words)
        called(lambda config=config: plan.main(config))
        count = sum(leaf.size for leaf in jax.tree.leaves(run.loaded.params))
        assert f"parameters          {count:,}\n" in capsys.readouterr().out


def test_a_translation_is_validated_and_scored_by_the_model_that_was_trained(
    translation, text, tmp_path
):
    loaded = translation.loaded
    lines = (text / "validation.en").read_text().splitlines()

    def expected(params, search):
        settings = search, loaded.config.translation
        system = replace(loaded, model=translation.model, params=params)
        return pipelines.translate(system, lines, *settings)

    checkpoints = Checkpoints(translation.folder / "checkpoints")
    samples = read_table(translation.folder / "samples" / "validation-5.tsv")
    greedy = replace(loaded.config.search, beam_size=1)
    assert samples["model"] == expected(checkpoints.restore_params(5), greedy)
    best = expected(loaded.params, loaded.config.search)
    options = {"run": str(translation.folder), "output": str(tmp_path / "out.txt")}
    source, target = (str(text / f"validation.{side}") for side in ("en", "de"))
    called(
        lambda: score_text.main(score_text.EvaluateOptions(source=source, target=target, **options))
    )
    assert (tmp_path / "out.txt").read_text().splitlines() == best
    called(lambda: translate.main(translate.TranslateOptions(input=source, **options)))
    assert (tmp_path / "out.txt").read_text().splitlines() == best


def test_a_metric_of_ones_own_is_computed_of_the_translations(translation):
    (logged,) = metrics_of(translation.folder, "validation_words")
    scored = json.loads((translation.folder / "scores.json").read_text())["words"]
    for name, found in (("validation-5", logged["validation_words"]), ("validation", scored)):
        made = read_table(translation.folder / "samples" / f"{name}.tsv")["model"]
        assert found == sum(len(text.split()) for text in made) / len(made)


def test_a_loss_and_a_schedule_of_ones_own_are_learned_by(language, tmp_path):
    more = f"--training.loss {HERE}:doubled_loss --optimizer.schedule {HERE}:halving"
    words = [*language.words, *more.split(), "--runs", str(tmp_path)]
    words += "--optimizer.total_steps 1 --training.log_every 1 --training.evaluate_every 1".split()
    config = cli.parse(LANGUAGE_PRESETS, words)
    called(lambda: language_train.main(config), words)
    folder = tmp_path / "language_modelling" / "own"
    record = json.loads((folder / "config.json").read_text())
    assert record["training"]["loss"] == f"{HERE}:doubled_loss"
    assert record["optimizer"]["schedule"] == f"{HERE}:halving"
    prepared = language_prepare.prepare(config, folder)
    batch = prepared.batches.batch(0)
    init_rng, rng = jax.random.split(jax.random.key(0))
    params = language.model.init(init_rng, batch.tokens[:2, :-1])["params"]
    value, slope = jax.value_and_grad(
        lambda p: own_parts.doubled_loss(language.model)(p, batch, rng)[0] / batch.loss_mask.sum()
    )(params)
    logged = {name: number for line in metrics_of(folder) for name, number in line.items()}
    assert logged["loss"] == pytest.approx(float(value), rel=1e-5)
    labels = batch.tokens[:, 1:][batch.loss_mask]
    assert logged["ids"] == pytest.approx(labels.mean(), rel=1e-5)
    # Validation reports the standard loss, one's own, and its auxiliary sums per token.
    assert logged["validation_custom_loss"] == pytest.approx(2.0 * logged["validation_loss"])
    task = language_train.objective(config)
    held_out = task.iterate_once(prepared.validation.tokens, prepared.tokenizer, config, 19)
    labels = np.concatenate([batch.tokens[:, 1:][batch.loss_mask] for batch in held_out])
    assert logged["validation_ids"] == pytest.approx(labels.mean(), rel=1e-5)
    b1, b2, eps = config.optimizer.b1, config.optimizer.b2, config.optimizer.eps
    steps = optax.chain(
        optax.clip_by_global_norm(config.optimizer.grad_clip_norm),
        optax.adam(own_parts.halving(config.optimizer), b1, b2, eps),
    )
    updates, _ = steps.update(slope, steps.init(params))
    found = Checkpoints(folder / "checkpoints").restore_params(1)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3)  # noqa: E731
    jax.tree.map(close, found, optax.apply_updates(params, updates))


def test_a_translation_is_validated_by_the_loss_of_ones_own_too(translation, text, tmp_path):
    more = f"--training.loss {HERE}:doubled_seq2seq_loss --optimizer.total_steps 1"
    words = [*translation.words, *more.split(), "--runs", str(tmp_path)]
    words += "--training.evaluate_every 1 --training.label_smoothing 0.1".split()
    config = cli.parse(TRANSLATION_PRESETS, words)
    called(lambda: translation_train.main(config), words)
    folder = tmp_path / "translation" / "own"
    (logged,) = metrics_of(folder, "validation_loss")
    loaded = translation_run.load_run(folder)
    sides = ((text / f"validation.{side}").read_text().splitlines() for side in ("en", "de"))
    source, target = map(loaded.tokenizer.encode_batch, sides)
    batch = PairBatch(
        pad_right([ids + [EOS] for ids in source], 7, 31),
        pad_right([[BOS, *ids, EOS] for ids in target], 7, 32),
        np.arange(7, dtype=np.int32),
    )
    for name, smoothing, factor in (("loss", 0.0, 1.0), ("custom_loss", 0.1, 2.0)):
        loss = seq2seq_loss(translation.model, pad=PAD, label_smoothing=smoothing)
        nats, tokens = jax.jit(loss)(loaded.params, batch, None)
        found = logged[f"validation_{name}"]
        assert found == pytest.approx(factor * float(nats / tokens), rel=1e-5)
    ids = sum(map(sum, target)) + 7 * EOS
    assert logged["validation_ids"] == pytest.approx(ids / float(tokens), rel=1e-5)


def test_values_given_from_python_are_recorded_by_name(language, tmp_path):
    config = replace(language.config, runs=str(tmp_path))
    training = replace(config.training, block="", attention_fn="reference")
    plain = replace(config, training=training)
    attention_fn, block = PARTS
    language_train.train(plain, block=block, attention_fn=attention_fn)
    folder = tmp_path / "language_modelling" / "own"
    name = "config.json"
    found, expected = (json.loads((x / name).read_text()) for x in (folder, language.folder))
    assert found["training"] == expected["training"]
    for step in (5, 7):
        runs = folder, language.folder
        trees = (Checkpoints(run / "checkpoints").restore_params(step) for run in runs)
        jax.tree.map(np.testing.assert_array_equal, *trees)
    with pytest.raises(ConfigError, match="block=.*cannot be found again by a name"):
        language_train.train(plain, block=lambda config, cross, attention_fn: None)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--training.attention_fn flash", "give one of reference, blockwise"),
        ("--training.attention_fn no.where:x", "there is no module 'no'"),
        (f"--training.block {HERE}:Absent", f"the module '{HERE}' has no 'Absent'"),
        (f"--model.positions {HERE}:Absent", f"the module '{HERE}' has no 'Absent'"),
        (f"--training.loss {HERE}:NOT_CALLABLE", "is not callable"),
        ("--training.block OwnBlock", "block='OwnBlock' is not a name of the form package.module"),
        ("--optimizer.schedule lineal", "give one of inverse_square_root, cosine, constant"),
        (f"--training.remat blocks {OWN}", "remat='blocks' needs the library's own block"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_what_to_do(words, said, language, capsys):
    words = [*language.words, *words.split()]
    code = cli.run(lambda: language_train.main(cli.parse(LANGUAGE_PRESETS, words)))
    assert code == 2 and said in capsys.readouterr().err


def test_a_resumed_run_may_not_change_a_function_of_ones_own(language, capsys):
    words = [*language.words, "--training.attention_fn", "reference"]
    assert cli.run(lambda: language_train.main(cli.parse(LANGUAGE_PRESETS, words))) == 2
    assert "training.attention_fn is " in capsys.readouterr().err
