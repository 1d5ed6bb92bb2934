"""Optional dependencies, imported when they are first needed."""

import importlib
import importlib.metadata
import re
from types import ModuleType

from jaxformer.errors import MissingExtra

_EXTRAS = {
    "torch": "models",
    "torchmetrics": "peers",
    "transformers": "models",
    "ctranslate2": "peers",
    "peft": "peers",
    "trackio": "peers",
    "mlflow": "peers",
    "wandb": "peers",
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
    """The module `name`; if it is missing, `MissingExtra` has the packages of its extra."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name != package:
            raise
        extra = _EXTRAS.get(package, "experiments")
        raise MissingExtra(
            f"{package} is needed but not installed: pip install {packages_of(extra) or package}, "
            f"which is the extra {extra!r} of a copy of the repository (pip install -e "
            f"'.[{extra}]')"
        ) from error


def is_there(name: str) -> bool:
    """Whether the module `name` can be imported, such as an experimental one of JAX."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def packages_of(extra: str) -> str:
    """The names of the packages of an extra, as `pip install` takes them; "" if none are recorded.

    The name of this package and its extra would install whatever has that name on an index.
    """
    try:
        required = importlib.metadata.requires("jaxformer") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    names: dict[str, None] = {}
    for line in required:
        requirement, _, condition = line.partition(";")
        if not re.search(rf"""extra == ['"]{extra}['"]""", condition):
            continue
        parts = re.fullmatch(r"\s*([\w.-]+)(?:\[([^]]*)\])?.*", requirement)
        assert parts is not None  # as the standard for metadata says
        name, more = parts.groups()
        if name == "jaxformer":
            names |= dict.fromkeys(
                word for each in more.split(",") for word in packages_of(each.strip()).split()
            )
        else:
            names[name] = None
    return " ".join(names)
