"""Optional dependencies, asked for by name when first needed."""

import importlib
from types import ModuleType

_EXTRAS = {
    "torch": "peers",
    "transformers": "peers",
    "ctranslate2": "peers",
    "sentencepiece": "subwords",
}


class MissingExtra(ImportError):
    """A package that only some uses need is not installed."""


def load(name: str) -> ModuleType:
    """The module `name`; `MissingExtra` says which extra installs it when it is absent."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name != package:
            raise
        extra = _EXTRAS.get(package, "experiments")
        raise MissingExtra(
            f"{package} is needed here and is not installed: pip install 'jaxformer[{extra}]'"
        ) from error
