"""Strategies as PyTorch's own plans: a device mesh, DTensor placements, parallelize_module and fully_shard."""
