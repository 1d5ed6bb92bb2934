"""The option to write instead of one that does not exist."""

import difflib
from collections.abc import Sequence

_OTHER_NAMES = {
    "accum": ("grad_accumulation",),
    "batch": ("batch_size", "batch_tokens"),
    "batch_size": ("batch_tokens",),
    "beam": ("beam_size", "eval_beam_size"),
    "beams": ("beam_size", "eval_beam_size"),
    "bf16": ("dtype",),
    "block_size": ("seq_len",),
    "checkpoint": ("run", "init_from"),
    "clip": ("grad_clip_norm",),
    "clip_norm": ("grad_clip_norm",),
    "dropout": ("dropout_rate",),
    "epochs": ("total_steps",),
    "eval_interval": ("evaluate_every",),
    "eval_steps": ("evaluate_every",),
    "fp16": ("dtype",),
    "gradient_accumulation_steps": ("grad_accumulation",),
    "heads": ("num_heads",),
    "hidden_size": ("d_model",),
    "iters": ("total_steps",),
    "layers": ("num_encoder_layers", "num_decoder_layers"),
    "log_interval": ("log_every",),
    "logging_steps": ("log_every",),
    "lr": ("learning_rate",),
    "max_tokens": ("batch_tokens", "max_new_tokens"),
    "max_grad_norm": ("grad_clip_norm",),
    "max_iters": ("total_steps",),
    "length": ("max_new_tokens", "seq_len"),
    "max_length": ("max_len", "seq_len", "max_new_tokens"),
    "max_lr": ("learning_rate",),
    "max_steps": ("total_steps",),
    "min_lr": ("min_lr_ratio",),
    "model": ("run",),
    "model_name_or_path": ("run", "init_from"),
    "n_embd": ("d_model",),
    "n_head": ("num_heads",),
    "n_layer": ("num_encoder_layers", "num_decoder_layers"),
    "out_dir": ("runs", "output"),
    "output_dir": ("runs", "output"),
    "save_steps": ("save_every",),
    "seq_length": ("seq_len",),
    "steps": ("total_steps",),
    "warmup": ("warmup_steps",),
    "wd": ("weight_decay",),
}
"""Other programs' name of an option -> the last words of the options here."""
_NOT_OPTIONS = {
    "device": "JAX chooses the device; set JAX_PLATFORMS=cpu, cuda or tpu in the environment",
    "gpu": "JAX uses the GPUs that it sees; set CUDA_VISIBLE_DEVICES to hide some",
    "resume": "train has it; a training also resumes when its command is given again",
}
"""Options of other programs that do not exist here -> what to do."""


def suggestion(name: str, known: Sequence[str]) -> str:
    """The option to write instead of the unknown one `name`; names are without hyphens."""
    word = _last_word(name)
    if word in _NOT_OPTIONS:
        return _NOT_OPTIONS[word]
    group = [option for option in known if option.startswith(f"{name}.")]
    if group:
        return f"it is a group of options, such as --{group[0]}; --help {name} lists them"
    words = (word, *_OTHER_NAMES.get(word.removeprefix("num_"), ()))
    same = [f"--{option}" for option in known if _last_word(option) in words][:3]
    if same:
        return f"use {' or '.join(same)}"
    near = difflib.get_close_matches(word, dict.fromkeys(map(_last_word, known)))
    options = [f"--{option}" for each in near for option in known if _last_word(option) == each]
    return f"{did_you_mean(options[:3])}--help all lists them"


def did_you_mean(near: Sequence[str]) -> str:
    """A question that names the options `near`, or nothing."""
    return f"did you mean {' or '.join(near)}? " if near else ""


def _last_word(option: str) -> str:
    return option.rpartition(".")[2]
