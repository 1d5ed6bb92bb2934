"""Runs compared: groups of equal settings, their scores, intervals and tests, as tables."""
