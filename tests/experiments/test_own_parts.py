"""What a user names `module:name` is used, recorded, loaded, and refused if it is not there.

One run of a language model and one of a translation have values of one's own wherever they can.
What a run was trained with is what every later command uses: to the bit the numbers of the model
that was trained.
"""

import contextlib
import io
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import registry
from experiments.examples import custom_data
from experiments.harness import cli
from experiments.harness.planning import plan_run
from experiments.harness.results.comparing import compare as compare_runs
from experiments.harness.runs import run_folder
from experiments.harness.runs.sample_tables import read_table
from experiments.harness.training import build, held_out_loss, metric_inputs, named_values
from experiments.language_modelling import evaluate
from experiments.language_modelling import load_run as language_run
from experiments.language_modelling import prepare as language_prepare
from experiments.language_modelling import train as language_train
from experiments.language_modelling.objectives import objective_of
from experiments.language_modelling.presets import PRESETS
from experiments.translation import evaluate as evaluate_text
from experiments.translation import load_run as translation_run
from experiments.translation import prepare as translation_prepare
from experiments.translation import scoring, translate
from experiments.translation import train as translation_train
from experiments.translation.presets import PRESETS as TRANSLATION_PRESETS
from jaxformer import pipelines
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import to_plain
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly
from jaxformer.text.tokenizers import EOS, PAD
from jaxformer.training.losses import causal_loss, seq2seq_loss
from tests.experiments import own_parts
from tests.experiments.commands import call, metrics_of
from tests.experiments.tiny_runs import changed, language_config, translation_config
from tests.stored import stored

pytestmark = pytest.mark.long

HERE = "tests.experiments.own_parts"
VALUES = {
    "block": own_parts.OwnBlock,
    "attention_fn": own_parts.cosine_attention,
    "loss": own_parts.doubled_loss,
    "metrics": [own_parts.lengths],
    "schedule": own_parts.halving,
    "optimizer": own_parts.plain_descent,
    "batches": own_parts.counting,
    "dataset": own_parts.texts,
    "tokenizer": own_parts.upper,
}
NAMES = {
    "training__block": f"{HERE}:OwnBlock",
    "training__attention_fn": f"{HERE}:cosine_attention",
    "training__loss": f"{HERE}:doubled_loss",
    "training__metrics": (f"{HERE}:lengths",),
    "optimizer__schedule": f"{HERE}:halving",
    "optimizer__name": f"{HERE}:plain_descent",
    "data__batches": f"{HERE}:counting",
    "data__train": (f"{HERE}:texts",),
    "data__tokenizer": f"{HERE}:upper",
}
PARTS = own_parts.cosine_attention, own_parts.OwnBlock
ROWS = np.array([0, 2])


class Collect:
    """A logger that keeps what it gets."""

    def __init__(self):
        self.lines = []

    def log(self, step, metrics):
        self.lines.append({"step": step, **metrics})
        metrics.clear()  # its own copy


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A run with values of one's own given from Python, and the model that it trained."""
    plain = language_config(
        tmp_path_factory.mktemp("language"),
        name="own",
        model__positions=own_parts.OwnPositions(),
        optimizer__learning_rate=4.0,
        optimizer__total_steps=3,
        training__save_every=1,
        training__evaluate_every=1,
        training__log_every=1,
        training__average_checkpoints=2,
        training__loggers=(f"{HERE}:OwnLogger",),
    )
    collected, warnings = Collect(), io.StringIO()
    with contextlib.redirect_stderr(warnings):
        result = language_train.train(plain, loggers=[collected], **VALUES)
    loaded = language_run.load_run(result.folder)
    return SimpleNamespace(
        plain=plain,
        config=changed(plain, **NAMES),
        folder=result.folder,
        scores=result.scores,
        collected=collected.lines,
        warnings=warnings.getvalue(),
        loaded=loaded,
        model=(model := DecoderOnly(loaded.model.config, *PARTS)),
        loss=jax.jit(causal_loss(model)),
        task=objective_of(plain),
        lines=list(map(json.loads, (result.folder / "metrics.jsonl").open())),
    )


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    """A translation by a model of one's own with its parts, loss and metric."""
    root = tmp_path_factory.mktemp("translation")
    config = translation_config(
        root,
        name="own",
        search__beam_size=3,
        training__evaluate_every=1,
        training__average_checkpoints=1,
        training__label_smoothing=0.1,
        training__model=f"{HERE}:OwnTranslator",
        training__block=f"{HERE}:OwnBlock",
        training__attention_fn=f"{HERE}:cosine_attention",
        training__loss=f"{HERE}:doubled_seq2seq_loss",
        training__metrics=(f"{HERE}:words",),
    )
    folder = translation_train.train(config).folder
    loaded = translation_run.load_run(folder)
    model = own_parts.OwnTranslator(loaded.model.config, *PARTS)
    return SimpleNamespace(root=root, config=config, folder=folder, loaded=loaded, model=model)


