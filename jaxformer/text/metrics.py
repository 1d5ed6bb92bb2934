"""Scores of translations, with the settings needed to repeat them, and of likelihoods."""

import math
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError, MissingExtra
from jaxformer.text.tokenizers import check_list

# By the first part of a language code, of ISO 639-1 or 639-3.
_TOKENIZERS: dict[str, str] = dict.fromkeys(("zh", "zho", "chi", "cmn", "yue", "lzh"), "zh")
_TOKENIZERS |= {"ja": "ja-mecab", "jpn": "ja-mecab", "ko": "ko-mecab", "kor": "ko-mecab"}

# Thai, Lao, Burmese, Khmer, kana, Chinese characters.
_UNSEGMENTED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]"
)


class Scores(NamedTuple):
    """BLEU and chrF of translations."""

    bleu: float
    """0 to 100."""
    chrf: float
    """0 to 100."""
    bleu_signature: str
    """sacreBLEU's signature: the settings of this score."""
    chrf_signature: str
    """sacreBLEU's signature: the settings of this score."""
    sentences: int
    """The number of sentences."""


def score_translations(
    hypotheses: Sequence[str],
    references: Sequence[str],
    language: str = "",
    tokenize: str | None = None,
) -> Scores:
    """Cased BLEU and chrF2 of plain text with one reference per sentence.

    BLEU counts words as sacreBLEU's tokenizer `tokenize` cuts them; None: the one for `language`, a
    code such as "zh", "zh_CN" or "zho_Hans" ("zh" of Chinese, "ja-mecab" of Japanese, "ko-mecab" of
    Korean), and 13a for others. Warns where 13a takes whole sentences for words. Raises `DataError`
    for different numbers of sentences, or none, `ConfigError` for an unknown tokenizer,
    `MissingExtra` for one that is not installed. Post 2018, Popović 2015.

    >>> text = ["Ein Haus steht dort."]
    >>> round(jf.score_translations(text, text).bleu, 1)
    100.0
    """
    _check_counts(hypotheses, references)
    bleu = make_bleu(language, tokenize)
    if bleu.tokenizer_signature == "13a" and _is_unsegmented(references):
        warnings.warn(
            "BLEU's tokenizer 13a takes whole sentences of these references for words, because "
            "they have no spaces: give the language of the target text, or a tokenizer such as "
            "zh, ja-mecab or char",
            stacklevel=2,
        )
    return _score(bleu, hypotheses, references)


def score_lowercased(hypotheses: Sequence[str], references: Sequence[str], language: str) -> Scores:
    """BLEU and chrF2 of both sides after `lowercased_tokens`, as in older papers on Multi30k.

    The signatures begin with `lc.norm.moses:LANGUAGE|`, because sacreBLEU only gets the tokens.
    Raises `DataError` for different numbers of sentences, or none.
    """
    found, right = (lowercased_tokens(side, language) for side in (hypotheses, references))
    return _score(make_bleu(tokenize="none"), found, right, f"lc.norm.moses:{language}|")


def make_bleu(language: str = "", tokenize: str | None = None) -> Any:
    """sacreBLEU's metric BLEU with the tokenizer that `score_translations` describes."""
    metrics = optional_dependencies.load("sacrebleu").metrics
    known = metrics.BLEU.TOKENIZERS
    if tokenize is None:
        code = re.split("[-_]", language.lower())[0]
        tokenize = _TOKENIZERS.get(code, "13a")
    elif tokenize not in known:
        raise ConfigError(f"tokenize={tokenize!r}, but sacreBLEU has {', '.join(sorted(known))}")
    try:
        return metrics.BLEU(tokenize=tokenize, force=tokenize == "none")
    except (ImportError, RuntimeError) as error:  # RuntimeError where a package is missing
        reason = " ".join(str(error).split())
        raise MissingExtra(f"BLEU's tokenizer {tokenize}: {reason}") from error


