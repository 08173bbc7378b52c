"""The fragment of a value: pieces from devices that make it to devices that read it, and collectives among them."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import inner, inner_with_arrays
from search.kernels.fragments import (
    ASSEMBLY_WORDS,
    COLLECTIVE_WORDS,
    LOAD_WORDS,
    READER_WORDS,
    TRANSFER_TIME_WORDS,
    VALUE_WORDS,
    assemblies_of,
    collectives_of,
    first_readers_of,
    listed_words,
    loads_of,
    piece_sources_of,
    read_assemblies_of,
    readers_of,
    served_assemblies_of,
    sizes_of,
    source_devices_of,
    transfer_times_of,
    value_header,
)
from search.kernels.messages import transfer_ns
from search.kernels.records import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    FEWEST_DEVICES,
    REDUCE,
    REDUCE_SCATTER,
    Array,
    ExchangeLinks,
    Overlaps,
    Readers,
    Sources,
)


@inner_with_arrays
def write_exchange(
    arena: Array,
    at: int,
    sources: Sources,
    readers: Readers,
    overlaps: Overlaps,
    links: ExchangeLinks,
    item_bytes: int,
    summable: int,
) -> int:
    """Write a value fragment at `at`; return its words, or minus the words needed where the arena is too short.

    The same assemblies as `graph.exchange.exchange`, which is its oracle; of collectives all but resource sets and ns.
    """
    devices = len(links.node_D)
    first_reader, assembly_of = find_assemblies(readers, devices)
    count, pieces = len(first_reader), 0
    for reader in first_reader:
        wanted = readers.region[reader]
        pieces += overlaps.pointers[wanted + 1] - overlaps.pointers[wanted]
    source_count, reader_count, readings = len(sources.device), len(readers.device), len(readers.pointers) - 1
    sizes = overlaps.pointers[len(overlaps.pointers) - 1]
    listed = sizes if sources.replicas == 1 else pieces
    collectives_at = (
        VALUE_WORDS + ASSEMBLY_WORDS * (count + 1) + (READER_WORDS + 1) * reader_count + readings + source_count
        + sizes + listed_words(listed)
    )  # fmt: skip
    words = collectives_at + COLLECTIVE_WORDS * (count + 1) + count + (1 + TRANSFER_TIME_WORDS) * pieces
    if at + words + LOAD_WORDS * links.busy_2L.shape[1] > len(arena):
        return -int(words + LOAD_WORDS * links.busy_2L.shape[1])
    value = value_header(arena, at)
    value.assemblies, value.pieces, value.listed, value.sizes = count, pieces, listed, sizes
    value.readers, value.readings, value.sources = reader_count, readings, source_count
    value.collectives_at, value.collectives = collectives_at, 0
    write_pieces(arena, at, sources, readers, overlaps, links, item_bytes, first_reader)
    write_readers(arena, at, readers, assembly_of)
    words = collectives_at
    if value.remote_pieces >= FEWEST_DEVICES - 1:
        region = readers.region[first_reader]
        words = write_collectives(arena, at, region, devices, summable)
    count_reads(arena, at)
    return int(words + write_transfers(arena, at, words, links))


@inner
def write_transfers(arena: Array, at: int, times_at: int, links: ExchangeLinks) -> int:
    """Write the times of a value's transfers, and those of links, after all else; return the words of both."""
    value, assemblies, pieces = value_header(arena, at), assemblies_of(arena, at), piece_sources_of(arena, at)
    value.times_at, value.loads, value.transfers = times_at, 0, 0
    for number in range(value.assemblies):
        assembly = assemblies[number]
        assembly.first_transfer = value.transfers
        if assembly.collective < 0:
            value.transfers += assembly.pieces - assembly.locals
    if value.transfers == 0:
        return 0
    times, sizes, device_T = transfer_times_of(arena, at), sizes_of(arena, at), source_devices_of(arena, at)
    busy_2L, devices, transfer = links.busy_2L, len(links.node_D), 0
    for number in range(value.assemblies):
        assembly = assemblies[number]
        if assembly.collective >= 0:
            continue
        for position in range(assembly.pieces):
            source = device_T[pieces[assembly.first_piece + position]]
            if source == assembly.device:
                continue
            size_bytes = sizes[assembly.first_size + position]
            there, back = source * devices + assembly.device, assembly.device * devices + source
            time = times[transfer]
            time.run_ns, time.back_ns = (
                transfer_ns(links, there, size_bytes),
                transfer_ns(links, back, size_bytes),
            )
            transfer += 1
            for index in range(links.link_ptr[there], links.link_ptr[there + 1]):
                busy_2L[0, links.link[index]] += time.run_ns
            for index in range(links.link_ptr[back], links.link_ptr[back + 1]):
                busy_2L[1, links.link[index]] += time.back_ns
    count = 0
    for link in range(busy_2L.shape[1]):
        count += busy_2L[0, link] > 0 or busy_2L[1, link] > 0
    value.loads = count
    loads = loads_of(arena, at)
    count = 0
    for link in range(busy_2L.shape[1]):
        if busy_2L[0, link] > 0 or busy_2L[1, link] > 0:
            load = loads[count]
            load.link, load.forward_ns, load.back_ns = link, busy_2L[0, link], busy_2L[1, link]
            busy_2L[0, link] = busy_2L[1, link] = 0
            count += 1
    return int(TRANSFER_TIME_WORDS * value.transfers + LOAD_WORDS * count)


