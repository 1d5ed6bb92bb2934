"""Writes a run's ids as shards: `python -m experiments.language_modelling.export_shards --run RUN`.

They are what modded-nanogpt and llm.c read, or with --bare nanoGPT.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.harness import cli
from experiments.language_modelling.prepare import load_tokenizer, open_encoded
from experiments.language_modelling.shards import write_shards


@dataclass(frozen=True)
class ShardOptions:
    """Which ids are written, and where."""

    run: str = "runs/language_modelling/python_stdlib"
    """The folder of a run, trained or only prepared."""
    part: Literal["train", "validation", "test"] = "train"
    """The part of its text."""
    output: str = "shards"
    """The folder that receives PART_000000.bin and so on."""
    ids_per_shard: int = 100_000_000
    """The most ids of a file."""
    bare: bool = False
    """Leaves out the header."""


def main(options: ShardOptions) -> None:
    """Writes the files and names them."""
    folder = Path(options.run)
    text = open_encoded(folder, options.part, load_tokenizer(folder))
    paths = write_shards(
        text.tokens,
        options.output,
        name=options.part,
        ids_per_shard=options.ids_per_shard,
        header=not options.bare,
    )
    print(f"{len(text.tokens.ids):,} ids in {', '.join(map(str, paths))}")


if __name__ == "__main__":
    cli.start(main, {"default": ShardOptions()}, __doc__)
