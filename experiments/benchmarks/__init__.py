"""Benchmarks: the time of this library next to its peers, in the same run."""
