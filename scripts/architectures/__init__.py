"""Architectures from outside of the zoo: which are imported, split, and train as in plain PyTorch (docs/models.md)."""
