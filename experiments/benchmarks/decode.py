"""Times beam search next to its peers: `python -m experiments.benchmarks.decode`.

The peers are transformers and CTranslate2. All read the same Marian model with random weights. A
bias on the logits forbids EOS and padding, so that every text has the full length and all do the
same work. With --preset gpu, jaxformer in bfloat16 and CTranslate2 in float16 have a GPU. Prints a
table and writes RUNS/benchmarks/NAME.json.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.text_cases import compiled_texts, random_params, text_case
from experiments.benchmarks.timing import Case, MakeCase, TimingConfig, one_by_one, run_tables
from experiments.benchmarks.torch_peers import load_torch
from experiments.harness import cli
from jaxformer import optional_dependencies
from jaxformer.config import (
    Checked,
    Count,
    FeedForwardOptions,
    NormOptions,
    OutputOptions,
    Sinusoidal,
    TransformerConfig,
)
from jaxformer.decoding import SearchConfig
from jaxformer.nn.int8 import quantize
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import translate_ids
from jaxformer.pretrained import load_pretrained, save_pretrained
from jaxformer.runtime import cpu_count

_EOS = 0
_FORBIDDEN = -1e4  # as a logit

MARIAN_BASE = TransformerConfig(
    vocab_size=32_000,
    d_model=512,
    d_ff=2_048,
    num_heads=8,
    num_encoder_layers=6,
    num_decoder_layers=6,
    max_len=33,
    feed_forward=FeedForwardOptions("silu"),
    norm=NormOptions(eps=1e-5),
    output=OutputOptions(bias=True),
    positions=Sinusoidal(layout="halves"),
)
"""The base size in Marian's layout."""


@dataclass(frozen=True)
class DecodeWork(Checked):
    """The model, and the texts that it translates."""

    model: TransformerConfig = MARIAN_BASE
    """Sizes of the model, in Marian's layout; the last token id is padding and starts a text."""
    batch_size: Count = 32
    """Number of source texts."""
    source_len: Count = 32
    """Tokens of each source."""
    target_len: Count = 32
    """Tokens of each translation."""
    beam_size: Count = 4
    """Beam size."""

    @property
    def pad(self) -> int:
        """The padding id, the last one, which also starts each translation."""
        return self.model.vocab_size - 1

    def sources(self) -> np.ndarray:
        """Random words [B, S] int32, without special tokens."""
        rng = np.random.default_rng(1)
        return rng.integers(2, self.pad, (self.batch_size, self.source_len), np.int32)


@dataclass(frozen=True)
class DecodeOptions(TimingConfig):
    """The beam search, and its timing."""

    name: str = "decode"
    work: DecodeWork = DecodeWork()
    """The model and the texts."""
    device: Literal["cpu", "gpu"] = "cpu"
    """cpu: float32 and int8, with transformers as a peer too; gpu: bfloat16 and float16."""


PRESETS = {
    "default": DecodeOptions(),
    "gpu": one_by_one(
        DecodeOptions(name="decode_gpu", work=DecodeWork(batch_size=128), device="gpu")
    ),
}
TRANSFORMERS = "transformers"
CTRANSLATE2 = "CTranslate2"
TWO_TRANSLATORS = "CTranslate2, two translators"
PEERS = (TRANSFORMERS, CTRANSLATE2, TWO_TRANSLATORS)


def main(options: DecodeOptions) -> None:
    """Measures, prints the table and writes the file."""
    work = options.work
    title = f"{work.batch_size} texts of {work.target_len} tokens, beam {work.beam_size}"
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "marian"
        write_model(work, folder)
        run_tables(options, {title: cases(work, folder, options.device)}, PEERS)


def cases(work: DecodeWork, folder: Path, device: str) -> dict[str, MakeCase]:
    """The function that makes each case."""
    if device == "gpu":
        return {
            "jaxformer": partial(jax_search, work, folder, "bfloat16"),
            CTRANSLATE2: partial(ctranslate2_search, work, folder, "cuda", "float16"),
        }
    two = partial(ctranslate2_search, work, folder, translators=2)
    return {
        "jaxformer": partial(jax_search, work, folder),
        "jaxformer, int8": partial(jax_search, work, folder, "int8"),
        TRANSFORMERS: partial(transformers_search, work, folder),
        CTRANSLATE2: partial(ctranslate2_search, work, folder),
        TWO_TRANSLATORS: two,
        f"{TWO_TRANSLATORS}, int8": partial(two, dtype="int8"),
    }


