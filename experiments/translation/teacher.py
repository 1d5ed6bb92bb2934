"""Word-level distillation: a teacher's logits beside each batch (Kim & Rush 2016, section 3.1)."""

import hashlib
import json
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.training import initialization
from experiments.harness.training.fit import Step
from experiments.translation.load_run import load_run
from experiments.translation.prepare import Prepared
from experiments.translation.presets import TrainingConfig, TranslationConfig
from jaxformer.checkpoint import manifest
from jaxformer.distributed import CompiledStep, Strategy
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.ops.masks import AnyArray
from jaxformer.pretrained import Loaded
from jaxformer.records import Record
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import TokenLoss, seq2seq_loss


def with_teacher(
    step: Step, config: TranslationConfig, prepared: Prepared, devices: Strategy, folder: Path
) -> Any:
    """`step` on batches to which the teacher's logits are added on their devices, if there is one.

    The teacher's parameters are no part of the state: nothing trains or saves them. The run's
    `folder` records them. Raises `ConfigError` for a teacher that is no run, and for one with other
    tokenizers, `CheckpointError` where the teacher's weights have changed since the run began.
    """
    if not config.training.teacher:
        return step
    parent = initialization.find_run(config.training.teacher)
    if parent is None:
        initialization.refuse_parent("teacher", config.training.teacher)
    with display.phase(f"reading the teacher {parent.folder}"):
        teacher = load_run(parent.folder, parent, devices=devices)
    _check_tokenizers(parent.folder, teacher, prepared)
    with distributed.together():
        _record(folder, config.training.teacher, digest(parent))
    logits = CompiledStep(partial(_logits, teacher.model), devices.mesh)
    return lambda state, batch: step(state, with_logits(batch, logits(teacher.params, batch)))


def loss_of(options: TrainingConfig) -> Callable[..., TokenLoss]:
    """The function that makes the loss of a translation, with the teacher that `options` name."""
    return distilled(options.distillation_weight) if options.teacher else seq2seq_loss


def distilled(weight: float) -> Callable[..., TokenLoss]:
    """`seq2seq_loss` with a teacher: it makes the loss of a model.

    The loss is 1 - `weight` times that of the labels plus `weight` times the cross-entropy with the
    distribution of `batch.teacher_logits` [B, T, V], whose sum is the auxiliary sum "teacher_loss".
    """

    @wraps(seq2seq_loss)
    def make(model: EncoderDecoder, **options: Any) -> TokenLoss:
        loss = seq2seq_loss(model, **options)

        def inputs_and_labels(batch):
            return *loss.inputs_and_labels(batch), batch.teacher_logits

        def terms(logits, labels, loss_mask, teacher_logits):
            nats, tokens = loss.terms(logits, labels, loss_mask)[:2]
            teacher = soft_cross_entropy(logits, teacher_logits, loss_mask)
            return (1.0 - weight) * nats + weight * teacher, tokens, {"teacher_loss": teacher}

        return replace(loss, inputs_and_labels=inputs_and_labels, terms=terms)

    return make


def soft_cross_entropy(
    logits: Float[Array, "*shape V"],
    teacher_logits: Float[Array, "*shape V"],
    loss_mask: Bool[Array, "*shape"],
) -> Float[Array, ""]:
    """The sum of -sum_v q_v log p_v in nats where `loss_mask` is True; float32.

    p is the distribution of `logits`, q that of `teacher_logits`, which get no gradient.
    """
    teacher_logits = jax.lax.stop_gradient(teacher_logits).astype(jnp.float32)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    nats = -jnp.sum(jax.nn.softmax(teacher_logits) * log_probs, axis=-1)
    return jnp.sum(jnp.where(loss_mask, nats, 0.0))


def with_logits(batch: Any, teacher_logits: Float[AnyArray, "B T V"]) -> Any:
    """A batch with the fields of the NamedTuple `batch`, and `teacher_logits`."""
    kind: Any = type(batch)
    return _with_logits_class(kind)(*batch, teacher_logits)


@lru_cache
def _with_logits_class(kind: Any) -> Any:
    """The class of batches of `kind` with `teacher_logits`, one for all steps."""
    return namedtuple(f"{kind.__name__}WithLogits", (*kind._fields, "teacher_logits"))


def digest(teacher: RunOptions) -> str:
    """SHA-256 (hex) of the sums in the manifests of the checkpoints that the teacher is made of."""
    _, steps, tree = teacher.weights
    folders = (teacher.folder / "checkpoints" / str(step) for step in steps)
    sums = [tree, *(sorted(manifest.read(folder).files.items()) for folder in folders)]
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def _logits(model: EncoderDecoder, params: Any, batch: Any) -> Float[Array, "B T V"]:
    source, inputs = batch.source, batch.target[:, :-1]
    logits: Any = model.apply({"params": params}, source, inputs, source != PAD)
    return logits


def _check_tokenizers(folder: Path, teacher: Loaded, prepared: Prepared) -> None:
    ours = prepared.source_tokenizer, prepared.target_tokenizer
    theirs = teacher.tokenizer, teacher.target_tokenizer
    if [x.fingerprint for x in ours] != [x.fingerprint for x in theirs]:
        raise ConfigError(
            f"the teacher {folder} has other tokenizers than this run, so its probabilities are of "
            "other tokens: leave out --init_from, or choose a teacher with the same tokenizers"
        )


def _record(folder: Path, name: str, sha256: str) -> None:
    """Writes which weights the run learns from; refuses others than it began with."""
    record = Record(folder / "teacher.json")
    before = record.read(sha256=str)
    if before and before["sha256"] != sha256:
        raise CheckpointError(
            f"the weights of the teacher {name} have changed since {folder} began: give the "
            "teacher's step, as in RUN@1500, or use another --name"
        )
    if not before and distributed.is_first():
        record.write({"run": name, "sha256": sha256})
