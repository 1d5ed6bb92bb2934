"""Recorded commands: what they set when they ran, and what they set today.

recorded_settings.json has the settings of each command as the code of its commit resolved them.
A command repeats its number if today's options accept it and give the same settings, field by
field. The tables below say which names and values mean the same as before.
"""

import contextlib
import functools
import io
import json
import re
import runpy
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints
from unittest import mock

from experiments import plan, registry, runs, sweep
from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.harness.results.run_settings import shared_settings
from jaxformer.config import import_by_name, is_import_name
from jaxformer.errors import ConfigError
from tests.evidence.settings import Settings, changed_settings, settings_of_config

RECORDED = Path(__file__).with_name("recorded_settings.json")

RENAMED = {
    "model.activation": "model.feed_forward.activation",
    "model.activation_dropout_rate": "model.feed_forward.dropout_rate",
    "model.attention.full_every": "model.window.full_every",
    "model.attention.window": "model.window.size",
    "model.attention_dropout_rate": "model.attention.dropout_rate",
    "model.attention_softcap": "model.attention.softcap",
    "model.attention_window": "model.window.size",
    "model.embedding_norm": "model.embeddings.norm",
    "model.full_attention_interval": "model.window.full_every",
    "model.gated": "model.feed_forward.gated",
    "model.logits_softcap": "model.output.softcap",
    "model.norm": "model.norm.kind",
    "model.norm_eps": "model.norm.eps",
    "model.norm_placement": "model.norm.placement",
    "model.num_kv_heads": "model.attention.num_kv_heads",
    "model.num_token_types": "model.embeddings.num_types",
    "model.output_bias": "model.output.bias",
    "model.positions": "model.positions.type",
    "model.qkv_bias": "model.attention.qkv_bias",
    "model.query_key_norm": "model.attention.query_key_norm",
    "model.query_pre_attn_scalar": "model.attention.query_scalar",
    "model.scale_embeddings": "model.embeddings.scale",
    "model.tied_embeddings": "model.embeddings.tied",
    "model.zero_embedding_id": "model.embeddings.zero_id",
    "sampling.eos": "completion.eos",
    "sampling.overflow": "completion.overflow",
    "sampling.seed": "completion.seed",
    "sampling.stop": "completion.stop",
    "search.batch_size": "translation.batch_size",
    "search.bos": "translation.bos",
    "search.max_extra_tokens": "translation.max_extra_tokens",
    "search.max_length": "search.max_new_tokens",
    "search.min_length": "search.min_new_tokens",
    "search.pad": "translation.pad",
    "work.model.attention.full_every": "work.model.window.full_every",
    "work.model.attention.window": "work.model.window.size",
}
"""Settings that have another name today."""

REMOVED: Mapping[str, Any] = {
    "completion.prefill_chunk": None,
    "data.bpe_dropout": 0.0,
    "data.bpe_encodings": 8,
    "data.weights": [],
    "decoding": "beam",
    "ensemble": "arithmetic",
    "mbr_samples": 32,
    "min_p": 0.0,
    "model.embeddings.dropout_rate": 0.0,
    "model.encoder.d_ff": None,
    "model.encoder.num_heads": None,
    "model.encoder_d_ff": None,
    "model.num_encoder_heads": None,
    "model.parallel_residual": False,
    "model.pooler_activation": "tanh",
    "model.relative_buckets": 32,
    "model.relative_max_distance": 128,
    "model.rotary_attention_factor": None,
    "model.rotary_base": 10000.0,
    "model.rotary_beta_fast": 32.0,
    "model.rotary_beta_slow": 1.0,
    "model.rotary_factor": 1.0,
    "model.rotary_fraction": 1.0,
    "model.rotary_high_freq_factor": 4.0,
    "model.rotary_low_freq_factor": 1.0,
    "model.rotary_original_len": 8192,
    "model.rotary_scaling": "none",
    "model.sinusoidal_endpoint": False,
    "model.sinusoidal_layout": "interleaved",
    "model.sinusoidal_offset": 0,
    "model.word_dropout_rate": 0.0,
    "optimizer.layer_lr_decay": 1.0,
    "optimizer.step_boundaries": [],
    "optimizer.step_factor": 0.1,
    "seed": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "training.distillation_weight": 0.5,
    "training.extra_ema_decays": [],
    "training.gradient_noise_scale": False,
    "training.log_attention": False,
    "training.log_update_ratio": False,
    "training.position_scheme": "",
    "training.r_drop": 0.0,
    "training.schedule_free": False,
    "training.teacher": "",
    "translation.source_bos": False,
    "utility": "chrf",
    "work.model.embeddings.dropout_rate": 0.0,
    "work.model.encoder.d_ff": None,
    "work.model.encoder.num_heads": None,
    "work.own_model": "",
}
"""Settings that are gone, with the value that computes what is computed without them."""

