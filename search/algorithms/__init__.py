"""Search algorithms: chains, their moves and their log; greedy, OptCNN, Tofu, placement, exhaustive; recomputation."""
