"""Activation checkpointing (recomputation): groups of operators whose activations are made again in the backward.

A group is a run of operators that follow each other in the graph's order, so that what leaves it never comes back: in
the backward it is made again as a whole, just before the backward of its last operator. What is made again are the
tasks that have a backward. What enters the group is kept: what they read that is made outside, or by tasks without a
backward, and what other devices have sent.

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174); PyTorch's
torch.utils.checkpoint.
"""

from __future__ import annotations

from graph.operator_ranges import OperatorRanges


def needed_at(groups: OperatorRanges, index: int) -> int:
    """Return the operator before whose backward an operator's inputs are needed: the last of its group, or itself."""
    return next((group.last for group in groups if group.first <= index <= group.last), index)
