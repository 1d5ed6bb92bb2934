"""Trained models from folders: of `transformers`, of a run, or of the hub."""

import os
from pathlib import Path
from typing import Literal

from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError, DataError
from jaxformer.ops.attention import AttentionFn, auto_attention
from jaxformer.pretrained.hf_folder import foreign_files, locate
from jaxformer.pretrained.loaded import Loaded
from jaxformer.pretrained.peft_adapters import ADAPTER_CONFIG, Adapter, base_folder
from jaxformer.pretrained.published_model import PublishedModel
from jaxformer.pretrained.run_weights import CheckpointName
from jaxformer.pretrained.trained_run import TrainedRun
from jaxformer.storage import read_json, to_local_path, to_path


def open_folder(
    folder: str | os.PathLike[str], *, trust_code: bool = False
) -> TrainedRun | PublishedModel:
    """The run or the published model in `folder`; of its files only config.json is read.

    Model, parameters, tokenizers and settings of the result can be read each alone; a run first
    needs `with_weights`. `folder` and `trust_code` are as in `load`. Raises `ConfigError` for a
    folder of neither kind, `DataError` for a damaged config.json.

    >>> from dataclasses import replace
    >>> small = {"vocab_size": 11, "d_model": 8, "d_ff": 32, "num_heads": 2}
    >>> model = jf.DecoderOnly(replace(jf.GPT2, **small, num_decoder_layers=1))
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> jf.save_pretrained("model", model, params)
    >>> opened = open_folder("model")
    >>> opened.config["model_type"], opened.model().config.d_ff, opened.tokenizers()
    ('gpt2', 32, (None, None))
    """
    path = locate(folder)
    if (path / ADAPTER_CONFIG).is_file():
        return _open_adapted(path)
    config = read_json(path / "config.json", default={})
    if "model_type" in config:
        return PublishedModel(to_local_path(path), config)
    if isinstance(config.get("model"), dict):
        return TrainedRun(path, config, trust_code=trust_code)
    if config:
        reason = "its config.json has no 'model' and no 'model_type'"
    else:
        reason = foreign_files(path) or "no config.json"
    raise ConfigError(f"{path} is neither a run nor a folder of transformers: {reason}")


