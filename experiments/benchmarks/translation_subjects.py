"""Beam search by one Marian model: ours, that of `transformers`, and that of CTranslate2.

All read the same folder with random weights. A bias on the logits forbids EOS and padding, so that
every text has the full length and all subjects do the same work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import jax
import numpy as np

from experiments.benchmarks.environment import load_torch
from experiments.benchmarks.subprocesses import Subject
from jaxformer import optional_dependencies
from jaxformer.config import TransformerConfig, check_at_least
from jaxformer.errors import ConfigError
from jaxformer.nn.int8 import Int8, quantize
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pretrained import load_pretrained, save_pretrained
from jaxformer.runtime.concurrency import cpu_count

_END = 0
_FORBIDDEN = -1e4  # as a logit


@dataclass(frozen=True)
class Work:
    """The model, and the texts that it translates."""

    vocab_size: int = 32_000
    """Number of token ids."""
    d_model: int = 512
    """Size of a token's vector."""
    d_ff: int = 2_048
    """Size of the feed-forward networks."""
    num_heads: int = 8
    """Number of attention heads."""
    num_layers: int = 6
    """Number of encoder layers, and of decoder layers."""
    rows: int = 32
    """Number of source texts."""
    source: int = 32
    """Tokens in each source."""
    target: int = 32
    """Tokens in each translation."""
    beams: int = 4
    """Beam size."""

    def __post_init__(self):
        check_at_least(self, 1, "d_model", "num_heads", "num_layers", "rows", "source", "target")
        check_at_least(self, 1, "beams")
        if self.vocab_size < self.beams + 3:
            raise ConfigError(
                f"vocab_size={self.vocab_size} leaves no {self.beams} words for the beams beside "
                f"three special tokens: give at least {self.beams + 3}"
            )
        self.config()

    @property
    def start(self) -> int:
        """Returns the padding id, the last one, which also starts each translation."""
        return self.vocab_size - 1

    def config(self) -> TransformerConfig:
        """Returns the configuration, in Marian's layout."""
        return TransformerConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            d_ff=self.d_ff,
            num_heads=self.num_heads,
            num_encoder_layers=self.num_layers,
            num_decoder_layers=self.num_layers,
            max_len=max(self.source, self.target) + 1,
            sinusoidal_layout="halves",
            activation="silu",
            norm_eps=1e-5,
            output_bias=True,
            tied_embeddings="all",
        )

    def sources(self) -> np.ndarray:
        """Returns random words [B, S] int32, without special tokens."""
        rng = np.random.default_rng(1)
        return rng.integers(2, self.start, (self.rows, self.source), np.int32)


def write_model(work: Work, folder: Path) -> None:
    """Writes the model to the new `folder` in the format of `transformers`."""
    model, ids = EncoderDecoder(work.config()), np.zeros((1, 2), np.int32)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), ids, ids))["params"]
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if len(leaf.shape) == 1:
            return np.full(leaf.shape, float(path[-1].key == "scale"), np.float32)
        return rng.standard_normal(leaf.shape, np.float32) * np.float32(work.d_model**-0.5)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    params["embedding"]["table"][work.start] = 0.0  # where CTranslate2 begins
    params["output"]["bias"][[_END, work.start]] = _FORBIDDEN
    special = {
        "eos_token_id": _END,
        "pad_token_id": work.start,
        "decoder_start_token_id": work.start,
    }
    save_pretrained(folder, model, params, family="marian", token_ids=special)


Dtype = Literal["float32", "bfloat16", "int8"]
Decode = Callable[[], np.ndarray]
"""decode() -> the best translation of each source, [B, T]."""


def _subject(decode: Decode, facts: dict[str, Any]) -> Subject:
    """Reports also the first tokens of three texts, which should be equal for all subjects."""
    begun = decode()[:3, :4].tolist()
    return Subject(decode, facts | {"begins": begun})


def ours(work: Work, folder: Path, dtype: Dtype = "float32") -> Subject:
    """`beam_search` as one compiled program, with default compiler options."""
    return _subject(our_decode(work, folder, dtype), {"device": jax.devices()[0].device_kind})


