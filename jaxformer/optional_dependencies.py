"""Optional dependencies, imported when they are first needed."""

import importlib
from types import ModuleType

from jaxformer.errors import MissingExtra

_EXTRAS = {
    "torch": "models",
    "torchmetrics": "peers",
    "transformers": "models",
    "ctranslate2": "peers",
    "nbclient": "notebooks",
    "nbformat": "notebooks",
    "sentencepiece": "subwords",
    "pdoc": "docs",
    "pyarrow": "data",
    "datasets": "data",
    "rouge_score": "finetuning",
    "gcsfs": "gcs",
}


def load(name: str) -> ModuleType:
    """The module `name`; if it is missing, `MissingExtra` says which extra installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name != package:
            raise
        extra = _EXTRAS.get(package, "experiments")
        raise MissingExtra(
            f"{package} is needed but not installed: pip install 'jaxformer[{extra}]'"
        ) from error
