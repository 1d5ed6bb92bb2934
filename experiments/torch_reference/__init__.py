"""The same models in PyTorch, as classes with state: to compare designs, losses and speed."""
