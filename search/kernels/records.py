"""Arrays and constants that kernels share.

Shape letters: T tasks, E dependencies, D devices, R resources, O operators, V values, W weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
FORWARD, BACKWARD, TRANSFER, GRADIENT_TRANSFER, BUFFER_TRANSFER, SYNCHRONIZE, UPDATE = range(7)
COLLECTIVE, GRADIENT_COLLECTIVE, BUFFER_COLLECTIVE = range(7, 10)
FORWARD_GATHER, BACKWARD_GATHER, UPDATE_GATHER = range(10, 13)
RECOMPUTE, WEIGHT = 13, 14
# Codes of `graph.schedule.Phase`, in its order.
FORWARD_UNIT, BACKWARD_UNIT, WEIGHT_UNIT = range(3)
# Codes of `graph.strategy.Sharding`, in its order.
SHARED_UPDATE, SHARED_WEIGHT = 1, 2
# Codes of `graph.collectives.CollectiveKind`.
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, REDUCE = range(6)
FEWEST_DEVICES = 3
# Instead of an origin, in the fragment of an operator of which no cost is known: every task has a backward, or of the
# replicas of each part some have, nobody knows which.
ACTIVE, PARTLY_ACTIVE = -1, -2
PARTS_PER_MILLION = 1_000_000
# Instead of a message, of a gradient that is on the device already, or that goes back as one collective.
STAYS, SUMMED = -2, -1
# What an operator exchanges with other devices: nothing; by one collective that all of its tasks wait for, or none of
# them, and that all of them take part in; otherwise.
LOCAL, ONE_COLLECTIVE, MIXED = range(3)
# The words of `Machine.deferred`. To when each device is free are to be added, and from what it has left to be taken;
# whether all devices are free at the same time, and then the most that one of them has left; whether something
# was computed that paid no debt yet. Then a resource set that was served alone of late, or -1: when it is free, what is
# to be taken from what its resources have left, and the most that one of these had left before.
(
    FREE_DEFERRED, LEFT_DEFERRED, EVEN, MOST_LEFT, COMPUTED, HELD, HELD_END, HELD_DEFERRED, HELD_LEFT,
) = range(9)  # fmt: skip


class GraphArrays(NamedTuple):
    """The wiring of an operator graph. A CSR pair is `x_ptr` and what it points into."""

    output_ptr: Array  # O + 1, into output_value
    output_value: Array
    slot_ptr: Array  # O + 1, into slot_value and slot_reading
    slot_value: Array  # the value read, or -1 for one in place at step start
    slot_reading: Array  # position among the value's readings
    read_ptr: Array  # O + 1, into read_value
    read_value: Array  # distinct values read, ascending
    producer: Array  # a value fragment: its operator
    reading_ptr: Array  # V + buffers + 1, into reading_operator and reading_gradient
    reading_operator: Array
    reading_gradient: Array  # whether a gradient flows back through the slot
    needs_gradient: Array  # V
    order: Array  # O: operators as they are executed, those that the loss depends on first
    loss_operators: int  # how many of these there are
    buffer_count: int  # value fragments of renewed buffers are V and up
    weight_ptr: Array  # W + 1, into weight_user
    weight_user: Array  # operators that read the weight, ascending
    reader_ptr: Array  # W + 1, into reader
    reader: Array  # operators that read the weight or a view of it, ascending
    behind_ptr: Array  # O + 1, into behind_weight
    behind_weight: Array  # weights that the operator reads, by themselves or through views, ascending
    static_item_bytes: Array  # a static fragment
    loss_value: int
    value_count: int
    weight_count: int
    static_count: int


class Fragments(NamedTuple):
    """Where the fragment of each operator, value and static tensor starts in the arena."""

    operator_at: Array
    value_at: Array
    static_at: Array


class ResourceSets(NamedTuple):
    """Sets of resources that a task holds: devices 0..D-1, then routes (source, destination), then device sets.

    Resources are devices 0..D-1, then links. `ends` are the devices whose compute the task slows, each as an end of
    `flows` messages at once.
    """

    resource_ptr: Array
    resource: Array
    end_ptr: Array
    end: Array
    latency_s: Array  # resource sets, algorithms: see `search.cost.collective_cost.CollectivePrice`
    s_per_byte: Array
    segments: Array  # S, 2: the first segment in `curve` of what was measured and the one after its last, else equal
    origin: Array
    operation: Array  # the code of a device set's collective, else -1
    flows: Array
    curve: Array  # segments, 3: see `search.cost.link_costs.Curve`
    issue_ns: Array  # in which the host of each of the ends issues a communication; of devices 0


class Tasks(NamedTuple):
    """Flat arrays of a task graph, in program order."""

    kind: Array
    run_ns: Array
    resource_set: Array
    origin: Array
    subject: Array
    part: Array
    size_bytes: Array
    launch_ns: (
        Array  # in which the host of each device that takes part issues the task (`search.kernels.hosts`)
    )
    pred_ptr: Array
    pred: Array


class ExchangeLinks(NamedTuple):
    """The node of each device; latency, bandwidth and links between all pairs of them: source * D + destination.

    Where messages were measured, segments and curve as in `ResourceSets`, which take precedence; else none.
    """

    node_D: Array
    latency_s_DD: Array
    bandwidth_DD: Array
    segments: Array
    curve: Array
    link_ptr: Array  # D * D + 1, into link
    link: Array
    busy_2L: Array  # scratch, forward and back: zeros between values


class Groups(NamedTuple):
    """Groups of operators that are made again in the backward (`graph.recomputation`)."""

    of_O: Array  # an operator: the number of its group, or -1
    first_O: Array  # an operator: the first one of the group of which it is the last, or -1
    last_O: Array  # an operator: the last one of its group; itself where it is in none
    ended_O: Array  # an operator: how many groups are all before it


class Derivation(NamedTuple):
    """Which tasks of one strategy have a backward, who completes its gradients, and its memory.

    An operator or a value has words in the pool: strategies that differ in a few of them share the rest.
    """

    pool: Array
    active_at: Array  # O: of each task, whether it has a backward
    # V: of an assembly, the operator after whose backward its gradient is complete, or -1. Of values alone, -1 for
    # buffers.
    last_at: Array
    collective_at: Array  # V: of a collective, the operator after whose backward it goes back as one, or -1
    operator_active: Array  # O: whether any task has a backward
    elements_D: Array  # to update
    memory_D: Array  # bytes, but for what is recomputed
    # A group: bytes that are there once it is recomputed, and those that what lies between its end and the next one's
    # keeps.
    again_2GD: Array
    peak_D: Array  # peak bytes
    counts: Array  # 0 the strategy's words in the pool, 1 where they end


class StageMemory(NamedTuple):
    """Bytes of a step in micro-batches, by device and by pipeline stage (S stages)."""

    static_D: Array  # weights, their gradients and optimizer state, buffers
    input_D: Array  # inputs of one micro-batch
    kept_SD: Array  # what is there of one micro-batch between its forward and its backward
    again_SD: (
        Array  # in a backward, the most that is there beyond it while a group of the stage is made again
    )
    weight_SD: Array  # what is there of one micro-batch between its backward and its weight part


class StepCopies(NamedTuple):
    """The tasks of a step in M micro-batches, as copies of those of one: N of T tasks."""

    source_N: Array  # the task of one micro-batch
    micro_batch_N: Array
    number_MT: Array  # of each task of a micro-batch the number in the step


class LatestTasks(NamedTuple):
    """The latest tasks of every device while the tasks of a step are gone through, by number; -1: none yet."""

    computation_D: Array
    sum_DB: Array  # the sum of gradients of each bucket, in column 0 of those that are shared
    awaited_D: Array  # the first of the sums that its next computation waits for, a place in `awaited_2P`
    awaited_2P: Array  # such sums, and the place of the next one, or -1


class StepWaits(NamedTuple):
    """The dependencies of a step's tasks as a CSR pair."""

    pred_ptr: Array
    pred: Array


