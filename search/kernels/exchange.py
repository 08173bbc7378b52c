"""The unit of a value: pieces from devices that make it to devices that read it, and the collectives among them."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner, inner_with_arrays
from search.kernels.records import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    ASSEMBLY_STRIDE,
    BROADCAST,
    COLLECTIVE_STRIDE,
    FEWEST_DEVICES,
    PIECE_STRIDE,
    REDUCE,
    REDUCE_SCATTER,
    VALUE_COLLECTIVES,
    VALUE_HEADER,
    Array,
)


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
