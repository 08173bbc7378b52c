"""The processes of an execution: torchrun, the lead of rank 0, and how processes end."""