class Scratch(NamedTuple):
    """Tasks that are written so far: where those of an operator or a value begin, or what stands for one.

    Arrays beside the pool of the derivation have a word for each of its own.
    """

    forward_base: Array  # O
    transfer_base: Array  # V + buffers
    collective_base: Array  # V + buffers
    backward_task: Array  # beside the pool: of a task
    gradient_base: Array  # beside the pool: of an assembly
    gradient_collective: Array  # beside the pool: of a collective
    counts: Array  # 0 tasks, 1 dependencies


class UpdateTimes(NamedTuple):
    """What the update of each device's weights takes: the device, and its host to issue it; origins of the former."""

    run_ns_D: Array
    origin_D: Array
    launch_ns_D: Array


class GradientsBySource(NamedTuple):
    """Which gradients each backward task of one operator waits for, by source task (G gradients)."""

    first_T: Array  # T + 1, into the others
    value_G: Array
    assembly_G: Array
    message_G: Array  # which of those that the assembly's gradient goes back in, `STAYS` or `SUMMED`


class Buckets(NamedTuple):
    """Gradient buckets, in the order of their all-reduces, with linked lists of weights."""

    resource_set: Array
    size_bytes: Array
    after: Array
    first_entry: Array
    last_entry: Array
    entry_weight: Array
    entry_next: Array
    filling: Array  # a resource set: its bucket being filled, or -1
    order: Array
    sharing: Array  # what the holders of its cells share
    gather: Array  # the resource set of the gather of their shares, or -1
    counts: Array  # 0 buckets, 1 entries


