"""The model card of an exported run: data, settings, scores, commands and licence."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

from experiments.harness.runs import checkpoint_selection
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.runs.run_folder import as_json

Task = Literal["translation", "text-generation", "fill-mask"]

_LICENCES = {
    "grammar": "The sentences come from a grammar in jaxformer and have its licence, Apache-2.0.",
    "multi30k": "Multi30k is for research and education only.",
    "tatoeba": "The sentences of Tatoeba are CC BY 2.0 FR.",
    "python_stdlib": "Python's standard library has the PSF licence.",
    "shakespeare": "The text is in the public domain.",
    "wikitext2": "WikiText-2 is CC BY-SA.",
}
_OWN = "The licence of the training files is not known here: say it before you pass the model on."
_USAGE = {
    "translation": (
        "model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)",
        'inputs = tokenizer(["a sentence"], return_tensors="pt")',
        'ids = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"])',
        "print(tokenizer.batch_decode(ids, skip_special_tokens=True))",
    ),
    "text-generation": (
        'write = transformers.pipeline("text-generation", model=folder)',
        'print(write("a text"))',
    ),
    "fill-mask": (
        'fill = transformers.pipeline("fill-mask", model=folder)',
        'print(fill(f"a text with a {tokenizer.mask_token}"))',
    ),
}


def write(options: Any, config: Any, task: Task, differing: list[str]) -> str:
    """The card, in Markdown, of the run that `options` name.

    `differing` are the settings of its texts that the folder cannot hold.
    """
    folder = Path(options.run.split(",")[0])
    parts = [
        f"---\nlibrary_name: {_library(options)}\npipeline_tag: {task}\n---\n\n# {config.name}",
        f"A model trained with jaxformer, exported by\n\n    {_command()}",
        "## Data\n\n" + _data(config),
        "## Scores\n\n" + _scores(folder),
        "## Training\n\n" + _training(folder, config, options),
        "## Licence\n\n" + _licence(config.data),
    ]
    if options.format == "transformers":
        parts.insert(1, _usage(task))
    if differing:
        said = "transformers has no such settings, so its texts may be others than the run's: "
        parts.append(f"## Limitations\n\n{said}{', '.join(differing)}.")
    return "\n\n".join(parts) + "\n"


def _library(options: Any) -> str:
    return "jax" if options.format == "stablehlo" else options.format


def _usage(task: Task) -> str:
    lines = ["import transformers", "", 'folder = "."']
    lines.append("tokenizer = transformers.AutoTokenizer.from_pretrained(folder)")
    return "\n".join(["```python", *lines, *_USAGE[task], "```"])


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = getattr(spec, "name", "experiments")
    return shlex.join(["python", "-m", name, *sys.argv[1:]])


def _data(config: Any) -> str:
    data = config.data
    lines = [f"- corpus: {data.corpus}"]
    for part in ("train", "validation", "test"):
        given = getattr(data, part)
        names = given if isinstance(given, tuple) else (given.source, given.target)
        if any(names):
            lines.append(f"- {part}: {', '.join(Path(name).name for name in names if name)}")
    return "\n".join([*lines, f"- tokenizer: {Path(data.tokenizer).name}"])


def _scores(folder: Path) -> str:
    path = folder / "scores.json"
    if not path.is_file():
        return "The run has no scores.json: its training did not end."
    found = json.loads(path.read_text(encoding="utf-8"))
    kept = json.dumps(found, indent=2, sort_keys=True)
    return f"Of the weights chosen at the end of the training:\n\n```json\n{kept}\n```"


_SETTINGS = (
    *("model", "objective", "optimizer", "training"),
    *("search", "translation", "sampling", "completion"),
)


def _training(folder: Path, config: Any, options: RunOptions) -> str:
    steps, tree = checkpoint_selection.select(folder, config.training, options)
    path = folder / "env.json"
    environment = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    settings = {name: value for name, value in as_json(config).items() if name in _SETTINGS}
    lines = [f"- weights: {tree} of step {', '.join(map(str, steps))}"]
    lines += [f"- command: `{environment['command']}`"] if "command" in environment else []
    versions = (f"{name} {environment[name]}" for name in ("jax", "flax") if name in environment)
    lines += [f"- versions: {', '.join(versions)}"]
    return "\n".join(lines) + f"\n\n```json\n{json.dumps(settings, indent=2)}\n```"


def _licence(data: Any) -> str:
    own = getattr(data.train, "source", data.train)
    return _OWN if own else _LICENCES.get(data.corpus, _OWN)
