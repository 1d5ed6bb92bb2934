"""Words to text, alike in both languages."""


def phrase(words: list[str]) -> str:
    """The words that are not empty, with a space between."""
    return " ".join(word for word in words if word)


def written(words: list[str], end: str) -> str:
    """The sentence of `words`, with its capital letter and its last sign."""
    text = phrase(words)
    return text[0].upper() + text[1:] + end
