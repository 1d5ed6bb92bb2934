"""A configuration from presets, files and the options of a command line."""

import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from experiments.harness.cli import config_files, help_text, words
from experiments.harness.cli.exit_codes import sentence
from experiments.harness.cli.option_effects import refuse_without_effect
from jaxformer.config import check_trusted, is_import_name, names_in, plain, to_plain, trust
from jaxformer.errors import ConfigError
from jaxformer.storage import is_in_bucket, to_path

T = TypeVar("T")


def parse(
    presets: Mapping[str, T],
    args: list[str] | None = None,
    description: str | None = None,
    *,
    experiment: str = "",
    positional: str = "",
) -> T:
    """The preset named by `--preset` (the first by default), changed by the options.

    `presets` holds frozen dataclasses. A nested field is set by its dotted name, as in
    `--model.d_model 256`; a field of type bool is a flag, `--int8` or `--no_int8`. A part is chosen
    by its name, as in `--model.positions rotary`, and set as a nested field. Below the options,
    `--config PATH` changes fields by a JSON or TOML file, or a run's folder. With `experiment`,
    `--resume RUN` takes the settings of a run in a folder of that name, and `--continue_from RUN`
    too, for a new run that goes on from its state. Arguments without a name are values of the
    option `positional`; they stand before or after the options, but not after one that takes a
    list. A list that is given several times has all values. None for `args` reads the process's. An
    unknown preset or option, an option without effect, and settings that contradict each other, end
    the process with code 2 and one sentence on stderr.
    """
    with _ending_the_process():
        config, options = _parse(presets, args, description or "", experiment, positional)
        refuse_without_effect(config, options)
    return config


def parse_base(
    presets: Mapping[str, T], args: Sequence[str], description: str | None
) -> tuple[T, list[str]]:
    """The result of `parse` for settings that a sweep changes, and the options that were typed.

    An option without effect there may have one in a cell. Errors end the process as in `parse`.
    """
    with _ending_the_process():
        return _parse(presets, [*args], description or "", "", "")


@contextmanager
def _ending_the_process() -> Iterator[None]:
    """Within it a `ConfigError` ends the process with code 2 and one sentence on stderr."""
    try:
        yield
    except ConfigError as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        raise SystemExit(2) from error


def take_options(options: T, args: Sequence[str]) -> tuple[T, list[str]]:
    """`options` with each of the words `args` that is one of its fields, and the other words.

    `--help` prints what the options are, and stays among the words.
    """
    groups = words.group(args)
    kinds = config_files.settings(options)
    if "help" in groups:
        print(help_text.of(options, kinds, []))
    values = words.take(kinds, groups)
    other_words: list[str] = []
    for name, uses in groups.items():
        for use in uses:
            other_words += [f"--{name}", *use]
    return config_files.with_overrides(options, values), other_words


def read_option(config: Any, name: str, word: str) -> Any:
    """The value that `word` gives to the setting `name` of `config`."""
    kinds = config_files.settings(config)
    _check_known([name], kinds)
    return words.read(kinds[name], [word], name)


def _parse(
    presets: Mapping[str, T],
    args: list[str] | None,
    description: str,
    experiment: str,
    positional: str,
) -> tuple[T, list[str]]:
    """The configuration, and the names of the options that were given."""
    args = sys.argv[1:] if args is None else args
    groups = words.group(args, positional)
    start_options = {"preset": str, "config": str}
    if experiment:
        start_options |= {"resume": str, "continue_from": str}
    other_options = {"trust_code": bool, "help": tuple[str, ...]}
    starts = words.take(start_options | other_options, groups, positional)
    _trust_names(args, presets, starts.pop("trust_code", False))
    topics = starts.pop("help", None)
    config = _with_files(presets, starts, experiment)
    kinds = config_files.settings(config)
    kinds |= _own_parts(kinds, groups)
    values = words.take(kinds, groups, positional)
    _check_known(groups, [*kinds, *start_options])
    _refuse_no_words(config, values)
    config = config_files.with_overrides(config, values)
    if topics is not None:
        chosen = starts.get("preset", next(iter(presets)))
        about = help_text.about(description, presets, chosen, experiment)
        print(f"{about}\n{help_text.of(config, kinds, topics)}", end="")
        raise SystemExit(0)
    return config, [*values]


