"""All compiled kernels: memo units, task graph, and the three orders of simulation, with and without a task graph.

Callers have validated. All in one file: a cached kernel does not notice that another file's kernel changed. Integers
only, but for prices: those are double expressions without fastmath, and are rounded once.

Memo units live in one int64 arena, addressed by offset. Layouts (word offsets from the unit's start):

    operator unit   0 tasks, 1 replicas, then a task: device, forward ns, backward ns, bytes kept for the
                    backward, origin, bytes that are there only from when its group is made again to its backward
    value unit      0 assemblies, 1 pieces, 2 readers, 3 source tasks, 4 remote pieces, 5 readings,
                    6 where source tasks start, 7 collectives, 8 remote pieces that no collective serves, then
                    an assembly: device, bytes copied, first piece, first reader, collective or -1 (one more
                    assembly, as a sentinel);
                    a piece: source task, hold, ns, bytes, rank among remote ones (those that no collective serves
                    first) or -1, assembly, hold and ns back;
                    a reader: reading, task;  a reading: its first reader;  a (reading, task): its assembly;
                    a source task: its first piece (one more);  the pieces by source task;
                    a collective: kind, root or -1, bytes, bytes that its price is for, first served assembly, first
                    source task, hold and ns, hold and ns back (one more);  the served assemblies;  the source tasks
    static unit     0 holders, 1 cells, 2 what holders share, then a holder: device, elements kept, elements updated;
                    then a cell: hold of its sum, bytes, hold that gathers its shares or -1

Shape letters: T tasks, E dependencies, D devices, R resources, O operators, V values, W weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import njit

Array = np.ndarray[Any, np.dtype[Any]]

FORWARD, BACKWARD, TRANSFER, GRADIENT_TRANSFER, BUFFER_TRANSFER, SYNCHRONIZE, UPDATE = range(7)
COLLECTIVE, GRADIENT_COLLECTIVE, BUFFER_COLLECTIVE = range(7, 10)
FORWARD_GATHER, BACKWARD_GATHER, UPDATE_GATHER = range(10, 13)
RECOMPUTE = 13
# Codes of `graph.strategy.Sharding`, in its order.
SHARED_UPDATE, SHARED_WEIGHT = 1, 2
# Codes of `graph.collectives.CollectiveKind`.
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, REDUCE = range(6)
FEWEST_DEVICES = 3
OPERATOR_HEADER, OPERATOR_STRIDE = 2, 6
VALUE_HEADER, ASSEMBLY_STRIDE, PIECE_STRIDE, COLLECTIVE_STRIDE = 9, 5, 8, 10
# The word of a value unit that counts its collectives.
VALUE_COLLECTIVES = 7
STATIC_HEADER, HOLDER_STRIDE, CELL_STRIDE = 3, 3, 3
# Instead of an origin, in the unit of an operator of which no cost is known: every task has a backward, or of the
# replicas of each part some have, nobody knows which.
ACTIVE, PARTLY_ACTIVE = -1, -2
PARTS_PER_MILLION = 1_000_000
# How an operator meets other devices: not at all; so that all of its tasks wait for one collective, or none of them,
# and all of them take part in one; otherwise.
APART, TOGETHER, SCATTERED = range(3)
# The words of `Machine.owed`. To when each device is free are to be added, and from what it has left to be taken;
# whether all devices are free at the same time, and then the most that one of them has left; whether something
# was computed that paid no debt yet. Then a hold that was served alone of late, or -1: when it is free, what is to be
# taken from what its resources have left, and the most that one of these had left before.
FREE_OWED, LEFT_OWED, EVEN, MOST_LEFT, COMPUTED, HELD, HELD_END, HELD_OWED, HELD_LEFT = range(9)

Function = TypeVar("Function", bound=Callable[..., object])


# Its stubs lack some of the options below.
_njit: Any = njit


def _kept(function: Function, **options: bool) -> Function:
    """Compile a kernel that Python calls; what is compiled is kept on disk, where a folder can be written."""
    compile_it = partial(_njit, nogil=True, no_cfunc_wrapper=True, **options)
    compiled: Function
    try:
        compiled = compile_it(cache=True)(function)
    except RuntimeError:  # numba finds none
        compiled = compile_it()(function)
    return compiled


def entry(function: Function) -> Function:
    """Compile a kernel that Python calls."""
    return _kept(function)


def quick_entry(function: Function) -> Function:
    """Compile a kernel that Python calls, without counts of references to arrays.

    In a loop the counts cost ten times what the loop does. A kernel that makes an array needs them, and the compiler
    insists on them.
    """
    return _kept(function, _nrt=False)


def inner(function: Function) -> Function:
    """Compile a kernel that kernels alone call, without counts: a part of them, for which Python has no way in."""
    compiled: Function = _njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)(
        function
    )
    return compiled


def hot(function: Function) -> Function:
    """Compile as `inner` does, into every kernel that calls it: a call hands over each array as seven words."""
    compiled: Function = _njit(
        nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False, forceinline=True
    )(function)
    return compiled


def section(function: Function) -> Function:
    """Make a kernel that one kernel calls, once, a piece of its text: by itself it would be compiled twice."""
    compiled: Function = _njit(inline="always")(function)
    return compiled


def inner_with_arrays(function: Function) -> Function:
    """Compile a kernel that kernels alone call and that makes arrays."""
    compiled: Function = _njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return compiled


class GraphArrays(NamedTuple):
    """The wiring of an operator graph. A CSR pair is `x_ptr` and what it points into."""

    output_ptr: Array  # O + 1, into output_value
    output_value: Array
    slot_ptr: Array  # O + 1, into slot_value and slot_reading
    slot_value: Array  # the value read, or -1 for one in place at step start
    slot_reading: Array  # position among the value's readings
    read_ptr: Array  # O + 1, into read_value
    read_value: Array  # distinct values read, ascending
    producer: Array  # a value unit: its operator
    reading_ptr: Array  # V + buffers + 1, into reading_operator and reading_gradient
    reading_operator: Array
    reading_gradient: Array  # whether a gradient flows back through the slot
    needs_gradient: Array  # V
    order: Array  # O: operators as they are executed, those that the loss depends on first
    loss_operators: int  # how many of these there are
    buffer_count: int  # value units of renewed buffers are V and up
    weight_ptr: Array  # W + 1, into weight_user
    weight_user: Array  # operators that read the weight, ascending
    reader_ptr: Array  # W + 1, into reader
    reader: Array  # operators that read the weight or a view of it, ascending
    behind_ptr: Array  # O + 1, into behind_weight
    behind_weight: Array  # weights that the operator reads, by themselves or through views, ascending
    static_item_bytes: Array  # a static unit
    loss_value: int
    value_count: int
    weight_count: int
    static_count: int


class Units(NamedTuple):
    """Where the memo unit of each operator, value and static tensor starts in the arena."""

    operator_at: Array
    value_at: Array
    static_at: Array


class Holds(NamedTuple):
    """What a task holds while it runs: devices 0..D-1, then routes (source, destination), then device sets.

    Resources are devices 0..D-1, then links. `ends` are the devices whose compute the task slows, each as an end of
    `flows` messages at once.
    """

    resource_ptr: Array
    resource: Array
    end_ptr: Array
    end: Array
    latency_s: Array  # a hold: of two lines, see `search.links.CollectivePrice`
    s_per_byte: Array
    is_measured: Array  # whether the higher line counts, not the lower one
    origin: Array
    operation: Array  # the code of a device set's collective, else -1
    flows: Array


class Tasks(NamedTuple):
    """Flat arrays of a task graph, in program order."""

    kind: Array
    run_ns: Array
    hold: Array
    origin: Array
    subject: Array
    part: Array
    size_bytes: Array
    pred_ptr: Array
    pred: Array


class Groups(NamedTuple):
    """Groups of operators that are made again in the backward (`graph.recomputation`)."""

    of_O: Array  # an operator: the number of its group, or -1
    first_O: Array  # an operator: the first one of the group of which it is the last, or -1
    last_O: Array  # an operator: the last one of its group; itself where it is in none
    ended_O: Array  # an operator: how many groups are all before it


class Scratch(NamedTuple):
    """What the layout knows about operators' tasks and values' assemblies, flat."""

    task_base: Array  # O + 1
    assembly_base: Array  # V + 1
    active: Array  # a compute task: whether it has a backward
    last_reader: Array  # an assembly: the operator after whose backward its gradient is complete, or -1
    operator_active: Array
    forward_base: Array
    backward_task: Array
    transfer_base: Array
    gradient_base: Array
    collective_base: Array  # V + buffers + 1
    collective_after: Array  # a collective: the operator after whose backward it goes back as one, or -1
    collective_task: Array
    gradient_collective: Array
    elements_D: Array
    memory_D: Array
    # A group: bytes that are there once it is made again, and those that what lies between its end and the next one's
    # keeps.
    again_2GD: Array
    counts: Array  # 0 tasks, 1 dependencies


class Buckets(NamedTuple):
    """Gradient buckets, in the order of their all-reduces, with linked lists of weights."""

    hold: Array
    size_bytes: Array
    after: Array
    first_entry: Array
    last_entry: Array
    entry_weight: Array
    entry_next: Array
    filling: Array  # a hold: its bucket being filled, or -1
    order: Array
    sharing: Array  # what the holders of its cells share
    gather: Array  # the hold that gathers their shares, or -1
    counts: Array  # 0 buckets, 1 entries


class Gathers(NamedTuple):
    """Gathers of weights that are kept in shares: those of the forward in its order, then those of the backward.

    Pairs are of the forward and of the backward.
    """

    hold: Array
    size_bytes: Array
    operator: Array  # before which it must be there
    task: Array  # its number; where there is no task graph, when it ends
    first_2O: Array  # an operator: its first gather, and one beyond its last
    last_2O: Array
    weight_2W: Array  # a weight: the operator before which it is gathered, or -1
    latest_D: Array  # a device: the last task that it computes so far, or -1
    blocked_D: Array  # a device: what its backward waits for before it goes on, or -1; or when that ends
    reduced_D: Array  # a device: the last sum of gradients that it shares, or -1; or when that ends
    counts: Array  # 0 gathers of the forward, 1 all gathers


@entry
def write_exchange(
    arena: Array,
    at: int,
    source_device: Array,
    source_region: Array,
    replicas: int,
    reader_ptr: Array,
    reader_device: Array,
    reader_region: Array,
    reader_row: Array,
    row_elements: Array,
    common_ptr: Array,
    common_group: Array,
    common_elements: Array,
    node_D: Array,
    latency_s_DD: Array,
    bandwidth_DD: Array,
    item_bytes: int,
    summable: int,
) -> int:
    """Write a value unit at `at`; return its words, or minus the words needed where the arena is too short.

    The same assemblies as `graph.exchange.exchange`, which is its oracle; of collectives all but holds and ns.
    common_ptr, common_group, common_elements: of each region of readers (row), the groups of replicas of the producer
        that have something of it, ascending, and how many elements.
    """
    devices = len(node_D)
    sources = len(source_device)
    readings = len(reader_ptr) - 1
    readers = len(reader_device)
    first_on_device = np.full(devices, -1, np.int64)
    next_on_device = np.empty(readers, np.int64)
    first_reader_of = np.empty(readers, np.int64)
    assembly_of = np.empty(readers, np.int64)
    readers_of = np.zeros(readers + 1, np.int64)
    assemblies = 0
    pieces = 0
    for reader in range(readers):
        device = reader_device[reader]
        found = first_on_device[device]
        while found >= 0 and reader_region[first_reader_of[found]] != reader_region[reader]:
            found = next_on_device[found]
        if found < 0:
            found = assemblies
            next_on_device[found] = first_on_device[device]
            first_on_device[device] = found
            first_reader_of[found] = reader
            assemblies += 1
            pieces += common_ptr[reader_row[reader] + 1] - common_ptr[reader_row[reader]]
        assembly_of[reader] = found
        readers_of[found] += 1
    assembly_at = at + VALUE_HEADER
    piece_at = assembly_at + ASSEMBLY_STRIDE * (assemblies + 1)
    reader_at = piece_at + PIECE_STRIDE * pieces
    reading_at = reader_at + 2 * readers
    assigned_at = reading_at + readings
    source_at = assigned_at + readers
    collective_at = source_at + sources + 1 + pieces
    end = collective_at + COLLECTIVE_STRIDE * (assemblies + 1) + assemblies + pieces
    if end > len(arena):
        return at - end
    arena[at] = assemblies
    arena[at + 1] = pieces
    arena[at + 2] = readers
    arena[at + 3] = sources
    arena[at + 5] = readings
    arena[at + 6] = source_at - at
    by_source = np.zeros(sources + 1, np.int64)
    piece = 0
    rank = 0
    reader_start = 0
    for assembly in range(assemblies):
        reader = first_reader_of[assembly]
        device = reader_device[reader]
        row = reader_row[reader]
        where = assembly_at + ASSEMBLY_STRIDE * assembly
        arena[where] = device
        arena[where + 2] = piece
        arena[where + 3] = reader_start
        arena[where + 4] = -1
        reader_start += readers_of[assembly]
        first_piece = piece
        direct = False
        for common in range(common_ptr[row], common_ptr[row + 1]):
            group = common_group[common]
            task = choose_replica(source_device, group * replicas, replicas, device, node_D)
            source = source_device[task]
            size_bytes = common_elements[common] * item_bytes
            target = piece_at + PIECE_STRIDE * piece
            arena[target] = task
            arena[target + 3] = size_bytes
            arena[target + 5] = assembly
            if source == device:
                arena[target + 1] = -1
                arena[target + 2] = 0
                arena[target + 4] = -1
                arena[target + 6] = -1
                arena[target + 7] = 0
                direct = source_region[task] == reader_region[reader]
            else:
                there = source * devices + device
                back = device * devices + source
                arena[target + 1] = devices + there
                arena[target + 2] = transfer_ns(latency_s_DD[there], bandwidth_DD[there], size_bytes)
                arena[target + 4] = rank
                arena[target + 6] = devices + back
                arena[target + 7] = transfer_ns(latency_s_DD[back], bandwidth_DD[back], size_bytes)
                rank += 1
            by_source[task + 1] += 1
            piece += 1
        direct = direct and piece == first_piece + 1
        arena[where + 1] = 0 if direct else row_elements[row] * item_bytes
    sentinel = assembly_at + ASSEMBLY_STRIDE * assemblies
    arena[sentinel] = -1
    arena[sentinel + 1] = 0
    arena[sentinel + 2] = piece
    arena[sentinel + 3] = readers
    arena[sentinel + 4] = -1
    arena[at + 4] = rank
    arena[at + 7] = 0
    arena[at + 8] = rank
    filled = np.zeros(assemblies, np.int64)
    for reading in range(readings):
        arena[reading_at + reading] = reader_ptr[reading]
        for reader in range(reader_ptr[reading], reader_ptr[reading + 1]):
            assembly = assembly_of[reader]
            arena[assigned_at + reader] = assembly
            place = arena[assembly_at + ASSEMBLY_STRIDE * assembly + 3] + filled[assembly]
            filled[assembly] += 1
            arena[reader_at + 2 * place] = reading
            arena[reader_at + 2 * place + 1] = reader - reader_ptr[reading]
    for task in range(sources):
        by_source[task + 1] += by_source[task]
    for task in range(sources + 1):
        arena[source_at + task] = by_source[task]
    for piece in range(pieces):
        task = arena[piece_at + PIECE_STRIDE * piece]
        arena[source_at + sources + 1 + by_source[task]] = piece
        by_source[task] += 1
    if rank < FEWEST_DEVICES - 1:
        return collective_at - at
    region = reader_region[first_reader_of[:assemblies]]
    return write_collectives(arena, at, collective_at, region, source_device, devices, summable) - at


@inner
def find(leader: Array, node: int) -> int:
    """Return what stands for the connected nodes of `node`."""
    while leader[node] != node:
        leader[node] = leader[leader[node]]
        node = leader[node]
    return node


@inner_with_arrays
def write_collectives(
    arena: Array,
    at: int,
    collective_at: int,
    region: Array,
    source_device: Array,
    devices: int,
    summable: int,
) -> int:
    """Write the collectives of a value unit; return its end.

    The same as `graph.collectives.recognize`, which is its oracle. region: the number of each assembly's.
    """
    assemblies = arena[at]
    assembly_at = at + VALUE_HEADER
    piece_at = assembly_at + ASSEMBLY_STRIDE * (assemblies + 1)
    reader_at = piece_at + PIECE_STRIDE * arena[at + 1]
    leader = np.arange(arena[at + 5] * devices)
    node_of = np.full(assemblies, -1, np.int64)
    for assembly in range(assemblies):
        where = assembly_at + ASSEMBLY_STRIDE * assembly
        base = arena[reader_at + 2 * arena[where + 3]] * devices
        first, last = arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]
        remote = False
        for piece in range(first, last):
            remote = remote or arena[piece_at + PIECE_STRIDE * piece + 4] >= 0
        if remote:
            node_of[assembly] = base + arena[where]
            for piece in range(first, last):
                there = find(leader, base + source_device[arena[piece_at + PIECE_STRIDE * piece]])
                leader[there] = find(leader, node_of[assembly])
    component_of = np.full(len(leader), -1, np.int64)
    components = 0
    ptr = np.zeros(assemblies + 1, np.int64)
    for assembly in range(assemblies):
        if node_of[assembly] >= 0:
            node = find(leader, node_of[assembly])
            if component_of[node] < 0:
                component_of[node] = components
                components += 1
            node_of[assembly] = component_of[node]
            ptr[node_of[assembly] + 1] += 1
    for component in range(components):
        ptr[component + 1] += ptr[component]
    members = np.empty(ptr[components], np.int64)
    filled = ptr.copy()
    for assembly in range(assemblies):
        component = node_of[assembly]
        if component >= 0:
            members[filled[component]] = assembly
            filled[component] += 1
    found = served = 0
    for component in range(components):
        group = members[ptr[component] : ptr[component + 1]]
        kind = kind_of(arena, at, group, region, source_device, devices, summable)
        if kind >= 0:
            for assembly in group:
                arena[assembly_at + ASSEMBLY_STRIDE * assembly + 4] = found
            arena[collective_at + COLLECTIVE_STRIDE * found] = kind
            found += 1
            served += len(group)
    if found == 0:
        return collective_at
    arena[at + 7] = found
    member_at = collective_at + COLLECTIVE_STRIDE * (found + 1)
    task_at = member_at + served
    member = task = 0
    last_in = np.full(len(source_device), -1, np.int64)
    for collective in range(found):
        where = collective_at + COLLECTIVE_STRIDE * collective
        arena[where + 4] = member
        arena[where + 5] = task
        for assembly in range(assemblies):
            mine = assembly_at + ASSEMBLY_STRIDE * assembly
            if arena[mine + 4] != collective:
                continue
            arena[member_at + member] = assembly
            member += 1
            for piece in range(arena[mine + 2], arena[mine + 2 + ASSEMBLY_STRIDE]):
                source = arena[piece_at + PIECE_STRIDE * piece]
                if last_in[source] != collective:
                    last_in[source] = collective
                    arena[task_at + task] = source
                    task += 1
        measure_collective(arena, at, where, member_at, member, source_device)
    arena[collective_at + COLLECTIVE_STRIDE * found + 4] = member
    arena[collective_at + COLLECTIVE_STRIDE * found + 5] = task
    rank = 0
    for covered in range(2):
        for piece in range(arena[at + 1]):
            word = piece_at + PIECE_STRIDE * piece
            in_collective = arena[assembly_at + ASSEMBLY_STRIDE * arena[word + 5] + 4] >= 0
            if arena[word + 4] >= 0 and in_collective == (covered == 1):
                arena[word + 4] = rank
                rank += 1
        if covered == 0:
            arena[at + 8] = rank
    return task_at + task


@inner_with_arrays
def are_distinct(numbers: Array, places: Array) -> bool:
    """Return whether the numbers at some places differ; sorting takes two seconds to compile."""
    slots = 2 * len(places)
    seen = np.full(slots, -1, np.int64)
    for place in places:
        slot = numbers[place] % slots
        while seen[slot] >= 0 and seen[slot] != numbers[place]:
            slot = (slot + 1) % slots
        if seen[slot] >= 0:
            return False
        seen[slot] = numbers[place]
    return True


@inner_with_arrays
def kind_of(
    arena: Array,
    at: int,
    group: Array,
    region: Array,
    source_device: Array,
    devices: int,
    summable: int,
) -> int:
    """Return which collective serves exactly the connected assemblies of `group`, or -1."""
    assembly_at = at + VALUE_HEADER
    piece_at = assembly_at + ASSEMBLY_STRIDE * (arena[at] + 1)
    is_reader = np.zeros(devices, np.bool_)
    is_source = np.zeros(devices, np.bool_)
    task_on = np.full(devices, -1, np.int64)
    seen_by = np.full(devices, -1, np.int64)
    leading = assembly_at + ASSEMBLY_STRIDE * group[0]
    count = arena[leading + 2 + ASSEMBLY_STRIDE] - arena[leading + 2]
    for piece in range(arena[leading + 2], arena[leading + 2 + ASSEMBLY_STRIDE]):
        task = arena[piece_at + PIECE_STRIDE * piece]
        task_on[source_device[task]] = task
    sums = summable != 0
    same_tasks = same_region = full = even = level = True
    for place in range(len(group)):
        where = assembly_at + ASSEMBLY_STRIDE * group[place]
        if is_reader[arena[where]]:
            return -1
        is_reader[arena[where]] = True
        first, last = arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]
        same_tasks = same_tasks and last - first == count
        full = full and last - first == len(group)
        same_region = same_region and region[group[place]] == region[group[0]]
        level = level and arena[where + 1] == arena[leading + 1]
        for piece in range(first, last):
            word = piece_at + PIECE_STRIDE * piece
            device = source_device[arena[word]]
            if seen_by[device] == place:
                return -1
            seen_by[device] = place
            is_source[device] = True
            same_tasks = same_tasks and task_on[device] == arena[word]
            sums = sums and arena[word + 3] == arena[where + 1]
            even = even and arena[word + 3] == arena[piece_at + PIECE_STRIDE * first + 3]
    sources = 0
    together = 0
    for device in range(devices):
        sources += is_source[device]
        together += is_source[device] or is_reader[device]
    if together < FEWEST_DEVICES:
        return -1
    if len(group) == 1:
        return REDUCE if sums else -1
    if sources == 1:
        return BROADCAST if same_tasks and same_region else -1
    if not full or sources != len(group) or together != len(group):
        return -1
    if sums and same_tasks and same_region:
        return ALL_REDUCE
    if sums and same_tasks and level and are_distinct(region, group):
        return REDUCE_SCATTER
    return ALL_GATHER if same_tasks and same_region and even else ALL_TO_ALL


@inner
def measure_collective(
    arena: Array, at: int, where: int, member_at: int, member_end: int, source_device: Array
) -> None:
    """Write root and bytes of the collective at `where`, as `graph.collectives.moved` finds them."""
    assembly_at = at + VALUE_HEADER
    piece_at = assembly_at + ASSEMBLY_STRIDE * (arena[at] + 1)
    kind = arena[where]
    members = member_end - arena[where + 4]
    whole = largest = 0
    root = -1
    for member in range(arena[where + 4], member_end):
        mine = assembly_at + ASSEMBLY_STRIDE * arena[member_at + member]
        if kind == REDUCE_SCATTER:
            whole += arena[mine + 1]
        for piece in range(arena[mine + 2], arena[mine + 2 + ASSEMBLY_STRIDE]):
            word = piece_at + PIECE_STRIDE * piece
            size_bytes = arena[word + 3]
            if kind == ALL_TO_ALL:
                if arena[word + 4] >= 0:
                    whole += size_bytes
                    largest = max(largest, size_bytes)
            elif kind == ALL_GATHER:
                if member == arena[where + 4]:
                    whole += size_bytes
            elif kind != REDUCE_SCATTER:
                whole = size_bytes
            if kind == BROADCAST:
                root = source_device[arena[word]]
        if kind == REDUCE:
            root = arena[mine]
    arena[where + 1] = root
    arena[where + 2] = whole
    arena[where + 3] = largest * members if kind == ALL_TO_ALL else whole


@inner
def choose_replica(device_T: Array, first: int, replicas: int, device: int, node_D: Array) -> int:
    """Return the replica that `device` reads: its own, else one in its node, else that of lowest index."""
    for task in range(first, first + replicas):
        if device_T[task] == device:
            return task
    for task in range(first, first + replicas):
        if node_D[device_T[task]] == node_D[device]:
            return task
    return first


@inner
def transfer_ns(latency_s: float, bandwidth_bytes_per_s: float, size_bytes: int) -> int:
    """Return the nanoseconds of a transfer; the same expression as `Topology.transfer_time_s`, rounded."""
    return int((latency_s + size_bytes / bandwidth_bytes_per_s) * 1e9 + 0.5)


@quick_entry
def find_activity(graph: GraphArrays, units: Units, arena: Array, scratch: Scratch) -> None:
    """Find which tasks and assemblies take part in the backward, as `graph.plan` does.

    `scratch.task_base` and `scratch.assembly_base` are already there.
    """
    active = scratch.active
    active[: scratch.task_base[-1]] = 0
    scratch.operator_active[:] = 0
    for operator in range(len(units.operator_at) - 1, -1, -1):
        base = scratch.task_base[operator]
        count = scratch.task_base[operator + 1] - base
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            at = units.value_at[value]
            piece_at = at + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[at] + 1)
            reader_at = piece_at + PIECE_STRIDE * arena[at + 1]
            for assembly in range(arena[at]):
                where = at + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
                last = -1
                if graph.needs_gradient[value]:
                    for reader in range(arena[where + 3], arena[where + 3 + ASSEMBLY_STRIDE]):
                        reading = graph.reading_ptr[value] + arena[reader_at + 2 * reader]
                        user = graph.reading_operator[reading]
                        task = scratch.task_base[user] + arena[reader_at + 2 * reader + 1]
                        # Readers with a backward are in topological order: it reaches the first of them last.
                        if graph.reading_gradient[reading] and active[task]:
                            last = user
                            break
                scratch.last_reader[scratch.assembly_base[value] + assembly] = last
                if last >= 0:
                    for piece in range(arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]):
                        active[base + arena[piece_at + PIECE_STRIDE * piece]] = 1
            if value == graph.loss_value and graph.needs_gradient[value]:
                for task in range(0, count, arena[units.operator_at[operator] + 1]):
                    active[base + task] = 1
        for task in range(count):
            if active[base + task]:
                scratch.operator_active[operator] = 1
                break
    for value in range(graph.value_count):
        find_gradient_collectives(units.value_at[value], value, arena, scratch)


@quick_entry
def collectives_of(arena: Array, unit: int) -> int:
    """Return where the collectives of a value unit start."""
    return int(unit + arena[unit + 6] + arena[unit + 3] + 1 + arena[unit + 1])


@inner
def find_gradient_collectives(unit: int, value: int, arena: Array, scratch: Scratch) -> None:
    """Find after which operator's backward each collective of a value goes back as one, if it does."""
    found = arena[unit + 7]
    if found == 0:
        return
    collective_at = collectives_of(arena, unit)
    member_at = collective_at + COLLECTIVE_STRIDE * (found + 1)
    for collective in range(found):
        where = collective_at + COLLECTIVE_STRIDE * collective
        after = -2
        for member in range(arena[where + 4], arena[where + 4 + COLLECTIVE_STRIDE]):
            last = scratch.last_reader[scratch.assembly_base[value] + arena[member_at + member]]
            after = last if after == -2 or after == last else -1
            if after == -1:
                break
        scratch.collective_after[scratch.collective_base[value] + collective] = after