class GatherArrays(NamedTuple):
    """Gathers of weights that are kept in shares: those of the forward in its order, then those of the backward.

    Pairs are of the forward and of the backward.
    """

    resource_set: Array
    size_bytes: Array
    operator: Array  # before which it must be there
    task: Array  # its number; where there is no task graph, when it ends
    first_2O: Array  # an operator: its first gather, and one beyond its last
    last_2O: Array
    weight_2W: Array  # a weight: the operator before which it is gathered, or -1
    stage_O: Array  # an operator: its stage, each of which gathers for itself; 0 of a step in one batch
    latest_D: Array  # a device: the last task that it computes so far, or -1
    blocked_D: Array  # a device: what its backward waits for before it goes on, or -1; or when that ends
    reduced_D: Array  # a device: the last sum of gradients that it shares, or -1; or when that ends
    counts: Array  # 0 gathers of the forward, 1 all gathers


class Emission(NamedTuple):
    """All that kernels read and write while they emit the task graph of a strategy."""

    graph: GraphArrays
    fragments: Fragments
    arena: Array
    links: ExchangeLinks
    groups: Groups
    derivation: Derivation
    scratch: Scratch
    resource_sets: ResourceSets
    buckets: Buckets
    gathers: GatherArrays
    tasks: Tasks


class Timeline(NamedTuple):
    """When each task runs, and the task that it had to wait for (-1: none)."""

    start_ns: Array
    end_ns: Array
    cause: Array


class Resources(NamedTuple):
    """Devices and links while tasks are served."""

    free_ns_R: Array  # when each is free
    last_R: Array  # the task that it served last, or -1
    debt_ns_D: Array  # by how much communications slow the next computation
    contention_ppm_D: Array


class Events(NamedTuple):
    """What the event-driven order keeps of every task, and the heap of those that are ready."""

    waiting: Array  # predecessors that have not ended
    ready_ns: Array
    cause: Array
    ptr: Array  # T + 1, into successor
    successor: Array
    heap_ns: Array
    heap_task: Array
    left_ns_R: Array  # what the tasks still to be served run on each resource


class Positions(NamedTuple):
    """Where in a step, and in the forward of the step after it, the work of operators stands: ascending numbers."""

    forward_O: Array
    backward_O: Array
    next_O: Array  # the forward of the next step
    next_V: Array  # V + buffers: the first forward of the next step that reads it
    last: int  # beyond all of them


class Queues(NamedTuple):
    """Communications that are ready and wait for links: a heap for each link, and who may start in this round."""

    priority_T: Array
    ptr: Array  # R + 1, into priority and task, the heaps
    priority: Array
    task: Array
    size_R: Array
    used_R: Array  # in which round the link was last given to a task
    tried_T: Array  # in which round the task was last tried
    tried: Array  # those of this round
    ended: Array  # communications that end in this round
    end_ns: Array  # the heap of those that run
    end_task: Array


