"""The study of FlexFlow's paper, repeated on models of its clusters, and the whole zoo against its baselines."""
