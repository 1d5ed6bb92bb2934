"""Measurements one after the other, each in a process of its own and within its time."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

Measurement = Callable[[], Iterator[tuple[str, Any]]]
"""measurement() yields names and values, as soon as they are known; it can be pickled."""


class Section(NamedTuple):
    """What is measured under `name`: the first of `attempts` that comes to its end.

    `weight` is its share of the time.
    """

    name: str
    weight: float
    attempts: Mapping[str, Measurement]


Entry = dict[str, Any]
"""What became of a section: what it yielded, "attempt", "seconds", and "failed" if it did."""


def run_all(
    sections: Sequence[Section], seconds: float, save: Callable[[dict[str, Entry]], object]
) -> dict[str, Entry]:
    """The entries of all `sections`, within `seconds`; `save` is given those so far after each.

    A section has the share of the time left that its weight is of those to come, so that what one
    leaves over the others get. At the end of its time its process is killed.
    """
    end, found = time.monotonic() + seconds, {}
    for number, section in enumerate(sections):
        to_come = sum(later.weight for later in sections[number:])
        left = max(end - time.monotonic(), 0.0)
        found[section.name] = run(section, left * section.weight / to_come)
        save(found)
    return found


def run(section: Section, seconds: float) -> Entry:
    """The entry of one section within `seconds`.

    "failed" says why: of each attempt, if none came to its end; else of those before the one that
    did. What a failed attempt yielded before is kept if it was the last.
    """
    begin = time.monotonic()
    entry: Entry = {}
    failed = {}
    for name, measurement in section.attempts.items():
        facts, reason = _attempt(measurement, begin + seconds - time.monotonic())
        entry = {"attempt": name, **facts}
        if reason is None:
            break
        failed[name] = reason
    entry["seconds"] = round(time.monotonic() - begin, 1)
    if len(failed) == len(section.attempts):
        entry["failed"] = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
    elif failed:
        entry["failed_before"] = failed
    return entry


def _attempt(measurement: Measurement, seconds: float) -> tuple[Entry, str | None]:
    """What `measurement` yielded, and why it did not come to its end, if so."""
    if seconds <= 0.0:
        return {}, "no time was left"
    # fork would copy the locks of libraries that run threads
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, measurement), daemon=True)
    process.start()
    theirs.close()
    facts: Entry = {}
    end = time.monotonic() + seconds
    try:
        while ours.poll(max(end - time.monotonic(), 0.0)):
            kind, *said = ours.recv()
            if kind != "fact":
                return facts, said[0]
            facts[said[0]] = said[1]
        return facts, f"took longer than {seconds:.0f} s"
    except EOFError:
        process.join()
        return facts, f"its process ended with code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _serve(connection: Connection, measurement: Measurement) -> None:
    """In the process of the section: sends what is yielded, then ("end", None or why not)."""
    reason = None
    try:
        for name, value in measurement():
            connection.send(("fact", name, value))
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        reason = f"{type(error).__name__}: {first}"[:500]
    with contextlib.suppress(BrokenPipeError):
        connection.send(("end", reason))
