"""A synchronous grammar: one derivation yields an English sentence and its German translation."""

from experiments.translation.grammar.corpus import (
    Pair,
    is_held_out,
    make_corpus,
    realize,
    sample_pair,
)

__all__ = ["Pair", "is_held_out", "make_corpus", "realize", "sample_pair"]
