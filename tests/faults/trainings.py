"""Tiny trainings by the real command, each in a process of its own, and what they leave behind."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock

from experiments.harness import cli
from experiments.translation import train
from experiments.translation.presets import PRESETS
from jaxformer import optional_dependencies
from jaxformer.checkpoint import Checkpoints, manifest
from tests.faults import children, states
from tests.faults.children import Child

Tell = Callable[[Any], None]
Around = Callable[[Tell], AbstractContextManager[None]]

WORDS = {"dog": "Hund", "bird": "Vogel", "tree": "Baum", "sees": "sieht", "finds": "findet"}
SETTINGS = """
    --name tiny --model.vocab_size 300 --model.d_model 16 --model.d_ff 22 --model.num_heads 2
    --model.num_encoder_layers 1 --model.num_decoder_layers 1 --model.max_len 31
    --model.dropout_rate 0.1 --data.batch_tokens 128 --data.buckets 1
    --optimizer.schedule inverse_square_root --optimizer.warmup_steps 3
    --optimizer.total_steps 40 --training.log_every 3 --training.save_every 7
    --training.evaluate_every 15 --training.average_checkpoints 2
    --search.beam_size 2
    --translation.batch_size 1
"""


def settings(folder: Path) -> dict[str, Any]:
    """The options of a tiny run of a text that is written into `folder`."""
    random = children.drawn(3)
    args: dict[str, Any] = dict(zip(SETTINGS.split()[::2], SETTINGS.split()[1::2], strict=True))
    for part, count in (("train", 97), ("validation", 5), ("test", 3)):
        lines = [random.choices(list(WORDS), k=random.randrange(2, 7)) for _ in range(count)]
        for side in ("source", "target"):
            words = [line if side == "source" else map(WORDS.get, line) for line in lines]
            path = folder / f"{part}.{side}"
            path.write_text("".join(" ".join(line) + "\n" for line in words))
            args[f"--data.{part}.{side}"] = path
    return args


def load_libraries() -> None:
    """Imports, once for all children, what a training asks for late."""
    for name in ("sacrebleu", "tokenizers", "tensorboardX.event_file_writer"):
        optional_dependencies.load(name)


@contextmanager
def undisturbed(tell: Tell) -> Iterator[None]:
    """Nothing happens to the training within it."""
    yield


def begin(
    args: dict[str, Any], place: Path, around: Around = undisturbed, *, programs: str = "programs"
) -> Child:
    """A process that trains in the folder `place` within `around`, and then ends as the command.

    "--runs" in `args` may lead elsewhere. It tells "begun" at its start. Compiled programs are kept
    in the folder `programs` two above `place`, for all injections; with an empty name they are
    compiled anew. What it says lies in `place`/said.txt.
    """
    return Child(partial(_train, args, place, around, programs))


def end(child: Child) -> int:
    """Its exit code, once all it tells was heard."""
    for _ in child.told():
        pass
    return child.wait()


def ended(
    args: dict[str, Any], place: Path, around: Around = undisturbed, *, programs: str = "programs"
) -> int:
    """The exit code of `begin`."""
    return end(begin(args, place, around, programs=programs))


def completed(args: dict[str, Any], place: Path) -> dict[str, Any]:
    """The files and values that an undisturbed training leaves."""
    if ended(args, place) != 0:
        raise RuntimeError(said(place))
    return left(place)


def completed_once(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As `completed` for `settings` that nothing changes, once for all injections."""
    path = folder.parent / "whole.json"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_text(json.dumps(completed(args, folder / "whole")))
    return json.loads(path.read_text())


def goes_on(args: dict[str, Any], place: Path, expected: dict[str, Any], step: int) -> str:
    """Whether the training in `place` goes on after `step`, and leaves what was `expected`."""
    return judge(ended(args, place), place, expected, step)


def judge(
    code: int, place: Path, expected: dict[str, Any], step: int, runs: Path | None = None
) -> str:
    """The outcome of a training in `place` that was to go on after `step`, with its `runs`."""
    if code != 0:
        return f"resuming ended with {code}: {said(place)}"
    if starts(place)[-1] != step:
        return f"silent: went on from step {starts(place)[-1]} instead of {step}"
    found = left(runs or place)
    wrong = [
        name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name)
    ]
    return f"silent: other {', '.join(wrong)}" if wrong else "survived"


def said(place: Path) -> str:
    """The output of all trainings in `place`."""
    return (place / "said.txt").read_text()


def starts(place: Path) -> list[int]:
    """The steps that the trainings in `place` went on from."""
    return [int(step) for step in re.findall(r"parameters; from step (\d+) to", said(place))]


def left(place: Path) -> dict[str, Any]:
    """The bytes of the last state, by the names of its parts, metadata, metrics and scores."""
    return children.in_child(partial(_left, place))


def run_of(place: Path) -> Path:
    """The folder of the run."""
    return place / "translation" / "tiny"


def _train(args: dict, place: Path, around: Around, programs: str, tell: Tell) -> None:
    """Never returns: ends this process as the command would."""
    place.mkdir(exist_ok=True)
    # Most of a tiny training is compiling.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_enable_compilation_cache", bool(programs))
    if programs:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(place.parent.parent / programs)
        jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    words = [str(word) for pair in ({"--runs": place} | args).items() for word in pair]

    def main() -> None:
        tell("begun")
        with around(tell):
            train.main(cli.parse(PRESETS, words))

    with (place / "said.txt").open("a") as heard:
        os.dup2(heard.fileno(), 1), os.dup2(heard.fileno(), 2)
        code = cli.run(main)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    os._exit(code)


def _left(place: Path) -> dict:
    run = run_of(place)
    checkpoints = Checkpoints(run / "checkpoints")
    newest = checkpoints.newest_step()
    leaves = manifest.read(checkpoints.folder / str(newest)).leaves
    parts = sorted({path.split("/")[0] for path in leaves})
    state = {part: states.as_bytes(checkpoints.restore_params(tree=part)) for part in parts}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("tokens_per_second", "data_wait"):
            line.pop(name, None)
    return {
        "newest step": newest,
        **{part: [leaf.hex() for leaf in raw] for part, raw in state.items()},
        "metadata": checkpoints.metadata(),
        "metrics": lines,
        "weights": json.loads((run / "weights.json").read_text()),
        "scores": json.loads((run / "scores.json").read_text()),
    }
