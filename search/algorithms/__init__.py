"""Search algorithms: chains, their moves and their log; greedy, OptCNN, exhaustive; sharding, checkpointing."""
