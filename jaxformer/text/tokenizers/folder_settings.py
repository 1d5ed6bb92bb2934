"""The settings of a tokenizer in a published folder: roles, further tokens, class, languages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.errors import DataError
from jaxformer.storage import read_json
from jaxformer.text.tokenizers.languages import Languages
from jaxformer.text.tokenizers.tokenizer import Tokenizer

# The keys of each role; BERT's names of the first and the last token are [CLS] and [SEP].
_ROLES = {
    "pad": ("pad_token",),
    "bos": ("bos_token", "cls_token"),
    "eos": ("eos_token", "sep_token"),
    "unk": ("unk_token",),
    "mask": ("mask_token",),
}

# Classes of tokenizers for models whose folders do not name one.
_CLASSES = {
    "gpt2": "GPT2Tokenizer",
    "bert": "BertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "bart": "RobertaTokenizer",
    "roberta": "RobertaTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "mbart": "MBartTokenizer",
    "m2m_100": "M2M100Tokenizer",
}


class _Style(NamedTuple):
    """The way in which the tokenizers of a class mark languages."""

    default: str
    token: str = "{}"
    begins: bool = True


_STYLES = {
    "NllbTokenizer": _Style("eng_Latn"),
    "MBartTokenizer": _Style("en_XX", begins=False),
    "MBart50Tokenizer": _Style("en_XX"),
    "M2M100Tokenizer": _Style("en", "__{}__"),
}


class FolderSettings:
    """tokenizer_config.json and special_tokens_map.json of `folder`, as `transformers` reads them.

    Attributes: `config`, their keys and values; `kind`, the class of the tokenizer; `roles`, the
    token of each role, None where the folder names none; `added`, the tokens beside the vocabulary
    by their ids, each with the arguments of an `AddedToken`. Raises `DataError` for damaged files,
    and for settings that are not supported.
    """

    def __init__(self, folder: Path, name: str = "tokenizer_config.json") -> None:
        self._path = folder / name
        config = read_json(self._path, default={})
        model = read_json(folder / "config.json", default={})
        if "added_tokens_decoder" not in config:
            config |= read_json(folder / "special_tokens_map.json", default={})
        self.config: dict[str, Any] = config
        self._model: dict[str, Any] = model
        kind = config.get("tokenizer_class") or model.get("tokenizer_class")
        kind = kind or _CLASSES.get(str(model.get("model_type")), "")
        self.kind: str = str(kind).removesuffix("Fast")
        if self.kind.startswith("Qwen2") and self.option("add_prefix_space", False):
            raise DataError(
                f"{self._path}: add_prefix_space=true is not supported for {self.kind}: set it to "
                "false, with which texts get other ids"
            )
        self.roles = self._read_roles()
        self.added = self._read_added(read_json(folder / "added_tokens.json", default={}))

    def option(self, name: str, default: bool | None) -> bool | None:
        """The truth value `name` of tokenizer_config.json, or `default`."""
        value = self.config.get(name, default)
        if value is not default and not isinstance(value, bool):
            raise DataError(f"{self._path}: {name} must be true or false, got {value!r}")
        return value

    def vocab_size(self, key: str) -> int | None:
        """The number of ids of the model, the number `key` of config.json; None: it does not say.

        The target's side has the source's number where the folder does not say its own.
        """
        value = self._model.get(key) or self._model.get("vocab_size")
        return value if type(value) is int and value > 0 else None

    def name_of(self, key: str) -> str | None:
        """The token of a key such as "bos_token", which may be an object with its content."""
        value = self.config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(value, str):
            raise DataError(f"{self._path}: {key} must be the text of a token, got {value!r}")
        return value

    def more_special(self) -> list[str]:
        """The special tokens without a role, in their order."""
        more = self.config.get("additional_special_tokens") or []
        return [str(token["content"] if isinstance(token, dict) else token) for token in more]

    def languages(self, tokenizer: Tokenizer) -> Languages | None:
        """The languages of the texts of a translator's tokenizer; None for another."""
        style = _STYLES.get(self.kind)
        if style is None:
            return None
        before, after = style.token.split("{}")
        ids = {
            name.removeprefix(before).removesuffix(after): index
            for name, index in tokenizer.special_ids.items()
            if index not in tokenizer.special and name.startswith(before) and name.endswith(after)
        }
        source, target = (self.config.get(f"{side}_lang") for side in ("src", "tgt"))
        begins = style.begins and not self.option("legacy_behaviour", False)
        end = tokenizer.special.eos
        if end is None or not ids:
            raise DataError(f"{self._path}: a {self.kind} needs an EOS and tokens of languages")
        return Languages(ids, source or style.default, target, end, begins)

    def _read_roles(self) -> Mapping[str, str | None] | None:
        if not any(key in self.config for keys in _ROLES.values() for key in keys):
            return None
        return {
            role: next((name for name in map(self.name_of, keys) if name is not None), None)
            for role, keys in _ROLES.items()
        }

    def _read_added(self, older: Mapping[str, int]) -> dict[int, dict[str, Any]]:
        special = {*(self.roles or {}).values(), *self.more_special()}
        added: dict[int, dict[str, Any]] = {
            index: {"content": name, "special": name in special, "normalized": name not in special}
            for name, index in older.items()
        }
        try:
            newer = self.config.get("added_tokens_decoder", {})
            return added | {int(index): dict(token) for index, token in newer.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(f"{self._path}: added_tokens_decoder must hold tokens") from error


def read_text(path: Path) -> str:
    """The text of a file of a tokenizer, which is UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the tokenizer: {error}") from error