ADDED: Mapping[str, Any] = {
    "completion.max_length": None,
    "completion.min_length": 0,
    "data.document_id": None,
    "data.lowercase": False,
    "data.source_len": 0,
    "data.target_len": 0,
    "data.validation_tokens": 0,
    "distributed": False,
    "document_id": None,
    "language": "",
    "model.attention.norm_over_heads": False,
    "model.feed_forward.experts": None,
    "model.positions.base": 10000.0,
    "model.positions.endpoint": False,
    "model.positions.fraction": 1.0,
    "model.positions.layout": "interleaved",
    "model.positions.offset": 0,
    "model.positions.scaling.type": "no_scaling",
    "model.positions.window_base": None,
    "num_processes": None,
    "optimizer.ns_coeffs": "standard",
    "sampling.min_new_tokens": 0,
    "sampling.suppress_tokens": [],
    "source_language": None,
    "target_language": None,
    "tokenize": None,
    "training.balance": 0.0,
    "training.usual_parts": 1,
    "translation.prefix": "",
    "translation.source_language": None,
    "translation.target_language": None,
    "work.model.attention.norm_over_heads": False,
    "work.model.feed_forward.experts": None,
    "work.optimizer.ns_coeffs": "standard",
}
"""Settings that did not exist, with the value that computes what was computed without them."""

SAME_VALUES: Mapping[str, Sequence[tuple[Any, Any]]] = {
    "model.output.bias": [(False, None)],
    "model.pooler": [(False, "none")],
    "strategy": [("single", "auto")],
    "training.grad_accumulation": [(1, None)],
    "work.model.output.bias": [(False, None)],
}
"""Pairs of a value and the value that means the same today, on one device."""

_NO_EFFECT = ("compilation_cache_dir", "prompts")
"""Settings that no recorded number depends on: a cache, and texts that are only shown."""
_READERS = ("experiments.plan", "experiments.runs")
"""Commands that train and score nothing: it is enough that their options are accepted."""
_COMMAND = re.compile(r"^((?:\w+=(?:'[^']*'|\S*) )*)python -m (experiments\.[\w.]+)(.*)$")


class Recorded(NamedTuple):
    """A command of a commit, and the settings of its runs, one for each variant.

    They are what the code of the commit resolved `original` to, the command that ran; `command` may
    be the same in today's words. `changed` has the names of the settings of each run that were not
    the defaults then.
    """

    commit: str
    original: str
    command: str
    cells: list[dict[str, str]]
    changed: list[list[str]]


@functools.cache
def recorded_commands() -> dict[tuple[str, str], Recorded]:
    """What is recorded, by commit ("" where it is not known) and command."""
    bases, commands = _read()
    read = {}
    for entry in commands:
        cells = [{**bases[run["base"]], **run["settings"]} for run in entry["runs"]]
        changed = [run["changed"] for run in entry["runs"]]
        names = entry["commit"], entry["original"], entry["command"]
        read[entry["commit"], entry["command"]] = Recorded(*names, cells, changed)
    return read


def record(command: str, commit: str) -> None:
    """Adds what today's code resolves `command` to, which ran at `commit`, to the file."""
    bases, commands = _read()
    runs_of = []
    for config in parse(command):
        settings = settings_of_config(config)
        alike = [number for number, base in enumerate(bases) if base.keys() == settings.keys()]
        if not alike:
            alike = [len(bases)]
            bases.append(settings)
        base = bases[alike[0]]
        differing = {name: text for name, text in settings.items() if base[name] != text}
        changed = list(changed_settings(config))
        runs_of.append({"base": alike[0], "settings": differing, "changed": changed})
    entry = {"commit": commit, "original": command, "command": command, "runs": runs_of}
    kept = [x for x in commands if (x["commit"], x["command"]) != (commit, command)]
    _write(bases, [*kept, entry])
    recorded_commands.cache_clear()


def _read() -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """Settings that many runs share, and commands whose runs say what differs from them."""
    content = json.loads(RECORDED.read_text(encoding="utf-8"))
    return content["bases"], content["commands"]


def _write(bases: list[dict[str, str]], commands: list[dict[str, Any]]) -> None:
    """Writes a line for each of `bases` and of `commands`."""
    parts = {"bases": bases, "commands": commands}
    texts = [
        f'"{name}": [\n' + ",\n".join(json.dumps(line) for line in lines) + "\n]"
        for name, lines in parts.items()
    ]
    RECORDED.write_text("{" + ",\n".join(texts) + "}\n", encoding="utf-8")


