"""The text of --help, and the option to write instead of one that does not exist."""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from experiments.harness.cli.config_files import has_setting
from jaxformer.config.plain import part_kinds, part_name, shown
from jaxformer.errors import ConfigError

RUN = "run"
"""The group of the options that belong to no other."""
_OTHER_NAMES = {
    "accum": ("grad_accumulation",),
    "batch": ("batch_size", "batch_tokens"),
    "batch_size": ("batch_tokens",),
    "beam": ("beam_size", "eval_beam_size"),
    "beams": ("beam_size", "eval_beam_size"),
    "bf16": ("dtype",),
    "block_size": ("seq_len",),
    "checkpoint": ("run", "init_from"),
    "clip": ("grad_clip_norm",),
    "clip_norm": ("grad_clip_norm",),
    "dropout": ("dropout_rate",),
    "epochs": ("total_steps",),
    "eval_interval": ("evaluate_every",),
    "eval_steps": ("evaluate_every",),
    "fp16": ("dtype",),
    "gradient_accumulation_steps": ("grad_accumulation",),
    "heads": ("num_heads",),
    "hidden_size": ("d_model",),
    "iters": ("total_steps",),
    "layers": ("num_encoder_layers", "num_decoder_layers"),
    "log_interval": ("log_every",),
    "logging_steps": ("log_every",),
    "lr": ("learning_rate",),
    "max_tokens": ("batch_tokens", "max_new_tokens"),
    "max_grad_norm": ("grad_clip_norm",),
    "max_iters": ("total_steps",),
    "length": ("max_new_tokens", "seq_len"),
    "max_length": ("max_len", "seq_len", "max_new_tokens"),
    "max_lr": ("learning_rate",),
    "max_steps": ("total_steps",),
    "min_lr": ("min_lr_ratio",),
    "model": ("run",),
    "model_name_or_path": ("run", "init_from"),
    "n_embd": ("d_model",),
    "n_head": ("num_heads",),
    "n_layer": ("num_encoder_layers", "num_decoder_layers"),
    "out_dir": ("runs", "output"),
    "output_dir": ("runs", "output"),
    "save_steps": ("save_every",),
    "seq_length": ("seq_len",),
    "steps": ("total_steps",),
    "warmup": ("warmup_steps",),
    "wd": ("weight_decay",),
}
"""Other programs' name of an option -> the last words of the options here."""
_NOT_OPTIONS = {
    "device": "JAX chooses the device; set JAX_PLATFORMS=cpu, cuda or tpu in the environment",
    "gpu": "JAX uses the GPUs that it sees; set CUDA_VISIBLE_DEVICES to hide some",
    "resume": "train has it; a training also resumes when its command is given again",
}
"""Options of other programs that do not exist here -> what to do."""


def of(config: Any, kinds: Mapping[str, Any], topics: Sequence[str]) -> str:
    """The help of the options `kinds` of `config`: of the groups `topics`, of "all", or in short.

    In short it shows the options that the class of `config` names in `common_options`, and those
    of its subclass; without such names all. Those in its `rare_options` are the last of their
    group. Raises `ConfigError` for an unknown group.
    """
    rare = getattr(config, "rare_options", ())
    kinds = {name: kinds[name] for name in sorted(kinds, key=rare.__contains__)}
    common = list(getattr(config, "common_options", ()))
    if not topics and common:
        declaring = next(k for k in type(config).__mro__ if "common_options" in vars(k))
        inherited = {field.name for field in dataclasses.fields(declaring)}
        added = [name for name in kinds if name.partition(".")[0] not in inherited]
        return _short(config, kinds, [*added, *common])
    groups = _groups(kinds)
    for topic in topics:
        if topic not in (*groups, "all"):
            raise ConfigError(
                f"--help {topic}: there is no such group: give all or one of {', '.join(groups)}"
            )
    chosen = [*groups] if not topics or "all" in topics else topics
    return "\n".join(
        f"{group}\n{''.join(_entry(config, kinds[name], name) for name in names)}"
        for group in chosen
        if (names := [x for x in kinds if _group(x) == group and has_setting(config, x)])
    )