@quick_entry
def count_tasks(graph: GraphArrays, units: Units, arena: Array, scratch: Scratch) -> tuple[int, int, int]:
    """Set the bases of tasks, assemblies and collectives; return their totals."""
    total = 0
    for operator in range(len(units.operator_at)):
        scratch.task_base[operator] = total
        total += arena[units.operator_at[operator]]
    scratch.task_base[len(units.operator_at)] = total
    assemblies = 0
    for value in range(graph.value_count):
        scratch.assembly_base[value] = assemblies
        assemblies += arena[units.value_at[value]]
    scratch.assembly_base[graph.value_count] = assemblies
    collectives = 0
    for value in range(graph.value_count + graph.buffer_count):
        scratch.collective_base[value] = collectives
        collectives += arena[units.value_at[value] + 7]
    scratch.collective_base[graph.value_count + graph.buffer_count] = collectives
    return total, assemblies, collectives


@quick_entry
def weigh(
    graph: GraphArrays, units: Units, arena: Array, scratch: Scratch, groups: Groups, state_tensors: int
) -> None:
    """Find the elements that each device updates, and its peak memory (rule: `search.simulator.Simulation`)."""
    elements_D = scratch.elements_D
    memory_D = scratch.memory_D
    elements_D[:] = 0
    memory_D[:] = 0
    scratch.again_2GD[:] = 0
    for static in range(graph.static_count):
        at = units.static_at[static]
        trained = False
        if static < graph.weight_count:
            for user in range(graph.weight_ptr[static], graph.weight_ptr[static + 1]):
                trained = trained or scratch.operator_active[graph.weight_user[user]] != 0
        for holder in range(arena[at]):
            word = at + STATIC_HEADER + HOLDER_STRIDE * holder
            device, kept, updated = arena[word], arena[word + 1], arena[word + 2]
            if trained:
                kept += updated * (1 + state_tensors)
                elements_D[device] += updated
            memory_D[device] += kept * graph.static_item_bytes[static]
    for operator in range(len(units.operator_at)):
        at = units.operator_at[operator] + OPERATOR_HEADER
        group, ended = groups.of_O[operator], groups.ended_O[operator]
        for task in range(arena[units.operator_at[operator]]):
            if scratch.active[scratch.task_base[operator] + task]:
                word = at + OPERATOR_STRIDE * task
                memory_D[arena[word]] += arena[word + 3]
                if group >= 0:
                    scratch.again_2GD[0, group, arena[word]] += arena[word + 5]
                if ended > 0:
                    scratch.again_2GD[1, ended - 1, arena[word]] += arena[word + 3]
    for value in range(graph.value_count):
        at = units.value_at[value]
        ended = groups.ended_O[graph.producer[value]]
        for assembly in range(arena[at]):
            if scratch.last_reader[scratch.assembly_base[value] + assembly] >= 0:
                where = at + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
                memory_D[arena[where]] += arena[where + 1]
                if ended > 0:
                    scratch.again_2GD[1, ended - 1, arena[where]] += arena[where + 1]
    add_again(scratch.again_2GD, memory_D)


@inner
def add_again(again_2GD: Array, memory_D: Array) -> None:
    """Add to what is kept what is there beyond it while that group is made again at which most is.

    By then all that lies behind the group is gone.
    """
    for device in range(len(memory_D)):
        most = later = 0
        for group in range(again_2GD.shape[1] - 1, -1, -1):
            later += again_2GD[1, group, device]
            most = max(most, again_2GD[0, group, device] - later)
        memory_D[device] += most


@entry
def fill_buckets(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    operator_active: Array,
    buckets: Buckets,
    bucket_bytes: int,
) -> bool:
    """Fill the gradient buckets as `graph.plan` does; return False where the arrays are too short.

    A bucket's number is the order in which it was opened; `buckets.order` is that of the all-reduces.
    """
    operators = len(units.operator_at)
    complete_at = np.full(graph.weight_count, -1, np.int64)
    ptr = np.zeros(operators + 1, np.int64)
    for weight in range(graph.weight_count):
        for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
            operator = graph.weight_user[user]
            if operator_active[operator] and (complete_at[weight] < 0 or operator < complete_at[weight]):
                complete_at[weight] = operator
        if complete_at[weight] >= 0:
            ptr[complete_at[weight] + 1] += 1
    for operator in range(operators):
        ptr[operator + 1] += ptr[operator]
    weights = np.empty(ptr[operators], np.int64)
    place = ptr.copy()
    for weight in range(graph.weight_count):
        if complete_at[weight] >= 0:
            weights[place[complete_at[weight]]] = weight
            place[complete_at[weight]] += 1
    opened = closed = entries = 0
    buckets.filling[:] = -1
    for operator in range(operators - 1, -1, -1):
        for position in range(ptr[operator], ptr[operator + 1]):
            weight = weights[position]
            at = units.static_at[weight]
            sharing = arena[at + 2]
            cell_at = at + STATIC_HEADER + HOLDER_STRIDE * arena[at]
            for cell in range(arena[at + 1]):
                if opened + 1 > len(buckets.hold) or entries + 1 > len(buckets.entry_weight):
                    return False
                word = cell_at + CELL_STRIDE * cell
                hold = arena[word]
                # One series a kind of sharing: the holds of the sums are the same for both.
                series = arena[word + 2] if sharing == SHARED_WEIGHT else hold
                bucket = buckets.filling[series]
                if bucket < 0:
                    bucket = opened
                    opened += 1
                    buckets.filling[series] = bucket
                    buckets.hold[bucket] = hold
                    buckets.sharing[bucket] = sharing
                    buckets.gather[bucket] = arena[word + 2]
                    buckets.size_bytes[bucket] = 0
                    buckets.after[bucket] = -1
                    buckets.first_entry[bucket] = entries
                elif buckets.entry_weight[buckets.last_entry[bucket]] != weight:
                    buckets.entry_next[buckets.last_entry[bucket]] = entries
                # Another cell of a weight that the bucket has already waits for the same tasks.
                if (
                    buckets.size_bytes[bucket] == 0
                    or buckets.entry_weight[buckets.last_entry[bucket]] != weight
                ):
                    buckets.entry_weight[entries] = weight
                    buckets.entry_next[entries] = -1
                    buckets.last_entry[bucket] = entries
                    entries += 1
                buckets.size_bytes[bucket] += arena[word + 1]
                if buckets.size_bytes[bucket] >= bucket_bytes:
                    buckets.after[bucket] = operator
                    buckets.order[closed] = bucket
                    closed += 1
                    buckets.filling[series] = -1
    for bucket in range(opened):
        if buckets.after[bucket] < 0:
            buckets.after[bucket] = 0
            buckets.order[closed] = bucket
            closed += 1
    buckets.counts[0] = opened
    buckets.counts[1] = entries
    return True


@entry
def find_gathers(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    operator_active: Array,
    groups: Groups,
    gathers: Gathers,
    least_bytes: int,
) -> bool:
    """Find what is gathered before which operator, as `graph.plan` does; return False where arrays are too short."""
    gathers.first_2O[:] = 0
    gathers.last_2O[:] = 0
    gathers.weight_2W[:] = -1
    gathers.latest_D[:] = -1
    gathers.blocked_D[:] = -1
    gathers.reduced_D[:] = -1
    gathers.counts[:] = 0
    found = 0
    for weight in range(graph.weight_count):
        first, last = graph.reader_ptr[weight], graph.reader_ptr[weight + 1]
        at = units.static_at[weight]
        if first == last or arena[at + 2] != SHARED_WEIGHT or arena[at + 1] == 0:
            continue
        found += 1
        gathers.weight_2W[0, weight] = graph.reader[first]
        for place in range(first, last):
            if operator_active[graph.reader[place]]:
                gathers.weight_2W[1, weight] = groups.last_O[graph.reader[place]]
    if found == 0:
        return True
    operators = len(units.operator_at)
    count = 0
    for side in range(2):
        # The weights of each operator as linked lists, in their order.
        head = np.full(operators, -1, np.int64)
        following = np.empty(graph.weight_count, np.int64)
        for weight in range(graph.weight_count - 1, -1, -1):
            operator = gathers.weight_2W[side, weight]
            if operator >= 0:
                following[weight] = head[operator]
                head[operator] = weight
        unit, first, size_bytes = -1, count, 0
        for place in range(operators):
            operator = place if side == 0 else operators - 1 - place
            weight = head[operator]
            if weight < 0:
                continue
            if unit < 0:
                unit, first, size_bytes = operator, count, 0
            while weight >= 0:
                gathers.weight_2W[side, weight] = unit
                at = units.static_at[weight]
                cell_at = at + STATIC_HEADER + HOLDER_STRIDE * arena[at]
                for cell in range(arena[at + 1]):
                    word = cell_at + CELL_STRIDE * cell
                    number = first
                    while number < count and gathers.hold[number] != arena[word + 2]:
                        number += 1
                    if number == count:
                        if count + 1 > len(gathers.hold):
                            return False
                        gathers.hold[count] = arena[word + 2]
                        gathers.size_bytes[count] = 0
                        gathers.operator[count] = unit
                        count += 1
                    gathers.size_bytes[number] += arena[word + 1]
                    size_bytes += arena[word + 1]
                weight = following[weight]
            gathers.first_2O[side, unit] = first
            gathers.last_2O[side, unit] = count
            if size_bytes >= least_bytes:
                unit = -1
        if side == 0:
            gathers.counts[0] = count
    gathers.counts[1] = count
    return True


@inner
def next_gathers(gathers: Gathers, side: int, operator: int) -> tuple[int, int]:
    """Return which gathers begin before an operator: those that the next one needs; before the first, its own too."""
    first, last = gathers.first_2O[side, operator], gathers.last_2O[side, operator]
    if first == last:
        return 0, 0
    begin, end = (0, gathers.counts[0]) if side == 0 else (gathers.counts[0], gathers.counts[1])
    upto = last if last == end else gathers.last_2O[side, gathers.operator[last]]
    return first if first == begin else last, upto


