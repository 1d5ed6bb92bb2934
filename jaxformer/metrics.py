"""Scores of translations, each with what is needed to repeat it, and of probabilities."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxformer import extras
from jaxformer.config import ConfigError
from jaxformer.tokenizers import DataError


class Scores(NamedTuple):
    """BLEU and chrF (0 to 100) of `sentences` sentences, with sacreBLEU's signatures."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str
    sentences: int


def score_translations(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """Cased BLEU (tokenizer 13a) and chrF2 of plain text, one reference a sentence.

    Raises `DataError` for different numbers of sentences, or none. Post 2018, Popović 2015.
    """
    return _score(hypotheses, references, tokenize="13a", label="")


def score_tokenized(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """BLEU and chrF2 of text whose tokens already stand between spaces (tok:none).

    Raises `DataError` for different numbers of sentences, or none.
    """
    return _score(hypotheses, references, tokenize="none", label="")


def score_lowercased(hypotheses: Sequence[str], references: Sequence[str], language: str) -> Scores:
    """BLEU and chrF2 of both sides after `lowercased_tokens`, as older papers on Multi30k report.

    The signatures begin with `lc.norm.moses:LANGUAGE|`, for sacreBLEU itself sees only tokens.
    Raises `DataError` for different numbers of sentences, or none.
    """
    return _score(
        lowercased_tokens(hypotheses, language),
        lowercased_tokens(references, language),
        tokenize="none",
        label=f"lc.norm.moses:{language}|",
    )


def lowercased_tokens(lines: Sequence[str], language: str) -> list[str]:
    """Plain text as Multi30k publishes it: lower-cased, punctuation normalised, Moses-tokenised.

    Tokens stand between spaces, with `"` as `&quot;` and so on; equal to the published
    `lc.norm.tok` files of English, German and French on every line. `language` is a code such as
    "de" (`ConfigError` for anything else). Elliott et al. 2016.
    """
    if not re.fullmatch("[a-z]{2,3}", language):
        raise ConfigError(f"language must be a code like 'de', got {language!r}")
    moses = extras.load("sacremoses")
    normalizer = moses.MosesPunctNormalizer(lang=language, perl_parity=True)
    tokenizer = moses.MosesTokenizer(lang=language)
    # The Perl script sees the line feed: with it a closing quotation mark moves before the stop.
    normal = (normalizer.normalize(line.lower() + "\n") for line in lines)
    return [tokenizer.tokenize(line, return_str=True) for line in normal]


def bleu_interval(
    hypotheses: Sequence[str], references: Sequence[str], *, resamples: int = 1000
) -> tuple[float, float]:
    """The ends of the 95 % bootstrap interval of cased BLEU (13a), resampling sentences.

    Drawn with sacreBLEU's fixed seed, so equal input gives equal numbers. Raises `DataError` for
    different numbers of sentences, or none. Koehn 2004.
    """
    _check_counts(hypotheses, references)
    bleu = extras.load("sacrebleu").metrics.BLEU(references=[list(references)])
    score = bleu.corpus_score(list(hypotheses), None, n_bootstrap=resamples)
    facts = json.loads(score.format(12, signature=str(bleu.get_signature()), is_json=True))
    mean, half = facts["confidence_mean"], facts["confidence_var"]
    return mean - half, mean + half


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """The share (0 to 1) of hypotheses that equal their reference character for character.

    Raises `DataError` for different numbers of sentences, or none.
    """
    _check_counts(hypotheses, references)
    pairs = zip(hypotheses, references, strict=True)
    return sum(hypothesis == reference for hypothesis, reference in pairs) / len(references)


class Amount(NamedTuple):
    """How long a text is: words, each line feed counted as one more, and bytes in UTF-8."""

    words: int
    bytes: int


class Likelihood(NamedTuple):
    """What a model gives a text: `nats` is the sum of its tokens' negative log-likelihoods.

    `tokens` counts the predicted ones; `words` and `bytes` are the `Amount` of the text. The
    sums of two texts, added field by field, are those of both.
    """

    nats: float
    tokens: int
    words: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats a token; `DataError` when there is none."""
        return _mean(self.nats, self.tokens, "the loss", "token")

    @property
    def perplexity(self) -> float:
        """exp(nats / tokens), which only models of one tokenizer can be compared by."""
        return perplexity(self.nats, self.tokens)

    @property
    def word_perplexity(self) -> float:
        """exp(nats / words): comparable between tokenizers and, on WikiText, with papers.

        Infinite where the exponential overflows; `DataError` when there is no word.
        """
        return _exp(_mean(self.nats, self.words, "perplexity", "word"))

    @property
    def bits_per_byte(self) -> float:
        """nats / (bytes ln 2): comparable between tokenizers."""
        return bits_per_byte(self.nats, self.bytes)


def count_text(blocks: Iterable[str]) -> Amount:
    """The amount of a text that comes in `blocks`, cut anywhere, words included.

    A word is what stands between white space, and the end of a line is a word of its own, as
    WikiText is counted (Merity et al. 2017): 245,569 in the test part of WikiText-2.
    """
    words = size = 0
    inside = False
    for block in blocks:
        words += len(block.split()) + block.count("\n")
        size += len(block.encode())
        # The first word of a block may be the rest of one that is counted already.
        if inside and block and not block[0].isspace():
            words -= 1
        if block:
            inside = not block[-1].isspace()
    return Amount(words, size)


def count_words(text: str) -> int:
    """The words of `text` and its line feeds, as `count_text` counts them."""
    return count_text([text]).words


def perplexity(nats: float, tokens: float) -> float:
    """exp(nats / tokens): `nats` is the sum of the negative log-likelihoods of `tokens` tokens.

    Infinite where the exponential overflows. Raises `DataError` unless tokens > 0.
    """
    return _exp(_mean(nats, tokens, "perplexity", "token"))


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """nats / (num_bytes ln 2): independent of the tokenizer, for text of `num_bytes` in UTF-8.

    Raises `DataError` unless num_bytes > 0.
    """
    return _mean(nats, num_bytes, "the number of bits per byte", "byte") / math.log(2)


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
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str, label: str
) -> Scores:
    _check_counts(hypotheses, references)
    sacrebleu = extras.load("sacrebleu").metrics
    bleu, chrf = sacrebleu.BLEU(tokenize=tokenize, force=tokenize == "none"), sacrebleu.CHRF()
    sides = list(hypotheses), [list(references)]
    return Scores(
        bleu=bleu.corpus_score(*sides).score,
        chrf=chrf.corpus_score(*sides).score,
        bleu_signature=label + str(bleu.get_signature()),
        chrf_signature=label + str(chrf.get_signature()),
        sentences=len(references),
    )


def _check_counts(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """sacreBLEU would score ten hypotheses against a thousand references as 100."""
    if len(hypotheses) != len(references) or len(references) == 0:
        raise DataError(
            f"{len(hypotheses)} hypotheses and {len(references)} references: "
            "as many of one as of the other are needed, and at least one"
        )
