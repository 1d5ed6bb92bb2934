"""A task of `finetune`: the functions in which classification, spans and chat differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from experiments.harness.training.open_run import OpenRun
from experiments.language_modelling.finetune_presets import FinetuneConfig, TaskOptions
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.losses import Loss


class Encoded(NamedTuple):
    """Examples as ids, and what is needed to score what a model says of them."""

    items: Sequence[Any]
    """The examples as they were read, without those that have no row."""
    examples: Any
    """All rows in one batch."""
    notes: Any = None
    """For spans: the question and the places of each row."""


class Scored(NamedTuple):
    """The scores of a text, the main one first, and a table of its examples."""

    scores: dict[str, float]
    table: Mapping[str, Sequence[str]]


WithStart = Callable[[OpenRun[FinetuneConfig], nn.Module, Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class FinetuneTask:
    """A task that is learned from examples.

    `facts` are what rows depend on besides the examples: the labels, or a chat template.
    """

    scores: tuple[str, ...]
    """The scores of an evaluation, the main one first."""
    loss: Callable[..., Loss]
    """The loss of a model."""
    read: Callable[[FinetuneConfig, str], list[Any]]
    """(config, path) -> the examples of a file."""
    facts: Callable[[FinetuneConfig, Path, Tokenizer, Sequence[Any]], Any]
    """(config, folder of the run, tokenizer, training examples) -> facts."""
    write_facts: Callable[[Path, Any], None]
    """Writes facts into the folder of the run."""
    encode: Callable[[FinetuneConfig, Tokenizer, Sequence[Any], Any], Encoded]
    """(config, tokenizer, examples, facts) -> rows of ids."""
    make_model: Callable[[FinetuneConfig, nn.Module, Any], nn.Module]
    """(config, model below the head, facts) -> the model that is trained."""
    inputs: Callable[[Any], tuple[Any, ...]]
    """The arguments of the model for a batch."""
    outputs: Callable[[Any], Callable[[Any, Any], jax.Array]]
    """model -> a function of (params, batch), what the model says of each row."""
    score: Callable[[FinetuneConfig, np.ndarray, Encoded, Any], Scored]
    """(config, outputs of all rows, text, facts) -> scores."""
    loss_options: Callable[[TaskOptions], Mapping[str, Any]] = lambda task: {}
    """The arguments of `loss` that the options of the task give."""
    with_start: WithStart | None = None
    """(run, model, rows by split) -> the rows with what the weights at the start say of them; it is
    called before the first step and at each resume. None: rows do not depend on weights."""
    built_in: Callable[[str], list[Any]] | None = None
    """split -> examples for a run without files; None: files are needed."""
