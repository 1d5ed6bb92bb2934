"""Notebooks with text and pictures, and what draws the pictures."""
