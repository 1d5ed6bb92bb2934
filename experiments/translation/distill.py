"""Write a teacher's translations of its training text, and the settings of a student.

`python -m experiments.translation.distill --run TEACHER --out FOLDER` translates the source side
of the run's training text (sequence-level distillation, Kim & Rush 2016, section 3.2). Called
again, it goes on where it ended. `--num_processes N --process_id I` shares the work.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.harness import cli
from experiments.harness.runs import json_records, run_folder
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.runs.decoding_options import DecodingOptions, load_members, run_folders
from experiments.harness.runs.text_io import write_lines
from experiments.translation.corpus import Corpus, Text, fingerprint, load_corpus
from experiments.translation.evaluation import without_too_long
from experiments.translation.load_run import Translator, load_translator
from experiments.translation.presets import Files, TranslationConfig
from jaxformer.config import check_at_least
from jaxformer.errors import ConfigError

_NOTE = "distill.json"


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
    """Lines of a part; a command that is stopped loses at most one part."""
    num_processes: int = 1
    """How many commands share the work."""
    process_id: int = 0
    """Number of this command, from 0."""

    def __post_init__(self):
        super().__post_init__()
        RunOptions.__post_init__(self)
        check_at_least(self, 1, "lines_at_once", "num_processes")
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"process_id={self.process_id}, but it must be 0 to num_processes - 1 = "
                f"{self.num_processes - 1}"
            )


def main(options: DistillOptions) -> None:
    """Translates the parts of this command that are not there; with all parts, writes the text."""
    out = Path(options.out)
    config = run_folder.load_config(run_folders(options.run)[0], TranslationConfig)
    corpus = load_corpus(config.data)
    _record(options, corpus, out)
    starts = range(0, len(corpus.train.source), options.lines_at_once)
    parts = [out / "parts" / f"{number:06}.txt" for number in range(len(starts))]
    own = range(options.process_id, len(parts), options.num_processes)
    missing = [number for number in own if not parts[number].exists()]
    if missing:
        translator = _load(options)
        for number in missing:
            print(f"part {number + 1} of {len(parts)}", flush=True)
            _translate(translator, corpus.train.source, starts[number], options, parts[number])
    there = sum(part.exists() for part in parts)
    if there < len(parts):
        print(f"{there} of {len(parts)} parts are there: the other processes write the rest")
        return
    lines = [line for part in parts for line in part.read_text("utf-8").split("\n")[:-1]]
    student = _write_student(options, config, corpus, lines)
    print(f"{len(lines):,} lines are translated. Train the student, with sizes of its own:")
    print(f"  python -m experiments.translation.train --config {student} --model.d_model 64")


def _load(options: DistillOptions) -> Translator:
    return load_members(
        lambda folder: load_translator(folder, options, options),
        options.run,
        options.ensemble,
        int8=options.int8,
    )


def _record(options: DistillOptions, corpus: Corpus, out: Path) -> None:
    """Writes what decides the translations; refuses a folder that was begun with other settings."""
    decides: dict[str, Any] = asdict(options)
    for name in ("out", "name", "num_processes", "process_id"):
        del decides[name]
    decides["text"] = fingerprint(corpus.train)
    found = json_records.read(out / _NOTE, {"text": str}, "use another --out")
    if found is None:
        out.mkdir(parents=True, exist_ok=True)
        json_records.write(out / _NOTE, decides)
        return
    wrong = [
        f"{name} is {found.get(name)!r} there but {value!r} here"
        for name, value in decides.items()
        if found.get(name) != value
    ]
    if wrong:
        raise ConfigError(f"{out} was begun otherwise: {'; '.join(wrong)}: use another --out")


def _translate(
    translator: Translator, source: list[str], start: int, options: DistillOptions, path: Path
) -> None:
    """Writes the translations of the lines from `start`; the file is there when it is whole."""
    lines, _ = without_too_long(translator, source[start : start + options.lines_at_once])
    found = translator(lines, first=start)
    unfinished = path.with_suffix(".unfinished")
    write_lines(unfinished, [best[0].text for best in found])
    unfinished.replace(path)


def _write_student(
    options: DistillOptions, config: TranslationConfig, corpus: Corpus, lines: list[str]
) -> Path:
    """Writes the distilled text, the teacher's other texts, and the student's settings."""
    out = Path(options.out)
    files: dict[str, Any] = {}
    texts = corpus._replace(train=Text(corpus.train.source, lines))
    for name, text in texts._asdict().items():
        if text.source:
            paths = [out / f"{name}.{side}" for side in Text._fields]
            files[name] = Files(*map(str, paths))
            for file, side in zip(paths, text, strict=True):
                write_lines(file, side)
    data = replace(config.data, corpus="files", **files)
    training = replace(config.training, teacher="")
    student = replace(config, name=options.name, data=data, training=training)
    student = replace(student, init_from="", continue_from="")
    path = out / "student.json"
    run_folder.write_json(path, run_folder.as_json(student))
    return path


if __name__ == "__main__":
    cli.start(main, {"default": DistillOptions()}, __doc__)
