"""Which network is meant, its operator graph and its summary; which functions of a user's own may run."""