# The language model


def test_the_record_names_what_a_run_was_built_with(language):
    stored = json.loads((language.folder / "config.json").read_text())
    assert stored == json.loads(json.dumps(to_plain(language.config)))
    assert stored["model"]["positions"]["type"] == f"{HERE}:OwnPositions"
    assert named_values.with_values(language.plain, **VALUES) == language.config
    assert set(VALUES) | {"model"} == set(named_values.VALUES)


def test_a_loaded_model_has_the_logits_of_the_trained_one(language, rng):
    tokens = rng.integers(4, 29, (2, 11), np.int32)
    models = language.loaded.model, language.model, DecoderOnly(language.model.config)
    logits = jax.jit(lambda params: [model.apply({"params": params}, tokens) for model in models])
    loaded, trained, plain = map(np.asarray, logits(language.loaded.params))
    np.testing.assert_array_equal(loaded, trained)
    assert np.abs(plain - trained).max() > 1e-2, "or this proves nothing"


def likelihood(run, params, name):
    """Nats, tokens and the sum of their ids of a part of a run's text, by the trained model."""
    text = language_prepare.open_encoded(run.folder, name, run.loaded.tokenizer)
    sums = []
    for batch in run.task.iterate_once(text.tokens, run.loaded.tokenizer, run.config, 19):
        ids = batch.tokens[:, 1:][batch.loss_mask].sum()
        sums.append((*run.loss(params, batch, None), ids))
    return [sum(map(float, column)) for column in zip(*sums, strict=True)]


def test_a_language_model_is_validated_selected_and_scored_as_it_was_trained(language):
    checkpoints = Checkpoints(language.folder / "checkpoints")
    validation = metrics_of(language.folder, "validation_loss")[1]
    nats, tokens, ids = likelihood(language, stored(checkpoints, 2), "validation")
    assert validation["step"] == 2 and validation["validation_loss"] == nats / tokens
    # Validation reports the standard loss, one's own, and its auxiliary sums per token.
    assert validation["validation_custom_loss"] == pytest.approx(2.0 * nats / tokens)
    assert validation["validation_ids"] == pytest.approx(ids / tokens, rel=1e-5)
    chosen = json.loads((language.folder / "weights.json").read_text())
    nats, tokens, _ = likelihood(language, language.loaded.params, "validation")
    assert chosen["validation_loss"] == nats / tokens
    done = call(evaluate, {"--run": language.folder, "--part": "train"})
    found = json.loads(done.out.splitlines()[-1])
    expected = likelihood(language, language.loaded.params, "train")
    assert [found["nats"], found["tokens"]] == expected[:2]


def test_a_step_takes_batches_loss_schedule_and_optimizer_of_ones_own(language):
    batch = own_parts.Counting().batch(0, lambda count: np.arange(count))
    init_rng, rng = jax.random.split(jax.random.key(language.config.training.seed))

    @jax.jit
    def first_update():
        params = language.model.init(init_rng, batch.tokens[:2, :-1])["params"]
        loss = lambda p: own_parts.doubled_loss(language.model)(p, batch, rng)[0]  # noqa: E731
        nats, slope = jax.value_and_grad(loss)(params)
        tokens = batch.loss_mask.sum()
        updated = jax.tree.map(lambda p, g: p - 4.0 / 8 * g / tokens, params, slope)
        return nats / tokens, updated

    loss, params = first_update()
    assert language.lines[0]["loss"] == pytest.approx(float(loss), rel=1e-5)
    labels = batch.tokens[:, 1:][batch.loss_mask]
    assert language.lines[0]["ids"] == pytest.approx(labels.mean(), rel=1e-5)
    checkpoints = Checkpoints(language.folder / "checkpoints")
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, stored(checkpoints, 1), params)
    assert checkpoints.metadata()["data"] == "counting"


def test_a_metric_of_ones_own_is_logged_scored_and_compared(language):
    line = [line for line in language.lines if "validation_half" in line][1]
    assert line["step"] == 2 and line["validation_half"] == line["validation_loss"] / 2
    assert line["validation_size"] == 31
    assert language.scores["half"] == language.scores["loss"] / 2
    assert compare_runs([language.folder], "half").groups[0].mean == language.scores["half"]


def test_loggers_get_every_line_and_one_that_fails_is_named_once_while_training_goes_on(language):
    assert language.collected == language.lines and len(language.lines) == 6
    said = "warning: the logger OwnLogger failed: ValueError: no room; training"
    assert language.warnings.count(said) == 1
    steps = [f"{x['step']} {x['loss']}" for x in language.lines if "loss" in x]
    assert (language.folder / "own.log").read_text().splitlines() == [*steps, "closed"]


