"""Which rank a process is, and whether it makes progress."""
