"""Beam search by one Marian-shaped model: ours, that of `transformers`, and that of CTranslate2.

All read the same folder. Its weights are random, and a bias on the logits forbids the end and the
padding, so that every text has the whole length and all do the same work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import pytorch
from experiments.benchmarks.children import Subject
from jaxformer import extras
from jaxformer.config import ConfigError, TransformerConfig, check_least
from jaxformer.int8 import Int8, quantize
from jaxformer.models import EncoderDecoder
from jaxformer.pretrained import load_pretrained, save_pretrained
from jaxformer.processors import cores

_END = 0
_FORBIDDEN = -1e4  # as a logit


@dataclass(frozen=True)
class Work:
    """The model, and what it translates: `rows` sources of `source` tokens into `target` each."""

    vocab_size: int = 32_000
    d_model: int = 512
    d_ff: int = 2_048
    num_heads: int = 8
    num_layers: int = 6
    rows: int = 32
    source: int = 32
    target: int = 32
    beams: int = 4

    def __post_init__(self):
        check_least(self, 1, "d_model", "num_heads", "num_layers", "rows", "source", "target")
        check_least(self, 1, "beams")
        if self.vocab_size < self.beams + 3:
            raise ConfigError(
                f"vocab_size={self.vocab_size} leaves no {self.beams} words for the beams beside "
                f"three special tokens: give at least {self.beams + 3}"
            )
        self.config()

    @property
    def start(self) -> int:
        """The id of the padding, the last one, with which a text begins."""
        return self.vocab_size - 1

    def config(self) -> TransformerConfig:
        """The model, in Marian's layout."""
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
        """Random words [B, S] int32, without the special tokens."""
        rng = np.random.default_rng(1)
        return rng.integers(2, self.start, (self.rows, self.source), np.int32)


def write_model(work: Work, folder: Path) -> None:
    """Writes the model into the new `folder`, as `transformers` loads it."""
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
    ids = {"eos_token_id": _END, "pad_token_id": work.start, "decoder_start_token_id": work.start}
    save_pretrained(folder, model, params, family="marian", token_ids=ids)


Decode = Callable[[], np.ndarray]
"""decode() -> the best text of each source, [B, T]."""


def _subject(decode: Decode, facts: dict[str, Any]) -> Subject:
    """Told with it is what the first three texts begin with, which should be the same for all."""
    begun = decode()[:3, :4].tolist()
    return Subject(decode, facts | {"begins": begun})


def ours(work: Work, folder: Path, dtype: str = "float32") -> Subject:
    """`beam_search`, as one compiled program; untuned, for `runtime.tune` helps training alone."""
    return _subject(our_decode(work, folder, dtype), {"device": jax.devices()[0].device_kind})


def our_decode(work: Work, folder: Path, dtype: str = "float32") -> Decode:
    """Ours, compiled, with weights and numbers of `dtype`; in as many parts as `translate`'s.

    With "int8" all but the products with weights is in float32.
    """
    import jax.numpy as jnp

    from jaxformer.decoding import beam_search, is_cut, power
    from jaxformer.generation import concurrency, concurrently, step_function

    numbers = "float32" if dtype == "int8" else dtype
    model, params, _ = load_pretrained(folder, dtype=numbers)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, numbers), params)
    if dtype == "int8":
        model, params = Int8(model), quantize(params)
    size = {"length": work.target, "hypotheses": work.beams}

    def search(params: Any, source: jax.Array) -> jax.Array:
        first, limits = (jnp.full(len(source), n, jnp.int32) for n in (work.start, work.target))
        valid = jnp.ones(source.shape, bool)
        cache = model.apply({"params": params}, source, valid, method="start", **size)
        found = beam_search(
            step_function(model, params),
            cache,
            first,
            limits,
            width=work.beams,
            length=work.target,
            end=_END,
            penalty=power(1.0),
            limit=is_cut,
        )
        return found.tokens[:, 0]

    compiled, count = jax.jit(search), concurrency(params)
    parts = np.array_split(work.sources(), min(count, work.rows))
    runs = [lambda part=part: np.asarray(compiled(params, part)) for part in parts]
    return lambda: np.concatenate(list(concurrently(runs, count)))


def transformers(work: Work, folder: Path) -> Subject:
    """`generate` of `transformers` with its cache, on as many threads as there are processors."""
    torch = pytorch.load()
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
    work: Work, folder: Path, device: str = "cpu", dtype: str = "float32", parts: int = 1
) -> Subject:
    """CTranslate2 in numbers of `dtype`; on a CPU, on as many threads as there are processors.

    These are shared by the `parts` of the texts, which are translated at the same time.
    """
    library = extras.load("ctranslate2")
    with TemporaryDirectory() as place:
        _convert(work, folder, place)
        size = {"inter_threads": parts, "intra_threads": max(1, cores() // parts)}
        translator = library.Translator(place, device=device, compute_type=dtype, **size)
    source = [[str(number) for number in row] for row in work.sources()]

    def decode() -> np.ndarray:
        found = translator.translate_batch(
            source,
            beam_size=work.beams,
            max_batch_size=-(-work.rows // parts),
            min_decoding_length=work.target,
            max_decoding_length=work.target,
        )
        return np.array([[int(word) for word in one.hypotheses[0]] for one in found])

    return _subject(decode, {"threads": cores(), "parts": parts})


def _marian(folder: Path) -> Any:
    library = extras.load("transformers")
    library.utils.logging.disable_progress_bar()
    return library.MarianMTModel.from_pretrained(folder)


def _convert(work: Work, folder: Path, path: str) -> None:
    """The folder as CTranslate2 reads it; its words are the numbers of the ids."""
    loader = extras.load("ctranslate2.converters.transformers").MarianMTLoader()
    spec = loader.get_model_spec(_marian(folder))
    words = [str(number) for number in range(work.start)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.eos_token, spec.config.unk_token = words[:2]
    spec.config.decoder_start_token = words[0]
    spec.validate()
    spec.optimize()
    spec.save(path)
