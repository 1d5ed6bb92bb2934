"""Export a run's search: `python -m experiments.translation.export --run RUN --output FILE`.

The file holds one program with the weights. It needs JAX (with flatbuffers) but not jaxformer: see
this folder's README for the lines that load it.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.export import export as export_function

from experiments.harness import cli
from experiments.harness.checkpoint_selection import RunOptions
from experiments.harness.decoding_options import DecodingOptions, load_members
from experiments.translation.load_run import LoadedRun, load_run
from jaxformer import optional_dependencies
from jaxformer.decoding import GenerationConfig
from jaxformer.errors import ConfigError
from jaxformer.pipelines import max_target_length, translate_ids
from jaxformer.text.tokenizers import PAD


@dataclass(frozen=True)
class ExportOptions(DecodingOptions, RunOptions):
    """The run to export, and the shape that the exported function takes."""

    run: str = "runs/translation/grammar"
    """The folder of the run; several folders, separated by commas, are exported as one ensemble."""
    output: str = "translate.jax"
    """The file to write."""
    batch_size: int = 8
    """Sentences of a call."""
    source_length: int = 32
    """Ids of each sentence, padding included."""
    platforms: str = "cpu"
    """What it runs on, separated by commas: cpu, cuda, rocm, tpu."""

    def __post_init__(self):
        super().__post_init__()
        RunOptions.__post_init__(self)
        if self.decoding != "beam":
            raise ConfigError(
                f"decoding={self.decoding!r} cannot be exported, only beam search: leave it out"
            )


def export(
    loaded: LoadedRun,
    batch_size: int,
    source_length: int,
    platforms: tuple[str, ...],
    search: GenerationConfig | None = None,
) -> bytes:
    """The run's beam search as a serialised function of source ids [B, S] int32.

    B is `batch_size` and S is `source_length`. Each sentence ends with EOS. The function returns
    {"tokens" [B, W, L], "scores" [B, W], "log_probs" [B, W, L]}. `search` replaces the run's own.
    """
    search = search or loaded.config.search

    def translate(source):
        limits = jnp.sum(source != PAD, axis=1, dtype=jnp.int32) + search.max_extra_tokens
        if search.max_length is not None:
            limits = jnp.full_like(limits, search.max_length)
        max_length = max_target_length(loaded.model.config, source_length, search)
        found = translate_ids(
            loaded.model, loaded.params, source, limits, search, max_length=max_length
        )
        return found._asdict()

    shape = jax.ShapeDtypeStruct((batch_size, source_length), jnp.int32)
    return bytes(export_function(jax.jit(translate), platforms=platforms)(shape).serialize())


def main(options: ExportOptions) -> None:
    """Writes the exported function."""
    optional_dependencies.load("flatbuffers")  # JAX would raise a bare ImportError at the end
    platforms = tuple(options.platforms.split(","))
    unknown = set(platforms) - {"cpu", "cuda", "rocm", "tpu"}
    if unknown:
        raise ConfigError(f"platforms={options.platforms!r}: choose among cpu, cuda, rocm and tpu")
    loaded = load_members(lambda folder: load_run(folder, options), options.run, options.ensemble)
    limit = loaded.config.model.max_len
    if options.batch_size < 1 or not 1 <= options.source_length <= limit:
        raise ConfigError(
            f"batch_size={options.batch_size} and source_length={options.source_length}, but they "
            f"must be at least 1, and source_length at most max_len={limit}"
        )
    search = options.search(loaded.config.search)
    program = export(loaded, options.batch_size, options.source_length, platforms, search)
    Path(options.output).write_bytes(program)
    print(f"{options.output}: {len(program):,} bytes, for {options.platforms}")


if __name__ == "__main__":
    cli.start(main, {"default": ExportOptions()}, __doc__)
