"""The operations that make a Transformer fast; a test compares each with its plain twin."""
