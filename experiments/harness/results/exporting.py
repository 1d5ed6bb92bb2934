"""A run as a folder for other programs: transformers, CTranslate2, or one compiled function."""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.export import export as export_function
from jaxtyping import Array, Int

from experiments.harness import cli
from experiments.harness.runs import checkpoint_selection
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.runs.run_folder import as_json
from jaxformer import optional_dependencies
from jaxformer.config import check_at_least
from jaxformer.decoding import SamplingConfig, SearchConfig
from jaxformer.decoding.pipeline_options import CompletionOptions
from jaxformer.errors import ConfigError
from jaxformer.pretrained import inexpressible_settings, save_pretrained
from jaxformer.text.tokenizers import Tokenizer

PROGRAM = "program.jax"
Task = Literal["translation", "text-generation", "fill-mask"]

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_NEEDED = {
    "transformers": ("safetensors",),
    "ctranslate2": ("ctranslate2", "transformers", "torch"),
    "stablehlo": ("flatbuffers",),
}
_COPIED = ("README.md", "tokenizer.json", "tokenizer_config.json")
_LICENCES = {
    "grammar": "The sentences come from a grammar in jaxformer and have its licence, Apache-2.0.",
    "multi30k": "Multi30k is for research and education only.",
    "tatoeba": "The sentences of Tatoeba are CC BY 2.0 FR.",
    "python_stdlib": "Python's standard library has the PSF licence.",
    "shakespeare": "The text is in the public domain.",
    "wikitext2": "WikiText-2 is CC BY-SA.",
}
_UNKNOWN_LICENCE = (
    "The licence of the training files is not known here: say it before you pass the model on."
)
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


@dataclass(frozen=True)
class ExportOptions(RunOptions):
    """The run to export, what for, and where to."""

    _: KW_ONLY
    format: Literal["transformers", "ctranslate2", "stablehlo"] = "transformers"
    """transformers: a folder for its from_pretrained. ctranslate2: this folder, converted by
    CTranslate2. stablehlo: one compiled function with its weights, for JAX without jaxformer."""
    out: str = "exported"
    """The new folder."""
    batch_size: int = 8
    """Rows of a call, with --format stablehlo."""
    platforms: str = "cpu"
    """What the function runs on, with --format stablehlo: cpu, cuda, rocm, tpu, by commas."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 1, "batch_size")
        if set(self.platforms.split(",")) - set(_PLATFORMS):
            raise ConfigError(f"platforms={self.platforms!r}: choose among cpu, cuda, rocm and tpu")


class Published(NamedTuple):
    """A model in the layout of a family of transformers, with its tokenizer and its settings."""

    model: Any
    params: Any
    tokenizer: Tokenizer
    generation: SearchConfig | SamplingConfig | None
    completion: CompletionOptions = CompletionOptions()


class Exportable(NamedTuple):
    """A run that is to be exported, as its experiment describes it."""

    config: Any
    task: Task
    published: Callable[[], Published]
    """Raises `ConfigError` for a model in which no family fits."""
    presets: Sequence[str]
    """The presets whose runs fit."""
    function: Callable[[Int[Array, "B S"]], Any]
    """The function of ids that is compiled."""
    length: tuple[str, int]
    """S, the ids of each row, after the name of its option."""
    tokenizers: Mapping[str, Tokenizer]
    """The tokenizers by the file names that they get beside the function."""


def export(options: ExportOptions, load: Callable[[], Exportable]) -> None:
    """Writes the folder `options.out` of the run that `load` reads.

    Raises `ConfigError` for a run that cannot be exported, and what `load` raises.
    """
    for name in _NEEDED[options.format]:  # before anything is done
        optional_dependencies.load(name)
    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: give --out the name of a new folder")
    write = _write_program if options.format == "stablehlo" else _write_pretrained
    write(out, options, load())
    for path in sorted(out.iterdir()):
        print(f"{path}: {path.stat().st_size:,} bytes")


def _write_pretrained(out: Path, options: ExportOptions, run: Exportable) -> None:
    """The folder for transformers, or what CTranslate2's converter makes of it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        convert = options.format == "ctranslate2"
        folder = Path(temporary) / "transformers" if convert else out
        try:
            *found, generation, completion = run.published()
            inexpressible = []
            if generation is not None:
                inexpressible = inexpressible_settings(generation, completion)
            card = model_card(options, run.config, run.task, inexpressible)
            save_pretrained(folder, *found, generation=generation, card=card)
        except ConfigError as error:
            raise ConfigError(
                f"{options.run} cannot be exported as {options.format}: {error}. Runs of the "
                f"presets {', '.join(run.presets)} can; --format stablehlo takes all"
            ) from error
        if convert:
            copied = [name for name in _COPIED if (folder / name).exists()]
            converters = optional_dependencies.load("ctranslate2.converters")
            converter = converters.TransformersConverter(str(folder), copy_files=copied)
            converter.convert(str(out), force=True)
    if inexpressible:
        cli.say(f"transformers has no {', '.join(inexpressible)}: its texts may differ from ours.")


