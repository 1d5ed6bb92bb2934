"""Shows the next token that a GPT would say after each layer.

`python -m experiments.examples.logit_lens --run RUN`

The logit lens (nostalgebraist 2020): the residual stream after a layer takes the place of the one
after the last layer, so that the final norm and the output projection read it. Most runs settle on
a token some layers before the last one.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.harness import cli
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.language_modelling.evaluate import token_text
from experiments.language_modelling.load_run import LoadedRun, load_objective
from jaxformer.config import check_at_least
from jaxformer.errors import DataError
from jaxformer.nn.inspection import Patched, read_taps

_WIDTH = 11
_LAYERS = 5


@dataclass(frozen=True)
class LensOptions(RunOptions):
    """The run and the text."""

    run: str = "runs/language_modelling/python_stdlib"
    """Folder of a causal run, or of pretrained weights."""
    text: str = "for i in range(len(self._"
    """The text that the model reads."""
    tokens: int = 12
    """Number of the last tokens that are shown."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 1, "tokens")


def main(options: LensOptions) -> None:
    """Prints the most likely next token after each layer, a line for each token of the text."""
    loaded = load_objective(Path(options.run), "causal", "a causal run", options)
    ids = loaded.tokenizer.encode(options.text)[: loaded.model.config.max_len]
    if not ids:
        raise DataError("--text is blank: give a text")
    logits = lens(loaded.model, loaded.params, np.array([ids]))[:, 0]
    print("\n".join(table(loaded, ids, np.asarray(logits), options.tokens)))


def lens(model: Any, params: Any, tokens: Int[np.ndarray, "B T"]) -> Float[Array, "layers B T V"]:
    """The logits that the final norm and the output make of the residual stream after each layer.

    The first are those of the stack's input, the last are the model's own.
    """
    count = model.config.num_decoder_layers
    names = [f"decoder/blocks_{i}/after_feed_forward" for i in range(count)]

    @jax.jit
    def run(params: Any) -> Array:
        _, taps = read_taps(model, params, tokens, names=["decoder/input", *names])

        def read(stream: Array) -> Array:
            patched = Patched(model, {names[-1]: lambda _: stream})
            return patched.apply({"params": params}, tokens)

        return jax.vmap(read)(jnp.stack(list(taps.values())))

    return run(params)


def table(
    loaded: LoadedRun, ids: list[int], logits: Float[np.ndarray, "layers T V"], last: int
) -> list[str]:
    """A line for each of the `last` tokens: the token, and the likeliest next one by layer."""
    layers = np.unique(np.linspace(0, len(logits) - 1, _LAYERS + 1).round().astype(int))
    shown = partial(_shown, loaded)
    heads = [f"layer {i}" if i else "input" for i in layers]
    lines = ["".join(f"{word:<{_WIDTH}}" for word in ("token", *heads)).rstrip()]
    for t in range(max(len(ids) - last, 0), len(ids)):
        words = [shown(ids[t]), *(shown(int(logits[i, t].argmax())) for i in layers)]
        lines.append("".join(f"{word:<{_WIDTH}}" for word in words).rstrip())
    return lines


def _shown(loaded: LoadedRun, index: int) -> str:
    """The token as it is written in Python, cut to its column."""
    return repr(token_text(loaded.tokenizer.token(index), loaded.tokenizer))[: _WIDTH - 1]


if __name__ == "__main__":
    cli.start(main, {"default": LensOptions()}, __doc__)
