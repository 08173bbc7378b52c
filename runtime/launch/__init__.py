"""The processes of an execution: torchrun, how rank 0 leads the others, how they end."""
