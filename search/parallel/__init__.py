"""Processes beside the search: chains in a pool, kernels compiled ahead, pauses of the garbage collector."""