@inner
def takes_part(holds: Holds, hold: int, device: int) -> bool:
    """Return whether a device is one of those of a device set."""
    found = False
    for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
        found = found or holds.end[place] == device
    return found


@inner
def lay_out_gathers(
    scratch: Scratch, tasks: Tasks, holds: Holds, gathers: Gathers, side: int, operator: int
) -> bool:
    """Write the gathers that begin before an operator; return False where arrays are too short.

    A gather begins when its devices have computed all that comes before.
    """
    begin, end = next_gathers(gathers, side, operator)
    for gather in range(begin, end):
        n, e = scratch.counts[0], scratch.counts[1]
        hold, size_bytes = gathers.hold[gather], gathers.size_bytes[gather]
        first, last = holds.end_ptr[hold], holds.end_ptr[hold + 1]
        if n + 1 > len(tasks.kind) or e + last - first > len(tasks.pred):
            return False
        run_ns = collective_ns(holds, hold, size_bytes)
        put(tasks, n, FORWARD_GATHER + side, run_ns, hold, holds.origin[hold], operator, gather, size_bytes)
        tasks.subject[n] = gathers.operator[gather]
        gathers.task[gather] = n
        for place in range(first, last):
            if gathers.latest_D[holds.end[place]] >= 0:
                tasks.pred[e] = gathers.latest_D[holds.end[place]]
                e += 1
        tasks.pred_ptr[n + 1] = e
        scratch.counts[0] = n + 1
        scratch.counts[1] = e
    return True


@inner
def add_gathers(
    graph: GraphArrays,
    tasks: Tasks,
    holds: Holds,
    gathers: Gathers,
    side: int,
    operator: int,
    device: int,
    e: int,
) -> int:
    """Let a task wait for the gathers of what it reads; return where dependencies end, -1 without room for them."""
    for place in range(graph.behind_ptr[operator], graph.behind_ptr[operator + 1]):
        weight = graph.behind_weight[place]
        if gathers.weight_2W[side, weight] < 0:
            continue
        gathering = gathers.weight_2W[side, weight]
        for gather in range(gathers.first_2O[side, gathering], gathers.last_2O[side, gathering]):
            if takes_part(holds, gathers.hold[gather], device):
                if e + 1 > len(tasks.pred):
                    return -1
                tasks.pred[e] = gathers.task[gather]
                e += 1
    return e


@inner
def put(
    tasks: Tasks,
    n: int,
    kind: int,
    run_ns: int,
    hold: int,
    origin: int,
    subject: int,
    part: int,
    size_bytes: int,
) -> None:
    """Write task `n`."""
    tasks.kind[n] = kind
    tasks.run_ns[n] = run_ns
    tasks.hold[n] = hold
    tasks.origin[n] = origin
    tasks.subject[n] = subject
    tasks.part[n] = part
    tasks.size_bytes[n] = size_bytes


@inner
def lay_out_collectives(
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    operator: int,
    value: int,
    kind: int,
) -> bool:
    """Write the collectives of a value that `operator` makes; return False where arrays are too short."""
    unit = units.value_at[value]
    found = arena[unit + 7]
    if found == 0:
        return True
    n, e = scratch.counts[0], scratch.counts[1]
    collective_at = collectives_of(arena, unit)
    last = collective_at + COLLECTIVE_STRIDE * found
    task_at = last + COLLECTIVE_STRIDE + arena[last + 4]
    if n + found > len(tasks.kind) or e + arena[last + 5] > len(tasks.pred):
        return False
    for collective in range(found):
        where = collective_at + COLLECTIVE_STRIDE * collective
        hold = arena[where + 6]
        size_bytes = arena[where + 2]
        put(tasks, n, kind, arena[where + 7], hold, holds.origin[hold], value, collective, size_bytes)
        scratch.collective_task[scratch.collective_base[value] + collective] = n
        for position in range(arena[where + 5], arena[where + 5 + COLLECTIVE_STRIDE]):
            tasks.pred[e] = scratch.forward_base[operator] + arena[task_at + position]
            e += 1
        n += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@inner
def lay_out_transfers(
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    operator: int,
    value: int,
    kind: int,
    link_origin: int,
) -> bool:
    """Write the transfers of a value that `operator` makes; return False where arrays are too short."""
    n, e = scratch.counts[0], scratch.counts[1]
    unit = units.value_at[value]
    scratch.transfer_base[value] = n
    transfers = arena[unit + 8]
    if n + transfers > len(tasks.kind) or e + transfers > len(tasks.pred):
        return False
    if transfers == 0:
        return True
    piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
    for piece in range(arena[unit + 1]):
        word = piece_at + PIECE_STRIDE * piece
        if arena[word + 4] < 0 or arena[word + 4] >= transfers:
            continue
        size_bytes = arena[word + 3]
        put(tasks, n, kind, arena[word + 2], arena[word + 1], link_origin, value, piece, size_bytes)
        tasks.pred[e] = scratch.forward_base[operator] + arena[word]
        n += 1
        e += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@quick_entry
def lay_out_forward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    gathers: Gathers,
    link_origin: int,
    first_place: int,
    last_place: int,
) -> bool:
    """Write the forward tasks of operators `first_place` to `last_place` of the order, and the exchanges of their
    outputs; return False where arrays are too short."""
    for order_place in range(first_place, last_place):
        operator = graph.order[order_place]
        if gathers.counts[1] and not lay_out_gathers(scratch, tasks, holds, gathers, 0, operator):
            return False
        n, e = scratch.counts[0], scratch.counts[1]
        at = units.operator_at[operator]
        count = arena[at]
        scratch.forward_base[operator] = n
        if n + count > len(tasks.kind):
            return False
        for task in range(count):
            word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
            device = arena[word]
            put(tasks, n, FORWARD, arena[word + 1], device, arena[word + 4], operator, task, 0)
            gathers.latest_D[device] = n
            if gathers.counts[1]:
                e = add_gathers(graph, tasks, holds, gathers, 0, operator, device, e)
                if e < 0:
                    return False
            for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
                value = graph.slot_value[slot]
                if value < 0:
                    continue
                unit = units.value_at[value]
                piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
                reading_at = piece_at + PIECE_STRIDE * arena[unit + 1] + 2 * arena[unit + 2]
                assigned = reading_at + arena[unit + 5] + arena[reading_at + graph.slot_reading[slot]] + task
                where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * arena[assigned]
                first, last = arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]
                if e + last - first > len(tasks.pred):
                    return False
                if arena[where + 4] >= 0:
                    tasks.pred[e] = scratch.collective_task[scratch.collective_base[value] + arena[where + 4]]
                    e += 1
                    continue
                for piece in range(first, last):
                    word = piece_at + PIECE_STRIDE * piece
                    if arena[word + 4] < 0:
                        tasks.pred[e] = scratch.forward_base[graph.producer[value]] + arena[word]
                    else:
                        tasks.pred[e] = scratch.transfer_base[value] + arena[word + 4]
                    e += 1
            n += 1
            tasks.pred_ptr[n] = e
        scratch.counts[0] = n
        scratch.counts[1] = e
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            if not lay_out_collectives(units, arena, scratch, tasks, holds, operator, value, COLLECTIVE):
                return False
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            if not lay_out_transfers(units, arena, scratch, tasks, operator, value, TRANSFER, link_origin):
                return False
    return True


@quick_entry
def lay_out_renewals(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    link_origin: int,
) -> bool:
    """Write the exchanges that renew buffers; return False where arrays are too short."""
    for value in range(graph.value_count, graph.value_count + graph.buffer_count):
        operator = graph.producer[value]
        if not lay_out_collectives(units, arena, scratch, tasks, holds, operator, value, BUFFER_COLLECTIVE):
            return False
    for value in range(graph.value_count, graph.value_count + graph.buffer_count):
        operator = graph.producer[value]
        if not lay_out_transfers(units, arena, scratch, tasks, operator, value, BUFFER_TRANSFER, link_origin):
            return False
    return True


@inner
def add_readers(
    graph: GraphArrays,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    value: int,
    unit: int,
    assembly: int,
    e: int,
) -> int:
    """Append the backward tasks that give an assembly its gradient; return the next place, or -1 if too short."""
    reader_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1) + PIECE_STRIDE * arena[unit + 1]
    where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
    first, last = arena[where + 3], arena[where + 3 + ASSEMBLY_STRIDE]
    if e + last - first > len(tasks.pred):
        return -1
    for reader in range(first, last):
        reading = graph.reading_ptr[value] + arena[reader_at + 2 * reader]
        task = scratch.task_base[graph.reading_operator[reading]] + arena[reader_at + 2 * reader + 1]
        if graph.reading_gradient[reading] and scratch.active[task]:
            tasks.pred[e] = scratch.backward_task[task]
            e += 1
    return e


@inner
def lay_out_again(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    gathers: Gathers,
    first: int,
    last: int,
) -> bool:
    """Write the forward tasks of a group that are made again; return False where arrays are too short.

    What they read is on their device. Each waits for what the device computes before it, that none comes too early
    where tasks are not served in program order.
    """
    n, e = scratch.counts[0], scratch.counts[1]
    for operator in range(first, last + 1):
        at = units.operator_at[operator]
        if n + arena[at] > len(tasks.kind):
            return False
        for task in range(arena[at]):
            flat = scratch.task_base[operator] + task
            if not scratch.active[flat]:
                continue
            word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
            device = arena[word]
            put(tasks, n, RECOMPUTE, arena[word + 1], device, arena[word + 4], operator, task, 0)
            # Where the backward of the task looks for it.
            scratch.backward_task[flat] = n
            if e + 2 > len(tasks.pred):
                return False
            tasks.pred[e] = gathers.latest_D[device]
            e += 1
            if gathers.blocked_D[device] >= 0:
                tasks.pred[e] = gathers.blocked_D[device]
                e += 1
            if gathers.counts[1]:
                e = add_gathers(graph, tasks, holds, gathers, 1, operator, device, e)
                if e < 0:
                    return False
            gathers.latest_D[device] = n
            n += 1
            tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@inner
def lay_out_operator_backward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    groups: Groups,
    gathers: Gathers,
    operator: int,
) -> bool:
    """Write the backward tasks of one operator; return False where arrays are too short."""
    n, e = scratch.counts[0], scratch.counts[1]
    at = units.operator_at[operator]
    if n + arena[at] > len(tasks.kind):
        return False
    for task in range(arena[at]):
        flat = scratch.task_base[operator] + task
        if not scratch.active[flat]:
            continue
        word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
        put(tasks, n, BACKWARD, arena[word + 2], arena[word], arena[word + 4], operator, task, 0)
        if e + 1 > len(tasks.pred):
            return False
        made_again = groups.of_O[operator] >= 0
        tasks.pred[e] = scratch.backward_task[flat] if made_again else scratch.forward_base[operator] + task
        e += 1
        scratch.backward_task[flat] = n
        device = arena[word]
        if gathers.blocked_D[device] >= 0:
            if e + 1 > len(tasks.pred):
                return False
            tasks.pred[e] = gathers.blocked_D[device]
            e += 1
        if gathers.counts[1]:
            e = add_gathers(graph, tasks, holds, gathers, 1, operator, device, e)
            if e < 0:
                return False
        gathers.latest_D[device] = n
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            unit = units.value_at[value]
            sources = arena[unit + 3]
            piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
            source_at = unit + arena[unit + 6]
            latest = -1
            for position in range(arena[source_at + task], arena[source_at + task + 1]):
                word = piece_at + PIECE_STRIDE * arena[source_at + sources + 1 + position]
                assembly = arena[word + 5]
                if scratch.last_reader[scratch.assembly_base[value] + assembly] < 0:
                    continue
                collective = arena[unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly + 4]
                if collective >= 0:
                    flat_collective = scratch.collective_base[value] + collective
                    if scratch.collective_after[flat_collective] >= 0:
                        # One task stands for all assemblies that the collective serves.
                        if latest != collective:
                            if e + 1 > len(tasks.pred):
                                return False
                            tasks.pred[e] = scratch.gradient_collective[flat_collective]
                            e += 1
                            latest = collective
                        continue
                if arena[word + 4] >= 0:
                    if e + 1 > len(tasks.pred):
                        return False
                    base = scratch.gradient_base[scratch.assembly_base[value] + assembly]
                    tasks.pred[e] = base + arena[word + 4]
                    e += 1
                else:
                    e = add_readers(graph, arena, scratch, tasks, value, unit, assembly, e)
                    if e < 0:
                        return False
        n += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@inner
def lay_out_gradient_collectives(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    operator: int,
) -> bool:
    """Write the gradient collectives that one operator's backward completes; False where too short."""
    for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
        value = graph.read_value[position]
        unit = units.value_at[value]
        found = arena[unit + 7]
        if found == 0:
            continue
        collective_at = collectives_of(arena, unit)
        member_at = collective_at + COLLECTIVE_STRIDE * (found + 1)
        for collective in range(found):
            flat = scratch.collective_base[value] + collective
            if scratch.collective_after[flat] != operator:
                continue
            n, e = scratch.counts[0], scratch.counts[1]
            if n + 1 > len(tasks.kind):
                return False
            where = collective_at + COLLECTIVE_STRIDE * collective
            hold = arena[where + 8]
            run_ns, size_bytes = arena[where + 9], arena[where + 2]
            put(
                tasks,
                n,
                GRADIENT_COLLECTIVE,
                run_ns,
                hold,
                holds.origin[hold],
                value,
                collective,
                size_bytes,
            )
            scratch.gradient_collective[flat] = n
            for member in range(arena[where + 4], arena[where + 4 + COLLECTIVE_STRIDE]):
                e = add_readers(graph, arena, scratch, tasks, value, unit, arena[member_at + member], e)
                if e < 0:
                    return False
            tasks.pred_ptr[n + 1] = e
            scratch.counts[0] = n + 1
            scratch.counts[1] = e
    return True


@inner
def lay_out_gradient_transfers(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    operator: int,
    link_origin: int,
) -> bool:
    """Write the transfers of the gradients that one operator's backward completes; False where too short."""
    n, e = scratch.counts[0], scratch.counts[1]
    for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
        value = graph.read_value[position]
        unit = units.value_at[value]
        piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
        for assembly in range(arena[unit]):
            flat = scratch.assembly_base[value] + assembly
            if scratch.last_reader[flat] != operator:
                continue
            where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
            collective = arena[where + 4]
            if collective >= 0 and scratch.collective_after[scratch.collective_base[value] + collective] >= 0:
                continue
            based = False
            for piece in range(arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]):
                word = piece_at + PIECE_STRIDE * piece
                if arena[word + 4] < 0:
                    continue
                if not based:
                    scratch.gradient_base[flat] = n - arena[word + 4]
                    based = True
                if n + 1 > len(tasks.kind):
                    return False
                size_bytes = arena[word + 3]
                run_ns, hold = arena[word + 7], arena[word + 6]
                put(tasks, n, GRADIENT_TRANSFER, run_ns, hold, link_origin, value, piece, size_bytes)
                e = add_readers(graph, arena, scratch, tasks, value, unit, assembly, e)
                if e < 0:
                    return False
                n += 1
                tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@inner
def collective_ns(holds: Holds, hold: int, size_bytes: int) -> int:
    """Return the nanoseconds of a device set's collective, as `search.links.CollectivePrice.duration_ns` does."""
    first = holds.latency_s[hold, 0] + size_bytes * holds.s_per_byte[hold, 0]
    second = holds.latency_s[hold, 1] + size_bytes * holds.s_per_byte[hold, 1]
    seconds = max(first, second) if holds.is_measured[hold] else min(first, second)
    return int(seconds * 1e9 + 0.5)


@inner
def lay_out_bucket(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    buckets: Buckets,
    gathers: Gathers,
    position: int,
    member_D: Array,
) -> bool:
    """Write the sum of one bucket; return False where arrays are too short.

    Of gradients that are shared, a device has two buckets at most in its hands: it waits for the one before.
    """
    n, e = scratch.counts[0], scratch.counts[1]
    bucket = buckets.order[position]
    hold = buckets.hold[bucket]
    size_bytes = buckets.size_bytes[bucket]
    if n + 1 > len(tasks.kind):
        return False
    run_ns = collective_ns(holds, hold, size_bytes)
    put(tasks, n, SYNCHRONIZE, run_ns, hold, holds.origin[hold], position, 0, size_bytes)
    for end in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
        device = holds.end[end]
        member_D[device] = position
        if buckets.sharing[bucket]:
            if gathers.reduced_D[device] >= 0:
                if e + 1 > len(tasks.pred):
                    return False
                tasks.pred[e] = gathers.reduced_D[device]
                e += 1
            gathers.blocked_D[device] = gathers.reduced_D[device]
            gathers.reduced_D[device] = n
    entry = buckets.first_entry[bucket]
    while entry >= 0:
        weight = buckets.entry_weight[entry]
        for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
            operator = graph.weight_user[user]
            at = units.operator_at[operator]
            if e + arena[at] > len(tasks.pred):
                return False
            for task in range(arena[at]):
                flat = scratch.task_base[operator] + task
                device = arena[at + OPERATOR_HEADER + OPERATOR_STRIDE * task]
                if scratch.active[flat] and member_D[device] == position:
                    tasks.pred[e] = scratch.backward_task[flat]
                    e += 1
        entry = buckets.entry_next[entry]
    tasks.pred_ptr[n + 1] = e
    scratch.counts[0] = n + 1
    scratch.counts[1] = e
    return True


@entry
def lay_out_backward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    buckets: Buckets,
    groups: Groups,
    gathers: Gathers,
    link_origin: int,
) -> bool:
    """Write backward tasks, what is made again before them, gradient transfers and all-reduces.

    Returns False where arrays are too short.
    """
    member_D = np.full(len(scratch.memory_D), -1, np.int64)
    position = 0
    for operator in range(len(units.operator_at) - 1, -1, -1):
        if gathers.counts[1] and not lay_out_gathers(scratch, tasks, holds, gathers, 1, operator):
            return False
        first = groups.first_O[operator]
        if first >= 0 and not lay_out_again(
            graph, units, arena, scratch, tasks, holds, gathers, first, operator
        ):
            return False
        if not lay_out_operator_backward(
            graph, units, arena, scratch, tasks, holds, groups, gathers, operator
        ):
            return False
        if not lay_out_gradient_collectives(graph, units, arena, scratch, tasks, holds, operator):
            return False
        if not lay_out_gradient_transfers(graph, units, arena, scratch, tasks, operator, link_origin):
            return False
        while position < buckets.counts[0] and buckets.after[buckets.order[position]] == operator:
            if not lay_out_bucket(
                graph, units, arena, scratch, tasks, holds, buckets, gathers, position, member_D
            ):
                return False
            position += 1
    return True


