"""SIGTERM at random moments of a small training, which then goes on as if nothing had been."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from experiments import commands
from experiments.progress import Progress
from experiments.translation import train
from experiments.translation.presets import PRESETS
from jaxformer import extras
from jaxformer.checkpoint import Checkpoints
from tests.faults import children, states
from tests.faults.children import Child, Count

EVALUATED = 30  # a step that is evaluated, but not saved
PROMISED = 30.0  # seconds from the signal to the end
WORDS = {"dog": "Hund", "bird": "Vogel", "tree": "Baum", "sees": "sieht", "finds": "findet"}
SETTINGS = """
    --name tiny --model.vocab_size 300 --model.d_model 16 --model.d_ff 22 --model.num_heads 2
    --model.num_encoder_layers 1 --model.num_decoder_layers 1 --model.max_len 31
    --model.dropout_rate 0.1 --data.tokens 128 --data.buckets 1
    --optimizer.schedule inverse_square_root --optimizer.warmup_steps 3
    --optimizer.total_steps 40 --training.log_every 3 --training.save_every 7
    --training.evaluate_every 15 --training.average 2 --search.width 2 --search.rows 1
"""


def at_random(folder: Path, tries: int) -> Count:
    """A training stopped at `tries` moments from its start to its end, and started again each time.

    The first of them is a step that is evaluated, but not saved unless it is the last one. It
    must end with 143 within 30 seconds and, once resumed, with 0, the bytes of a training that
    was never stopped, and its lines of metrics. One that ends before its signal is no try.
    """
    for name in ("tyro", "sacrebleu", "tokenizers", "tensorboardX.event_file_writer"):
        extras.load(name)  # once, for all children
    args = settings(folder)
    whole = folder / "whole"
    for _ in range(2):  # the second finds its programs compiled, and takes what the tries take
        shutil.rmtree(whole, ignore_errors=True)
        began = time.monotonic()
        if _end(Child(partial(_train, args, whole))) != 0:
            raise RuntimeError((whole / "said.txt").read_text())
        length = time.monotonic() - began
    expected = children.in_child(partial(_result, whole))
    random = children.drawn(2)
    outcomes = [_stop(args, folder / "evaluated", None, expected)]
    while len(outcomes) < tries:
        place = folder / "stopped"
        said = _stop(args, place, random.uniform(0.02, 0.98) * length, expected)
        outcomes += [] if said is None else [said]
        shutil.rmtree(place, ignore_errors=True)
    return children.counted(outcomes)


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
    return args | {"--runs": folder / "runs"}


def _stop(args: dict, place: Path, after: float | None, expected: dict) -> str | None:
    """What became of a training stopped `after` seconds, or after the step `EVALUATED` if None."""
    child = Child(partial(_train if after else _train_until_evaluated, args, place))
    if after is not None:
        next(child.told())
        time.sleep(after)
        child.send(signal.SIGTERM)
    sent = time.monotonic()
    code, seconds = _end(child), time.monotonic() - sent
    when = "after an evaluated step" if after is None else f"after {after:.2f} s"
    if code == 0:
        return None
    if code != 143 or (after is not None and seconds > PROMISED):
        said = (place / "said.txt").read_text()
        return f"{when}: ended with {code} after {seconds:.1f} s: {said}"
    code = _end(Child(partial(_train, args, place)))
    if code != 0:
        return f"{when}: resuming ended with {code}"
    found = children.in_child(partial(_result, place))
    wrong = [name for name in expected if found[name] != expected[name]]
    return f"silent: {when}, other {wrong}" if wrong else "survived"


def _train_until_evaluated(args: dict, place: Path, tell: Callable[[Any], None]) -> None:
    add = Progress.add

    def add_and_stop(self: Progress, step: int, *rest: Any) -> None:
        add(self, step, *rest)
        if step == EVALUATED:
            os.kill(os.getpid(), signal.SIGTERM)

    Progress.add = add_and_stop
    _train(args, place, tell)


def _end(child: Child) -> int:
    for _ in child.told():
        pass
    return child.wait()


def _train(args: dict, place: Path, tell: Callable[[Any], None]) -> None:
    """Never returns: ends this process as the command would."""
    place.mkdir(exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(place.parent / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    words = [str(word) for pair in (args | {"--runs": place}).items() for word in pair]

    def main() -> None:
        tell("begun")
        train.main(commands.parse(PRESETS, words))

    with (place / "said.txt").open("a") as said:
        os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
        code = commands.run(main)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    os._exit(code)


def _result(place: Path) -> dict:
    """What a training leaves: the bytes of its last state, its metrics and its scores."""
    run = place / "translation" / "tiny"
    checkpoints = Checkpoints(run / "checkpoints")
    params = states.as_bytes(checkpoints.restore_params())
    moments = states.as_bytes(checkpoints.restore_params(tree="opt_state"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("tokens_per_second", None)
    return {
        "step": checkpoints.newest_step(),
        "parameters": [leaf.hex() for leaf in params],
        "optimizer": [leaf.hex() for leaf in moments],
        "facts": checkpoints.facts(),
        "metrics": lines,
        "weights": json.loads((run / "weights.json").read_text()),
        "scores": json.loads((run / "scores.json").read_text()),
    }
