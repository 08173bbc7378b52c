"""Compiled kernels: fragments, task graph, the simulation in all orders, and the incremental one in program order.

A file imports from those above it in this list: `cache` (decorators), `held` (tuples of arrays by a pointer), `records`
(arrays), `fragments` (records in the arena), `collective_formulas`, `messages`, `exchange`, `regions`,
`collective_list`, `static_writing`, `fragment_table`, `fragment_writing`, `memory_accounting`, `stage_memory`,
`derivation`, `gradient_buckets`, `weight_gathers`, `forward_tasks`, `backward_tasks`, `update_tasks`, `task_graph`,
`program_order`, `fifo_order`, `priority_order`, `bounds`, `stage_division`, `workload`, `machine`,
`incremental_forward`, `incremental_backward`, `incremental`; `priorities` and `micro_batches` by themselves.

Callers have validated. Integers only, but for prices: those are double expressions without fastmath, and are rounded
once.
"""
