"""The tasks of `finetune`, by their names."""

from dataclasses import replace

from experiments.language_modelling.tasks.chat import CHAT
from experiments.language_modelling.tasks.classification import CLASSIFICATION
from experiments.language_modelling.tasks.finetune_task import Encoded, FinetuneTask, Scored
from experiments.language_modelling.tasks.preference import PREFERENCE
from experiments.language_modelling.tasks.spans import SPANS

__all__ = ["TASKS", "Encoded", "FinetuneTask", "Scored"]

TASKS: dict[str, FinetuneTask] = {
    "classification": CLASSIFICATION,
    "pairs": replace(CLASSIFICATION, built_in=None),
    "spans": SPANS,
    "chat": CHAT,
    "preference": PREFERENCE,
}
