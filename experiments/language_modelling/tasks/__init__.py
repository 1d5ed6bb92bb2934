"""Tasks that a run's model is fine-tuned for, each with its files, its head and its scores."""