def _write_program(out: Path, options: ExportOptions, run: Exportable) -> None:
    """The compiled function, the tokenizers and the model card."""
    (name, length), limit = run.length, run.config.model.max_len
    if not 1 <= length <= limit:
        raise ConfigError(f"{name}={length}, but it must be at least 1 and at most max_len={limit}")
    platforms = tuple(options.platforms.split(","))
    program = compile_function(run.function, options.batch_size, length, platforms)
    out.mkdir(parents=True, exist_ok=True)
    for name, tokenizer in run.tokenizers.items():
        tokenizer.save(out / name)
    (out / "README.md").write_text(model_card(options, run.config, run.task), encoding="utf-8")
    unfinished = out / f".{PROGRAM}"
    unfinished.write_bytes(program)
    os.replace(unfinished, out / PROGRAM)


def compile_function(
    function: Callable[[Int[Array, "B S"]], Any],
    batch_size: int,
    length: int,
    platforms: tuple[str, ...],
) -> bytes:
    """`function` of ids [`batch_size`, `length`] int32, serialised with the weights it holds."""
    shape = jax.ShapeDtypeStruct((batch_size, length), jax.numpy.int32)
    return bytes(export_function(jax.jit(function), platforms=platforms)(shape).serialize())


def model_card(
    options: ExportOptions, config: Any, task: Task, inexpressible: Sequence[str] = ()
) -> str:
    """The model card, in Markdown, of a run: usage, data, scores, settings and licence.

    `inexpressible` are the settings of its texts that the folder cannot hold.
    """
    folder, data = Path(options.run.split(",")[0]), config.data
    scores, environment = (_read(folder / name) for name in ("scores.json", "env.json"))
    steps, tree = checkpoint_selection.select(folder, config.training, options)
    parts_of_run = "model objective optimizer training search translation sampling completion"
    settings = {
        name: value for name, value in as_json(config).items() if name in parts_of_run.split()
    }
    files = [name for part in ("train", "validation", "test") for name in _files(data, part)]
    library = "jax" if options.format == "stablehlo" else options.format
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    command = shlex.join(["python", "-m", getattr(spec, "name", "experiments"), *sys.argv[1:]])
    usage = "\n".join(
        [
            "```python\nimport transformers\n",
            'folder = "."',
            "tokenizer = transformers.AutoTokenizer.from_pretrained(folder)",
            *_USAGE[task],
            "```",
        ]
    )
    parts = [
        f"---\nlibrary_name: {library}\npipeline_tag: {task}\n---\n\n# {config.name}",
        *([usage] if options.format == "transformers" else []),
        f"A model trained with jaxformer, exported by\n\n    {command}",
        f"## Data\n\n- corpus: {data.corpus}\n- files: {', '.join(files) or 'none'}\n"
        f"- tokenizer: {Path(data.tokenizer).name}",
        f"## Scores\n\n{_json(scores) if scores else 'The training has not ended.'}",
        f"## Training\n\n- weights: {tree} of step {', '.join(map(str, steps))}\n"
        f"- command: `{environment.get('command', 'not recorded')}`\n"
        f"- versions: jax {environment.get('jax', '?')}, flax {environment.get('flax', '?')}\n\n"
        f"{_json(settings)}",
        "## Licence\n\n"
        + (_UNKNOWN_LICENCE if files else _LICENCES.get(data.corpus, _UNKNOWN_LICENCE)),
    ]
    if inexpressible:
        parts.append(
            "## Limitations\n\ntransformers has no such settings, so its texts may differ from the "
            f"run's: {', '.join(inexpressible)}."
        )
    return "\n\n".join(parts) + "\n"


def _files(data: Any, part: str) -> list[str]:
    """The names, without folders, of the files of a part of the text."""
    files = getattr(data, part)
    names = files if isinstance(files, tuple) else (files.source, files.target)
    return [Path(name).name for name in names if name]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _json(content: Any) -> str:
    return f"```json\n{json.dumps(content, indent=2)}\n```"