class _Started(BaseException):
    """Ends a command where it would parse its words."""


def parse(command: str) -> list[Any]:
    """The configurations of the runs that `command` would start; none of the seeds but the first.

    Raises `ConfigError` for a command that today's code refuses, or does not have.
    """
    match = _COMMAND.match(command)
    if match is None:
        raise ConfigError(f"{command!r} is no command of an experiment")
    module, words = match[2], shlex.split(match[3])
    parser = _PARSERS.get(module, functools.partial(_parse_module, module))
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            return parser(words)
    except SystemExit as error:
        raise ConfigError(message.getvalue().strip() or str(error)) from None


def _parse_module(module: str, words: list[str]) -> list[Any]:
    """The configuration that a module's `cli.start` would get."""
    started: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def start(*args: Any, **options: Any) -> None:
        started.append((args, options))
        raise _Started

    with mock.patch.object(cli, "start", start), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that the module is imported already
        with contextlib.suppress(_Started, ImportError):
            runpy.run_module(module, run_name="__main__")
    if not started:
        raise ConfigError(f"python -m {module} is no command")
    (_, presets, *_), options = started[0]
    return [cli.parse(presets, words, "", **options)]


def _parse_sweep(words: list[str]) -> list[Any]:
    _, config, options, _ = registry.parse(words, sweep.SweepOptions(), "")
    variants = import_by_name(options.cells, "cells")() if options.cells else ({},)
    cells = sweep.name_cells(config, sweep.read_vary(config, options.vary), variants)
    return [config_files.with_overrides(config, changes) for changes in cells.values()]


def _parse_plan(words: list[str]) -> list[Any]:
    """As for a CPU: the compiler of another target need not be installed."""
    if "--compiler" in words:
        words[words.index("--compiler") + 1] = "cpu"
    return [registry.parse(words, plan.PlanOptions(), "").config]


def _parse_runs(words: list[str]) -> list[Any]:
    options = get_type_hints(runs.COMMANDS[words[0]])["options"]()
    return [cli.parse({"default": options}, words[1:], "", positional="runs")]


_PARSERS: dict[str, Callable[[list[str]], list[Any]]] = {
    "experiments.sweep": _parse_sweep,
    "experiments.plan": _parse_plan,
    "experiments.runs": _parse_runs,
}


def differences(recorded: Settings, today: Settings) -> Iterator[str]:
    """A sentence for each setting that does not mean today what it meant when it was recorded."""
    recorded = {name: text for name, text in shared_settings(recorded).items() if _counts(name)}
    today = {name: text for name, text in shared_settings(today).items() if _counts(name)}
    same_name = {name: name for name in recorded.keys() & today.keys()}
    renamed = {
        name: RENAMED[name] for name in recorded.keys() - today.keys() if RENAMED.get(name) in today
    }
    for name, new in (same_name | renamed).items():
        before, after = json.loads(recorded[name]), json.loads(today[new])
        if before != after and (before, after) not in SAME_VALUES.get(new, ()):
            yield f"{new} was {before!r} and is {after!r}"
    for name in sorted(recorded.keys() - same_name.keys() - renamed.keys()):
        value = json.loads(recorded[name])
        if name not in REMOVED or REMOVED[name] != value:
            yield f"{name}, which was {value!r}, is gone"
    for name in sorted(today.keys() - same_name.keys() - set(renamed.values())):
        value = json.loads(today[name])
        if name not in ADDED or ADDED[name] != value:
            yield f"{name} is new, and is {value!r}"


def _counts(name: str) -> bool:
    return name not in _NO_EFFECT


def check_names(settings: Settings) -> None:
    """Raises `ConfigError` for a setting that names a function or class that is not there."""
    for name, text in settings.items():
        value = json.loads(text)
        if isinstance(value, str) and is_import_name(value):
            import_by_name(value, name)


def why_not_repeated(command: str | None, commit: str | None) -> str:
    """Why `command` does not do today what it did at `commit`; "" where it does.

    A line without a command of an experiment, as of another program, is never asked.
    """
    if command is None or not _COMMAND.match(command):
        return ""
    try:
        today = [settings_of_config(config) for config in parse(command)]
        for settings in today:
            check_names(settings)
    except ConfigError as error:
        return str(error)
    recorded = recorded_commands().get((commit or "", command))
    if recorded is None:
        return (
            "" if command.partition("-m ")[2].startswith(_READERS) else "nothing is recorded of it"
        )
    if len(recorded.cells) > len(today):
        return f"it had {len(recorded.cells)} variants, and has {len(today)}"
    for before, after in zip(recorded.cells, today, strict=False):
        for difference in differences(before, after):
            return difference
    return ""