def _check_known(names: Iterable[str], known: Iterable[str]) -> None:
    options = [*known]
    for name in names:
        if name not in options:
            raise ConfigError(f"there is no option --{name}: {help_text.suggestion(name, options)}")


def _refuse_no_words(config: Any, values: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a list without words in place of one that is empty already.

    So does a shell that knows no file of a pattern, or an empty variable.
    """
    empty = [name for name, value in values.items() if value == ()]
    before = config_files.flat(to_plain(config)) if empty else {}
    for name in empty:
        if before.get(name) == "[]":
            raise ConfigError(
                f"--{name} takes values, but none was given: give one, or leave it out"
            )


def _trust_names(args: Sequence[str], presets: Mapping[str, Any], trust_code: bool) -> None:
    """Trusts the code that the command line and the presets name, or all of it."""
    given = [word.partition("=")[2] or word for word in args]
    trust(*filter(is_import_name, given), trust_code=trust_code)
    for preset in presets.values():
        trust(*(name for _, name, _ in names_in(to_plain(preset))))


def _with_files(presets: Mapping[str, T], starts: Mapping[str, str], experiment: str) -> T:
    """The preset with the fields of the files that --config, --resume and --continue_from name.

    `starts` are the words of these options and of --preset, by name.
    """
    resume, parent, chosen = map(starts.get, ("resume", "continue_from", "preset"))
    if resume and len(starts) > 1:
        raise ConfigError(
            "--resume takes all settings of the run: leave out --config, --preset and "
            "--continue_from"
        )
    run = resume
    if parent and not ("config" in starts or chosen):
        run = str(config_files.split_step(parent)[0])
    location = _location(run, experiment) if run else {}
    path = run or starts.get("config")
    fields = config_files.read_object(to_path(path)) if path else {}
    check_trusted(fields, path or "")
    name = chosen or fields.get("preset") or next(iter(presets))
    if name not in presets:
        raise ConfigError(f"there is no preset {name!r}: choose one of {', '.join(presets)}")
    preset: Any = presets[name]
    if path:
        fields.pop("preset", None)
        preset = config_files.with_fields(preset, fields, to_path(path))
    if run:
        preset = dataclasses.replace(preset, **location)
    if not parent:
        return preset
    name = f"{preset.name}-continued" if run else preset.name
    return dataclasses.replace(preset, name=name, continue_from=parent, init_from="")


def _location(path: str, experiment: str) -> dict[str, str]:
    """The options `name` and `runs` of the run in the folder `path`."""
    folder = to_path(path if "://" in path else os.path.abspath(path))
    if folder.parent.name != experiment:
        raise ConfigError(
            f"{path} is not a run of {experiment}: it is not in a folder {experiment}/"
        )
    root = folder.parent.parent
    runs = str(root) if os.path.isabs(path) or is_in_bucket(root) else os.path.relpath(root)
    return {"name": folder.name, "runs": runs}


def _own_parts(kinds: Mapping[str, Any], groups: Mapping[str, list[list[str]]]) -> dict[str, Any]:
    """The settings of the parts of your own that `groups` name."""
    settings_of_parts: dict[str, Any] = {}
    for name in [name for name in groups if plain.part_kinds(kinds.get(name))]:
        word = words.read(kinds[name], groups[name][-1], f"--{name}")
        part = plain.find_part(kinds[name], word, f"--{name}")
        if part != word:
            settings_of_parts |= config_files.settings(part, f"{name}.")
    return settings_of_parts
