"""Schedules of `tpu_flash`: the instruction bundles that a TPU's compiler makes of its kernels.

XLA's estimate of a program's cycles leaves out Mosaic kernels. libtpu writes their schedules into a
folder where LIBTPU_INIT_ARGS asks for it; a bundle takes a cycle. Waiting for memory is not in it.
"""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

_VARIABLE = "LIBTPU_INIT_ARGS"
_FOLDER = "jaxformer_schedules_"
_FILES = "packed-bundles-post-ra"
_PIPELINED = 2
"""The passes of the grid's loop beyond its steps: operands come before, results go after."""
_SIMILAR = 1.5
"""The most that a block with a mask takes over one without; of twelve kernels, 1.0 to 1.15."""


class Schedule(NamedTuple):
    """Bundles of a kernel of `tpu_flash`.

    Attributes:
      steps: the steps of the grid that a core of the chip runs.
      step: bundles of a step, whatever it computes.
      fetch: bundles of copying another block of keys and values to where products read them.
      block: bundles of a block of keys of which each query of a block sees all.
      masked_block: bundles of a block of keys of which a query sees a part.
      row: bundles of the beginning and the end of a block of queries.
      group: bundles of the beginning and the end of a group of heads of keys.
      group_block: bundles of writing the gradients of a block of keys, once a group.
    """

    steps: int
    step: int
    fetch: int
    block: int
    masked_block: int
    row: int
    group: int = 0
    group_block: int = 0


def ask_for_schedules() -> None:
    """Makes libtpu write schedules into a temporary folder of this process.

    It works before libtpu is loaded. Dumps that the user has asked for take the place of them.
    """
    arguments = os.environ.get(_VARIABLE, "")
    if "--xla_jf_dump" in arguments:
        return
    folder = tempfile.mkdtemp(prefix=_FOLDER)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[_VARIABLE] = (
        f"{arguments} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex=.*{_FILES}.*"
    ).lstrip()


def take_schedules() -> dict[str, Schedule]:
    """The schedules of the kernels compiled since the last call, by their instructions' names.

    The compiler schedules only one of several equal kernels. {} where libtpu writes none.
    """
    asked = re.search(rf"--xla_jf_dump_to=(\S*{_FOLDER}\S*)", os.environ.get(_VARIABLE, ""))
    schedules: dict[str, Schedule] = {}
    if asked is None:
        return schedules
    for path in sorted(Path(asked[1]).iterdir()):
        name = re.search(rf"-([^-]*tpu_flash_[^-]*)-\d+-{_FILES}\.txt$", path.name)
        if name:
            schedule = read_schedule(path.read_text(encoding="utf-8"))
            if schedule:
                schedules[name[1]] = schedule
        path.unlink()
    return schedules


class _Region(NamedTuple):
    """Bundles that a branch jumps over, or a loop; `inside` are the regions within, in order."""

    start: int
    end: int
    is_loop: bool
    inside: "list[_Region]"

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def rest(self) -> int:
        """The bundles that are in none of the regions within."""
        return self.size - sum(region.size for region in self.inside)

    def paths(self) -> "Iterator[list[_Region]]":
        """The path from this region to each within it, itself included."""
        yield [self]
        for region in self.inside:
            for path in region.paths():
                yield [self, *path]


def read_schedule(text: str) -> Schedule | None:
    """The bundles of the parts of a kernel by its schedule; None for one without a structure.

    In a step of the grid the kernel computes a block of keys without or with a mask: of all similar
    regions side by side the largest ones. Before them begin a group of heads
    (in a backward pass) and a row; after them a row ends, and a group with a loop over its blocks.
    Results are copied after that, the row's first. Around all of it operands are copied. Where a
    row has one block of keys, there is no choice: a step always does the same.
    """
    whole, passes = _regions(text)
    if not whole.inside:
        return None
    path, number = _computation(whole)
    body = path[-1].inside
    blocks, rows, groups = [], [], body
    if number is not None:
        before, blocks, after = body[:number], body[number : number + 2], body[number + 2 :]
        writes = [n for n, region in enumerate(after) if any(x.is_loop for x in region.inside)]
        end = writes[0] if writes else len(after)
        rows = [*before[-1:], *after[:end], *after[end + 1 : end + 2]]
        groups = [*before[:-1], *after[end : end + 1], *after[end + 2 :]]
    in_loops = sum(loop.size for region in groups for loop in region.inside if loop.is_loop)
    step, copies = _around(path)
    # Of queries, keys and values: the copied ones are those in the chip's vector memory.
    places = re.findall(r"= inlined_call_operand\.(\w+)", text)[:3]
    first = places[:1].count("vmem")
    of_keys = sum(copies[first : first + places[1:].count("vmem")])
    return Schedule(
        steps=max(max(passes, default=0) - _PIPELINED, 1),
        step=step,
        fetch=of_keys,
        block=blocks[0].size if blocks else 0,
        masked_block=blocks[1].size if blocks else 0,
        row=sum(region.size for region in rows) + sum(copies) - of_keys,
        group=sum(region.size for region in groups) - in_loops,
        group_block=in_loops,
    )


def _computation(whole: _Region) -> tuple[list[_Region], int | None]:
    """The path to the region that computes a step, and the number of its block without a mask.

    The number is None where the region has no such block, and computes without a choice.
    """
    paths = list(whole.paths())
    pairs = [
        (min(one.size, other.size), path, number)
        for path in paths
        for number, (one, other) in enumerate(pairwise(path[-1].inside))
        if not one.is_loop
        and not other.is_loop
        and max(one.size, other.size) < _SIMILAR * min(one.size, other.size)
    ]
    size, path, number = max(pairs, key=lambda pair: pair[0], default=(0, paths[0], 0))
    widest = max((path for path in paths if path[-1].inside), key=lambda path: path[-1].rest)
    if size > widest[-1].rest:
        return path, number
    return widest, None


def _around(path: list[_Region]) -> tuple[int, list[int]]:
    """The bundles of a step of the grid around what it computes, and of each copied operand.

    The last region of `path` is the computation, the last loop before it the grid.
    """
    loops = [number for number, region in enumerate(path) if region.is_loop]
    grid = path[loops[-1] :] if loops else path
    step = sum(region.rest for region in grid)
    copies = []
    for outer, inner in pairwise(grid):
        for region in outer.inside:
            if region is not inner and region.inside:
                step += region.rest
                copies += [copy.size for copy in region.inside]
            elif region is not inner:
                copies.append(region.size)
    return step, copies


def _regions(text: str) -> tuple[_Region, list[int]]:
    """The whole schedule with the regions within it, and the number of passes of its loops."""
    at = 0
    spans = set()
    for line in text.splitlines():
        if place := re.match(r"\s*(?:0x([0-9a-f]+)|0)\s", line):
            at = int(place[1] or "0", 16)
        for target in map(int, re.findall(r"sbr\.rel.*?target bundleno = (\d+)", line)):
            spans.add((min(at, target), -max(at, target), target <= at))
    whole = _Region(0, at + 1, False, [])
    path = [whole]
    for start, minus_end, is_loop in sorted(spans):
        region = _Region(start, -minus_end, is_loop, [])
        while not path[-1].start <= region.start <= region.end <= path[-1].end:
            path.pop()
        path[-1].inside.append(region)
        path.append(region)
    return whole, [int(passes) for passes in re.findall(r", (\d+) /\* loop exit test", text)]
