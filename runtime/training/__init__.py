"""Training of a user's own module: `parallelize`, the trainer, batches, optimizer state, loss scaling."""
