"""Search algorithms: chains, their moves and their log; greedy, OptCNN, Tofu, exhaustive; sharding, recomputation."""
