"""Codes of languages, by which BLEU chooses how it counts words."""

import re

_TWO_LETTERS = frozenset(
    "aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da "
    "de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy "
    "hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg "
    "li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or "
    "os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw "
    "ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu".split()
)
"""The codes of ISO 639-1."""


def is_language_code(language: str) -> bool:
    """Whether `language` begins with a code of ISO 639-1, or of three letters as in ISO 639-3.

    >>> [is_language_code(code) for code in ("zh_CN", "deu_Latn", "jp", "german")]
    [True, True, False, False]
    """
    code = re.split("[-_]", language.lower())[0]
    return code in _TWO_LETTERS or re.fullmatch("[a-z]{3}", code) is not None


def describe_word_counting(language: str, tokenize: str | None = None) -> str:
    """A sentence for somebody whose `language` does not choose how BLEU counts words, else ""."""
    if not language or tokenize is not None or is_language_code(language):
        return ""
    return (
        f"{language!r} is no code of a language, so BLEU counts words as sacreBLEU's tokenizer 13a "
        "cuts them, which needs spaces between words: give a code such as de, zh, ja or ko"
    )
