"""Runs measurements one after the other, each in a process of its own with a time limit."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

Measurement = Callable[[], Iterator[tuple[str, Any]]]
"""measurement() yields names and values as soon as they are known. It is pickled."""


class Section(NamedTuple):
    """One measurement: the result is that of the first of `attempts` that does not fail.

    `weight` is its share of the time.
    """

    name: str
    weight: float
    attempts: Mapping[str, Measurement]


Entry = dict[str, Any]
"""The result of a section: what it yielded, "attempt", "seconds", and "failed" if it failed."""


def run_all(
    sections: Sequence[Section], seconds: float, save: Callable[[dict[str, Entry]], object]
) -> dict[str, Entry]:
    """Runs all `sections` within `seconds`; calls `save` with the entries so far after each.

    A section gets a share of the remaining time: its weight divided by the weights to come. At the
    end of its time its process is killed.
    """
    end, found = time.monotonic() + seconds, {}
    for number, section in enumerate(sections):
        to_come = sum(later.weight for later in sections[number:])
        left = max(end - time.monotonic(), 0.0)
        found[section.name] = run(section, left * section.weight / to_come)
        save(found)
    return found


def run(section: Section, seconds: float) -> Entry:
    """Runs one section within `seconds`.

    "failed" holds the reason of each attempt if all failed; "failed_before" holds the reasons of
    the attempts before the successful one. The values of the last attempt are kept.
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
    """Returns what `measurement` yielded, and the reason if it failed."""
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
    """Runs in the process of the section: sends each value, then ("end", reason or None)."""
    reason = None
    try:
        for name, value in measurement():
            connection.send(("fact", name, value))
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        reason = f"{type(error).__name__}: {first}"[:500]
    with contextlib.suppress(BrokenPipeError):
        connection.send(("end", reason))