@entry
def lay_out_updates(
    tasks: Tasks, scratch: Scratch, holds: Holds, buckets: Buckets, update_ns_D: Array, update_origin_D: Array
) -> bool:
    """Write one update a device that updates weights, and the gathers of shares that are then new.

    Returns False where arrays are too short.
    """
    devices = len(update_ns_D)
    waits_D, place_D = np.zeros(devices, np.int64), np.full(devices, -1, np.int64)
    return write_updates(
        tasks, scratch, holds, update_ns_D, update_origin_D, waits_D, place_D
    ) and write_update_gathers(tasks, scratch, holds, buckets, place_D)


@inner
def write_update_gathers(
    tasks: Tasks, scratch: Scratch, holds: Holds, buckets: Buckets, task_D: Array
) -> bool:
    """Write the gathers of updated shares, in the order of their buckets; `task_D` is overwritten."""
    n, e = scratch.counts[0], scratch.counts[1]
    task_D[:] = -1
    task = n - 1
    while task >= 0 and tasks.kind[task] == UPDATE:
        task_D[tasks.hold[task]] = task
        task -= 1
    for position in range(buckets.counts[0]):
        bucket = buckets.order[position]
        if buckets.sharing[bucket] != SHARED_UPDATE:
            continue
        hold, size_bytes = buckets.gather[bucket], buckets.size_bytes[bucket]
        first, last = holds.end_ptr[hold], holds.end_ptr[hold + 1]
        if n + 1 > len(tasks.kind) or e + last - first > len(tasks.pred):
            return False
        run_ns = collective_ns(holds, hold, size_bytes)
        put(tasks, n, UPDATE_GATHER, run_ns, hold, holds.origin[hold], position, 0, size_bytes)
        for place in range(first, last):
            if task_D[holds.end[place]] >= 0:
                tasks.pred[e] = task_D[holds.end[place]]
                e += 1
        n += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@inner
def write_updates(
    tasks: Tasks,
    scratch: Scratch,
    holds: Holds,
    update_ns_D: Array,
    update_origin_D: Array,
    waits_D: Array,
    place_D: Array,
) -> bool:
    """Write the updates as `lay_out_updates`; `waits_D` is 0 and `place_D` -1 everywhere."""
    devices = len(update_ns_D)
    n, e = scratch.counts[0], scratch.counts[1]
    for task in range(n):
        if tasks.kind[task] == BACKWARD:
            waits_D[tasks.hold[task]] += 1
        elif tasks.kind[task] == SYNCHRONIZE:
            for end in range(holds.end_ptr[tasks.hold[task]], holds.end_ptr[tasks.hold[task] + 1]):
                waits_D[holds.end[end]] += 1
    last = n
    for device in range(devices):
        if scratch.elements_D[device] == 0:
            continue
        if last + 1 > len(tasks.kind) or e + waits_D[device] > len(tasks.pred):
            return False
        put(tasks, last, UPDATE, update_ns_D[device], device, update_origin_D[device], device, 0, 0)
        place_D[device] = e
        e += waits_D[device]
        last += 1
        tasks.pred_ptr[last] = e
    for task in range(n):
        if tasks.kind[task] == BACKWARD:
            device = tasks.hold[task]
            if place_D[device] >= 0:
                tasks.pred[place_D[device]] = task
                place_D[device] += 1
        elif tasks.kind[task] == SYNCHRONIZE:
            for end in range(holds.end_ptr[tasks.hold[task]], holds.end_ptr[tasks.hold[task] + 1]):
                device = holds.end[end]
                if place_D[device] >= 0:
                    tasks.pred[place_D[device]] = task
                    place_D[device] += 1
    scratch.counts[0] = last
    scratch.counts[1] = e
    return True


class Timeline(NamedTuple):
    """When each task runs, and the task that it had to wait for (-1: none)."""

    start_ns: Array
    end_ns: Array
    cause: Array


@hot
def slowed_ns(contention_ppm: int, run_ns: int) -> int:
    """Return by how much a communication slows the compute of a device where it ends, halves up.

    Whole millions of nanoseconds and the rest apart: the product of a step of months fits into no word.
    """
    millions, rest = run_ns // PARTS_PER_MILLION, run_ns % PARTS_PER_MILLION
    return contention_ppm * millions + (contention_ppm * rest + PARTS_PER_MILLION // 2) // PARTS_PER_MILLION


@inner
def serve(
    task: int,
    ready_ns: int,
    cause: int,
    hold: int,
    run_ns: int,
    resource_ptr: Array,
    resource_of: Array,
    end_ptr: Array,
    end_of: Array,
    flows: int,
    contention_ppm_D: Array,
    free_ns_R: Array,
    last_R: Array,
    debt_ns_D: Array,
    start_ns_T: Array,
    end_ns_T: Array,
    cause_T: Array,
) -> int:
    """Run one task as early as what it holds allows; return its end."""
    begin_ns = ready_ns
    for place in range(resource_ptr[hold], resource_ptr[hold + 1]):
        resource = resource_of[place]
        if free_ns_R[resource] > begin_ns:
            begin_ns = free_ns_R[resource]
            cause = last_R[resource]
    if hold < len(debt_ns_D):
        extra_ns = debt_ns_D[hold] - (begin_ns - free_ns_R[hold])
        if extra_ns > 0:
            run_ns += extra_ns
        debt_ns_D[hold] = 0
    else:
        for place in range(end_ptr[hold], end_ptr[hold + 1]):
            device = end_of[place]
            debt_ns_D[device] += slowed_ns(contention_ppm_D[device] * flows, run_ns)
    end_ns = begin_ns + run_ns
    for place in range(resource_ptr[hold], resource_ptr[hold + 1]):
        resource = resource_of[place]
        free_ns_R[resource] = end_ns
        last_R[resource] = task
    start_ns_T[task] = begin_ns
    end_ns_T[task] = end_ns
    cause_T[task] = cause
    return end_ns


@entry
def run_program_order(
    task_count: int,
    tasks: Tasks,
    holds: Holds,
    contention_ppm_D: Array,
    resource_count: int,
    timeline: Timeline,
) -> int:
    """Serve the tasks in program order; return the makespan in nanoseconds."""
    free_ns_R = np.zeros(resource_count, np.int64)
    last_R = np.full(resource_count, -1, np.int64)
    debt_ns_D = np.zeros(len(contention_ppm_D), np.int64)
    return serve_in_program_order(
        task_count, tasks, holds, contention_ppm_D, timeline, free_ns_R, last_R, debt_ns_D
    )


@inner
def serve_in_program_order(
    task_count: int,
    tasks: Tasks,
    holds: Holds,
    contention_ppm_D: Array,
    timeline: Timeline,
    free_ns_R: Array,
    last_R: Array,
    debt_ns_D: Array,
) -> int:
    """Serve the tasks in program order; return the makespan. Resources are free from the start, and nothing owed."""
    hold_T, run_ns_T, pred_ptr, pred_E = tasks.hold, tasks.run_ns, tasks.pred_ptr, tasks.pred
    resource_ptr, resource_of, end_ptr, end_of = holds.resource_ptr, holds.resource, holds.end_ptr, holds.end
    start_ns_T, end_ns_T, cause_T = timeline.start_ns, timeline.end_ns, timeline.cause
    makespan_ns = 0
    for task in range(task_count):
        ready_ns = 0
        cause = -1
        for place in range(pred_ptr[task], pred_ptr[task + 1]):
            pred = pred_E[place]
            if end_ns_T[pred] > ready_ns:
                ready_ns = end_ns_T[pred]
                cause = pred
        end_ns = serve(
            task,
            ready_ns,
            cause,
            hold_T[task],
            run_ns_T[task],
            resource_ptr,
            resource_of,
            end_ptr,
            end_of,
            holds.flows[hold_T[task]],
            contention_ppm_D,
            free_ns_R,
            last_R,
            debt_ns_D,
            start_ns_T,
            end_ns_T,
            cause_T,
        )
        makespan_ns = max(makespan_ns, end_ns)
    return makespan_ns


@inner
def push(heap_ns: Array, heap_task: Array, size: int, ready_ns: int, task: int) -> int:
    """Add (ready time, task) to a binary heap; return its new size."""
    place = size
    while place > 0:
        parent = (place - 1) // 2
        if heap_ns[parent] < ready_ns or (heap_ns[parent] == ready_ns and heap_task[parent] < task):
            break
        heap_ns[place] = heap_ns[parent]
        heap_task[place] = heap_task[parent]
        place = parent
    heap_ns[place] = ready_ns
    heap_task[place] = task
    return size + 1


@inner
def pop(heap_ns: Array, heap_task: Array, size: int) -> int:
    """Remove the first of a binary heap (the caller has read it); return its new size."""
    size -= 1
    ready_ns, task = heap_ns[size], heap_task[size]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            heap_ns[right] < heap_ns[child]
            or (heap_ns[right] == heap_ns[child] and heap_task[right] < heap_task[child])
        ):
            child = right
        if ready_ns < heap_ns[child] or (ready_ns == heap_ns[child] and task < heap_task[child]):
            break
        heap_ns[place] = heap_ns[child]
        heap_task[place] = heap_task[child]
        place = child
    heap_ns[place] = ready_ns
    heap_task[place] = task
    return size


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


@entry
def run_fifo_order(
    task_count: int,
    tasks: Tasks,
    holds: Holds,
    contention_ppm_D: Array,
    resource_count: int,
    timeline: Timeline,
    bound_ns: int,
) -> int:
    """Serve the tasks by (ready time, task); return the makespan, or -1 once it is sure to exceed the bound.

    Source: FlexFlow, Algorithm 1.
    """
    events = Events(
        np.empty(task_count, np.int64),
        np.zeros(task_count, np.int64),
        np.full(task_count, -1, np.int64),
        np.zeros(task_count + 2, np.int64),
        np.empty(tasks.pred_ptr[task_count], np.int64),
        np.empty(task_count, np.int64),
        np.empty(task_count, np.int64),
        np.zeros(resource_count, np.int64),
    )
    free_ns_R = np.zeros(resource_count, np.int64)
    last_R = np.full(resource_count, -1, np.int64)
    debt_ns_D = np.zeros(len(contention_ppm_D), np.int64)
    return serve_by_readiness(
        task_count, tasks, holds, contention_ppm_D, timeline, events, free_ns_R, last_R, debt_ns_D, bound_ns
    )


@inner
def find_successors(task_count: int, tasks: Tasks, holds: Holds, events: Events) -> int:
    """Turn the dependencies round, and find what every resource has to do; return the longest of that."""
    pred_ptr, pred_E, ptr = tasks.pred_ptr, tasks.pred, events.ptr
    # Counted two places on: filling them moves each pointer to where the next task's begins.
    for task in range(task_count):
        events.waiting[task] = pred_ptr[task + 1] - pred_ptr[task]
        for place in range(pred_ptr[task], pred_ptr[task + 1]):
            ptr[pred_E[place] + 2] += 1
    for task in range(task_count):
        ptr[task + 2] += ptr[task + 1]
    for task in range(task_count):
        for place in range(pred_ptr[task], pred_ptr[task + 1]):
            pred = pred_E[place]
            events.successor[ptr[pred + 1]] = task
            ptr[pred + 1] += 1
    longest_ns = 0
    for task in range(task_count):
        hold = tasks.hold[task]
        for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
            resource = holds.resource[place]
            events.left_ns_R[resource] += tasks.run_ns[task]
            longest_ns = max(longest_ns, events.left_ns_R[resource])
    return longest_ns


@inner
def finish(
    task: int,
    tasks: Tasks,
    holds: Holds,
    contention_ppm_D: Array,
    timeline: Timeline,
    events: Events,
    free_ns_R: Array,
    last_R: Array,
    debt_ns_D: Array,
    bound_ns: int,
    size: int,
) -> tuple[int, int]:
    """Serve a task, and put what is then ready into the heap of `size`; return its new size and the task's end.

    The end is -1 where the makespan is sure to exceed the bound.
    """
    hold, run_ns = tasks.hold[task], tasks.run_ns[task]
    end_ns = serve(
        task,
        events.ready_ns[task],
        events.cause[task],
        hold,
        run_ns,
        holds.resource_ptr,
        holds.resource,
        holds.end_ptr,
        holds.end,
        holds.flows[hold],
        contention_ppm_D,
        free_ns_R,
        last_R,
        debt_ns_D,
        timeline.start_ns,
        timeline.end_ns,
        timeline.cause,
    )
    for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
        resource = holds.resource[place]
        events.left_ns_R[resource] -= run_ns
        if end_ns > bound_ns - events.left_ns_R[resource]:
            return size, -1
    for place in range(events.ptr[task], events.ptr[task + 1]):
        following = events.successor[place]
        if end_ns > events.ready_ns[following]:
            events.ready_ns[following] = end_ns
            events.cause[following] = task
        events.waiting[following] -= 1
        if events.waiting[following] == 0:
            ready_ns = events.ready_ns[following]
            size = push(events.heap_ns, events.heap_task, size, ready_ns, following)
    return size, end_ns


@inner
def serve_by_readiness(
    task_count: int,
    tasks: Tasks,
    holds: Holds,
    contention_ppm_D: Array,
    timeline: Timeline,
    events: Events,
    free_ns_R: Array,
    last_R: Array,
    debt_ns_D: Array,
    bound_ns: int,
) -> int:
    """Serve the tasks by (ready time, task), as `run_fifo_order`."""
    heap_ns, heap_task = events.heap_ns, events.heap_task
    if find_successors(task_count, tasks, holds, events) > bound_ns:
        return -1
    size = 0
    for task in range(task_count):
        if events.waiting[task] == 0:
            size = push(heap_ns, heap_task, size, 0, task)
    makespan_ns = 0
    while size > 0:
        task = heap_task[0]
        size = pop(heap_ns, heap_task, size)
        size, end_ns = finish(
            task,
            tasks,
            holds,
            contention_ppm_D,
            timeline,
            events,
            free_ns_R,
            last_R,
            debt_ns_D,
            bound_ns,
            size,
        )
        if end_ns < 0:
            return -1
        makespan_ns = max(makespan_ns, end_ns)
    return makespan_ns


class Positions(NamedTuple):
    """Where in a step, and in the forward of the step after it, the work of operators stands: ascending numbers."""

    forward_O: Array
    backward_O: Array
    next_O: Array  # the forward of the next step
    next_V: Array  # V + buffers: the first forward of the next step that reads it
    last: int  # beyond all of them


@quick_entry
def number_by_position(
    task_count: int, tasks: Tasks, devices: int, positions: Positions, priority_T: Array, bucket_T: Array
) -> None:
    """Write the number of every communication as `search.policies.layer` defines it; computations get 0.

    bucket_T: room for a number of each bucket, of which there are fewer than tasks.
    """
    for task in range(task_count):
        kind, subject = tasks.kind[task], tasks.subject[task]
        first, last = tasks.pred_ptr[task], tasks.pred_ptr[task + 1]
        if tasks.hold[task] < devices:
            priority_T[task] = 0
            if kind == UPDATE:
                continue
            number = positions.forward_O[subject] if kind == FORWARD else positions.backward_O[subject]
            for place in range(first, last):
                pred = tasks.pred[place]
                if tasks.hold[pred] >= devices and number < priority_T[pred]:
                    priority_T[pred] = number
            continue
        number = positions.last
        if kind == SYNCHRONIZE:
            for place in range(first, last):
                pred = tasks.pred[place]
                if tasks.hold[pred] < devices:
                    number = min(number, positions.next_O[tasks.subject[pred]])
            bucket_T[subject] = number
        elif kind == UPDATE_GATHER:
            number = bucket_T[subject]
        elif kind in (BUFFER_TRANSFER, BUFFER_COLLECTIVE):
            number = positions.next_V[subject]
        priority_T[task] = number


class Queues(NamedTuple):
    """Communications that are ready and wait for links: a heap for each link, and who may start in this round."""

    ptr: Array  # R + 1, into key
    key: Array  # priority * 2^32 + task; both are below 2^31
    size_R: Array
    used_R: Array  # in which round the link was last given to a task
    tried_T: Array  # in which round the task was last tried
    tried: Array  # those of this round
    ended: Array  # communications that end in this round
    end_ns: Array  # the heap of those that run
    end_task: Array


@inner
def push_key(keys: Array, base: int, size: int, key: int) -> int:
    """Add to the binary heap that begins at `base`; return its new size."""
    place = size
    while place > 0:
        parent = (place - 1) // 2
        if keys[base + parent] < key:
            break
        keys[base + place] = keys[base + parent]
        place = parent
    keys[base + place] = key
    return size + 1


@inner
def pop_key(keys: Array, base: int, size: int) -> int:
    """Remove the first of the binary heap that begins at `base`; return its new size."""
    size -= 1
    key = keys[base + size]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and keys[base + child + 1] < keys[base + child]:
            child += 1
        if key < keys[base + child]:
            break
        keys[base + place] = keys[base + child]
        place = child
    keys[base + place] = key
    return size


@entry
def run_priority_order(
    task_count: int,
    tasks: Tasks,
    holds: Holds,
    contention_ppm_D: Array,
    resource_count: int,
    timeline: Timeline,
    priority_T: Array,
    bound_ns: int,
) -> int:
    """Serve computations as in fifo order, communications by priority (not negative, below 2^31), then task.

    Returns the makespan, or -1 once it is sure to exceed the bound.

    Source: TicTac (SysML 2019) and P3 (SysML 2019) for one channel; for several links see `search.simulator`.
    """
    events = Events(
        np.empty(task_count, np.int64),
        np.zeros(task_count, np.int64),
        np.full(task_count, -1, np.int64),
        np.zeros(task_count + 2, np.int64),
        np.empty(tasks.pred_ptr[task_count], np.int64),
        np.empty(task_count, np.int64),
        np.empty(task_count, np.int64),
        np.zeros(resource_count, np.int64),
    )
    devices = len(contention_ppm_D)
    ptr = np.zeros(resource_count + 1, np.int64)
    for task in range(task_count):
        hold = tasks.hold[task]
        if hold >= devices:
            for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
                ptr[holds.resource[place] + 1] += 1
    for resource in range(resource_count):
        ptr[resource + 1] += ptr[resource]
    queues = Queues(
        ptr,
        np.empty(ptr[resource_count], np.int64),
        np.zeros(resource_count, np.int64),
        np.zeros(resource_count, np.int64),
        np.zeros(task_count, np.int64),
        np.empty(task_count, np.int64),
        np.empty(task_count, np.int64),
        np.empty(task_count, np.int64),
        np.empty(task_count, np.int64),
    )
    free_ns_R = np.zeros(resource_count, np.int64)
    last_R = np.full(resource_count, -1, np.int64)
    debt_ns_D = np.zeros(devices, np.int64)
    return serve_by_priority(
        task_count,
        tasks,
        holds,
        contention_ppm_D,
        timeline,
        events,
        queues,
        free_ns_R,
        last_R,
        debt_ns_D,
        priority_T,
        bound_ns,
    )


