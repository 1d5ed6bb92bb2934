"""The small files of a run's folder, damaged at random, and what each next use makes of them."""

import contextlib
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from experiments.harness import cli
from experiments.harness.runs import run_folder
from experiments.translation import prepare
from experiments.translation.presets import TranslationConfig
from jaxformer.config import to_plain
from jaxformer.pretrained.run_weights import select_weights, weights_of
from tests.faults import children, mutations, states
from tests.faults.children import Count
from tests.faults.damage import flip
from tests.faults.trainings import Training

CODES = (2, 65, 66)
STEPS = (3, 5)


def _noise(content: bytes, random: Random) -> bytes:
    start = random.randrange(len(content))
    stop = min(len(content), start + random.randrange(1, 40))
    return content[:start] + random.randbytes(stop - start) + content[stop:]


def _cut(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content))]


WAYS: tuple[Callable[[bytes, Random], bytes], ...] = (_noise, _cut, flip)


def damaged(folder: Path, tries: int) -> Count:
    """Noise, a cut or a flipped bit in one file of a run but its checkpoints, `tries` times.

    A resume and a use of the run in turn must either find all as it was, or end in one sentence
    that names the folder with the exit code of a wrong setting, content or checkpoint. Two files
    are free: config.json is for people to edit, so that a use may find another valid setting, and
    metrics.jsonl, from which nothing is computed, may hold another number.
    """
    args = Training(folder, {"--runs": folder / "runs"}).args
    return children.counted_in_child(_damaged, args, folder / "whole", tries)


def _damaged(args: dict[str, Any], whole: Path, tries: int) -> Iterator[tuple[str, str]]:
    run, config = mutations.prepared(args), mutations.parsed(args)
    states.make_folder(run / "checkpoints", STEPS)
    weights_of(run).write({"steps": [STEPS[0]], "tree": "params", "validation_bleu": 7.3})
    log = run_folder.Run(run)
    for step in STEPS:
        log.log(step, loss=1.0 / step)
    log.call("close")
    names = [path.relative_to(run) for path in sorted(run.rglob("*")) if path.is_file()]
    names = [name for name in names if name.parts[0] not in ("checkpoints", "tensorboard")]
    shutil.copytree(run, whole)
    expected = [_asked(use, config, run)[2] for use in (_resumed, _used)]
    for number in range(tries):
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        random, name = children.drawn(number), names[number % len(names)]
        content = (run / name).read_bytes()
        (run / name).write_bytes(random.choice(WAYS)(content, random))
        which = number // len(names) % 2
        said = judge(name.name, *_asked((_resumed, _used)[which], config, run), expected[which])
        yield f"try {number}, {name}", said


def _asked(use: Callable, config: TranslationConfig, run: Path) -> tuple[int, str, Any]:
    """The exit code of `use`, what it said, and what it found."""
    said, found = io.StringIO(), []
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = cli.run(lambda: found.append(use(config, run)))
    return code, said.getvalue(), found


def _resumed(config: TranslationConfig, run: Path) -> dict[str, Any]:
    """The settings and text that a training starts from."""
    opened = run_folder.open_folder(
        config.runs, "translation", config.name, config, may_differ=config.free_fields()
    )
    prepared = prepare.prepare(config, run)
    opened.resume(STEPS[-1])
    first = prepared.batches.batch(0)
    return {
        "config.json": to_plain(run_folder.load_config(run, TranslationConfig)),
        "batches": (prepared.batches.fingerprint, [leaf.tobytes() for leaf in first]),
        "ids": prepared.target_tokenizer.encode("dog Hund sees"),
        "metrics.jsonl": opened.metrics(),
    }


def _used(config: TranslationConfig, run: Path) -> dict[str, Any]:
    """The weights and tokenizers that a translation starts from."""
    stored = run_folder.load_config(run, TranslationConfig)
    params = select_weights(run).read()
    source, target = prepare.load_tokenizers(run)
    return {
        "config.json": to_plain(stored),
        "weights": states.as_bytes(params),
        "ids": [tokenizer.encode("dog Hund sees") for tokenizer in (source, target)],
    }


def judge(name: str, code: int, said: str, found: list, expected: list) -> str:
    """The outcome of a use of the run whose file `name` was damaged."""
    if code != 0:
        one = said.splitlines()[-1:] and said.splitlines()[-1].startswith("error: ")
        named = "/translation/tiny" in said
        if code in CODES and one and named and "Traceback" not in said:
            return "survived"
        return f"ended with {code}: {said}"
    wrong = [what for what in expected[0] if found[0][what] != expected[0][what] and what != name]
    return f"silent: other {', '.join(wrong)}" if wrong else "survived"
