"""Benchmarks: the time of this library beside its peers, in the same run."""