def load(
    folder: str | os.PathLike[str],
    *,
    checkpoint: CheckpointName = "final",
    step: int | None = None,
    attention_fn: AttentionFn | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    strategy: Strategy | None = None,
    trust_code: bool = False,
) -> Loaded:
    """The model in `folder`: a run of `experiments`, or what `load_pretrained` reads.

    A run has the weights that were chosen at its end or, before its end, the newest ones, and the
    block, attention function and position scheme that it was trained with. `checkpoint` asks for
    other weights: best (of the best validation), last (of the newest step), average (the mean of
    the last steps) or ema (the moving average); `step` asks for the weights of a step that is kept.
    A run may be in a bucket (gs://bucket/path). Its config.json may name Python functions and
    classes of its author: these are imported with `trust_code`, if this user trained the run, or if
    jaxformer defines them. `attention_fn` and `dtype` replace the run's; for other folders None
    means `auto_attention`, as in `load_pretrained`, and "float32". `strategy` puts the
    parameters on its devices, tensor by tensor as `load_pretrained` does. The pipelines take the
    result, and by default use the folder's settings: generation_config.json, or the search or
    sampling of the run.

    Raises `ConfigError` for a folder of neither kind, for names that are not trusted, for weights
    that the folder cannot have and for a tokenizer that is not the run's, `CheckpointError` for a
    run without a complete checkpoint, without one of `step`, or with weights that do not fit,
    `DataError` for damaged files, and what `load_pretrained` raises.

    >>> from dataclasses import replace
    >>> tokenizer = jf.train_bpe(["a rose is a rose"], 264)
    >>> small = {"vocab_size": 264, "d_model": 8, "d_ff": 32, "num_heads": 2}
    >>> model = jf.DecoderOnly(replace(jf.GPT2, **small, num_decoder_layers=1))
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> jf.save_pretrained("model", model, params, tokenizer)
    >>> loaded = jf.load("model")
    >>> loaded.tokenizer.encode("a rose") == tokenizer.encode("a rose")
    True
    """
    source = open_folder(folder, trust_code=trust_code)
    if isinstance(source, PublishedModel):
        if checkpoint != "final" or step is not None:
            raise ConfigError(
                f"{folder} is a folder of transformers, which has one set of weights: leave out "
                "checkpoint and step"
            )
        return _load_published(source, attention_fn, dtype, strategy)
    run = source.with_weights(checkpoint, step)
    model = run.model(attention_fn, dtype)
    source_tokenizer, target_tokenizer = run.tokenizers()
    return Loaded(
        model,
        run.params(model, strategy),
        source_tokenizer,
        target_tokenizer,
        run.settings(),
        run.config,
    )


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    attention_fn: AttentionFn = auto_attention,
    dtype: Literal["float32", "bfloat16"] = "float32",
    strategy: Strategy | None = None,
) -> Loaded:
    """The model, parameters and tokenizers in `folder`, as `transformers` writes them.

    Reads config.json, model.safetensors (also in several files with an index) and the tokenizer's
    files (SentencePiece's need the extra `subwords`). `architectures` in config.json decides
    the model: a `DecoderOnly`, `EncoderOnly`, `EncoderDecoder`, `MaskedLanguageModel`,
    `Classifier`, `TokenClassifier` or `SpanPredictor`. Weights may be stored as F16, BF16 or F32;
    `params` are float32. The model computes in `dtype`. `attention_fn` is by default the
    fastest kernel for each call on the device that computes it, which on a CPU is `reference` but
    for long texts; `reference` alone keeps attention weights for `read_taps` and has derivatives in
    forward mode. A decoder without an output layer gets the transpose of its embedding. With a
    `strategy`, such as `sharded(mesh)`, `params` are JAX arrays of the stored type, and each device
    reads only its parts from the files. The model "hf:owner/model" of the hub is downloaded (needs
    `huggingface_hub`). A LoRA adapter of `peft` (adapter_config.json), beside the model or in a
    folder of its own that names the model's folder, is added to the weights.

    Pad texts at their ends, as the pipelines do: in transformers RoBERTa, XLM-R and M2M100 count
    positions from the first token that is no padding, here from the first column.

    Raises `ConfigError`, naming the key and its value, for what is not supported, and `DataError`
    for files that are damaged, lead out of the folder, or do not have exactly the tensors that the
    model needs.

    >>> from dataclasses import replace
    >>> small = {"vocab_size": 11, "d_model": 8, "d_ff": 32, "num_heads": 2}
    >>> model = jf.DecoderOnly(replace(jf.GPT2, **small, num_decoder_layers=1))
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> jf.save_pretrained("model", model, params)
    >>> loaded = jf.load_pretrained("model")
    >>> loaded.model.config.d_ff, loaded.tokenizer
    (32, None)
    >>> equal = jax.tree.map(lambda a, b: bool((a == b).all()), loaded.params, params)
    >>> all(jax.tree.leaves(equal))
    True
    """
    path = to_local_path(locate(folder))
    if (path / ADAPTER_CONFIG).is_file():
        source = _open_adapted(path)
    else:
        source = PublishedModel(path, read_json(path / "config.json"))
    return _load_published(source, attention_fn, dtype, strategy)


def load_without_weights(folder: str | os.PathLike[str]) -> Loaded:
    """As `load`, without `params`: of the weights only the shapes are read.

    A run without a checkpoint has the sizes that its config.json says.
    """
    source = open_folder(folder)
    if isinstance(source, PublishedModel):
        return Loaded(source.model(), {}, *source.tokenizers(), source.settings())
    if source.is_trained:
        source = source.with_weights()
    return Loaded(source.model(), {}, *source.tokenizers(), source.settings(), source.config)


def is_pretrained(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` holds a model as `transformers` writes it, or an adapter, and not a run."""
    try:
        path = to_path(folder)
        return (path / ADAPTER_CONFIG).is_file() or "model_type" in read_json(path / "config.json")
    except DataError:
        return False


def _open_adapted(folder: Path) -> PublishedModel:
    """The published model that the LoRA adapter in `folder` belongs to, with the adapter."""
    adapter = Adapter(to_local_path(folder))
    base = base_folder(adapter)
    return PublishedModel(base, read_json(base / "config.json"), adapter)


def _load_published(
    source: PublishedModel,
    attention_fn: AttentionFn | None,
    dtype: Literal["float32", "bfloat16"] | None,
    strategy: Strategy | None,
) -> Loaded:
    model = source.model(attention_fn or auto_attention, dtype or "float32")
    tokenizer, target_tokenizer = source.tokenizers()
    params = source.params(model, strategy)
    return Loaded(model, params, tokenizer, target_tokenizer, source.settings())