@inner
def may_start(
    task: int, hold: int, holds: Holds, queues: Queues, free_ns_R: Array, now_ns: int, turn: int
) -> bool:
    """Return whether all links of a waiting communication are free, and it is the first at each of them."""
    for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
        link = holds.resource[place]
        if (
            free_ns_R[link] > now_ns
            or queues.used_R[link] == turn
            or queues.key[queues.ptr[link]] & 0xFFFFFFFF != task
        ):
            return False
    return True


@inner
def join(task: int, hold: int, holds: Holds, queues: Queues, priority: int) -> None:
    """Let a communication wait at all links that it holds."""
    for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
        link = holds.resource[place]
        key = (priority << 32) + task
        queues.size_R[link] = push_key(queues.key, queues.ptr[link], queues.size_R[link], key)


@inner
def leave(hold: int, holds: Holds, queues: Queues, turn: int) -> None:
    """Take a communication that starts, the first everywhere, from where it waits."""
    for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
        link = holds.resource[place]
        queues.size_R[link] = pop_key(queues.key, queues.ptr[link], queues.size_R[link])
        queues.used_R[link] = turn


@inner
def add_freed(tried: int, ended: int, tasks: Tasks, holds: Holds, queues: Queues, turn: int) -> int:
    """Add who waits first at links that have just become free to those to be tried; return how many these are."""
    for position in range(ended):
        hold = tasks.hold[queues.ended[position]]
        for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
            link = holds.resource[place]
            if queues.size_R[link] > 0:
                first = queues.key[queues.ptr[link]] & 0xFFFFFFFF
                if queues.tried_T[first] != turn:
                    queues.tried_T[first] = turn
                    queues.tried[tried] = first
                    tried += 1
    return tried


@inner
def serve_by_priority(
    task_count: int,
    tasks: Tasks,
    holds: Holds,
    contention_ppm_D: Array,
    timeline: Timeline,
    events: Events,
    queues: Queues,
    free_ns_R: Array,
    last_R: Array,
    debt_ns_D: Array,
    priority_T: Array,
    bound_ns: int,
) -> int:
    """Serve the tasks as `run_priority_order`, one round after the other.

    In a round ends what ends by now; what is ready by now is served (computations) or waits (communications); then
    those that may start do. Only who has just become ready, or is first at a link that has just become free, can.
    """
    hold_T, devices = tasks.hold, len(contention_ppm_D)
    heap_ns, heap_task = events.heap_ns, events.heap_task
    if find_successors(task_count, tasks, holds, events) > bound_ns:
        return -1
    size = running = turn = makespan_ns = 0
    for task in range(task_count):
        if events.waiting[task] == 0:
            size = push(heap_ns, heap_task, size, 0, task)
    while size > 0 or running > 0:
        now_ns = heap_ns[0] if size > 0 else queues.end_ns[0]
        if running > 0:
            now_ns = min(now_ns, queues.end_ns[0])
        turn += 1
        tried = ended = 0
        while running > 0 and queues.end_ns[0] <= now_ns:
            queues.ended[ended] = queues.end_task[0]
            ended += 1
            running = pop(queues.end_ns, queues.end_task, running)
        while size > 0 and heap_ns[0] <= now_ns:
            task = heap_task[0]
            size = pop(heap_ns, heap_task, size)
            if hold_T[task] >= devices:
                join(task, hold_T[task], holds, queues, priority_T[task])
                queues.tried_T[task] = turn
                queues.tried[tried] = task
                tried += 1
                continue
            size, end_ns = finish(
                task,
                tasks,
                holds,
                contention_ppm_D,
                timeline,
                events,
                free_ns_R,
                last_R,
                debt_ns_D,
                bound_ns,
                size,
            )
            if end_ns < 0:
                return -1
            makespan_ns = max(makespan_ns, end_ns)
        tried = add_freed(tried, ended, tasks, holds, queues, turn)
        for position in range(tried):
            task = queues.tried[position]
            if not may_start(task, hold_T[task], holds, queues, free_ns_R, now_ns, turn):
                continue
            leave(hold_T[task], holds, queues, turn)
            size, end_ns = finish(
                task,
                tasks,
                holds,
                contention_ppm_D,
                timeline,
                events,
                free_ns_R,
                last_R,
                debt_ns_D,
                bound_ns,
                size,
            )
            if end_ns < 0:
                return -1
            makespan_ns = max(makespan_ns, end_ns)
            running = push(queues.end_ns, queues.end_task, running, end_ns, task)
    return makespan_ns


@entry
def exchange_ns(
    arena: Array,
    at: int,
    resource_ptr: Array,
    resource: Array,
    devices: int,
    link_ns: Array,
    back: int,
) -> int:
    """Return what a value unit's exchange takes by itself: the busiest link's time, forward or back."""
    link_ns[:] = 0
    first = at + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[at] + 1)
    for piece in range(arena[at + 1]):
        word = first + PIECE_STRIDE * piece
        if 0 <= arena[word + 4] < arena[at + 8]:
            hold = arena[word + 6] if back else arena[word + 1]
            run_ns = arena[word + 7] if back else arena[word + 2]
            for place in range(resource_ptr[hold], resource_ptr[hold + 1]):
                link_ns[resource[place] - devices] += run_ns
    collective_at = at + arena[at + 6] + arena[at + 3] + 1 + arena[at + 1]
    for collective in range(arena[at + VALUE_COLLECTIVES]):
        word = collective_at + COLLECTIVE_STRIDE * collective
        hold = arena[word + 8] if back else arena[word + 6]
        run_ns = arena[word + 9] if back else arena[word + 7]
        for place in range(resource_ptr[hold], resource_ptr[hold + 1]):
            link_ns[resource[place] - devices] += run_ns
    longest_ns = 0
    for run_ns in link_ns:
        longest_ns = max(longest_ns, run_ns)
    return longest_ns


@entry
def exchange_by_part(
    arena: Array, at: int, source_replicas: int, reader_replicas: int, sure: int, there: Array, back: Array
) -> None:
    """Write how long pieces travel from part to part of a value unit with one reading.

    The least over a part's replicas. Unless `sure`, a piece that travels counts as nothing: with the value's other
    readers it may be in a collective that is cheaper than this one.
    """
    assembly_at = at + VALUE_HEADER
    piece_at = assembly_at + ASSEMBLY_STRIDE * (arena[at] + 1)
    assigned_at = piece_at + PIECE_STRIDE * arena[at + 1] + 2 * arena[at + 2] + 1
    collective_at = at + arena[at + 6] + arena[at + 3] + 1 + arena[at + 1]
    for task in range(arena[at + 2]):
        where = assembly_at + ASSEMBLY_STRIDE * arena[assigned_at + task]
        reader = task // reader_replicas
        for piece in range(arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]):
            word = piece_at + PIECE_STRIDE * piece
            source = arena[word] // source_replicas
            there_ns = back_ns = 0
            if arena[word + 4] >= 0 and sure:
                if arena[where + 4] >= 0:
                    collective = collective_at + COLLECTIVE_STRIDE * arena[where + 4]
                    there_ns, back_ns = arena[collective + 7], arena[collective + 9]
                else:
                    there_ns, back_ns = arena[word + 2], arena[word + 7]
            if there[source, reader] < 0 or there_ns < there[source, reader]:
                there[source, reader] = there_ns
            if back[reader, source] < 0 or back_ns < back[reader, source]:
                back[reader, source] = back_ns


class Prefix(NamedTuple):
    """The chosen part of a strategy, see `search.partial`. `edge_ptr`, `edge`: the edges to each operator."""

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


@entry
def prefix_bound(prefix: Prefix, operators: Array, after_OD: Array) -> int:
    """Return the longest path through the chosen operators (ascending), as `search.paths` defines it.

    What comes from operators that are not chosen counts as nothing. after_OD: what follows the backward of an
    operator's task on a device.
    """
    never = -(1 << 52)
    parts = prefix.forward_OP.shape[1]
    longest = 0
    between = np.empty((parts, parts), np.int64)
    for operator in operators:
        head, outer = prefix.head_OP[operator], prefix.outer_OPP[operator]
        for part in range(parts):
            head[part] = never if prefix.forward_OP[operator, part] < 0 else 0
        for place in range(prefix.edge_ptr[operator], prefix.edge_ptr[operator + 1]):
            edge = prefix.edge[place]
            if not prefix.known_E[edge]:
                continue
            producer = prefix.producer_E[edge]
            for source in range(parts):
                before = prefix.head_OP[producer, source] + prefix.forward_OP[producer, source]
                if before < 0:
                    continue
                for part in range(parts):
                    if head[part] >= 0:
                        head[part] = max(head[part], before + prefix.there_EPP[edge, source, part])
        replicas = prefix.replicas_O[operator]
        for back in range(parts):
            tail = never
            if prefix.backward_OP[operator, back] >= 0:
                for task in range(back * replicas, (back + 1) * replicas):
                    after = after_OD[operator, prefix.device_OT[operator, task]]
                    tail = after if tail < 0 else min(tail, after)
            for part in range(parts):
                outer[part, back] = max(head[part] + tail, never)
        for place in range(prefix.edge_ptr[operator], prefix.edge_ptr[operator + 1]):
            edge = prefix.edge[place]
            if not (prefix.known_E[edge] and prefix.goes_back_E[edge]):
                continue
            producer = prefix.producer_E[edge]
            between[:] = never
            for part in range(parts):
                for source in range(parts):
                    there = prefix.there_EPP[edge, source, part] + prefix.forward_OP[producer, source]
                    if there < 0:
                        continue
                    for home in range(parts):
                        around = there + prefix.outer_OPP[producer, source, home]
                        between[part, home] = max(between[part, home], around)
            for part in range(parts):
                for home in range(parts):
                    if between[part, home] < 0:
                        continue
                    for back in range(parts):
                        around = (
                            between[part, home]
                            + prefix.backward_OP[producer, home]
                            + prefix.back_EPP[edge, back, home]
                        )
                        outer[part, back] = max(outer[part, back], around)
        for part in range(parts):
            for back in range(parts):
                longest = max(longest, prefix.inner_OPP[operator, part, back] + outer[part, back])
    return longest


class Versions(NamedTuple):
    """What is known of one strategy, an operator or a value at a time: offsets into a pool of words.

    Strategies that differ in a few operators share the rest.
    """

    active_at: Array  # O: of each task, whether it has a backward
    last_at: (
        Array  # V + buffers: an assembly's last reader as in `Scratch`, then what comes after each collective
    )
    ready_at: (
        Array  # V + buffers: when all that comes to an assembly is there (of values of which something comes)
    )
    ends_at: Array  # O: when each forward task ends (of operators that renew a buffer)
    operator_active: Array  # O
    elements_D: Array
    memory_D: Array  # but for what is made again
    again_2GD: Array  # as in `Scratch`
    load_ns_R: Array  # of all tasks but all-reduces of buckets and updates
    # An operator, of its forward and of its backward: how long every task takes, where each device has one and these
    # are alike, else -1; and how it meets other devices (`APART`, `TOGETHER`, `SCATTERED`).
    alike_ns_2O: Array
    meets_2O: Array


class Checkpoints(NamedTuple):
    """The state of all resources before every so many operators' forward, for two strategies.

    A row: when each resource is free, what each device owes, what each resource has done so far, and the latest end.
    """

    row: Array  # checkpoint, side, word
    side: Array  # a checkpoint: which of its two rows is the current strategy's
    stride: int


class Machines(NamedTuple):
    """What is known of devices beside their links."""

    contention_ppm_D: Array
    capacity_bytes_D: Array
    update_s_D: Array  # seconds in which an element is updated


class Machine(NamedTuple):
    """The resources while they are simulated."""

    free_ns_R: Array
    debt_ns_D: Array
    left_ns_R: Array  # what they still have to do
    total_ns_R: Array  # what they have to do in all
    contention_ppm_D: Array
    contended: bool  # whether any device is slowed by communication
    # What is not yet in the arrays above, see the constants that name its words.
    owed: Array


class Walk(NamedTuple):
    """Room for one simulation.

    What is the same for all tasks of an operator, or for all assemblies of a value, is one number; what is in the pool
    counts beside it.
    """

    sync_end_D: Array  # when the last all-reduce that a device takes part in ends
    member_D: Array
    task_at: Array  # O: in the pool, when a task's gradients are there, then when its backward ends; or -1
    gradient_at: Array  # V: in the pool, when an assembly's gradient is there
    gradients_ns_O: Array  # when the gradients that come to all tasks are there
    gradient_ns_V: Array  # when the gradients that all tasks make are there
    end_ns_O: Array  # when the backward of all tasks ends, -1 where each has its own end
    is_awaited_O: Array  # whether a bucket waits for an operator's backward
    close_B: Array  # a position: the operator whose backward ends after all others that the bucket waits for, or -1


@inner
def find_changed_activity(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    pool: Array,
    pool_end: int,
    versions: Versions,
    dirty: Array,
) -> int:
    """Find activity as `find_activity` does, of the operators that are dirty and those that these make so.

    dirty: 0 not, 1 what it or its outputs' readers do may have changed, 2 it has another configuration.
    Returns the pool's new end, or -1 where it is too short.
    """
    for operator in range(len(units.operator_at) - 1, -1, -1):
        if dirty[operator] == 0:
            continue
        count = arena[units.operator_at[operator]]
        words = count
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            unit = units.value_at[graph.output_value[output]]
            words += arena[unit] + arena[unit + VALUE_COLLECTIVES]
        if pool_end + words > len(pool):
            return -1
        before, base = versions.active_at[operator], pool_end
        versions.active_at[operator] = base
        pool_end += count
        for task in range(count):
            pool[base + task] = 0
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            versions.last_at[value] = pool_end
            find_last_readers(graph, units, arena, pool, versions, value, base)
            unit = units.value_at[value]
            pool_end += arena[unit] + arena[unit + VALUE_COLLECTIVES]
            if value == graph.loss_value and graph.needs_gradient[value]:
                for task in range(0, count, arena[units.operator_at[operator] + 1]):
                    pool[base + task] = 1
        known = arena[units.operator_at[operator] + OPERATOR_HEADER + 4]
        if known == ACTIVE:
            for task in range(count):
                pool[base + task] = 1
        versions.operator_active[operator] = known == PARTLY_ACTIVE
        changed = dirty[operator] == 2
        for task in range(count):
            if pool[base + task]:
                versions.operator_active[operator] = 1
            changed = changed or pool[before + task] != pool[base + task]
        if changed:
            for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
                producer = graph.producer[graph.read_value[position]]
                dirty[producer] = max(dirty[producer], 1)
    return pool_end


@inner
def find_last_readers(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    pool: Array,
    versions: Versions,
    value: int,
    active_at: int,
) -> None:
    """Write which operator's backward completes each gradient of a value, and mark the tasks that it goes to."""
    unit, last_at = units.value_at[value], versions.last_at[value]
    piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
    reader_at = piece_at + PIECE_STRIDE * arena[unit + 1]
    is_partial = False
    for assembly in range(arena[unit]):
        where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
        last = -1
        perhaps = False
        if graph.needs_gradient[value]:
            for reader in range(arena[where + 3], arena[where + 3 + ASSEMBLY_STRIDE]):
                reading = graph.reading_ptr[value] + arena[reader_at + 2 * reader]
                user = graph.reading_operator[reading]
                task = versions.active_at[user] + arena[reader_at + 2 * reader + 1]
                if graph.reading_gradient[reading]:
                    if pool[task]:
                        last = user
                        break
                    if arena[units.operator_at[user] + OPERATOR_HEADER + 4] == PARTLY_ACTIVE:
                        # Some replica sends a gradient back: whose assembly that is, and so when, is not known.
                        perhaps = is_partial = True
                        break
        pool[last_at + assembly] = last
        if last >= 0 or perhaps:
            for piece in range(arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]):
                pool[active_at + arena[piece_at + PIECE_STRIDE * piece]] = 1
    found = arena[unit + VALUE_COLLECTIVES]
    member_at = collectives_of(arena, unit) + COLLECTIVE_STRIDE * (found + 1)
    for collective in range(found):
        where = collectives_of(arena, unit) + COLLECTIVE_STRIDE * collective
        after = -2
        for member in range(arena[where + 4], arena[where + 4 + COLLECTIVE_STRIDE]):
            last = pool[last_at + arena[member_at + member]]
            after = last if after == -2 or after == last else -1
            if after == -1:
                break
        pool[last_at + arena[unit] + collective] = after
    if is_partial:
        # What goes back with what is not known is left out as well.
        for place in range(arena[unit] + found):
            pool[last_at + place] = -1


@inner
def add_load(holds: Holds, hold: int, run_ns: int, load_ns_R: Array) -> None:
    """Add a task's time to all that it holds."""
    for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
        load_ns_R[holds.resource[place]] += run_ns


@inner
def weigh_operator(
    arena: Array, at: int, pool: Array, active_at: int, group: int, ended: int, sign: int, versions: Versions
) -> None:
    """Add (sign 1) or take away (-1) the time and the activations of an operator's tasks."""
    for task in range(arena[at]):
        word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
        device, run_ns = arena[word], arena[word + 1]
        if pool[active_at + task]:
            versions.memory_D[device] += sign * arena[word + 3]
            run_ns += arena[word + 2]
            if group >= 0:
                versions.again_2GD[0, group, device] += sign * arena[word + 5]
                run_ns += arena[word + 1]
            if ended > 0:
                versions.again_2GD[1, ended - 1, device] += sign * arena[word + 3]
        versions.load_ns_R[device] += sign * run_ns


@inner
def weigh_value(
    arena: Array,
    unit: int,
    pool: Array,
    last_at: int,
    ended: int,
    sign: int,
    holds: Holds,
    versions: Versions,
) -> None:
    """Add or take away a value's transfers and collectives, and its assemblies; `last_at` -1: no gradient."""
    if last_at >= 0:
        for assembly in range(arena[unit]):
            if pool[last_at + assembly] >= 0:
                where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
                versions.memory_D[arena[where]] += sign * arena[where + 1]
                if ended > 0:
                    versions.again_2GD[1, ended - 1, arena[where]] += sign * arena[where + 1]
    if arena[unit + 4] == 0:
        return
    load_ns_R = versions.load_ns_R
    piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
    for word in range(piece_at, piece_at + PIECE_STRIDE * arena[unit + 1], PIECE_STRIDE):
        if arena[word + 4] < 0:
            continue
        if arena[word + 4] < arena[unit + 8]:
            add_load(holds, arena[word + 1], sign * arena[word + 2], load_ns_R)
        assembly = arena[word + 5]
        if last_at >= 0 and pool[last_at + assembly] >= 0:
            collective = arena[unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly + 4]
            if collective < 0 or pool[last_at + arena[unit] + collective] < 0:
                add_load(holds, arena[word + 6], sign * arena[word + 7], load_ns_R)
    for collective in range(arena[unit + VALUE_COLLECTIVES]):
        where = collectives_of(arena, unit) + COLLECTIVE_STRIDE * collective
        add_load(holds, arena[where + 6], sign * arena[where + 7], load_ns_R)
        if last_at >= 0 and pool[last_at + arena[unit] + collective] >= 0:
            add_load(holds, arena[where + 8], sign * arena[where + 9], load_ns_R)


