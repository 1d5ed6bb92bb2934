"""A run as a folder for transformers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.training.first_contact import AutoAttention
from jaxformer import optional_dependencies
from jaxformer.config import to_plain
from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig
from jaxformer.errors import ConfigError
from jaxformer.ops.attention import auto_attention
from jaxformer.pretrained import (
    inexpressible_settings,
    is_pretrained,
    locate_model,
    save_pretrained,
)
from jaxformer.records import Record
from jaxformer.storage import to_local_path
from jaxformer.text.tokenizers import Tokenizer

Task = Literal[
    "translation",
    "text-generation",
    "fill-mask",
    "text-classification",
    "question-answering",
]

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


@dataclass(frozen=True)
class ExportOptions(RunOptions):
    """The run and the folder of an export."""

    _: KW_ONLY
    out: str = "exported"
    """The new folder."""


class Published(NamedTuple):
    """A run's model in the layout of a family of transformers, its tokenizer and its settings."""

    config: Any
    task: Task
    model: Any
    params: Any
    tokenizer: Tokenizer
    generation: SearchConfig | SamplingConfig | None
    completion: CompletionOptions = CompletionOptions()
    token_ids: Mapping[str, int] | None = None
    """Ids of config.json by their names there, where they are not the tokenizer's."""
    labels: Sequence[str] = ()
    """Names of a classifier's classes."""
    like: Path | None = None
    """The folder of transformers that the run began with, whose other files are kept."""
    files: Mapping[str, str] = MappingProxyType({})
    """Further files, text by name, such as a chat template."""


def started_from(config: Any) -> Path | None:
    """The folder of transformers that the run of `config` began with, if it is still there."""
    if not is_pretrained(config.init_from or "-"):
        return None
    return locate_model(config.init_from)


def with_library_attention(model: Any) -> Any:
    """`model` with `auto_attention`, where its run has compared and timed the kernels."""
    backbone = getattr(model, "backbone", None)
    if backbone is not None:
        return model.clone(backbone=with_library_attention(backbone))
    if isinstance(model.attention_fn, AutoAttention):
        return model.clone(attention_fn=auto_attention)
    return model


def export(options: ExportOptions, load: Callable[[], Published], presets: Sequence[str]) -> None:
    """Writes the folder `options.out` of the run that `load` reads.

    Raises `ConfigError`, which names the `presets` whose runs fit, for a run that cannot be
    exported.
    """
    for name in ("safetensors", "jinja2"):  # before anything is done
        optional_dependencies.load(name)
    out = to_local_path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: give --out the name of a new folder")
    try:
        given = load()
        generation = given.generation
        inexpressible = inexpressible_settings(generation, given.completion) if generation else []
        out.parent.mkdir(parents=True, exist_ok=True)
        save_pretrained(
            out,
            with_library_attention(given.model),
            given.params,
            given.tokenizer,
            like=given.like,
            generation=generation,
            card=model_card(options, given, inexpressible),
            token_ids=given.token_ids,
            labels=given.labels,
        )
        if distributed.is_first():
            for name, text in given.files.items():
                (out / name).write_text(text, encoding="utf-8")
    except ConfigError as error:
        raise ConfigError(
            f"{options.run} cannot be exported: {error}. Runs of the presets "
            f"{', '.join(presets)} can"
        ) from error
    if inexpressible:
        display.say(
            f"transformers has no {', '.join(inexpressible)}: its texts may differ from those here."
        )
    if distributed.is_first():
        for path in sorted(out.iterdir()):
            print(f"{path}: {path.stat().st_size:,} bytes")


def model_card(options: ExportOptions, run: Published, inexpressible: Sequence[str]) -> str:
    """The card of an exported run in Markdown: data, settings, scores, commands and licence.

    `inexpressible` are settings of its texts that the folder cannot hold.
    """
    folder, config = options.folder, run.config
    _, steps, tree = options.weights
    scores = Record(folder / "scores.json").read_if_intact()
    environment = Record(folder / "env.json").read_if_intact()
    data = config.data
    files = {part: getattr(data, part) for part in ("train", "validation", "test")}
    names = {
        part: paths if isinstance(paths, tuple) else (paths.source, paths.target)
        for part, paths in files.items()
    }
    groups = (
        "model",
        "objective",
        "optimizer",
        "training",
        "search",
        "translation",
        "sampling",
        "completion",
    )
    written = to_plain(config)
    settings = {name: value for name, value in written.items() if name in groups}
    return _template().render(
        task=run.task,
        name=config.name,
        command=cli.own_command(),
        corpus="files" if any(names["train"]) else data.corpus,
        parts={part: [Path(x).name for x in paths if x] for part, paths in names.items()},
        tokenizer=Path(data.tokenizer).name,
        scores=json.dumps(scores, indent=2, sort_keys=True) if scores else "",
        tree=tree,
        steps=steps,
        environment=environment,
        settings=json.dumps(settings, indent=2),
        licence=_UNKNOWN_LICENCE
        if any(names["train"])
        else _LICENCES.get(data.corpus, _UNKNOWN_LICENCE),
        inexpressible=inexpressible,
    )


def _template() -> Any:
    text = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    jinja2 = optional_dependencies.load("jinja2")
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(text)
