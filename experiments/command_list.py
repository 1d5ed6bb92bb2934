"""The commands of a folder of experiments, listed by `python -m` of the folder.

Their files are read, not imported: a list needs no JAX.
"""

import ast
import sys
from pathlib import Path

_FOLDERS = ("translation", "language_modelling", "benchmarks", "examples", "torch_reference")
"""Folders with commands, the first ones first."""


def show(package: str) -> None:
    """Prints the commands of `package`, such as "experiments.translation".

    Ends the process with code 2 where words were given: they are a command's.
    """
    words = [word for word in sys.argv[1:] if word not in ("-h", "--help")]
    if words:
        given = words[0].removeprefix("-").removeprefix("-")
        fitting = [name for name in commands_of(package) if name.endswith(f".{given}")]
        hint = f"did you mean python -m {fitting[0]}" if fitting else f"see python -m {package}"
        print(f"error: python -m {package} takes no {words[0]!r}: {hint}", file=sys.stderr)
        raise SystemExit(2)
    commands = commands_of(package)
    width = max(map(len, commands))
    print("Commands; `python -m COMMAND --help` shows the options of one:\n")
    for name, about in commands.items():
        print(f"  {name:{width}}  {about}")


def commands_of(package: str) -> dict[str, str]:
    """The commands among the modules of `package`, and what each does; "experiments" has all."""
    root = Path(__file__).parent
    folders = [root.joinpath(*package.split(".")[1:])]
    if folders == [root]:
        folders += [root / name for name in _FOLDERS]
    found = {}
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            about = _about(path)
            if about:
                name = ".".join((root.name, *path.relative_to(root).with_suffix("").parts))
                found[name] = about
    return found


def _about(path: Path) -> str:
    """The first sentence of a command's docstring; "" for a module that is no command."""
    source = path.read_text(encoding="utf-8")
    if path.name == "__main__.py" or '\nif __name__ == "__main__":\n' not in source:
        return ""
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
    sentence = " ".join(first.split())
    return sentence.partition(": `python")[0].partition(". ")[0].rstrip(".")