@inner
def weigh_alike(
    arena: Array, at: int, pool: Array, active_at: int, versions: Versions, operator: int
) -> None:
    """Find how long an operator's tasks take where each device has one and all are alike."""
    devices = len(versions.memory_D)
    versions.alike_ns_2O[:, operator] = -1
    if arena[at] != devices:
        return
    for task in range(devices):
        word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
        # In any other order of devices tasks count as different.
        if arena[word] != task or arena[word + 1] != arena[at + OPERATOR_HEADER + 1]:
            return
    versions.alike_ns_2O[0, operator] = arena[at + OPERATOR_HEADER + 1]
    for task in range(devices):
        word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
        if not pool[active_at + task] or arena[word + 2] != arena[at + OPERATOR_HEADER + 2]:
            return
    versions.alike_ns_2O[1, operator] = arena[at + OPERATOR_HEADER + 2]


@inner
def meeting(arena: Array, unit: int) -> int:
    """Return how those that make and those that read a value meet."""
    if arena[unit + 4] == 0:
        return APART
    if arena[unit + VALUE_COLLECTIVES] != 1 or arena[unit + 8] != 0:
        return SCATTERED
    following = collectives_of(arena, unit) + COLLECTIVE_STRIDE
    serves_all = arena[following + 4] == arena[unit] and arena[following + 5] == arena[unit + 3]
    return TOGETHER if serves_all else SCATTERED


@inner
def meeting_back(graph: GraphArrays, arena: Array, unit: int, pool: Array, last_at: int, value: int) -> int:
    """Return how they meet where gradients go back."""
    if arena[unit + 4] == 0 or not graph.needs_gradient[value]:
        return APART
    goes_as_one = meeting(arena, unit) == TOGETHER and pool[last_at + arena[unit]] >= 0
    return TOGETHER if goes_as_one else SCATTERED


@inner
def find_meetings(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    pool: Array,
    versions: Versions,
    operator: int,
    keeps_ends: Array,
) -> None:
    """Find how an operator meets other devices."""
    there = back = APART
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value = graph.slot_value[slot]
        if value >= 0:
            unit, last_at = units.value_at[value], versions.last_at[value]
            there = max(there, meeting(arena, unit))
            back = max(back, meeting_back(graph, arena, unit, pool, last_at, value))
    for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
        value = graph.output_value[output]
        unit, last_at = units.value_at[value], versions.last_at[value]
        there = max(there, meeting(arena, unit))
        back = max(back, meeting_back(graph, arena, unit, pool, last_at, value))
    if keeps_ends[operator]:
        for value in range(graph.value_count, graph.value_count + graph.buffer_count):
            if graph.producer[value] == operator and arena[units.value_at[value] + 4] > 0:
                there = SCATTERED
    versions.meets_2O[0, operator] = there
    versions.meets_2O[1, operator] = back


@inner
def is_trained(graph: GraphArrays, static: int, operator_active: Array) -> int:
    """Return whether a static tensor is a weight that some operator's backward gives a gradient."""
    if static < graph.weight_count:
        for user in range(graph.weight_ptr[static], graph.weight_ptr[static + 1]):
            if operator_active[graph.weight_user[user]]:
                return 1
    return 0


@inner
def weigh_static(
    graph: GraphArrays,
    arena: Array,
    static: int,
    at: int,
    trained: int,
    sign: int,
    state_tensors: int,
    versions: Versions,
) -> None:
    """Add or take away the memory and the elements to update of a static tensor."""
    for holder in range(arena[at]):
        word = at + STATIC_HEADER + HOLDER_STRIDE * holder
        device, kept, updated = arena[word], arena[word + 1], arena[word + 2]
        if trained:
            kept += updated * (1 + state_tensors)
            versions.elements_D[device] += sign * updated
        versions.memory_D[device] += sign * kept * graph.static_item_bytes[static]


@inner
def weigh_changes(
    graph: GraphArrays,
    old_units: Units,
    units: Units,
    arena: Array,
    pool: Array,
    old: Versions,
    new: Versions,
    holds: Holds,
    groups: Groups,
    state_tensors: int,
    keeps_ends: Array,
    dirty: Array,
    everything: int,
) -> None:
    """Bring the sums in `new` from those of the old strategy (or from nothing) to those of the new one.

    And find anew how operators meet, where that may have changed. dirty: of operators, is overwritten.
    """
    dirty[:] = everything
    for operator in range(len(units.operator_at)):
        was, now = old_units.operator_at[operator], units.operator_at[operator]
        if everything or was != now or old.active_at[operator] != new.active_at[operator]:
            group, ended = groups.of_O[operator], groups.ended_O[operator]
            if not everything:
                weigh_operator(arena, was, pool, old.active_at[operator], group, ended, -1, new)
            weigh_operator(arena, now, pool, new.active_at[operator], group, ended, 1, new)
            weigh_alike(arena, now, pool, new.active_at[operator], new, operator)
    for value in range(len(units.value_at)):
        was, now = old_units.value_at[value], units.value_at[value]
        if everything or was != now or old.last_at[value] != new.last_at[value]:
            ended = groups.ended_O[graph.producer[value]]
            if not everything:
                weigh_value(arena, was, pool, old.last_at[value], ended, -1, holds, new)
            weigh_value(arena, now, pool, new.last_at[value], ended, 1, holds, new)
            dirty[graph.producer[value]] = 1
            for reading in range(graph.reading_ptr[value], graph.reading_ptr[value + 1]):
                dirty[graph.reading_operator[reading]] = 1
    for operator in range(len(units.operator_at)):
        if dirty[operator]:
            find_meetings(graph, units, arena, pool, new, operator, keeps_ends)
    for static in range(graph.static_count):
        was, now = old_units.static_at[static], units.static_at[static]
        trained_before = is_trained(graph, static, old.operator_active)
        trained = is_trained(graph, static, new.operator_active)
        if everything or was != now or trained != trained_before:
            if not everything:
                weigh_static(graph, arena, static, was, trained_before, -1, state_tensors, new)
            weigh_static(graph, arena, static, now, trained, 1, state_tensors, new)


@inner
def copy_versions(source: Versions, target: Versions) -> None:
    """Make `target` equal to `source`."""
    for operator in range(len(source.active_at)):
        target.active_at[operator] = source.active_at[operator]
        target.ends_at[operator] = source.ends_at[operator]
        target.operator_active[operator] = source.operator_active[operator]
        for side in range(2):
            target.alike_ns_2O[side, operator] = source.alike_ns_2O[side, operator]
            target.meets_2O[side, operator] = source.meets_2O[side, operator]
    for value in range(len(source.last_at)):
        target.last_at[value] = source.last_at[value]
        target.ready_at[value] = source.ready_at[value]
    for device in range(len(source.elements_D)):
        target.elements_D[device] = source.elements_D[device]
        target.memory_D[device] = source.memory_D[device]
        for which in range(2):
            for group in range(source.again_2GD.shape[1]):
                target.again_2GD[which, group, device] = source.again_2GD[which, group, device]
    for resource in range(len(source.load_ns_R)):
        target.load_ns_R[resource] = source.load_ns_R[resource]


@section
def prepare(
    graph: GraphArrays,
    old_units: Units,
    units: Units,
    arena: Array,
    holds: Holds,
    pool: Array,
    pool_end: int,
    old: Versions,
    new: Versions,
    buckets: Buckets,
    groups: Groups,
    gathers: Gathers,
    bucket_bytes: int,
    state_tensors: int,
    place_of: Array,
    keeps_ends: Array,
    everything: int,
) -> tuple[int, int]:
    """Make `new` that of the strategy that has `units`, all but times, from `old`; and fill its buckets.

    Returns the pool's new end (-2 where the pool is too short, -3 where the buckets are, -4 where the gathers are), and
    the first place in the order of operators whose forward, or the exchanges that follow it, are not those of the old
    strategy.
    """
    first = graph.loss_operators - 1
    dirty = np.zeros(len(units.operator_at), np.int64)
    if everything:
        first = 0
        dirty[:] = 2
        for sums in (new.memory_D, new.elements_D, new.load_ns_R):
            sums[:] = 0
        new.again_2GD[:] = 0
    else:
        copy_versions(old, new)
        for operator in range(len(units.operator_at)):
            if old_units.operator_at[operator] != units.operator_at[operator]:
                dirty[operator] = 2
                first = min(first, place_of[operator])
        for value in range(graph.value_count):
            if old_units.value_at[value] != units.value_at[value]:
                producer = graph.producer[value]
                dirty[producer] = max(dirty[producer], 1)
                first = min(first, place_of[producer])
        for value in range(graph.value_count, graph.value_count + graph.buffer_count):
            was, now = old_units.value_at[value], units.value_at[value]
            if was != now and arena[was + 4] == 0 and arena[now + 4] > 0:
                # Nobody has asked yet when the producer's tasks end.
                first = min(first, place_of[graph.producer[value]])
    pool_end = find_changed_activity(graph, units, arena, pool, pool_end, new, dirty)
    if pool_end < 0:
        return -2, 0
    weigh_changes(
        graph, old_units, units, arena, pool, old, new, holds, groups, state_tensors, keeps_ends, dirty, everything
    )  # fmt: skip
    if not fill_buckets(graph, units, arena, new.operator_active, buckets, bucket_bytes):
        return -3, 0
    if not find_gathers(graph, units, arena, new.operator_active, groups, gathers, bucket_bytes):
        return -4, 0
    if everything == 0:
        for weight in range(graph.weight_count):
            was, now = old_units.static_at[weight], units.static_at[weight]
            if arena[was + 2] == SHARED_WEIGHT or arena[now + 2] == SHARED_WEIGHT:
                # Checkpoints do not say which gathers are under way.
                first = 0
    return pool_end, first


@inner
def settle_held(holds: Holds, machine: Machine) -> None:
    """Write to its resources what the hold that was served alone of late has done."""
    owed, hold = machine.owed, machine.owed[HELD]
    for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
        machine.free_ns_R[holds.resource[place]] = owed[HELD_END]
        machine.left_ns_R[holds.resource[place]] -= owed[HELD_OWED]
    owed[HELD] = -1


@inner
def settle(machine: Machine) -> None:
    """Write to the devices what they have computed together.

    When a device is free and what it has left are the same sum as before, so that nothing new exceeds the bound, but
    for debts: these are checked with the device's next task, or at the end.
    """
    owed = machine.owed
    if owed[COMPUTED]:
        for device in range(len(machine.debt_ns_D)):
            machine.free_ns_R[device] += owed[FREE_OWED]
            machine.left_ns_R[device] -= owed[LEFT_OWED]
            if machine.contended:
                # The first task after a communication has paid it, without waiting for anything.
                machine.free_ns_R[device] += machine.debt_ns_D[device]
                machine.debt_ns_D[device] = 0
        owed[MOST_LEFT] -= owed[LEFT_OWED]
        owed[FREE_OWED] = owed[LEFT_OWED] = owed[COMPUTED] = 0


@inner
def settle_links(holds: Holds, machine: Machine) -> None:
    """Write to links and devices all that a communication by itself must find there."""
    if machine.owed[HELD] >= 0:
        settle_held(holds, machine)
    if machine.contended:
        settle(machine)


@inner
def carry_together(
    holds: Holds, machine: Machine, hold: int, ready_ns: int, run_ns: int, bound_ns: int
) -> int:
    """Serve a collective as `carry` does.

    Of several over the same devices, one after the other, the links are written once.
    """
    owed = machine.owed
    if owed[HELD] != hold:
        if owed[HELD] >= 0:
            settle_held(holds, machine)
        owed[HELD], owed[HELD_END], owed[HELD_OWED], owed[HELD_LEFT] = hold, 0, 0, 0
        for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
            resource = holds.resource[place]
            owed[HELD_END] = max(owed[HELD_END], machine.free_ns_R[resource])
            owed[HELD_LEFT] = max(owed[HELD_LEFT], machine.left_ns_R[resource])
    if machine.contended:
        settle(machine)
        for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
            device = holds.end[place]
            machine.debt_ns_D[device] += slowed_ns(
                machine.contention_ppm_D[device] * holds.flows[hold], run_ns
            )
    end_ns = max(ready_ns, owed[HELD_END]) + run_ns
    owed[HELD_END] = end_ns
    owed[HELD_OWED] += run_ns
    return int(end_ns) if end_ns <= bound_ns - (owed[HELD_LEFT] - owed[HELD_OWED]) else -1


@inner
def find_even(machine: Machine) -> None:
    """Find whether all devices are free at the same time; `settle` has run."""
    owed = machine.owed
    owed[EVEN] = 0
    if machine.contended:
        return
    most_left = 0
    for device in range(len(machine.debt_ns_D)):
        if machine.free_ns_R[device] != machine.free_ns_R[0]:
            return
        most_left = max(most_left, machine.left_ns_R[device])
    owed[EVEN], owed[MOST_LEFT] = 1, most_left


@inner
def compute_everywhere(machine: Machine, ready_ns: int, run_ns: int, bound_ns: int) -> int:
    """Serve a task on every device, all being free at the same time; return their end, or -1 as `compute` does."""
    owed = machine.owed
    free_ns = machine.free_ns_R[0] + owed[FREE_OWED]
    end_ns = max(ready_ns, free_ns) + run_ns
    owed[FREE_OWED] += end_ns - free_ns
    owed[LEFT_OWED] += run_ns
    owed[COMPUTED] = 1
    return int(end_ns) if end_ns <= bound_ns - (owed[MOST_LEFT] - owed[LEFT_OWED]) else -1


@hot
def owe(owed: Array, run_ns: int) -> None:
    """Serve a task on every device that waits for nothing and that nobody waits for: no end is asked for."""
    owed[FREE_OWED] += run_ns
    owed[LEFT_OWED] += run_ns
    owed[COMPUTED] = 1


@inner
def compute_apart(machine: Machine, arena: Array, at: int, word: int, pool: Array, active_at: int) -> None:
    """Serve the tasks of an operator that wait for nothing and that nobody waits for, before what is owed.

    Such a task makes a device free later by as much as it has less left: nothing new exceeds the bound.
    word: where a task has its time. active_at: where the pool has which tasks there are, or -1.
    """
    machine.owed[EVEN] = 0
    for task in range(arena[at]):
        if active_at < 0 or pool[active_at + task]:
            place = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
            device, task_ns = arena[place], arena[place + word]
            machine.left_ns_R[device] -= task_ns
            if machine.contended:
                task_ns += machine.debt_ns_D[device]
                machine.debt_ns_D[device] = 0
            machine.free_ns_R[device] += task_ns


@hot
def carry(holds: Holds, machine: Machine, hold: int, ready_ns: int, run_ns: int, bound_ns: int) -> int:
    """Serve a transfer or a collective; return its end, or -1 where the makespan is sure to exceed the bound.

    `settle_links` has run.
    """
    first, last = holds.resource_ptr[hold], holds.resource_ptr[hold + 1]
    begin_ns = ready_ns
    for place in range(first, last):
        begin_ns = max(begin_ns, machine.free_ns_R[holds.resource[place]])
    if machine.contended:
        for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
            device = holds.end[place]
            machine.debt_ns_D[device] += slowed_ns(
                machine.contention_ppm_D[device] * holds.flows[hold], run_ns
            )
    end_ns = begin_ns + run_ns
    longest_ns = 0
    for place in range(first, last):
        resource = holds.resource[place]
        machine.free_ns_R[resource] = end_ns
        left_ns = machine.left_ns_R[resource] - run_ns
        machine.left_ns_R[resource] = left_ns
        longest_ns = max(longest_ns, left_ns)
    return end_ns if end_ns <= bound_ns - longest_ns else -1


@hot
def compute(machine: Machine, device: int, ready_ns: int, run_ns: int, bound_ns: int) -> int:
    """Serve a task of a device; return its end, or -1 where the makespan is sure to exceed the bound."""
    begin_ns = max(ready_ns, machine.free_ns_R[device])
    left_ns = machine.left_ns_R[device] - run_ns
    machine.left_ns_R[device] = left_ns
    if machine.contended:
        extra_ns = machine.debt_ns_D[device] - (begin_ns - machine.free_ns_R[device])
        if extra_ns > 0:
            run_ns += extra_ns
        machine.debt_ns_D[device] = 0
    end_ns = begin_ns + run_ns
    machine.free_ns_R[device] = end_ns
    return end_ns if end_ns <= bound_ns - left_ns else -1


@inner
def assigned_to(arena: Array, unit: int, reading: int) -> int:
    """Return where a value unit says which assembly each task of a reading takes."""
    piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
    reading_at = piece_at + PIECE_STRIDE * arena[unit + 1] + 2 * arena[unit + 2]
    return int(reading_at + arena[unit + 5] + arena[reading_at + reading])


@inner
def walk_collectives(
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    unit: int,
    ends_at: int,
    ready_at: int,
    latest_ns: int,
    bound_ns: int,
    together_ns: int = 0,
) -> int:
    """Serve the collectives of a value whose producer's tasks end at `ends_at`; return the latest end or -1.

    ends_at: in the pool; -1 where they all end at `together_ns`.
    """
    found = arena[unit + VALUE_COLLECTIVES]
    member_at = collectives_of(arena, unit) + COLLECTIVE_STRIDE * (found + 1)
    source_at = member_at + arena[member_at - COLLECTIVE_STRIDE + 4] if found else 0
    for collective in range(found):
        where = collectives_of(arena, unit) + COLLECTIVE_STRIDE * collective
        ready_ns = together_ns
        if ends_at >= 0:
            for source in range(arena[where + 5], arena[where + 5 + COLLECTIVE_STRIDE]):
                ready_ns = max(ready_ns, pool[ends_at + arena[source_at + source]])
        end_ns = carry_together(holds, machine, arena[where + 6], ready_ns, arena[where + 7], bound_ns)
        if end_ns < 0:
            return -1
        latest_ns = max(latest_ns, end_ns)
        for member in range(arena[where + 4], arena[where + 4 + COLLECTIVE_STRIDE]):
            pool[ready_at + arena[member_at + member]] = end_ns
    return latest_ns


