"""A run as a folder for other programs: transformers, CTranslate2, or one compiled function."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.export import export as export_function
from jaxtyping import Array, Int

from experiments.harness import cli
from experiments.harness.results import model_card
from experiments.harness.runs.checkpoint_selection import RunOptions
from jaxformer import optional_dependencies
from jaxformer.config import check_at_least
from jaxformer.decoding import SamplingConfig, SearchConfig
from jaxformer.decoding.pipeline_options import CompletionOptions
from jaxformer.errors import ConfigError
from jaxformer.pretrained import inexpressible_settings, save_pretrained
from jaxformer.text.tokenizers import Tokenizer

PROGRAM = "program.jax"
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_NEEDED = {
    "transformers": ("safetensors",),
    "ctranslate2": ("ctranslate2", "transformers", "torch"),
    "stablehlo": ("flatbuffers",),
}
_COPIED = ("README.md", "tokenizer.json", "tokenizer_config.json")


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
    """What an experiment gives of a run that is to be exported."""

    config: Any
    task: model_card.Task
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
    """The folder for transformers, or what CTranslate2 makes of it."""
    convert = options.format == "ctranslate2"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as place:
        folder = Path(place) / "transformers" if convert else out
        differing = _save(folder, options, run)
        if convert:
            _convert(folder, out)
    if differing:
        cli.say(f"transformers has no {', '.join(differing)}: its texts may be others than here.")


def _save(folder: Path, options: ExportOptions, run: Exportable) -> list[str]:
    """Writes the folder for transformers; the settings that it cannot hold."""
    try:
        found = run.published()
        differing = []
        if found.generation:
            differing = inexpressible_settings(found.generation, found.completion)
        card = model_card.write(options, run.config, run.task, differing)
        save_pretrained(
            folder,
            found.model,
            found.params,
            found.tokenizer,
            generation=found.generation,
            card=card,
        )
    except ConfigError as error:
        raise ConfigError(
            f"{options.run} cannot be exported as {options.format}: {error}. Runs of the presets "
            f"{', '.join(run.presets)} can; --format stablehlo takes all"
        ) from error
    return differing


def _convert(folder: Path, out: Path) -> None:
    """Writes what CTranslate2's converter makes of `folder` to `out`."""
    converters = optional_dependencies.load("ctranslate2.converters")
    copied = [name for name in _COPIED if (folder / name).exists()]
    converters.TransformersConverter(str(folder), copy_files=copied).convert(str(out), force=True)


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
    card = model_card.write(options, run.config, run.task, [])
    (out / "README.md").write_text(card, encoding="utf-8")
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
