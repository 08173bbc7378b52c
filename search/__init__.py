"""The search: legal configurations, task graph, simulator, and the walk over strategies.

Neither torch nor SQL is known here; numba is imported when something is simulated first.

    search.costs           Origin, OperatorCost, CostSource (a protocol), CostTable
    search.links           LinkCosts: what communication costs beside the topology's links
    search.groups          find_groups, follow: operators that take their configuration from another one
    search.configurations  random_configuration, enumerate_degrees
    search.needed          needed_calls: what to profile before a search
    search.baselines       data_parallel, single_device, expert, random_strategy
    search.taskgraph       build_task_graph, TaskGraph, TaskKind
    search.simulator       simulate, Simulation, Order
    search.moves           Moves, MoveShares: what a proposal changes
    search.hybrids         hybrids, random_grid: what is proposed on many devices
    search.routes          route_table: the routes of a topology as arrays
    search.proposals       Observer, ProposalBatch, encode_configuration, decode_configuration
    search.chain           Chain, SearchOptions: one walk
    search.mcmc            search, SearchResult: all chains of a search
    search.parallel        the same chains walked by several processes (search.worker, search.forking)
"""
