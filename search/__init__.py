"""The search: legal configurations, task graph, simulator, and the walk over strategies.

Neither torch nor SQL is known here; numba is imported when something is simulated first.

    search.cost         what operators, messages and collectives cost; which calls must be profiled before a search
    search.space        groups, configurations, placements, baselines, hybrids
    search.problem      what a search is about, as arrays
    search.simulate     from a strategy to the time and memory of its step
    search.kernels      the compiled part of it
    search.evaluate     what a proposal costs: in full, or by what it changes
    search.algorithms   chains, moves, the proposal log; greedy, OptCNN, Tofu, placement, exhaustive, sharding
    search.bounds       lower bounds
    search.parallel     chains in several processes, kernels compiled ahead
"""
