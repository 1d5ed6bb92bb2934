"""Number words from 0 to 999 in English and German."""

from experiments.translation.grammar.lexicon import NUMERALS


def english_number(number: int) -> str:
    """Return the words of a number from 0 to 999: "three hundred forty-two" for 342."""
    hundreds, rest = _split(number)
    if hundreds:
        words = f"{NUMERALS[hundreds].english} hundred"
        return f"{words} {english_number(rest)}" if rest else words
    if rest in NUMERALS:
        return NUMERALS[rest].english
    return f"{NUMERALS[rest - rest % 10].english}-{NUMERALS[rest % 10].english}"


def german_number(number: int) -> str:
    """Return the word of a number from 0 to 999: "dreihundertzweiundvierzig" for 342."""
    hundreds, rest = _split(number)
    if hundreds:
        word = ("" if hundreds == 1 else NUMERALS[hundreds].german) + "hundert"
        return word + german_number(rest) if rest else word
    if rest in NUMERALS:
        return NUMERALS[rest].german
    units = "ein" if rest % 10 == 1 else NUMERALS[rest % 10].german
    return f"{units}und{NUMERALS[rest - rest % 10].german}"


def _split(number: int) -> tuple[int, int]:
    if not 0 <= number <= 999:
        raise ValueError(f"number words exist for 0 to 999, not for {number}: give a smaller one")
    return divmod(number, 100)