@inner
def count_reads(arena: Array, at: int) -> None:
    """Write how many pieces and collectives the readers of a value wait for."""
    value, assemblies = value_header(arena, at), assemblies_of(arena, at)
    value.reads = value.piece_reads = 0
    for number in range(value.assemblies):
        assembly, behind = assemblies[number], assemblies[number + 1]
        readers = behind.first_reader - assembly.first_reader
        value.piece_reads += readers * assembly.pieces
        value.reads += readers if assembly.collective >= 0 else readers * assembly.pieces


@inner_with_arrays
def find_assemblies(readers: Readers, devices: int) -> tuple[Array, Array]:
    """Return the first reader of every assembly, and the assembly of every reader.

    Readers of one region on one device share an assembly.
    """
    count = len(readers.device)
    latest_D = np.full(devices, -1, np.int64)
    previous, first_reader, assembly_of = (
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(count, np.int64),
    )
    assemblies = 0
    for reader in range(count):
        device = readers.device[reader]
        assembly = latest_D[device]
        while assembly >= 0 and readers.region[first_reader[assembly]] != readers.region[reader]:
            assembly = previous[assembly]
        if assembly < 0:
            assembly = assemblies
            previous[assembly] = latest_D[device]
            latest_D[device] = assembly
            first_reader[assembly] = reader
            assemblies += 1
        assembly_of[reader] = assembly
    return first_reader[:assemblies], assembly_of


@inner_with_arrays
def write_pieces(
    arena: Array,
    at: int,
    sources: Sources,
    readers: Readers,
    overlaps: Overlaps,
    links: ExchangeLinks,
    item_bytes: int,
    first_reader: Array,
) -> None:
    """Write source devices, pieces, and assemblies but for their first readers and first transfers."""
    replicas, value, assemblies = sources.replicas, value_header(arena, at), assemblies_of(arena, at)
    pieces, device_T, sizes = piece_sources_of(arena, at), source_devices_of(arena, at), sizes_of(arena, at)
    for task in range(len(device_T)):
        device_T[task] = sources.device[task]
    for overlap in range(len(sizes)):
        sizes[overlap] = overlaps.elements[overlap] * item_bytes
        if replicas == 1:
            pieces[overlap] = overlaps.group[overlap]
    # Of the latest list of source tasks, how many are on each device.
    locals_D = np.zeros(len(links.node_D), np.int64)
    begin = end = number = 0
    value.remote_pieces = 0
    for reader_index in range(len(first_reader)):
        reader = first_reader[reader_index]
        device, wanted = readers.device[reader], readers.region[reader]
        first_size, count = (
            overlaps.pointers[wanted],
            overlaps.pointers[wanted + 1] - overlaps.pointers[wanted],
        )
        if replicas > 1:
            first = number
            for position in range(count):
                group = overlaps.group[first_size + position]
                pieces[number] = choose_replica(sources.device, group * replicas, replicas, device, links)
                number += 1
        else:
            first = first_size
        if first != begin or first + count != end:
            for piece in range(begin, end):
                locals_D[device_T[pieces[piece]]] = 0
            begin, end = first, first + count
            for piece in range(begin, end):
                locals_D[device_T[pieces[piece]]] += 1
        assembly = assemblies[reader_index]
        assembly.device, assembly.pieces, assembly.collective = device, count, -1
        assembly.first_piece, assembly.first_size = first, first_size
        assembly.locals = locals_D[device]
        direct = count == 1 and assembly.locals == 1 and sources.region[pieces[first]] == wanted
        assembly.copied_bytes = 0 if direct else readers.region_elements[wanted] * item_bytes
        value.remote_pieces += count - assembly.locals
    sentinel = assemblies[len(first_reader)]
    sentinel.device = sentinel.collective = -1
    sentinel.copied_bytes, sentinel.pieces, sentinel.locals = 0, 0, 0