class Prefix(NamedTuple):
    """The chosen part of a strategy (`search.bounds.partial_bound`). `edge_ptr`, `edge`: the edges to each operator."""

    forward_OP: Array
    backward_OP: Array
    inner_OPP: Array
    device_OT: Array
    replicas_O: Array
    head_OP: Array
    outer_OPP: Array
    edge_ptr: Array
    edge: Array
    producer_E: Array
    goes_back_E: Array
    known_E: Array
    there_EPP: Array
    back_EPP: Array


class Step(NamedTuple):
    """All of a strategy that the incremental simulation reads, and what it writes of its weights."""

    graph: GraphArrays
    fragments: Fragments
    arena: Array
    links: ExchangeLinks
    resource_sets: ResourceSets
    groups: Groups
    buckets: Buckets
    gathers: GatherArrays


class Workload(NamedTuple):
    """The work that a strategy gives to resources, and which operators can be folded, beside its derivation."""

    derivation: Derivation
    load_ns_R: Array  # of all tasks but sums of buckets, gathers of weights and updates
    # An operator, of its forward and of its backward: how long every task takes, where each device has one and these
    # take the same time, else -1; and what it exchanges (`LOCAL`, `ONE_COLLECTIVE`, `MIXED`).
    uniform_ns_2O: Array
    exchange_2O: Array


class Machines(NamedTuple):
    """What is known of devices beside their links, and of training."""

    contention_ppm_D: Array
    capacity_bytes_D: Array
    update_s_D: Array  # seconds in which an element is updated
    update_launch_ns_D: Array  # in which the host issues an update
    bucket_bytes: int
    state_tensors: int  # of the optimizer, a weight


class Machine(NamedTuple):
    """The resources while they are simulated."""

    free_ns_R: Array
    debt_ns_D: Array
    host_ns_D: Array  # when the host of a device has issued all tasks served so far
    left_ns_R: Array  # what they still have to do
    contention_ppm_D: Array
    contended: bool  # whether any device is slowed by communication
    has_hosts: bool  # whether hosts may take time to issue tasks
    folds: bool  # whether what all devices do alike is served together
    bound_ns: int
    # What is not yet in the arrays above, see the constants that name its words.
    deferred: Array


class StepTimes(NamedTuple):
    """Times of one simulation. Arrays beside the pool of the derivation have a word for each of its own.

    What is the same for all tasks of an operator, or for all assemblies of a value, is one number; what is beside the
    pool counts as well.
    """

    # Beside the pool: when a forward task ends, and when all that comes to an assembly is there (of values of which
    # something comes).
    forward_ns: Array
    # Beside the pool: when a task's gradients are there, then when its backward ends; when an assembly's gradient is.
    backward_ns: Array
    sync_end_D: Array  # when the last all-reduce that a device takes part in ends
    member_D: Array
    gradients_ns_O: Array  # when the gradients that come to all tasks are there
    gradient_ns_V: Array  # when the gradients that all tasks make are there
    end_ns_O: Array  # when the backward of all tasks ends, -1 where each has its own end
    is_awaited_O: Array  # whether a bucket waits for an operator's backward
    close_B: Array  # a position: the operator whose backward ends after all others that the bucket waits for, or -1


class ProposalArrays(NamedTuple):
    """All that the evaluation of a proposal reads and writes."""

    old_fragments: Fragments
    step: Step
    old: Workload
    new: Workload
    machines: Machines
    times: StepTimes


class Sources(NamedTuple):
    """The tasks that make a value: where they are, the region that each makes, and replicas a part."""

    device: Array
    region: Array
    replicas: int


class Readers(NamedTuple):
    """The tasks that read a value, reading by reading: for each its device, its region; and elements by region."""

    pointers: Array  # a reading: its first task; one more
    device: Array
    region: Array
    region_elements: Array


class Overlaps(NamedTuple):
    """What regions have in common with groups of replicas: of each (pointers) the groups, ascending, and elements."""

    pointers: Array
    group: Array
    elements: Array


class Routes(NamedTuple):
    """The links between all pairs of devices, and scratch for the steps of a collective."""

    route_ptr: Array  # D * D + 1, into route_link: source * D + destination
    route_link: Array
    latency_s: Array  # D * D
    bandwidth: Array  # a link: bytes per second
    flows: Array  # a link: messages of the step at hand; zeros between steps
    is_used: Array  # a link: whether the collective holds it
    source_D: Array  # sender and receiver of each hop of a step
    destination_D: Array
