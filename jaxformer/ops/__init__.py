"""What makes a Transformer fast: each operation has a plain twin and a test that both agree."""
