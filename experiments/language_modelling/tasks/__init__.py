"""Fine-tuning tasks: how rows become examples, a loss, and a score.

A task is a module with `read(options)`, the rows to learn from and to test with, and
`make(options, loaded, train, test)`, the `Task` that they are for the model of a run.
"""

from experiments.language_modelling.tasks import chat, classification, spans
from experiments.language_modelling.tasks.task import Scored, Task, predict

TASKS = {
    "classification": classification,
    "pairs": classification,
    "spans": spans,
    "chat": chat,
}

__all__ = ["TASKS", "Scored", "Task", "predict"]
