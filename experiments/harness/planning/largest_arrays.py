"""The largest arrays of a compiled program."""

from collections import Counter

from experiments.harness.planning.hlo import WITHOUT_BUFFER, Program


def largest_arrays(program: Program, count: int = 5) -> list[tuple[int, str, int]]:
    """(bytes with padding, shape, instructions) of the `count` largest arrays in memory.

    Results inside a fusion are not in memory. Arrays of one size may share memory.
    """
    made = {(run.computation, run.instruction.name): run.instruction for run in program.executed}
    arrays = Counter(
        (shape.padded_bytes, str(shape))
        for each in made.values()
        if each.opcode not in WITHOUT_BUFFER and not each.opcode.endswith(("-start", "-done"))
        for shape in each.shapes
        if shape.sizes and not shape.on_chip
    )
    largest = sorted(arrays.items(), reverse=True)[:count]
    return [(size, text, number) for (size, text), number in largest]
