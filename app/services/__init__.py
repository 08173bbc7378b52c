"""Use cases: each loads rows from the store, calls the layers below, and stores their results."""