class Ending:
    """A logger that ends the process, as a program for the command line does."""

    def __init__(self, folder=None, when="log"):
        if folder is not None:
            raise SystemExit("no account")
        self.calls = 0

    def log(self, step, metrics):
        self.calls += 1
        raise SystemExit(1)


def test_a_logger_that_ends_the_process_is_named_once_while_training_goes_on(tmp_path, capsys):
    log, logger, lines = run_folder.Run(tmp_path), Ending(), []
    later = SimpleNamespace(log=lambda step, metrics: lines.append(step))
    log.loggers = [logger, later]
    log.log(1, loss=0.5)
    log.log(2, loss=0.25)
    assert (logger.calls, lines) == (2, [1, 2])
    said = capsys.readouterr().err
    assert said.count("the logger Ending failed: SystemExit: 1; training goes on") == 1


def test_a_logger_without_log_and_one_that_cannot_be_made_are_refused(tmp_path):
    plain = PRESETS["python_stdlib"].training
    training = replace(plain, loggers=(f"{__name__}:Ending",))
    with pytest.raises(ConfigError, match="Ending"):
        build.build_loggers(training, tmp_path, [])
    deaf = SimpleNamespace(write=print)
    with pytest.raises(ConfigError, match=r"SimpleNamespace .*log\(step, metrics\)"):
        build.build_loggers(plain, tmp_path, [deaf])


def test_texts_and_a_tokenizer_of_ones_own_are_prepared(language, tmp_path):
    prepared = language_prepare.prepare(language.config, language.folder)
    text = "".join(b for t in own_parts.texts() for b in t)
    assert prepared.train.amount.bytes + prepared.validation.amount.bytes == len(text)
    again = language_prepare.load_tokenizer(language.folder)
    assert again.decode(again.encode("A")) == "A" and again.vocab_size == 4 + 26 + 1
    batches = build.build_batches(language.config, prepared)
    assert batches.batch(2, lambda count: ROWS).tokens[:, 0].tolist() == [3, 5]
    other = named_values.with_values(language.config, dataset=own_parts.other_texts)
    other = language_prepare.prepare(other, tmp_path / "other").train.tokens.fingerprint
    assert other != prepared.train.tokens.fingerprint
    config = replace(TRANSLATION_PRESETS["grammar"], runs=str(tmp_path / "runs"))
    config = named_values.with_values(config, dataset=own_parts.pairs, tokenizer=own_parts.upper)
    pairs = translation_prepare.prepare(config, tmp_path / "pairs")
    assert pairs.target_tokenizer.vocab_size == 4 + 26 + 1
    assert len(pairs.batches.source) + len(pairs.validation.source) == 997


def test_a_plan_counts_the_parameters_of_the_model_that_is_trained(
    language, translation, leaf_shapes
):
    for experiment, run in (("language_modelling", language), ("translation", translation)):
        config = replace(run.config, model=run.model.config)
        planned = plan_run(config, registry.planned(experiment)).state.params
        assert leaf_shapes(planned) == leaf_shapes(run.loaded.params)


def test_a_resumed_run_may_not_change_a_function_of_ones_own(language):
    config = changed(language.config, training__attention_fn="reference")
    with pytest.raises(ConfigError, match="training.attention_fn"):
        language_train.train(config)
    free = set(config.free_fields())
    assert {"training.metrics", "training.loggers", "training.remat"} <= free
    assert {"prompts", "completion"} <= free and "training.loss" not in free


# The translation


def test_a_translation_is_validated_by_the_loss_of_ones_own_too(translation):
    logged, loaded = metrics_of(translation.folder, "validation_loss")[-1], translation.loaded
    text = translation_prepare.prepare(loaded.config, translation.folder).validation
    batches = list(scoring._batches(loaded, text))
    plain = held_out_loss.loss_sums(seq2seq_loss, loaded, batches, pad=PAD)
    own = {"pad": PAD, "label_smoothing": 0.1}
    own = held_out_loss.loss_sums(own_parts.doubled_seq2seq_loss, loaded, batches, **own)
    assert own["loss"] != pytest.approx(2.0 * plain["loss"]), "it is smoothed"
    targets = [loaded.tokenizer.encode(line) for line in text.target]
    expected = {
        "validation_loss": plain["loss"] / plain["tokens"],
        "validation_custom_loss": own["loss"] / own["tokens"],
        "validation_ids": (sum(map(sum, targets)) + 3 * EOS) / own["tokens"],
    }
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value, rel=1e-5), name


