"""What one GPU does in a few minutes: each section in a process of its own, all in one JSON."""