@inner
def walk_transfers(
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    unit: int,
    ends_at: int,
    ready_at: int,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve the transfers of a value whose producer's tasks end at `ends_at`; return the latest end or -1."""
    transfers = arena[unit + 8]
    if transfers == 0:
        return latest_ns
    if machine.owed[HELD] >= 0 or machine.contended:
        settle_links(holds, machine)
    piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
    for word in range(piece_at, piece_at + PIECE_STRIDE * arena[unit + 1], PIECE_STRIDE):
        if not 0 <= arena[word + 4] < transfers:
            continue
        ready_ns = pool[ends_at + arena[word]]
        end_ns = carry(holds, machine, arena[word + 1], ready_ns, arena[word + 2], bound_ns)
        if end_ns < 0:
            return -1
        latest_ns = max(latest_ns, end_ns)
        place = ready_at + arena[word + 5]
        pool[place] = max(pool[place], end_ns)
    return latest_ns


@inner
def walk_forward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    pool_end: int,
    versions: Versions,
    gathers: Gathers,
    keeps_ends: Array,
    checkpoints: Checkpoints,
    first_place: int,
    last_place: int,
    folds: int,
    latest_ns: int,
    bound_ns: int,
) -> tuple[int, int]:
    """Serve the forward tasks of some operators, and the exchanges of what they make.

    What a task reads on its own device is there when the device is free: only what comes from others is waited for.
    Returns the latest end, -1 beyond the bound, and the pool's new end, -1 where it is too short.
    """
    for order_place in range(first_place, last_place):
        if order_place > first_place and order_place % checkpoints.stride == 0:
            save_checkpoint(checkpoints, order_place // checkpoints.stride, holds, machine, latest_ns)
        operator = graph.order[order_place]
        if gathers.counts[1]:
            latest_ns = walk_gathers(holds, machine, gathers, 0, operator, latest_ns, bound_ns)
            if latest_ns < 0:
                return -1, pool_end
        at = units.operator_at[operator]
        alike_ns, meets = versions.alike_ns_2O[0, operator], versions.meets_2O[0, operator]
        if folds and meets == APART:
            if alike_ns >= 0:
                owe(machine.owed, alike_ns)
            else:
                compute_apart(machine, arena, at, 1, pool, -1)
            continue
        if folds and meets == TOGETHER and alike_ns >= 0 and machine.owed[EVEN]:
            latest_ns, pool_end = walk_together(
                graph, units, arena, holds, machine, pool, pool_end, versions, operator, latest_ns, bound_ns
            )
            if latest_ns < 0 or pool_end < 0:
                return latest_ns, pool_end
            continue
        if machine.owed[COMPUTED]:
            settle(machine)
        count = arena[at]
        words = 2 * count
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            words += arena[units.value_at[graph.output_value[output]]]
        if pool_end + words > len(pool):
            return latest_ns, -1
        ends_at = pool_end
        waits = find_ready(graph, units, arena, pool, versions, operator, ends_at + count)
        for task in range(count):
            word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
            ready_ns = pool[ends_at + count + task] if waits else 0
            if gathers.counts[1]:
                ready_ns = max(ready_ns, gathered_ns(graph, holds, gathers, 0, operator, arena[word]))
            end_ns = compute(machine, arena[word], ready_ns, arena[word + 1], bound_ns)
            if end_ns < 0:
                return -1, pool_end
            pool[ends_at + task] = end_ns
            latest_ns = max(latest_ns, end_ns)
        machine.owed[EVEN] = 0
        if alike_ns >= 0:
            find_even(machine)
        fill = ends_at + count
        sends = False
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            unit = units.value_at[value]
            if arena[unit + 4] > 0:
                sends = True
                versions.ready_at[value] = fill
                for assembly in range(arena[unit]):
                    pool[fill + assembly] = 0
                fill += arena[unit]
        if keeps_ends[operator]:
            versions.ends_at[operator] = ends_at
        if sends or keeps_ends[operator]:
            pool_end = fill
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            unit, ready_at = units.value_at[value], versions.ready_at[value]
            if arena[unit + VALUE_COLLECTIVES] == 0:
                continue
            latest_ns = walk_collectives(
                arena, holds, machine, pool, unit, ends_at, ready_at, latest_ns, bound_ns
            )
            if latest_ns < 0:
                return -1, pool_end
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            unit, ready_at = units.value_at[value], versions.ready_at[value]
            if arena[unit + 8] == 0:
                continue
            latest_ns = walk_transfers(
                arena, holds, machine, pool, unit, ends_at, ready_at, latest_ns, bound_ns
            )
            if latest_ns < 0:
                return -1, pool_end
    return latest_ns, pool_end


@inner
def walk_together(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    pool_end: int,
    versions: Versions,
    operator: int,
    latest_ns: int,
    bound_ns: int,
) -> tuple[int, int]:
    """Serve the forward tasks of an operator that are alike, all devices being free at the same time.

    Returns as `walk_forward` does.
    """
    ready_ns = 0
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value = graph.slot_value[slot]
        if value >= 0 and arena[units.value_at[value] + 4] > 0:
            # One collective makes all of it.
            ready_ns = max(ready_ns, pool[versions.ready_at[value]])
    end_ns = compute_everywhere(machine, ready_ns, versions.alike_ns_2O[0, operator], bound_ns)
    if end_ns < 0:
        return -1, pool_end
    for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
        value = graph.output_value[output]
        unit = units.value_at[value]
        if arena[unit + 4] > 0:
            if pool_end + arena[unit] > len(pool):
                return latest_ns, -1
            versions.ready_at[value] = pool_end
            latest_ns = walk_collectives(
                arena, holds, machine, pool, unit, -1, pool_end, latest_ns, bound_ns, end_ns
            )
            if latest_ns < 0:
                return -1, pool_end
            pool_end += arena[unit]
    return latest_ns, pool_end


@inner
def walk_gathers(
    holds: Holds, machine: Machine, gathers: Gathers, side: int, operator: int, latest_ns: int, bound_ns: int
) -> int:
    """Serve the gathers that begin before an operator; return the latest end, or -1 beyond the bound."""
    begin, end = next_gathers(gathers, side, operator)
    for gather in range(begin, end):
        hold = gathers.hold[gather]
        ready_ns = 0
        for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
            ready_ns = max(ready_ns, machine.free_ns_R[holds.end[place]])
        run_ns = collective_ns(holds, hold, gathers.size_bytes[gather])
        settle_links(holds, machine)
        end_ns = carry(holds, machine, hold, ready_ns, run_ns, bound_ns)
        if end_ns < 0:
            return -1
        gathers.task[gather] = end_ns
        latest_ns = max(latest_ns, end_ns)
    return latest_ns


@inner
def gathered_ns(
    graph: GraphArrays, holds: Holds, gathers: Gathers, side: int, operator: int, device: int
) -> int:
    """Return when the weights that an operator reads on a device are gathered."""
    ready_ns = 0
    for place in range(graph.behind_ptr[operator], graph.behind_ptr[operator + 1]):
        weight = graph.behind_weight[place]
        if gathers.weight_2W[side, weight] < 0:
            continue
        gathering = gathers.weight_2W[side, weight]
        for gather in range(gathers.first_2O[side, gathering], gathers.last_2O[side, gathering]):
            if takes_part(holds, gathers.hold[gather], device):
                ready_ns = max(ready_ns, gathers.task[gather])
    return ready_ns


@inner
def find_ready(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    pool: Array,
    versions: Versions,
    operator: int,
    ready_at: int,
) -> bool:
    """Write when all that comes to each forward task from other devices is there; return whether anything comes."""
    count = arena[units.operator_at[operator]]
    waits = False
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value = graph.slot_value[slot]
        if value < 0 or arena[units.value_at[value] + 4] == 0:
            continue
        if not waits:
            waits = True
            for task in range(count):
                pool[ready_at + task] = 0
        assigned = assigned_to(arena, units.value_at[value], graph.slot_reading[slot])
        there = versions.ready_at[value]
        for task in range(count):
            pool[ready_at + task] = max(pool[ready_at + task], pool[there + arena[assigned + task]])
    return waits


@inner
def save_checkpoint(
    checkpoints: Checkpoints, number: int, holds: Holds, machine: Machine, latest_ns: int
) -> None:
    """Write a checkpoint of the strategy that is proposed."""
    settle(machine)
    settle_links(holds, machine)
    resources, devices = len(machine.free_ns_R), len(machine.debt_ns_D)
    side = 1 - checkpoints.side[number]
    for resource in range(resources):
        checkpoints.row[number, side, resource] = machine.free_ns_R[resource]
        done_ns = machine.total_ns_R[resource] - machine.left_ns_R[resource]
        checkpoints.row[number, side, resources + devices + resource] = done_ns
    for device in range(devices):
        checkpoints.row[number, side, resources + device] = machine.debt_ns_D[device]
    checkpoints.row[number, side, 2 * resources + devices] = latest_ns


@inner
def walk_gradients(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    versions: Versions,
    walk: Walk,
    operator: int,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve the collectives, then the transfers, of the gradients that one operator's backward completes.

    Returns the latest end, or -1 beyond the bound.
    """
    for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
        value = graph.read_value[position]
        unit = units.value_at[value]
        found = arena[unit + VALUE_COLLECTIVES]
        if found == 0:
            continue
        last_at, gradient_at = versions.last_at[value], walk.gradient_at[value]
        task_at = walk.task_at[graph.producer[value]]
        member_at = collectives_of(arena, unit) + COLLECTIVE_STRIDE * (found + 1)
        source_at = member_at + arena[member_at - COLLECTIVE_STRIDE + 4]
        for collective in range(found):
            if pool[last_at + arena[unit] + collective] != operator:
                continue
            where = collectives_of(arena, unit) + COLLECTIVE_STRIDE * collective
            ready_ns = walk.gradient_ns_V[value]
            for member in range(arena[where + 4], arena[where + 4 + COLLECTIVE_STRIDE]):
                ready_ns = max(ready_ns, pool[gradient_at + arena[member_at + member]])
            end_ns = carry_together(holds, machine, arena[where + 8], ready_ns, arena[where + 9], bound_ns)
            if end_ns < 0:
                return -1
            latest_ns = max(latest_ns, end_ns)
            if meeting(arena, unit) == TOGETHER:
                producer = graph.producer[value]
                walk.gradients_ns_O[producer] = max(walk.gradients_ns_O[producer], end_ns)
                continue
            for source in range(arena[where + 5], arena[where + 5 + COLLECTIVE_STRIDE]):
                place = task_at + arena[source_at + source]
                pool[place] = max(pool[place], end_ns)
    for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
        value = graph.read_value[position]
        unit = units.value_at[value]
        if arena[unit + 4] == 0:
            continue
        last_at, gradient_at = versions.last_at[value], walk.gradient_at[value]
        task_at = walk.task_at[graph.producer[value]]
        piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
        for assembly in range(arena[unit]):
            if pool[last_at + assembly] != operator:
                continue
            where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
            collective = arena[where + 4]
            if collective >= 0 and pool[last_at + arena[unit] + collective] >= 0:
                continue
            if machine.owed[HELD] >= 0 or machine.contended:
                settle_links(holds, machine)
            ready_ns = pool[gradient_at + assembly]
            first, last = arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]
            for word in range(piece_at + PIECE_STRIDE * first, piece_at + PIECE_STRIDE * last, PIECE_STRIDE):
                if arena[word + 4] < 0:
                    continue
                end_ns = carry(holds, machine, arena[word + 6], ready_ns, arena[word + 7], bound_ns)
                if end_ns < 0:
                    return -1
                latest_ns = max(latest_ns, end_ns)
                place = task_at + arena[word]
                pool[place] = max(pool[place], end_ns)
    return latest_ns


@inner
def walk_again(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    versions: Versions,
    gathers: Gathers,
    first: int,
    last: int,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve the forward tasks of a group that are made again; return the latest end, or -1 beyond the bound."""
    for operator in range(first, last + 1):
        at, active_at = units.operator_at[operator], versions.active_at[operator]
        for task in range(arena[at]):
            if pool[active_at + task]:
                word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
                ready_ns = gathers.blocked_D[arena[word]]
                if gathers.counts[1]:
                    ready_ns = max(ready_ns, gathered_ns(graph, holds, gathers, 1, operator, arena[word]))
                end_ns = compute(machine, arena[word], ready_ns, arena[word + 1], bound_ns)
                if end_ns < 0:
                    return -1
                latest_ns = max(latest_ns, end_ns)
    return latest_ns


@inner
def walk_operator_backward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    versions: Versions,
    walk: Walk,
    gathers: Gathers,
    operator: int,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve the backward tasks of one operator; return the latest end, or -1 beyond the bound."""
    at, active_at, task_at = units.operator_at[operator], versions.active_at[operator], walk.task_at[operator]
    count = arena[at]
    together_ns = walk.gradients_ns_O[operator]
    if machine.owed[COMPUTED]:
        settle(machine)
    for task in range(count):
        if pool[active_at + task]:
            word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
            device = arena[word]
            ready_ns = max(pool[task_at + task], together_ns, gathers.blocked_D[device])
            if gathers.counts[1]:
                ready_ns = max(ready_ns, gathered_ns(graph, holds, gathers, 1, operator, device))
            end_ns = compute(machine, device, ready_ns, arena[word + 2], bound_ns)
            if end_ns < 0:
                return -1
            pool[task_at + task] = end_ns
            latest_ns = max(latest_ns, end_ns)
    machine.owed[EVEN] = 0
    if versions.alike_ns_2O[1, operator] >= 0:
        find_even(machine)
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value, reading = graph.slot_value[slot], graph.slot_reading[slot]
        if value < 0 or not graph.needs_gradient[value] or arena[units.value_at[value] + 4] == 0:
            continue
        if not graph.reading_gradient[graph.reading_ptr[value] + reading]:
            continue
        assigned = assigned_to(arena, units.value_at[value], reading)
        gradient_at = walk.gradient_at[value]
        for task in range(count):
            if pool[active_at + task]:
                place = gradient_at + arena[assigned + task]
                pool[place] = max(pool[place], pool[task_at + task])
    return latest_ns


@inner
def walk_backward_together(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    machine: Machine,
    versions: Versions,
    walk: Walk,
    operator: int,
    bound_ns: int,
) -> int:
    """Serve the backward tasks of an operator that are alike, all devices being free at the same time.

    Returns their end, or -1 beyond the bound.
    """
    run_ns = versions.alike_ns_2O[1, operator]
    end_ns = compute_everywhere(machine, walk.gradients_ns_O[operator], run_ns, bound_ns)
    walk.end_ns_O[operator] = end_ns
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value, reading = graph.slot_value[slot], graph.slot_reading[slot]
        if (
            value >= 0
            and arena[units.value_at[value] + 4] > 0
            and graph.reading_gradient[graph.reading_ptr[value] + reading]
        ):
            walk.gradient_ns_V[value] = max(walk.gradient_ns_V[value], end_ns)
    return end_ns


@inner
def bucket_ns(holds: Holds, buckets: Buckets, bucket: int) -> int:
    """Return how long a bucket's all-reduce takes."""
    return collective_ns(holds, buckets.hold[bucket], buckets.size_bytes[bucket])


@inner
def find_awaited(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    pool: Array,
    versions: Versions,
    walk: Walk,
    buckets: Buckets,
    bucket_count: int,
) -> None:
    """Find which operators' backward the buckets wait for.

    A device's tasks end one after the other: where the last operator that contributes to a bucket has a backward on
    each of its devices, that is all that the bucket waits for.
    """
    for position in range(bucket_count):
        bucket = buckets.order[position]
        last = buckets.entry_weight[buckets.last_entry[bucket]]
        close = -1
        for user in range(graph.weight_ptr[last], graph.weight_ptr[last + 1]):
            if versions.operator_active[graph.weight_user[user]]:
                close = graph.weight_user[user]
                break
        covers = versions.alike_ns_2O[1, close] >= 0
        if not covers:
            at, active_at = units.operator_at[close], versions.active_at[close]
            for task in range(arena[at]):
                if pool[active_at + task]:
                    walk.member_D[arena[at + OPERATOR_HEADER + OPERATOR_STRIDE * task]] = position
            hold = buckets.hold[bucket]
            covers = True
            for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
                covers = covers and walk.member_D[holds.end[place]] == position
        walk.close_B[position] = close if covers else -1
        if covers:
            walk.is_awaited_O[close] = 1
            continue
        entry = buckets.first_entry[bucket]
        while entry >= 0:
            weight = buckets.entry_weight[entry]
            for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
                walk.is_awaited_O[graph.weight_user[user]] = 1
            entry = buckets.entry_next[entry]
    walk.member_D[:] = -1


@inner
def ended_ns(
    units: Units,
    arena: Array,
    pool: Array,
    versions: Versions,
    walk: Walk,
    operator: int,
    position: int,
) -> int:
    """Return when an operator's backward has ended on the members of the bucket at hand."""
    if walk.end_ns_O[operator] >= 0:
        return int(walk.end_ns_O[operator])
    ready_ns = 0
    at, active_at = units.operator_at[operator], versions.active_at[operator]
    for task in range(arena[at]):
        device = arena[at + OPERATOR_HEADER + OPERATOR_STRIDE * task]
        if pool[active_at + task] and walk.member_D[device] == position:
            ready_ns = max(ready_ns, pool[walk.task_at[operator] + task])
    return ready_ns


@inner
def walk_bucket(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    versions: Versions,
    walk: Walk,
    buckets: Buckets,
    gathers: Gathers,
    position: int,
    bound_ns: int,
) -> int:
    """Serve the sum of one bucket; return its end, or -1 beyond the bound."""
    bucket = buckets.order[position]
    hold = buckets.hold[bucket]
    ready_ns = 0
    for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
        device = holds.end[place]
        walk.member_D[device] = position
        if buckets.sharing[bucket]:
            ready_ns = max(ready_ns, gathers.reduced_D[device])
    close = walk.close_B[position]
    if close >= 0:
        ready_ns = max(ready_ns, ended_ns(units, arena, pool, versions, walk, close, position))
    else:
        entry = buckets.first_entry[bucket]
        while entry >= 0:
            weight = buckets.entry_weight[entry]
            for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
                operator = graph.weight_user[user]
                ready_ns = max(ready_ns, ended_ns(units, arena, pool, versions, walk, operator, position))
            entry = buckets.entry_next[entry]
    end_ns = carry_together(holds, machine, hold, ready_ns, bucket_ns(holds, buckets, bucket), bound_ns)
    for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
        device = holds.end[place]
        walk.sync_end_D[device] = max(walk.sync_end_D[device], end_ns)
        if buckets.sharing[bucket]:
            gathers.blocked_D[device] = gathers.reduced_D[device]
            gathers.reduced_D[device] = end_ns
    return end_ns


@inner
def walk_backward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    pool_end: int,
    versions: Versions,
    walk: Walk,
    buckets: Buckets,
    groups: Groups,
    gathers: Gathers,
    bucket_count: int,
    folds: int,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve all backward tasks, gradients and buckets; return the latest end, -1 beyond the bound, -2 without room.

    A backward task waits for its own forward, and for readers on its device, by the device alone.
    """
    find_awaited(graph, units, arena, holds, pool, versions, walk, buckets, bucket_count)
    place = pool_end
    for operator in range(len(units.operator_at)):
        walk.task_at[operator] = place
        if versions.operator_active[operator] and not (
            folds and versions.meets_2O[1, operator] == APART and not walk.is_awaited_O[operator]
        ):
            place += arena[units.operator_at[operator]]
    for value in range(graph.value_count):
        walk.gradient_at[value] = place
        if graph.needs_gradient[value] and arena[units.value_at[value] + 4] > 0:
            place += arena[units.value_at[value]]
    if place > len(pool):
        return -2
    for word in range(pool_end, place):
        pool[word] = 0
    position = 0
    for operator in range(len(units.operator_at) - 1, -1, -1):
        if gathers.counts[1]:
            latest_ns = walk_gathers(holds, machine, gathers, 1, operator, latest_ns, bound_ns)
            if latest_ns < 0:
                return -1
        if groups.first_O[operator] >= 0:
            settle(machine)
            machine.owed[EVEN] = 0
            latest_ns = walk_again(
                graph,
                units,
                arena,
                holds,
                machine,
                pool,
                versions,
                gathers,
                groups.first_O[operator],
                operator,
                latest_ns,
                bound_ns,
            )
            if latest_ns < 0:
                return -1
        meets, alike_ns = versions.meets_2O[1, operator], versions.alike_ns_2O[1, operator]
        if not versions.operator_active[operator]:
            pass
        elif folds and meets == APART and not walk.is_awaited_O[operator]:
            at, active_at = units.operator_at[operator], versions.active_at[operator]
            if alike_ns >= 0:
                owe(machine.owed, alike_ns)
            else:
                compute_apart(machine, arena, at, 2, pool, active_at)
        else:
            if folds and meets <= TOGETHER and alike_ns >= 0 and machine.owed[EVEN]:
                end_ns = walk_backward_together(
                    graph, units, arena, machine, versions, walk, operator, bound_ns
                )
                latest_ns = end_ns if end_ns < 0 else latest_ns
            else:
                latest_ns = walk_operator_backward(
                    graph, units, arena, holds, machine, pool, versions, walk, gathers, operator, latest_ns,
                    bound_ns,
                )  # fmt: skip
            if latest_ns < 0:
                return -1
            if meets != APART:
                latest_ns = walk_gradients(
                    graph, units, arena, holds, machine, pool, versions, walk, operator, latest_ns, bound_ns
                )
                if latest_ns < 0:
                    return -1
        while position < bucket_count and buckets.after[buckets.order[position]] == operator:
            end_ns = walk_bucket(
                graph,
                units,
                arena,
                holds,
                machine,
                pool,
                versions,
                walk,
                buckets,
                gathers,
                position,
                bound_ns,
            )
            if end_ns < 0:
                return -1
            latest_ns = max(latest_ns, end_ns)
            position += 1
    return latest_ns


@inner
def walk_end(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    pool_end: int,
    versions: Versions,
    walk: Walk,
    buckets: Buckets,
    bucket_count: int,
    update_ns_D: Array,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve what renews buffers, the updates, and the gathers of updated shares.

    Returns the end of all, -1 beyond the bound, -2 without room.
    """
    settle(machine)
    last = graph.value_count + graph.buffer_count
    for value in range(graph.value_count, last):
        if pool_end + arena[units.value_at[value]] > len(pool):
            return -2
    # Nobody waits for a renewed buffer: what is written from `pool_end` on is not read.
    for value in range(graph.value_count, last):
        unit, ends_at = units.value_at[value], versions.ends_at[graph.producer[value]]
        if arena[unit + VALUE_COLLECTIVES] == 0:
            continue
        latest_ns = walk_collectives(
            arena, holds, machine, pool, unit, ends_at, pool_end, latest_ns, bound_ns
        )
        if latest_ns < 0:
            return -1
    for value in range(graph.value_count, last):
        unit, ends_at = units.value_at[value], versions.ends_at[graph.producer[value]]
        if arena[unit + 8] == 0:
            continue
        latest_ns = walk_transfers(arena, holds, machine, pool, unit, ends_at, pool_end, latest_ns, bound_ns)
        if latest_ns < 0:
            return -1
    for device in range(len(update_ns_D)):
        if versions.elements_D[device]:
            end_ns = compute(machine, device, walk.sync_end_D[device], update_ns_D[device], bound_ns)
            if end_ns < 0:
                return -1
            latest_ns = max(latest_ns, end_ns)
    for position in range(bucket_count):
        bucket = buckets.order[position]
        if buckets.sharing[bucket] != SHARED_UPDATE:
            continue
        hold = buckets.gather[bucket]
        ready_ns = 0
        for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
            device = holds.end[place]
            if versions.elements_D[device]:
                # The update is the last that the device computes.
                ready_ns = max(ready_ns, machine.free_ns_R[device])
        run_ns = collective_ns(holds, hold, buckets.size_bytes[bucket])
        settle_links(holds, machine)
        end_ns = carry(holds, machine, hold, ready_ns, run_ns, bound_ns)
        if end_ns < 0:
            return -1
        latest_ns = max(latest_ns, end_ns)
    # When tasks end that were not asked for: a device is free after its last one.
    for device in range(len(update_ns_D)):
        latest_ns = max(latest_ns, machine.free_ns_R[device])
    return latest_ns if latest_ns <= bound_ns else -1


@section
def walk_program_order(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    contention_ppm_D: Array,
    pool: Array,
    pool_end: int,
    versions: Versions,
    buckets: Buckets,
    groups: Groups,
    gathers: Gathers,
    bucket_count: int,
    update_s_D: Array,
    keeps_ends: Array,
    checkpoints: Checkpoints,
    number: int,
    folds: int,
    saves: int,
    bound_ns: int,
) -> tuple[int, int]:
    """Simulate in program order without a task graph, from a checkpoint on; the same makespan as of the task graph.

    `prepare` has run. A resource is never done before it is free and has done what it still has to do: where that
    exceeds the bound, so does the makespan.
    Returns the makespan, -1 beyond the bound, -2 where the pool is too short; and the pool's new end.
    """
    devices, resources = len(contention_ppm_D), len(versions.load_ns_R)
    row = checkpoints.row[number, checkpoints.side[number]]
    latest_ns = row[2 * resources + devices]
    total_ns_R = versions.load_ns_R.copy()
    # Where devices wait for gathers or for sums of others before them, every task is served by itself.
    if gathers.counts[1]:
        folds = 0
    for position in range(bucket_count):
        bucket = buckets.order[position]
        if buckets.sharing[bucket]:
            folds = 0
        add_load(holds, buckets.hold[bucket], bucket_ns(holds, buckets, bucket), total_ns_R)
        if buckets.sharing[bucket] == SHARED_UPDATE:
            hold = buckets.gather[bucket]
            add_load(holds, hold, collective_ns(holds, hold, buckets.size_bytes[bucket]), total_ns_R)
    for gather in range(gathers.counts[1]):
        hold = gathers.hold[gather]
        add_load(holds, hold, collective_ns(holds, hold, gathers.size_bytes[gather]), total_ns_R)
    gathers.blocked_D[:] = 0
    gathers.reduced_D[:] = 0
    update_ns_D = np.zeros(devices, np.int64)
    for device in range(devices):
        if versions.elements_D[device]:
            # The same expression as `search.costs.nanoseconds`.
            update_ns_D[device] = int(versions.elements_D[device] * update_s_D[device] * 1e9 + 0.5)
            total_ns_R[device] += update_ns_D[device]
    contended = False
    for device in range(devices):
        contended = contended or contention_ppm_D[device] > 0
    machine = Machine(
        row[:resources].copy(),
        row[resources : resources + devices].copy(),
        total_ns_R - row[resources + devices : 2 * resources + devices],
        total_ns_R,
        contention_ppm_D,
        contended,
        np.zeros(HELD_LEFT + 1, np.int64),
    )
    machine.owed[HELD] = -1
    find_even(machine)
    for resource in range(resources):
        if machine.free_ns_R[resource] > bound_ns - machine.left_ns_R[resource]:
            return -1, pool_end
    operators = len(units.operator_at)
    walk = Walk(
        np.zeros(devices, np.int64),
        np.full(devices, -1, np.int64),
        np.empty(operators, np.int64),
        np.empty(graph.value_count, np.int64),
        np.zeros(operators, np.int64),
        np.zeros(graph.value_count, np.int64),
        np.full(operators, -1, np.int64),
        np.zeros(operators, np.int64),
        np.empty(bucket_count, np.int64),
    )
    # A stride beyond all places: no checkpoint.
    none = Checkpoints(checkpoints.row, checkpoints.side, operators + 1)
    latest_ns, pool_end = walk_forward(
        graph, units, arena, holds, machine, pool, pool_end, versions, gathers, keeps_ends,
        checkpoints if saves else none,
        number * checkpoints.stride, graph.loss_operators, folds, latest_ns, bound_ns,
    )  # fmt: skip
    if latest_ns < 0 or pool_end < 0:
        return -1 if latest_ns < 0 else -2, pool_end
    kept_end = pool_end
    latest_ns = walk_backward(
        graph, units, arena, holds, machine, pool, pool_end, versions, walk, buckets, groups, gathers,
        bucket_count, folds, latest_ns, bound_ns,
    )  # fmt: skip
    if latest_ns < 0:
        return latest_ns, kept_end
    # What the backward wrote is overwritten.
    latest_ns, pool_end = walk_forward(
        graph, units, arena, holds, machine, pool, pool_end, versions, gathers, keeps_ends, none,
        graph.loss_operators, operators, folds, latest_ns, bound_ns,
    )  # fmt: skip
    if latest_ns < 0 or pool_end < 0:
        return -1 if latest_ns < 0 else -2, kept_end
    latest_ns = walk_end(
        graph, units, arena, holds, machine, pool, pool_end, versions, walk, buckets, bucket_count, update_ns_D,
        latest_ns, bound_ns,
    )  # fmt: skip
    return latest_ns, pool_end


@entry
def evaluate_program_order(
    graph: GraphArrays,
    old_units: Units,
    units: Units,
    arena: Array,
    holds: Holds,
    pool: Array,
    pool_end: int,
    old: Versions,
    new: Versions,
    buckets: Buckets,
    groups: Groups,
    gathers: Gathers,
    machines: Machines,
    place_of: Array,
    keeps_ends: Array,
    checkpoints: Checkpoints,
    bucket_bytes: int,
    state_tensors: int,
    everything: int,
    folds: int,
    saves: int,
    bound_ns: int,
) -> tuple[int, int, int, int]:
    """Make `new` that of the strategy that has `units` from `old`, and simulate it in program order.

    folds: what devices do alike is served together. saves: checkpoints, without which it cannot be accepted.

    Returns the makespan, -1 beyond the bound, -2 where the pool is too short, -3 where the buckets are, -4 where the
    gathers are; the pool's new end; the number of the checkpoint that it was simulated from; and the bytes beyond the
    devices' memories.
    """
    pool_end, first = prepare(
        graph, old_units, units, arena, holds, pool, pool_end, old, new, buckets, groups, gathers, bucket_bytes,
        state_tensors, place_of, keeps_ends, everything,
    )  # fmt: skip
    if pool_end < 0:
        return pool_end, 0, 0, 0
    number = first // checkpoints.stride
    makespan_ns, pool_end = walk_program_order(
        graph, units, arena, holds, machines.contention_ppm_D, pool, pool_end, new, buckets, groups, gathers,
        buckets.counts[0], machines.update_s_D, keeps_ends, checkpoints, number, folds, saves,
        bound_ns,
    )  # fmt: skip
    if makespan_ns < 0:
        return makespan_ns, pool_end, number, 0
    peak_D = new.memory_D.copy()
    add_again(new.again_2GD, peak_D)
    excess_bytes = 0
    for device in range(len(peak_D)):
        excess_bytes += max(peak_D[device] - machines.capacity_bytes_D[device], 0)
    return makespan_ns, pool_end, number, excess_bytes


@inner
def move_words(at: Array, place: int, count: int, pool: Array, target: Array, end: int) -> int:
    """Copy what is at `at[place]` to the end of another pool; return its new end."""
    for word in range(count):
        target[end + word] = pool[at[place] + word]
    at[place] = end
    return end + count


@quick_entry
def compact(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    keeps_ends: Array,
    versions: Versions,
    pool: Array,
    target: Array,
) -> int:
    """Copy all that `versions` refer to to another pool of the same length; return its end."""
    end = 0
    for operator in range(len(units.operator_at)):
        count = arena[units.operator_at[operator]]
        end = move_words(versions.active_at, operator, count, pool, target, end)
        if keeps_ends[operator] and versions.meets_2O[0, operator] == SCATTERED:
            end = move_words(versions.ends_at, operator, count, pool, target, end)
    for value in range(graph.value_count):
        unit = units.value_at[value]
        count = arena[unit]
        end = move_words(versions.last_at, value, count + arena[unit + VALUE_COLLECTIVES], pool, target, end)
        if arena[unit + 4] > 0:
            end = move_words(versions.ready_at, value, count, pool, target, end)
    return end


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


@inner
def price_step(routes: Routes, hops: int) -> tuple[float, float]:
    """Return seconds and seconds per byte of one step in which all hops send at the same time.

    The slowest hop counts; a link's bandwidth is divided by the hops that use it.
    """
    devices = len(routes.source_D)
    for hop in range(hops):
        place = routes.source_D[hop] * devices + routes.destination_D[hop]
        for at in range(routes.route_ptr[place], routes.route_ptr[place + 1]):
            routes.flows[routes.route_link[at]] += 1
    latency_s = s_per_byte = 0.0
    for hop in range(hops):
        place = routes.source_D[hop] * devices + routes.destination_D[hop]
        latency_s = max(latency_s, routes.latency_s[place])
        for at in range(routes.route_ptr[place], routes.route_ptr[place + 1]):
            link = routes.route_link[at]
            s_per_byte = max(s_per_byte, routes.flows[link] / routes.bandwidth[link])
    for hop in range(hops):
        place = routes.source_D[hop] * devices + routes.destination_D[hop]
        for at in range(routes.route_ptr[place], routes.route_ptr[place + 1]):
            routes.flows[routes.route_link[at]] = 0
    return latency_s, s_per_byte


@inner
def use_links(routes: Routes, hops: int) -> None:
    """Mark the links of a step's hops as used."""
    devices = len(routes.source_D)
    for hop in range(hops):
        place = routes.source_D[hop] * devices + routes.destination_D[hop]
        for at in range(routes.route_ptr[place], routes.route_ptr[place + 1]):
            routes.is_used[routes.route_link[at]] = True


@inner
def shift(routes: Routes, members: Array, distance: int) -> int:
    """Write the hops of a step in which every device sends to the one so far after it; return how many."""
    size = len(members)
    for k in range(size):
        routes.source_D[k] = members[k]
        routes.destination_D[k] = members[(k + distance) % size]
    return size


@inner
def price_pairwise(routes: Routes, members: Array) -> tuple[float, float]:
    """Return the price of p - 1 steps, in the k-th of which every device sends to the k-th after it."""
    size = len(members)
    latency_s = s_per_byte = 0.0
    for distance in range(1, size):
        hops = shift(routes, members, distance)
        use_links(routes, hops)
        step_latency_s, step_s_per_byte = price_step(routes, hops)
        latency_s += step_latency_s
        s_per_byte += step_s_per_byte / size
    return latency_s, s_per_byte


@inner
def price_halving(routes: Routes, members: Array) -> tuple[float, float]:
    """Return the price of recursive halving and doubling among 2^k devices."""
    size = len(members)
    latency_s = s_per_byte = 0.0
    distance, share = 1, 0.5
    while distance < size:
        for k in range(size):
            routes.source_D[k] = members[k]
            routes.destination_D[k] = members[k ^ distance]
        step_latency_s, step_s_per_byte = price_step(routes, size)
        latency_s += 2 * step_latency_s
        s_per_byte += 2 * share * step_s_per_byte
        distance, share = distance * 2, share / 2
    return latency_s, s_per_byte


@inner
def price_tree(routes: Routes, members: Array, root: int, kind: int) -> tuple[float, float, float, float]:
    """Return the prices of a binomial tree from (or, of a reduce, to) the member at place `root`.

    First of one that carries all N bytes along every hop, then of one that scatters (or gathers) them: at distance d
    a hop carries what lies behind it.
    """
    size = len(members)
    distance = 1
    while 2 * distance < size:
        distance *= 2
    latency_s = s_per_byte = part_s_per_byte = 0.0
    while distance > 0:
        hops = 0
        for place in range(0, size - distance, 2 * distance):
            here, there = members[(root + place) % size], members[(root + place + distance) % size]
            routes.source_D[hops] = there if kind == REDUCE else here
            routes.destination_D[hops] = here if kind == REDUCE else there
            hops += 1
        step_latency_s, step_s_per_byte = price_step(routes, hops)
        latency_s += step_latency_s
        s_per_byte += step_s_per_byte
        part_s_per_byte += min(distance, size - distance) / size * step_s_per_byte
        distance //= 2
    return latency_s, s_per_byte, latency_s, part_s_per_byte


@quick_entry
def price_collectives(
    routes: Routes,
    kind_K: Array,
    root_K: Array,
    member_ptr: Array,
    member: Array,
    line_K4: Array,
    used_KL: Array,
) -> None:
    """Write latency and seconds per byte of two algorithms of K collectives, and which links each holds.

    kind_K: codes. root_K: the device that is a broadcast's or reduce's root, else any. member: the devices of each, in
    ring order, and pointers. line_K4: the first algorithm's, and then the second's, see `search.prices`.
    """
    for number in range(len(kind_K)):
        kind, members, line = (
            kind_K[number],
            member[member_ptr[number] : member_ptr[number + 1]],
            line_K4[number],
        )
        size = len(members)
        routes.is_used[:] = False
        if kind == ALL_TO_ALL:
            line[0], line[1] = price_pairwise(routes, members)
            line[2], line[3] = line[0], line[1]
        else:
            hops = shift(routes, members, 1)
            use_links(routes, hops)
            latency_s, s_per_byte = price_step(routes, hops)
            ring_s, ring_s_per_byte = (size - 1) * latency_s, (size - 1) / size * s_per_byte
            if kind in (BROADCAST, REDUCE):
                root = 0
                while members[root] != root_K[number]:
                    root += 1
                line[0], line[1], line[2], line[3] = price_tree(routes, members, root, kind)
                line[2] += ring_s
                line[3] += ring_s_per_byte
            else:
                share = 1.0 if kind == ALL_REDUCE else 0.5
                line[0], line[1] = 2 * share * ring_s, 2 * share * ring_s_per_byte
                line[2] = line[3] = np.inf
                if size & (size - 1) == 0:
                    halving_s, halving_s_per_byte = price_halving(routes, members)
                    line[2], line[3] = share * halving_s, share * halving_s_per_byte
        for link in range(len(routes.is_used)):
            used_KL[number, link] = routes.is_used[link]