@inner_with_arrays
def write_readers(arena: Array, at: int, readers: Readers, assembly_of: Array) -> None:
    """Write the readers by assembly and by reading."""
    assemblies, targets = assemblies_of(arena, at), readers_of(arena, at)
    first_readers, read_assemblies = first_readers_of(arena, at), read_assemblies_of(arena, at)
    following = np.zeros(len(assemblies), np.int64)
    for reader in range(len(assembly_of)):
        following[assembly_of[reader] + 1] += 1
    for number in range(1, len(assemblies)):
        following[number] += following[number - 1]
    for number in range(len(assemblies)):
        assemblies[number].first_reader = following[number]
    for reading in range(len(first_readers)):
        first_readers[reading] = readers.pointers[reading]
        for reader in range(readers.pointers[reading], readers.pointers[reading + 1]):
            assembly = assembly_of[reader]
            read_assemblies[reader] = assembly
            target = targets[following[assembly]]
            target.reading, target.task = reading, reader - readers.pointers[reading]
            following[assembly] += 1


@inner
def find(leader: Array, node: int) -> int:
    """Return what stands for the connected nodes of `node`."""
    while leader[node] != node:
        leader[node] = leader[leader[node]]
        node = leader[node]
    return node


@inner_with_arrays
def write_collectives(arena: Array, at: int, region: Array, devices: int, summable: int) -> int:
    """Write the collectives of a value fragment; return its words up to the times of transfers.

    The same as `graph.collectives.recognize`, which is its oracle. region: the number of each assembly's.
    """
    value, assemblies, pieces = value_header(arena, at), assemblies_of(arena, at), piece_sources_of(arena, at)
    ptr, members = find_components(arena, at, devices)
    collective_count = served = 0
    for component in range(len(ptr) - 1):
        group = members[ptr[component] : ptr[component + 1]]
        kind = kind_of(arena, at, group, region, devices, summable)
        if kind >= 0:
            for number in group:
                assemblies[number].collective = collective_count
            collectives_of(arena, at)[collective_count].kind = kind
            collective_count += 1
            # The sentinel's place moves with their number.
            value.collectives = collective_count
            served += len(group)
    if collective_count == 0:
        return int(value.collectives_at)
    collectives = collectives_of(arena, at)
    collectives[collective_count].first_assembly = served
    served_assemblies = served_assemblies_of(arena, at)
    served_at = at + value.collectives_at + COLLECTIVE_WORDS * (collective_count + 1)
    task_at = served_at + served
    member = task = 0
    last_in = np.full(value.sources, -1, np.int64)
    for number in range(collective_count):
        collective = collectives[number]
        collective.first_assembly, collective.first_source = member, task
        latest = -1
        for index in range(value.assemblies):
            assembly = assemblies[index]
            if assembly.collective != number:
                continue
            served_assemblies[member] = index
            member += 1
            if task == collective.first_source + value.sources or assembly.first_piece == latest:
                continue  # all of these tasks are sources already
            latest = assembly.first_piece
            for piece in range(latest, latest + assembly.pieces):
                source = pieces[piece]
                if last_in[source] != number:
                    last_in[source] = number
                    arena[task_at + task] = source
                    task += 1
        measure_collective(arena, at, number, member)
    collectives[collective_count].first_source = task
    return int(task_at + task - at)


@inner_with_arrays
def find_components(arena: Array, at: int, devices: int) -> tuple[Array, Array]:
    """Return the assemblies that pieces between devices connect, within one reading: pointers, and assemblies."""
    value, assemblies, pieces = value_header(arena, at), assemblies_of(arena, at), piece_sources_of(arena, at)
    readers, device_T = readers_of(arena, at), source_devices_of(arena, at)
    leader = np.arange(value.readings * devices)
    node_of = np.full(value.assemblies, -1, np.int64)
    # Of pieces that assemblies share: the latest of these that was connected with their sources.
    latest_P = np.full(value.listed, -1, np.int64)
    for number in range(value.assemblies):
        assembly = assemblies[number]
        if assembly.pieces == assembly.locals:
            continue
        base = readers[assembly.first_reader].reading * devices
        first, latest = assembly.first_piece, latest_P[assembly.first_piece]
        node_of[number] = base + assembly.device
        # Readings ascend.
        if latest >= 0 and node_of[latest] >= base:
            there = find(leader, node_of[latest])
            leader[there] = find(leader, node_of[number])
            continue
        latest_P[first] = number
        for piece in range(first, first + assembly.pieces):
            there = find(leader, base + device_T[pieces[piece]])
            leader[there] = find(leader, node_of[number])
    component_of = np.full(len(leader), -1, np.int64)
    components = 0
    ptr = np.zeros(value.assemblies + 1, np.int64)
    for number in range(value.assemblies):
        if node_of[number] >= 0:
            node = find(leader, node_of[number])
            if component_of[node] < 0:
                component_of[node] = components
                components += 1
            node_of[number] = component_of[node]
            ptr[node_of[number] + 1] += 1
    for component in range(components):
        ptr[component + 1] += ptr[component]
    members = np.empty(ptr[components], np.int64)
    filled = ptr.copy()
    for number in range(value.assemblies):
        component = node_of[number]
        if component >= 0:
            members[filled[component]] = number
            filled[component] += 1
    return ptr[: components + 1], members


