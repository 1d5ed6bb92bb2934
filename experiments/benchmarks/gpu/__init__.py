"""Benchmarks of one GPU: each section in a process of its own, all results in one JSON file."""
