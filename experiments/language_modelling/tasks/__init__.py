"""The tasks of `finetune`, by their names: modules with the same functions.

`read(config, path)` gives the examples of a file, `facts` what rows depend on besides (labels, or a
chat template), `encode` the rows, `make_model` the model, `loss(model)` what is learned,
`outputs(model)` what it says of a row, and `score` the scores, named in `SCORES`.
"""

from types import ModuleType

from experiments.language_modelling.tasks import chat, classification, spans
from experiments.language_modelling.tasks.rows import Encoded, Scored

__all__ = ["TASKS", "Encoded", "Scored"]

TASKS: dict[str, ModuleType] = {
    "classification": classification,
    "pairs": classification,
    "spans": spans,
    "chat": chat,
}
