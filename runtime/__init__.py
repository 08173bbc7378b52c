"""Executes a strategy on real devices through `torch.distributed`, and times it."""
