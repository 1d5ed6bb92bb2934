"""Write a teacher's translations of its training text, and the settings of a student.

`python -m experiments.translation.distill --run TEACHER --out FOLDER` translates the source side
of the run's training text (sequence-level distillation, Kim & Rush 2016, section 3.2). A command
that was stopped continues when it is repeated.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.harness import cli
from experiments.harness.runs import json_records, run_folder
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.runs.decoding_options import DecodingOptions, load_members, run_folders
from experiments.harness.runs.text_io import one_line, write_lines
from experiments.translation.corpus import Corpus, Text, fingerprint, load_corpus
from experiments.translation.evaluate import without_too_long
from experiments.translation.load_run import load_translator
from experiments.translation.presets import Files, TranslationConfig
from jaxformer.config import check_at_least
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class DistillOptions(DecodingOptions, RunOptions):
    """The teacher, how it translates, and where the text goes."""

    run: str = "runs/translation/grammar"
    """The folder of the teacher's run; several folders, separated by commas, teach together."""
    out: str = "distilled"
    """The folder for the translations and the student's settings."""
    name: str = "student"
    """Name of the student's run."""
    int8: bool = False
    """Computes with weights of 8 bits."""
    lines_at_once: int = 2_000
    """Lines that are translated together; a command that is stopped loses at most so many."""

    def __post_init__(self):
        super().__post_init__()
        RunOptions.__post_init__(self)
        check_at_least(self, 1, "lines_at_once")


def main(options: DistillOptions) -> None:
    """Translates the lines that are not translated yet, then writes the student's files."""
    out = Path(options.out)
    config = run_folder.load_config(run_folders(options.run)[0], TranslationConfig)
    corpus = load_corpus(config.data)
    _check_begun(options, corpus, out)
    lines = _translate(options, corpus.train.source, out / "translations.txt")
    student = _write_student(options.name, config, corpus, lines, out)
    print(f"{len(lines):,} lines are translated. Train the student, with sizes of its own:")
    print(f"  python -m experiments.translation.train --config {student} --model.d_model 64")


def _check_begun(options: DistillOptions, corpus: Corpus, out: Path) -> None:
    """Records what decides the translations; refuses a folder begun with other settings."""
    settings = json.loads(json.dumps(asdict(options) | {"text": fingerprint(corpus.train)}))
    del settings["out"], settings["name"]
    path = out / "distill.json"
    begun = json_records.read(path, {"text": str}, "use another --out")
    if begun is None:
        out.mkdir(parents=True, exist_ok=True)
        json_records.write(path, settings)
    elif begun != settings:
        name = next(name for name in settings if begun.get(name) != settings[name])
        raise ConfigError(
            f"{out} was begun with {name}={begun.get(name)!r}, but this command has "
            f"{name}={settings[name]!r}: use another --out"
        )


def _translate(options: DistillOptions, source: list[str], path: Path) -> list[str]:
    """The translations of all lines; those that `path` lacks are appended to it."""
    written = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    if len(written) < len(source):
        write_lines(path, written)  # without a line that was cut short
        translator = load_members(
            lambda folder: load_translator(folder, options, options),
            options.run,
            options.ensemble,
            int8=options.int8,
        )
        with path.open("a", encoding="utf-8", newline="\n") as file:
            for start in range(len(written), len(source), options.lines_at_once):
                print(f"line {start + 1:,} of {len(source):,}", flush=True)
                lines = source[start : start + options.lines_at_once]
                lines, _ = without_too_long(translator, lines)
                texts = [one_line(best[0].text) for best in translator(lines, first=start)]
                file.writelines(f"{text}\n" for text in texts)
                file.flush()
                written += texts
    return written


def _write_student(
    name: str, config: TranslationConfig, corpus: Corpus, lines: list[str], out: Path
) -> Path:
    """Writes the distilled text, the teacher's other texts, and the student's settings."""
    files: dict[str, Any] = {}
    texts = corpus._replace(train=Text(corpus.train.source, lines))
    for part, text in texts._asdict().items():
        if text.source:
            paths = [out / f"{part}.{side}" for side in Text._fields]
            files[part] = Files(*map(str, paths))
            for path, side in zip(paths, text, strict=True):
                write_lines(path, side)
    student = replace(
        config,
        name=name,
        data=replace(config.data, corpus="files", **files),
        training=replace(config.training, teacher=""),
        init_from="",
        continue_from="",
    )
    path = out / "student.json"
    run_folder.write_json(path, run_folder.as_json(student))
    return path


if __name__ == "__main__":
    cli.start(main, {"default": DistillOptions()}, __doc__)
