"""A tokenizer as other programs read it: its special tokens, its settings and their ids."""

from typing import Any

from jaxformer import optional_dependencies
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.text.tokenizers import Tokenizer

NO_TOKEN_IDS: dict[str, int | None] = {
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Keys of config.json that are null, so that no default of transformers is used."""


def token_ids_of(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The ids of special tokens for config.json; null for a role without a token."""
    special = tokenizer.special
    return {
        "pad_token_id": special.pad,
        "bos_token_id": special.bos,
        "eos_token_id": special.eos,
    }


def with_template(tokenizer: Tokenizer, spec: ModelSpec) -> Tokenizer:
    """`tokenizer` that, in other programs, adds the special tokens that the model reads.

    They stand around each text. `encode` here gives the same ids as before.
    """
    decoder = spec.kind in ("decoder", "bare_decoder", "decoder_classifier")
    if decoder or tokenizer.library_tokenizer.post_processor is not None:
        return tokenizer
    library = optional_dependencies.load("tokenizers")
    special = tokenizer.special
    changed = tokenizer.to_library()
    bos = None if spec.kind == "encoder_decoder" else special.bos
    first, last = ([] if i is None else [tokenizer.token(i)] for i in (bos, special.eos))
    changed.post_processor = library.processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, "$B:1", *(f"{name}:1" for name in last)],
        special_tokens=[(name, tokenizer.id_of(name)) for name in dict.fromkeys((*first, *last))],
    )
    return Tokenizer(changed)


def tokenizer_config(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    special = tokenizer.special._asdict()
    names = {
        f"{role}_token": tokenizer.token(index)
        for role, index in special.items()
        if index is not None
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.config.max_len,
        "clean_up_tokenization_spaces": False,
        # Otherwise the names of special tokens in a text would be read, as here they are not.
        "split_special_tokens": special["mask"] is None and tokenizer.roles is None,
        **names,
    }
