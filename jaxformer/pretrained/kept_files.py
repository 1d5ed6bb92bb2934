"""The parts of a published folder that a model trained from it keeps when it is saved."""

import os
import re
from dataclasses import dataclass
from typing import Any

from jaxformer.pretrained.family import Family
from jaxformer.pretrained.peft_adapters import locate_model
from jaxformer.storage import read_json, to_local_path
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import Tokenizer

_TOKENIZER_FILES = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|target_vocab)\.json|"
    r"(merges|vocab)\.txt|chat_template\.(jinja|json)|.*\.(spm|model)"
)
_OTHER_FILES = ("generation_config.json", "modules.json")
_NOT_KEPT = ("dtype", "num_labels", "id2label", "label2id", "problem_type")
"""Keys of config.json, besides the family's, that are written anew or not at all."""


@dataclass(frozen=True)
class KeptFiles:
    """The files and the settings that are kept."""

    config: dict[str, Any]
    """The content of the folder's config.json."""
    files: dict[str, bytes]
    """The other files, by name."""
    has_tokenizer: bool
    """Whether the tokenizer's files are among them."""

    def keys_beside(self, family: Family) -> dict[str, Any]:
        """The keys of config.json that are no settings of `family`, and their values."""
        replaced = {name for key in family.keys for name in key.names}
        replaced |= {*family.aliases, *_NOT_KEPT}
        return {key: value for key, value in self.config.items() if key not in replaced}


def read_kept_files(folder: str | os.PathLike[str], tokenizer: Tokenizer | None) -> KeptFiles:
    """The kept files of the model in `folder`.

    The tokenizer's are among them if `tokenizer`, which the model is saved with, is None or equal.
    """
    source = to_local_path(locate_model(folder))
    config = read_json(source / "config.json")
    has_tokenizer = tokenizers.has_tokenizer(source)
    if has_tokenizer and tokenizer is not None:
        has_tokenizer = tokenizers.load(source).fingerprint == tokenizer.fingerprint
    files: dict[str, bytes] = {}
    for path in source.iterdir():
        is_tokenizer_file = _TOKENIZER_FILES.fullmatch(path.name) is not None
        is_kept = path.name in _OTHER_FILES or (has_tokenizer and is_tokenizer_file)
        if is_kept and path.is_file():
            files[path.name] = path.read_bytes()
    return KeptFiles(config, files, has_tokenizer)
