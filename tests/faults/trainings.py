"""Tiny trainings by the real command, each in a process of its own, and what they leave behind."""

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock

from experiments.harness import cli
from experiments.translation import train
from experiments.translation.presets import PRESETS
from jaxformer import distributed, optional_dependencies
from jaxformer.checkpoint import Checkpoints, manifest
from jaxformer.distributed import CompiledStep
from jaxformer.storage import to_path
from tests.faults import children, states
from tests.faults.children import Child
from tests.stored import stored

Tell = Callable[[Any], None]
Around = Callable[[Tell], AbstractContextManager[Any]]

HEARTBEAT = 5  # seconds between the signs of life of several processes
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


def undisturbed(tell: Tell) -> AbstractContextManager[Any]:
    """Nothing happens to the training within it."""
    return contextlib.nullcontext()


class Training:
    """The options of a tiny training of a text in `folder`, and what it leaves undisturbed.

    Its processes train in folders `place`, one process or as many as `--num_processes`. Programs
    are kept next to `folder` for all injections. What is said lies in `place`/said.txt.
    """

    def __init__(self, folder: Path, changes: dict[str, Any] | None = None):
        for name in ("sacrebleu", "tokenizers", "tensorboardX.summary"):
            optional_dependencies.load(name)  # once for all children
        self._changes, self._root = changes or {}, folder.parent
        words = SETTINGS.split()
        self.args: dict[str, Any] = dict(zip(words[::2], words[1::2], strict=True))
        self.args |= _write_texts(folder) | self._changes

    @property
    def whole(self) -> Path:
        """The folder of an undisturbed training with these changes, made once for all injections.

        In it lies left.json, what `left` says of it.
        """
        key = zlib.crc32(repr(sorted(self._changes.items())).encode())
        place = self._root / "whole" / f"{key:08x}"
        place.parent.mkdir(exist_ok=True)
        with FileLock(f"{place}.lock"):
            if not (place / "left.json").exists():
                if self.ended(place) != 0:
                    raise RuntimeError(said(place))
                (place / "left.json").write_text(json.dumps(children.in_child(left, place)))
        return place

    def begin(
        self,
        place: Path,
        around: Around = undisturbed,
        *,
        process: int = 0,
        programs: str | Path = "programs",
        runs: str = "",
    ) -> list[Child]:
        """The processes of a training in `place`, of which the one of that number is in `around`.

        `runs` leads to runs elsewhere. With an empty name of `programs` they are compiled anew.
        """
        args, count = {"--runs": runs or place} | self.args, self.args.get("--num_processes", 0)
        programs = programs and self._root / programs
        if not count:
            return [Child(partial(_train, args, place, around, programs))]
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            args["--coordinator"] = f"127.0.0.1:{free.getsockname()[1]}"
        arounds = [around if index == process else undisturbed for index in range(count)]
        return [
            Child(partial(_train, args | {"--process_id": index}, place, each, programs))
            for index, each in enumerate(arounds)
        ]

    def ended(self, place: Path, around: Around = undisturbed, **how: Any) -> int:
        """The largest exit code of the processes of `begin`."""
        return max(end(child) for child in self.begin(place, around, **how))

    def goes_on(self, place: Path, step: int | None = None, runs: str = "") -> str:
        """The outcome of a start that must go on after `step` and leave what `whole` has.

        None is the newest step that is there.
        """
        expected = json.loads((self.whole / "left.json").read_text())
        where = to_path(runs or place)
        if step is None:
            step = children.in_child(newest, where)
        code = self.ended(place, runs=runs)
        if code != 0:
            return f"resuming ended with {code}: {said(place)}"
        started = re.findall(r"parameters; from step (\d+) to", said(place))[-1]
        if int(started) != step:
            return f"silent: went on from step {started} instead of {step}"
        return other(children.in_child(left, where), expected)

    def resumed(
        self, place: Path, around: Around, code: int, *words: str, step: int | None = None
    ) -> str:
        """The outcome of a training that must end in `around` with `code`, and then go on.

        The last line that it says must hold `words`.
        """
        ended = self.ended(place, around)
        missing = [word for word in words if word not in said(place).splitlines()[-1]]
        if ended != code or missing:
            return f"ended with {ended}, without {missing}: {said(place)}"
        return self.goes_on(place, step)


def other(found: dict, expected: dict) -> str:
    """The outcome of a training that left `found`."""
    names = expected.keys() | found.keys()
    wrong = [name for name in names if found.get(name) != expected.get(name)]
    return f"silent: other {', '.join(wrong)}" if wrong else "survived"


def end(child: Child) -> int:
    """Its exit code, once all it tells was heard."""
    for _ in child.told():
        pass
    return child.wait()


def said(place: Path) -> str:
    """The output of all trainings in `place`."""
    return (place / "said.txt").read_text()


def run_of(place: Path) -> Path:
    """The folder of the run."""
    return place / "translation" / "tiny"


def newest(place: Path) -> int:
    """The newest step of the run, 0 for none."""
    return Checkpoints(run_of(place) / "checkpoints").newest_step() or 0


def in_steps(visit: Callable[..., Iterator[None]]) -> AbstractContextManager[Any]:
    """As `children.in_calls`, for the calls of the compiled step of training alone."""
    numbers = itertools.count(1)

    def visit_step(_: int, call: CompiledStep, *args: Any) -> Iterator[None]:
        if hasattr(args[0], "opt_state"):
            yield from visit(next(numbers))
        else:
            yield

    return children.in_calls(CompiledStep, "__call__", visit_step)


def left(place: Path) -> dict:
    """The bytes of the last state, by the names of its parts, metadata, metrics and scores."""
    run = run_of(place)
    checkpoints = Checkpoints(run / "checkpoints")
    newest = checkpoints.newest_step()
    leaves = manifest.read(checkpoints.folder / str(newest)).leaves
    parts = sorted({path.split("/")[0] for path in leaves})
    state = {part: states.as_bytes(stored(checkpoints, tree=part)) for part in parts}
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


def words_of(args: dict[str, Any]) -> list[str]:
    """The options `args` as words of a command line."""
    return [str(word) for pair in args.items() for word in pair]


def _write_texts(folder: Path) -> dict[str, Any]:
    """The options that name the files of a text, which is written into `folder`."""
    random, args = children.drawn(3), {}
    for part, count in (("train", 97), ("validation", 5), ("test", 3)):
        lines = [random.choices(list(WORDS), k=random.randrange(2, 7)) for _ in range(count)]
        for side in ("source", "target"):
            words = [line if side == "source" else map(WORDS.get, line) for line in lines]
            path = folder / f"{part}.{side}"
            path.write_text("".join(" ".join(line) + "\n" for line in words))
            args[f"--data.{part}.{side}"] = path
    return args


def _train(args: dict, place: Path, around: Around, programs: str | Path, tell: Tell) -> None:
    """Never returns: ends this process as the command would."""
    place.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(place.parent / "cache")  # of text, for runs in buckets
    # Most of a tiny training is compiling.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_enable_compilation_cache", bool(programs))
    if programs:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
        jax.config.update("jax_compilation_cache_dir", str(programs))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if "--process_id" in args:
        jax.config.update("jax_num_cpu_devices", 1)
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # each compiles for itself
        distributed.initialize = partial(distributed.initialize, heartbeat=HEARTBEAT)

    def main() -> None:
        with around(tell):
            train.main(cli.parse(PRESETS, words_of(args)))

    with (place / "said.txt").open("a") as heard:
        os.dup2(heard.fileno(), 1), os.dup2(heard.fileno(), 2)
        code = cli.run(main)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    os._exit(code)
