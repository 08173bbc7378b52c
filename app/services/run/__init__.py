"""`app run`: on this machine's devices, or under torchrun."""
