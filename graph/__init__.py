"""The nouns that all packages share: operator graph, topology, strategy, training."""