def our_decode(work: Work, folder: Path, dtype: Dtype = "float32") -> Decode:
    """Ours, compiled, in `dtype`; the batch is split into as many parts as `translate` uses.

    With "int8" only the products with weights are in int8, the rest is in float32.
    """
    import jax.numpy as jnp

    from jaxformer.decoding import GenerationConfig, beam_search
    from jaxformer.pipelines import make_step_fn
    from jaxformer.runtime.concurrency import concurrency, concurrently

    numbers = "float32" if dtype == "int8" else dtype
    model: Any
    model, params, _ = load_pretrained(folder, dtype=numbers)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, numbers), params)
    if dtype == "int8":
        model = cast(EncoderDecoder, model)
        model, params = Int8(model), quantize(model, params)
    config = GenerationConfig(
        beam_size=work.beams,
        length_penalty=1.0,
        length_penalty_kind="power",
        at_max_length="cut",
        max_length=work.target,
        eos=(_END,),
    )
    start = partial(model.apply, method="init_cache", max_length=work.target, num_beams=work.beams)

    def search(params: Any, source: jax.Array) -> jax.Array:
        bos, limits = (jnp.full(len(source), n, jnp.int32) for n in (work.start, work.target))
        valid = jnp.ones(source.shape, bool)
        cache = start({"params": params}, source, valid)
        found = beam_search(make_step_fn(cast(Any, model), params), cache, bos, limits, config)
        return found.tokens[:, 0]

    compiled, count = jax.jit(search), concurrency(params)
    parts = np.array_split(work.sources(), min(count, work.rows))
    runs = [lambda part=part: np.asarray(compiled(params, part)) for part in parts]
    return lambda: np.concatenate(list(concurrently(runs, count)))


def transformers(work: Work, folder: Path) -> Subject:
    """`generate` of `transformers` with its cache, on all processors."""
    torch = load_torch()
    model = _marian(folder).eval()
    source = torch.tensor(work.sources(), dtype=torch.int64)
    size = {"max_new_tokens": work.target, "min_new_tokens": work.target}

    def decode() -> np.ndarray:
        with torch.inference_mode():
            found = model.generate(
                source,
                attention_mask=torch.ones_like(source),
                num_beams=work.beams,
                do_sample=False,
                forced_eos_token_id=None,
                **size,
            )
        return found[:, 1:].numpy()

    return _subject(decode, {"threads": torch.get_num_threads()})


def ctranslate2(
    work: Work, folder: Path, device: str = "cpu", dtype: str = "float32", translators: int = 1
) -> Subject:
    """CTranslate2 in `dtype`, on all processors, with `translators` that run at the same time."""
    library = optional_dependencies.load("ctranslate2")
    with TemporaryDirectory() as place:
        _convert(work, folder, place)
        size = {
            "inter_threads": translators,
            "intra_threads": max(1, cpu_count() // translators),
        }
        translator = library.Translator(place, device=device, compute_type=dtype, **size)
    source = [[str(number) for number in row] for row in work.sources()]

    def decode() -> np.ndarray:
        found = translator.translate_batch(
            source,
            beam_size=work.beams,
            max_batch_size=-(-work.rows // translators),
            min_decoding_length=work.target,
            max_decoding_length=work.target,
        )
        return np.array([[int(word) for word in one.hypotheses[0]] for one in found])

    return _subject(decode, {"threads": cpu_count(), "translators": translators})


def _marian(folder: Path) -> Any:
    library = optional_dependencies.load("transformers")
    library.utils.logging.disable_progress_bar()
    return library.MarianMTModel.from_pretrained(folder)


def _convert(work: Work, folder: Path, path: str) -> None:
    """Converts the folder for CTranslate2; each word is an id written as a number."""
    loader = optional_dependencies.load("ctranslate2.converters.transformers").MarianMTLoader()
    spec = loader.get_model_spec(_marian(folder))
    words = [str(number) for number in range(work.start)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.eos_token, spec.config.unk_token = words[:2]
    spec.config.decoder_start_token = words[0]
    spec.validate()
    spec.optimize()
    spec.save(path)
