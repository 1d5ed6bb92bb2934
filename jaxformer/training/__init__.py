"""Losses, the optimizer, and one training step as a pure function."""
