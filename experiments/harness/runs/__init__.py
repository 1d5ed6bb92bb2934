"""A run's folder: settings, records, text cache, checkpoints to load, stopping and resuming."""
