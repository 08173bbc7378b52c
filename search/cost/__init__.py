"""What operators, messages and collectives cost, and which calls must be profiled."""