def lowercased_tokens(lines: Sequence[str], language: str) -> list[str]:
    """Lower-cased text with normalised punctuation, cut into Moses tokens with spaces between.

    `"` becomes `&quot;` and so on. The result equals the published `lc.norm.tok` files of Multi30k
    in English, German and French on every line. `language` is a code such as "de" (`ConfigError`
    for anything else). Elliott et al. 2016.
    """
    if not re.fullmatch("[a-z]{2,3}", language):
        raise ConfigError(f"language must be a code like 'de', got {language!r}")
    moses = optional_dependencies.load("sacremoses")
    normalizer = moses.MosesPunctNormalizer(lang=language, perl_parity=True)
    tokenizer = moses.MosesTokenizer(lang=language)
    # The Perl script gets the line feed; with it a closing quotation mark moves before the stop.
    normal = (normalizer.normalize(line.lower() + "\n") for line in lines)
    return [tokenizer.tokenize(line, return_str=True) for line in normal]


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """The share (0 to 1) of hypotheses that equal their reference character for character.

    Raises `DataError` for different numbers of sentences, or none.
    """
    _check_counts(hypotheses, references)
    pairs = zip(hypotheses, references, strict=True)
    return sum(hypothesis == reference for hypothesis, reference in pairs) / len(references)


class TextSize(NamedTuple):
    """The size of a text."""

    words: int
    """Words; each line feed counts as one more."""
    bytes: int
    """Bytes in UTF-8."""


class Likelihood(NamedTuple):
    """The likelihood of a text under a model.

    For two texts together, add the fields.
    """

    nats: float
    """The sum of the negative log-likelihoods of the tokens."""
    tokens: int
    """The number of predicted tokens."""
    words: int
    """As in `TextSize`."""
    bytes: int
    """As in `TextSize`."""

    @property
    def loss(self) -> float:
        """Nats per token; `DataError` when there is no token."""
        return _mean(self.nats, self.tokens, "the loss", "token")

    @property
    def perplexity(self) -> float:
        """exp(nats / tokens); comparable only between models with the same tokenizer.

        Infinite where the exponential overflows; `DataError` when there is no token.
        """
        return _exp(_mean(self.nats, self.tokens, "perplexity", "token"))

    @property
    def word_perplexity(self) -> float:
        """exp(nats / words): comparable between tokenizers and, on WikiText, with papers.

        Infinite where the exponential overflows; `DataError` when there is no word.
        """
        return _exp(_mean(self.nats, self.words, "perplexity", "word"))

    @property
    def bits_per_byte(self) -> float:
        """nats / (bytes ln 2): comparable between tokenizers; `DataError` when there is no byte."""
        return _mean(self.nats, self.bytes, "the number of bits per byte", "byte") / math.log(2)


def count_text(blocks: Iterable[str]) -> TextSize:
    """The size of a text given in `blocks`, which may be cut anywhere, even inside words.

    Words are separated by white space, and the end of a line counts as a word, as in WikiText
    (Merity et al. 2017): 245,569 words in the test part of WikiText-2.
    """
    words = size = 0
    inside = False
    for block in blocks:
        words += len(block.split()) + block.count("\n")
        size += len(block.encode())
        # The first word of a block may be the rest of a word that is already counted.
        if inside and block and not block[0].isspace():
            words -= 1
        if block:
            inside = not block[-1].isspace()
    return TextSize(words, size)


def _mean(nats: float, count: float, what: str, unit: str) -> float:
    if not count > 0:
        raise DataError(f"{what} needs at least one {unit}, got {count}")
    return nats / count


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def _score(
    bleu: Any, hypotheses: Sequence[str], references: Sequence[str], label: str = ""
) -> Scores:
    _check_counts(hypotheses, references)
    chrf = optional_dependencies.load("sacrebleu").metrics.CHRF()
    sides = list(hypotheses), [list(references)]
    return Scores(
        bleu=bleu.corpus_score(*sides).score,
        chrf=chrf.corpus_score(*sides).score,
        bleu_signature=label + str(bleu.get_signature()),
        chrf_signature=label + str(chrf.get_signature()),
        sentences=len(references),
    )


def _is_unsegmented(references: Sequence[str]) -> bool:
    """Whether most letters are of scripts that are written without spaces between words."""
    letters = sum(map(str.isalpha, "".join(references)))
    return sum(len(_UNSEGMENTED.findall(line)) for line in references) > letters / 2


def _check_counts(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Raises `DataError` for unequal numbers, for which sacreBLEU may give a score of 100."""
    check_list("hypotheses", hypotheses)
    check_list("references", references)
    if len(hypotheses) != len(references) or len(references) == 0:
        raise DataError(
            f"{len(hypotheses)} hypotheses and {len(references)} references: "
            "give one reference for each hypothesis, and at least one"
        )