def write_model(work: DecodeWork, folder: Path) -> None:
    """Writes the model to the new `folder` in the format of `transformers`."""
    model, ids = EncoderDecoder(work.model), np.zeros((1, 2), np.int32)
    params = random_params(model, ids, ids)
    params["embedding"]["table"][work.pad] = 0.0  # where CTranslate2 begins
    params["output"]["bias"][[_EOS, work.pad]] = _FORBIDDEN
    special = {
        "eos_token_id": _EOS,
        "pad_token_id": work.pad,
        "decoder_start_token_id": work.pad,
    }
    save_pretrained(folder, model, params, family="marian", token_ids=special)


def jax_search(
    work: DecodeWork, folder: Path, dtype: Literal["float32", "bfloat16", "int8"] = "float32"
) -> Case:
    """`translate_ids` as one compiled program.

    With "int8" only the products with weights are in int8, the rest is in float32.
    """
    numbers = "float32" if dtype == "int8" else dtype
    loaded = load_pretrained(folder, dtype=numbers)
    model = loaded.model
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, numbers), loaded.params)
    if dtype == "int8":
        params = quantize(model, params)
    config = SearchConfig(
        beam_size=work.beam_size,
        length_penalty=1.0,
        length_penalty_kind="power",
        at_max_length="cut",
        max_new_tokens=work.target_len,
        eos=(_EOS,),
    )

    def search(params: Any, source: jax.Array) -> jax.Array:
        limits = jnp.full(len(source), work.target_len, jnp.int32)
        texts = translate_ids(model, params, source, limits, config, bos=work.pad, pad=work.pad)
        return texts.tokens[:, 0]

    return compiled_texts(search, params, work.sources())


def transformers_search(work: DecodeWork, folder: Path) -> Case:
    """`generate` of `transformers` with its cache, on all processors."""
    torch = load_torch()
    model = _marian(folder).eval()
    source = torch.tensor(work.sources(), dtype=torch.int64)

    def decode() -> np.ndarray:
        with torch.inference_mode():
            texts = model.generate(
                source,
                attention_mask=torch.ones_like(source),
                num_beams=work.beam_size,
                do_sample=False,
                forced_eos_token_id=None,
                max_new_tokens=work.target_len,
                min_new_tokens=work.target_len,
            )
        return texts[:, 1:].numpy()

    return text_case(decode, threads=torch.get_num_threads())


def ctranslate2_search(
    work: DecodeWork,
    folder: Path,
    device: str = "cpu",
    dtype: str = "float32",
    translators: int = 1,
) -> Case:
    """CTranslate2 in `dtype`, on all processors, with `translators` that run at the same time."""
    library = optional_dependencies.load("ctranslate2")
    with TemporaryDirectory() as temporary:
        _convert(work, folder, temporary)
        translator = library.Translator(
            temporary,
            device=device,
            compute_type=dtype,
            inter_threads=translators,
            intra_threads=max(1, cpu_count() // translators),
        )
    source = [[str(number) for number in row] for row in work.sources()]

    def decode() -> np.ndarray:
        results = translator.translate_batch(
            source,
            beam_size=work.beam_size,
            max_batch_size=-(-work.batch_size // translators),
            min_decoding_length=work.target_len,
            max_decoding_length=work.target_len,
        )
        return np.array([[int(word) for word in one.hypotheses[0]] for one in results])

    return text_case(decode, threads=cpu_count(), translators=translators)


def _marian(folder: Path) -> Any:
    library = optional_dependencies.load("transformers")
    library.utils.logging.disable_progress_bar()
    return library.MarianMTModel.from_pretrained(folder)


def _convert(work: DecodeWork, folder: Path, path: str) -> None:
    """Converts the folder for CTranslate2; each word is an id written as a number."""
    loader = optional_dependencies.load("ctranslate2.converters.transformers").MarianMTLoader()
    spec = loader.get_model_spec(_marian(folder))
    words = [str(number) for number in range(work.pad)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.eos_token, spec.config.unk_token = words[:2]
    spec.config.decoder_start_token = words[0]
    spec.validate()
    spec.optimize()
    spec.save(path)


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