@inner_with_arrays
def are_distinct(numbers: Array, places: Array) -> bool:
    """Return whether the numbers at some places differ; sorting takes two seconds to compile."""
    slots = 2 * len(places)
    seen = np.full(slots, -1, np.int64)
    for index in places:
        slot = numbers[index] % slots
        while seen[slot] >= 0 and seen[slot] != numbers[index]:
            slot = (slot + 1) % slots
        if seen[slot] >= 0:
            return False
        seen[slot] = numbers[index]
    return True


@inner_with_arrays
def kind_of(
    arena: Array,
    at: int,
    group: Array,
    region: Array,
    devices: int,
    summable: int,
) -> int:
    """Return which collective serves exactly the connected assemblies of `group`, or -1."""
    assemblies, pieces, sizes = assemblies_of(arena, at), piece_sources_of(arena, at), sizes_of(arena, at)
    device_T = source_devices_of(arena, at)
    is_reader = np.zeros(devices, np.bool_)
    is_source = np.zeros(devices, np.bool_)
    task_on = np.full(devices, -1, np.int64)
    seen_by = np.full(devices, -1, np.int64)
    leading = assemblies[group[0]]
    for number in range(leading.first_piece, leading.first_piece + leading.pieces):
        task_on[device_T[pieces[number]]] = pieces[number]
    sums = summable != 0
    same_tasks = same_region = full = even = level = True
    for index in range(len(group)):
        assembly = assemblies[group[index]]
        if is_reader[assembly.device]:
            return -1
        is_reader[assembly.device] = True
        same_tasks = same_tasks and assembly.pieces == leading.pieces
        full = full and assembly.pieces == len(group)
        same_region = same_region and region[group[index]] == region[group[0]]
        level = level and assembly.copied_bytes == leading.copied_bytes
        if index > 0 and assembly.first_piece == leading.first_piece:
            continue  # the same pieces
        for position in range(assembly.pieces):
            task, size_bytes = pieces[assembly.first_piece + position], sizes[assembly.first_size + position]
            device = device_T[task]
            if seen_by[device] == index:
                return -1
            seen_by[device] = index
            is_source[device] = True
            same_tasks = same_tasks and task_on[device] == task
            sums = sums and size_bytes == assembly.copied_bytes
            even = even and size_bytes == sizes[assembly.first_size]
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
def measure_collective(arena: Array, at: int, number: int, member_end: int) -> None:
    """Write root and bytes of a collective, as `graph.collectives.moved` finds them."""
    assemblies, pieces, collective = (
        assemblies_of(arena, at),
        piece_sources_of(arena, at),
        collectives_of(arena, at)[number],
    )
    served, kind = served_assemblies_of(arena, at), collective.kind
    device_T, sizes = source_devices_of(arena, at), sizes_of(arena, at)
    whole = largest = 0
    root = -1
    for member in range(collective.first_assembly, member_end):
        assembly = assemblies[served[member]]
        if kind == REDUCE_SCATTER:
            whole += assembly.copied_bytes
            continue
        # But for an all-to-all the first assembly's pieces tell all.
        if member > collective.first_assembly and kind != ALL_TO_ALL:
            continue
        for position in range(assembly.pieces):
            source = device_T[pieces[assembly.first_piece + position]]
            size_bytes = sizes[assembly.first_size + position]
            if kind == ALL_TO_ALL:
                if source != assembly.device:
                    whole += size_bytes
                    largest = max(largest, size_bytes)
            elif kind == ALL_GATHER:
                whole += size_bytes
            else:
                whole = size_bytes
            if kind == BROADCAST:
                root = source
        if kind == REDUCE:
            root = assembly.device
    members = member_end - collective.first_assembly
    collective.root, collective.size_bytes = root, whole
    collective.priced_bytes = largest * members if kind == ALL_TO_ALL else whole


@inner
def choose_replica(device_T: Array, first: int, replicas: int, device: int, links: ExchangeLinks) -> int:
    """Return the replica that `device` reads: its own, else one in its node, else that of lowest index."""
    node_D = links.node_D
    for task in range(first, first + replicas):
        if device_T[task] == device:
            return task
    for task in range(first, first + replicas):
        if node_D[device_T[task]] == node_D[device]:
            return task
    return first
