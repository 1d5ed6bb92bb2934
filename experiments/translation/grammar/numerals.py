"""Number words from 0 to 999 in English and German."""

ENGLISH_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
ENGLISH_TENS = "- ten twenty thirty forty fifty sixty seventy eighty ninety".split()
GERMAN_SMALL = (
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
    "fünfzehn sechzehn siebzehn achtzehn neunzehn"
).split()
GERMAN_TENS = "- zehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()


def english_number(number: int) -> str:
    """Return the words of a number from 0 to 999, for 342 "three hundred forty-two".

    Raises:
        ValueError: the number lies outside 0 to 999.
    """
    hundreds, rest = _split(number)
    words = [f"{ENGLISH_SMALL[hundreds]} hundred"] if hundreds else []
    tens, units = divmod(rest, 10)
    if rest >= 20:
        words.append(ENGLISH_TENS[tens] + (f"-{ENGLISH_SMALL[units]}" if units else ""))
    elif rest or not hundreds:
        words.append(ENGLISH_SMALL[rest])
    return " ".join(words)


def german_number(number: int) -> str:
    """Return the word of a number from 0 to 999, for 342 "dreihundertzweiundvierzig".

    Raises:
        ValueError: the number lies outside 0 to 999.
    """
    hundreds, rest = _split(number)
    word = ""
    if hundreds:
        word = ("" if hundreds == 1 else GERMAN_SMALL[hundreds]) + "hundert"
    tens, units = divmod(rest, 10)
    if rest < 20:
        return word + (GERMAN_SMALL[rest] if rest or not hundreds else "")
    if units:
        word += ("ein" if units == 1 else GERMAN_SMALL[units]) + "und"
    return word + GERMAN_TENS[tens]


def _split(number: int) -> tuple[int, int]:
    if not 0 <= number <= 999:
        raise ValueError(f"number words reach from 0 to 999, not to {number}: give a smaller one")
    return divmod(number, 100)
