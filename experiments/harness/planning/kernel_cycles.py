"""Cycles of a TPU's Mosaic kernels, of which the compiler's cost model says nothing.

libtpu writes the schedule of each kernel that it compiles: one line for each cycle, also for those
in which a kernel waits for its own results. A kernel runs the whole schedule for each step of its
grid, but for the parts of `pl.when`, around which it branches. Waiting for memory is not in it.
"""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

_FOLDER = tempfile.TemporaryDirectory(prefix="jaxformer_schedules_")
_STAGE = "packed-bundles-post-ra"
_FLAGS = f"--xla_jf_dump_to={_FOLDER.name} --xla_jf_dump_llo_text=true"
_FILLING = 2  # passes of the loop that only fetch or only write
_ONLY = f"--xla_jf_dump_llo_pass_label_regex=.*{_STAGE}.*"

Schedules = Mapping[tuple[str, tuple[str, ...]], "Schedule"]
"""Schedules by `kernel_key`."""


class Schedule(NamedTuple):
    """Cycles of a kernel that takes `steps` steps on a core.

    `step` cycles pass in each step, `whole` more in one that visits a block of scores of which the
    mask by position hides none, `cut` more where it hides some, `row` more in each row of blocks,
    at its beginning and end. `windows` are (length, block) of the arrays of heads that it reads:
    queries, keys and values of an attention kernel.
    """

    steps: int
    windows: tuple[tuple[int, int], ...]
    step: int
    whole: int
    cut: int
    row: int

    def cycles(self, visited: Sequence[tuple[int, int]]) -> float:
        """The cycles of the kernel, where `visited` are (whole, cut) blocks of each row of blocks.

        A row takes as many steps as the row with the most blocks.
        """
        rows = self.steps / max(map(sum, visited))
        whole, cut = (fmean(column) for column in zip(*visited, strict=True))
        return self.steps * self.step + rows * (self.whole * whole + self.cut * cut + self.row)


def write_schedules() -> None:
    """Makes libtpu write schedules; it reads this when it is loaded."""
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    if _FOLDER.name not in given:
        os.environ["LIBTPU_INIT_ARGS"] = f"{given} {_FLAGS} {_ONLY}".strip()


def take_schedules() -> Schedules:
    """The schedules of the kernels compiled since the last call; their files are deleted."""
    found = {}
    for path in Path(_FOLDER.name).iterdir():
        if re.search(rf"-\d+-{_STAGE}\.txt$", path.name) and "schedule-analysis" not in path.name:
            text = path.read_text()
            name = re.sub(rf"^\d+-|-\d+-{_STAGE}\.txt$", "", path.name)
            inputs = tuple(re.findall(r"operand\.\w+ \[shape: ([^\]]*\]), [^;]*?kind: input", text))
            if schedule := read_schedule(text):
                found[kernel_key(name, inputs)] = schedule
        path.unlink()
    return found


def kernel_key(name: str, inputs: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """What kernels with the same schedule have in common: their name without number, and inputs.

    Of equal kernels libtpu compiles one.
    """
    return re.sub(r"\.\d+$", "", name), inputs


def read_schedule(text: str) -> Schedule | None:
    """The schedule in the text of a kernel; None where the text does not say the steps.

    Of the parts around which a step branches, the longest visits a block with its mask. One of more
    than half of its length does so without, and the others are said to run once a row.
    """
    branches, cycle = [], 0
    for line in text.splitlines():
        if at := re.match(r"\s*(?:0x([0-9a-f]+)|0)\s", line):
            cycle = int(at[1] or "0", 16)
        for target in re.findall(r"sbr\.rel.*?target bundleno = (\d+)", line):
            branches.append((cycle, int(target)))
    loops = [(target, at + 1) for at, target in branches if target <= at]
    # Of loops in a kernel that of the grid is the longest, and has the most passes.
    passes = [int(count) for count in re.findall(r", (\d+) /\* loop exit test", text)]
    if loops and not passes:
        return None
    start, end = max(loops, key=_length, default=(0, cycle + 1))
    inside = _outermost([b for b in branches if start <= b[0] < b[1] <= end])
    longest = max(inside, key=_length, default=(0, 0))
    if 2 * _length(longest) > end - start:  # the step, which filling the pipeline leaves out
        inside = _outermost([b for b in branches if longest[0] < b[0] < b[1] <= longest[1]])
    lengths = list(map(_length, inside))
    cut = max(lengths, default=0)
    windows = {
        int(operand): (int(length), int(size))
        for operand, size, length in re.findall(
            r"operator input (\d+)\. The window shape is (?:bf16|f32)\[(?:\d+,)+(\d+),\d+\], "
            r"while the full shape is \w+\[(?:\d+,)+(\d+),\d+\]",
            text,
        )
    }
    return Schedule(
        steps=max(passes) - _FILLING if passes else 1,
        windows=tuple(windows[operand] for operand in sorted(windows)),
        step=end - start - sum(lengths),
        whole=min((length for length in lengths if 2 * length > cut), default=0),
        cut=cut,
        row=sum(length for length in lengths if 2 * length <= cut),
    )


def _outermost(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges that lie in no other."""
    return [a for a in ranges if not any(b != a and b[0] <= a[0] and a[1] <= b[1] for b in ranges)]


def _length(part: tuple[int, int]) -> int:
    return part[1] - part[0]
