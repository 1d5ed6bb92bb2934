"""Training of a run: its settings, what it is built of, the loop's helpers, screen and loggers."""