def about(description: str, presets: Mapping[str, Any], chosen: str, experiment: str) -> str:
    """The description of a command, and of the options that are no settings."""
    text = ""
    if len(presets) > 1:
        text += f"--preset NAME chooses the defaults: {', '.join(presets)}. Those shown are of "
        text += f"{chosen}. "
    text += "--config PATH takes settings from a .json or .toml file or a run's folder; options "
    text += "come on top."
    if experiment:
        text += " --resume RUN goes on with the run in the folder RUN, --continue_from RUN with a "
        text += "new run from its state."
    text += " --trust_code lets files and folders name Python code of their authors, which runs."
    paragraphs = [each for each in inspect.cleandoc(description).split("\n\n") if each]
    return "\n".join(map(wrapped, [*paragraphs, text]))


def wrapped(text: str, indent: str = "") -> str:
    """`text` in the width of the terminal, at most 100 columns."""
    return textwrap.fill(text, _width(), subsequent_indent=indent) + "\n"


@cache
def field_docs(kind: Any) -> dict[str, str]:
    """The docstring under each field of the dataclass `kind`, on one line."""
    docs: dict[str, str] = {}
    base: Any
    for base in reversed([each for each in kind.__mro__ if dataclasses.is_dataclass(each)]):
        with contextlib.suppress(OSError, TypeError):  # a class made by a function has no source
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for field, doc in pairwise(body.body):  # type: ignore[attr-defined]
                if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                    docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(doc.value).split())
    return docs


def doc_of(config: Any, name: str) -> str:
    """The docstring of the field of `config` with the dotted `name`."""
    *path, field = name.split(".")
    for word in path:
        config = getattr(config, word)
    kind: Any = type(config)
    return field_docs(kind).get(field, "")


def _short(config: Any, kinds: Mapping[str, Any], names: Sequence[str]) -> str:
    names = [name for name in names if name in kinds]
    first, second = max(map(len, names)) + 2, 13
    room = _width() - first - second - 4
    text = f"{'option':{first}}  {'default':{second}}\n"
    for name in names:
        value = _shortened(_value(config, kinds[name], name), second)
        text += f"--{name:{first - 2}}  {value:{second}}  "
        text += f"{_shortened(doc_of(config, name).partition('. ')[0].removesuffix('.'), room)}\n"
    counts = ", ".join(f"{group} ({count})" for group, count in _groups(kinds).items())
    more = f"--help GROUP shows all options of a group: {counts}. --help all shows all of them."
    return f"{text}\n{wrapped(more)}"


def _shortened(text: str, width: int) -> str:
    return textwrap.shorten(text, width, placeholder=" ...")


def _value(config: Any, kind: Any, name: str) -> str:
    """The default of the option `name`, as it would be typed."""
    for word in name.split("."):
        config = getattr(config, word)
    if dataclasses.is_dataclass(config):
        return part_name(config, kind)
    return " ".join(map(str, config)) if isinstance(config, tuple | list) else str(config)


def _groups(kinds: Mapping[str, Any]) -> dict[str, int]:
    """The number of options of each group."""
    groups = [_group(name) for name in kinds]
    return {group: groups.count(group) for group in groups}


def _group(name: str) -> str:
    group, dot, _ = name.partition(".")
    return group if dot and group else RUN


def _entry(config: Any, kind: Any, name: str) -> str:
    """The option, its type, docstring and default."""
    parts = part_kinds(kind)
    allowed = "|".join(parts) if parts else "" if kind is bool else shown(kind)
    more = "; give it to see the options of another" if parts else ""
    text = f"{doc_of(config, name)} (default: {_value(config, kind, name) or 'empty'}{more})"
    return wrapped(f"--{name} {allowed}".strip()) + wrapped(f"    {text}", "    ")


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100)


def suggestion(name: str, known: Sequence[str]) -> str:
    """The option to write instead of the unknown one `name`; names are without hyphens."""
    word = _last_word(name)
    if word in _NOT_OPTIONS:
        return _NOT_OPTIONS[word]
    group = [option for option in known if option.startswith(f"{name}.")]
    if group:
        return f"it is a group of options, such as --{group[0]}; --help {name} lists them"
    words = (word, *_OTHER_NAMES.get(word.removeprefix("num_"), ()))
    same = [f"--{option}" for option in known if _last_word(option) in words][:3]
    if same:
        return f"use {' or '.join(same)}"
    near = difflib.get_close_matches(word, dict.fromkeys(map(_last_word, known)))
    options = [f"--{option}" for each in near for option in known if _last_word(option) == each]
    hint = f"did you mean {' or '.join(options[:3])}? " if options else ""
    return f"{hint}--help all lists them"


def _last_word(option: str) -> str:
    return option.rpartition(".")[2]
