"""A job: a strategy to execute and time, and its verification against the graph and the module."""