def test_a_translation_is_validated_and_scored_by_the_model_that_was_trained(translation, tmp_path):
    loaded = translation.loaded
    assert loaded.model == translation.model
    source, target = (str(translation.root / f"validation.{x}") for x in ("source", "target"))
    lines = (translation.root / "validation.source").read_text().splitlines()

    def expected(params, search):
        settings = search, loaded.config.translation
        system = replace(loaded, model=translation.model, params=params)
        return pipelines.translate(system, lines, *settings)

    checkpoints = Checkpoints(translation.folder / "checkpoints")
    samples = read_table(translation.folder / "samples" / "validation-1.tsv")
    greedy = replace(loaded.config.search, beam_size=1)
    assert samples["model"] == expected(stored(checkpoints, 1), greedy)
    best = expected(loaded.params, loaded.config.search)
    options = {"--run": translation.folder, "--output": tmp_path / "out.txt"}
    texts = {"--source": source, "--target": target}
    for command, more in ((evaluate_text, texts), (translate, {"--input": source})):
        assert call(command, {**options, **more}).code == 0
        assert (tmp_path / "out.txt").read_text().splitlines() == best


def test_a_metric_of_ones_own_is_computed_of_the_translations(translation):
    logged = metrics_of(translation.folder, "validation_words")[0]["validation_words"]
    scored = json.loads((translation.folder / "scores.json").read_text())["words"]
    for name, found in (("validation-1", logged), ("test", scored)):
        made = read_table(translation.folder / "samples" / f"{name}.tsv")["model"]
        assert found == sum(len(text.split()) for text in made) / len(made)


# Without a run


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
        ("--optimizer.name adan", "name='adan' is unknown: give one of adam, muon"),
        (f"--training.remat blocks --training.block {HERE}:OwnBlock", "needs the library's own"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_what_to_do(words, said, capsys):
    assert cli.run(lambda: named_values.check_named_values(cli.parse(PRESETS, words.split()))) == 2
    assert said in capsys.readouterr().err


def test_a_value_without_a_name_is_refused():
    with pytest.raises(ConfigError, match="block="):
        named_values.with_values(
            PRESETS["python_stdlib"], block=lambda config, cross, attention_fn: None
        )


def test_a_loss_of_ones_own_that_does_not_take_a_weight_is_refused():
    training = replace(TRANSLATION_PRESETS["grammar"].training, loss=f"{HERE}:rigid")
    with pytest.raises(ConfigError, match="z_loss=0.001 .*rigid"):
        build.build_loss(replace(training, z_loss=0.001), seq2seq_loss)
    with pytest.raises(ConfigError, match="balance=0.01 .*rigid"):
        build.build_loss(replace(training, balance=0.01), seq2seq_loss)


def test_a_metric_that_returns_no_numbers_or_a_taken_name_is_refused():
    training = replace(PRESETS["python_stdlib"].training, metrics=(f"{HERE}:lengths",))
    loaded = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=7))
    taken = metric_inputs.MetricInputs(loaded, None, {"half": 1.0, "loss": 2.0})
    with pytest.raises(ConfigError, match="returned 'half'"):
        metric_inputs.user_metrics(training, taken)
    with pytest.raises(AttributeError):
        metric_inputs.user_metrics(training, taken._replace(loaded=None))
    with pytest.raises(TypeError, match="str"):
        metric_inputs.user_metrics(replace(training, metrics=("builtins:repr",)), taken)


def test_a_schedule_and_an_optimizer_of_ones_own_move_what_is_not_frozen():
    base = replace(PRESETS["python_stdlib"].optimizer, name="adam", weight_decay=0.0)
    params = {name: {"kernel": np.ones((2, 3), np.float32)} for name in ("frozen", "trained")}
    eighth, half = -base.learning_rate / 8, f"{HERE}:halving"
    for name, moved in (("adam", eighth / 2), (f"{HERE}:plain_descent", eighth / 2)):
        config = replace(base, name=name, schedule=half, freeze="frozen/")
        rule = build.build_optimizer(config)

        def second(params, rule=rule):
            _, state = rule.update(params, rule.init(params), params)
            return rule.update(params, state, params)[0]

        found = jax.jit(second)(params)
        np.testing.assert_array_equal(found["frozen"]["kernel"], 0.0)
        np.testing.assert_allclose(found["trained"]["kernel"], moved, rtol=1e-4)


def test_batches_that_overfit_are_the_first_two_again_and_again():
    batches = custom_data.overfit(None, SimpleNamespace(batches=own_parts.Counting()))
    for step in (0, 1):
        expected = own_parts.Counting().batch(step, lambda count: ROWS)
        for found in (
            batches.batch(step, lambda count: ROWS),
            batches.batch(step + 6, lambda count: ROWS),
        ):
            np.testing.assert_array_equal(found.tokens, expected.tokens)
