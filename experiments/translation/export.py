"""Export a run's decoding: `python -m experiments.translation.export --run RUN --output FILE`.

The file holds one program, weights included, that needs JAX (with flatbuffers) and nothing of
jaxformer: see this folder's README for the lines that load it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.export import export as export_function

from experiments import commands
from experiments.translation.trained import Trained, load_trained
from jaxformer import extras
from jaxformer.config import ConfigError
from jaxformer.generation import decode, room
from jaxformer.tokenizers import PAD


@dataclass(frozen=True)
class ExportOptions:
    """Which run, where to, and the shape it takes: `rows` sentences of `length` ids.

    `platforms` is a comma-separated list such as "cpu,cuda,tpu".
    """

    run: str = "runs/translation/grammar"
    output: str = "translate.jax"
    rows: int = 8
    length: int = 32
    platforms: str = "cpu"


def export(trained: Trained, rows: int, length: int, platforms: tuple[str, ...]) -> bytes:
    """A serialised function from source ids [rows, length] int32, each sentence ended by EOS.

    It returns {"tokens" [rows, W, L], "scores" [rows, W], "log_probs" [rows, W, L]}, as
    `beam_search` does with the run's settings.
    """
    search = trained.config.search

    def translate(source):
        limits = jnp.sum(source != PAD, axis=1, dtype=jnp.int32) + search.extra_length
        size = room(trained.model.config, length, search.extra_length)
        found = decode(
            trained.model,
            trained.params,
            source,
            limits,
            width=search.width,
            alpha=search.alpha,
            length=size,
        )
        return found._asdict()

    shape = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return export_function(jax.jit(translate), platforms=platforms)(shape).serialize()


def main(options: ExportOptions) -> None:
    """Writes the exported function."""
    extras.load("flatbuffers")  # JAX itself would raise a bare ImportError, at the end
    platforms = tuple(options.platforms.split(","))
    unknown = set(platforms) - {"cpu", "cuda", "rocm", "tpu"}
    if unknown:
        raise ConfigError(f"platforms={options.platforms!r}: choose among cpu, cuda, rocm and tpu")
    trained = load_trained(Path(options.run))
    limit = trained.config.model.max_len
    if options.rows < 1 or not 1 <= options.length <= limit:
        raise ConfigError(
            f"rows={options.rows} and length={options.length}, but there must be at least 1 row "
            f"and 1 to max_len={limit} ids"
        )
    program = export(trained, options.rows, options.length, platforms)
    Path(options.output).write_bytes(program)
    print(f"{options.output}: {len(program):,} bytes, for {options.platforms}")


if __name__ == "__main__":
    options = {"default": ExportOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
