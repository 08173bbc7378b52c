"""The fragment of a value: pieces from devices that make it to devices that read it, and collectives among them."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import inner, inner_with_arrays
from search.kernels.fragments import (
    ASSEMBLY_WORDS,
    COLLECTIVE_WORDS,
    LOAD_WORDS,
    PIECE_WORDS,
    READER_WORDS,
    TRANSFER_TIME_WORDS,
    VALUE_WORDS,
    assemblies_of,
    by_source_words,
    collectives_of,
    first_pieces_of,
    first_readers_of,
    loads_of,
    pieces_of,
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
    collectives_at = (
        VALUE_WORDS + ASSEMBLY_WORDS * (count + 1) + PIECE_WORDS * pieces
        + (READER_WORDS + 1) * reader_count + readings + sizes + 2 * source_count + 1 + by_source_words(pieces)
    )  # fmt: skip
    words = collectives_at + COLLECTIVE_WORDS * (count + 1) + count + (1 + TRANSFER_TIME_WORDS) * pieces
    if at + words + LOAD_WORDS * links.busy_2L.shape[1] > len(arena):
        return -int(words + LOAD_WORDS * links.busy_2L.shape[1])
    value = value_header(arena, at)
    value.assemblies, value.pieces, value.readers, value.sources = count, pieces, reader_count, source_count
    value.sizes, value.readings, value.collectives_at, value.collectives = sizes, readings, collectives_at, 0
    remote_pieces = write_pieces(arena, at, sources, readers, overlaps, links, item_bytes, first_reader)
    value.remote_pieces = value.transfers = remote_pieces
    write_readers(arena, at, readers, assembly_of)
    # Sorted where a task graph is emitted.
    first_pieces_of(arena, at)[0] = -1
    words = collectives_at
    if remote_pieces >= FEWEST_DEVICES - 1:
        region = readers.region[first_reader]
        words = write_collectives(arena, at, region, sources.device, devices, summable)
    count_reads(arena, at)
    return words + write_transfers(arena, at, words, links)


@inner
def write_transfers(arena: Array, at: int, times_at: int, links: ExchangeLinks) -> int:
    """Write what the transfers of a value take, and what of links, after all else; return the words of both."""
    value, assemblies, pieces = value_header(arena, at), assemblies_of(arena, at), pieces_of(arena, at)
    value.times_at, value.loads = times_at, 0
    if value.transfers == 0:
        return 0
    times, sizes, device_T = transfer_times_of(arena, at), sizes_of(arena, at), source_devices_of(arena, at)
    busy_2L, devices = links.busy_2L, len(links.node_D)
    for number in range(value.assemblies):
        assembly = assemblies[number]
        if assembly.collective >= 0:
            continue
        first = assembly.first_piece
        for index in range(first, assemblies[number + 1].first_piece):
            piece = pieces[index]
            if piece.rank < 0:
                continue
            source, size_bytes = device_T[piece.source], sizes[assembly.first_size + index - first]
            there, back = source * devices + assembly.device, assembly.device * devices + source
            time = times[piece.rank]
            time.run_ns, time.back_ns = (
                transfer_ns(links, there, size_bytes),
                transfer_ns(links, back, size_bytes),
            )
            for position in range(links.link_ptr[there], links.link_ptr[there + 1]):
                busy_2L[0, links.link[position]] += time.run_ns
            for position in range(links.link_ptr[back], links.link_ptr[back + 1]):
                busy_2L[1, links.link[position]] += time.back_ns
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
        readers, pieces = (
            behind.first_reader - assembly.first_reader,
            behind.first_piece - assembly.first_piece,
        )
        value.piece_reads += readers * pieces
        value.reads += readers if assembly.collective >= 0 else readers * pieces


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


@inner
def write_pieces(
    arena: Array,
    at: int,
    sources: Sources,
    readers: Readers,
    overlaps: Overlaps,
    links: ExchangeLinks,
    item_bytes: int,
    first_reader: Array,
) -> int:
    """Write the assemblies, but for their first readers, and their pieces; return how many pieces travel."""
    replicas = sources.replicas
    assemblies, pieces = assemblies_of(arena, at), pieces_of(arena, at)
    device_T, sizes = source_devices_of(arena, at), sizes_of(arena, at)
    for task in range(len(device_T)):
        device_T[task] = sources.device[task]
    for overlap in range(len(sizes)):
        sizes[overlap] = overlaps.elements[overlap] * item_bytes
    number = remote = 0
    for reader_index in range(len(first_reader)):
        reader = first_reader[reader_index]
        device, wanted = readers.device[reader], readers.region[reader]
        assembly = assemblies[reader_index]
        assembly.device, assembly.first_piece, assembly.collective = device, number, -1
        assembly.first_size = overlaps.pointers[wanted]
        direct = False
        for overlap in range(overlaps.pointers[wanted], overlaps.pointers[wanted + 1]):
            task = choose_replica(sources.device, overlaps.group[overlap] * replicas, replicas, device, links)
            source = sources.device[task]
            piece = pieces[number]
            piece.source = task
            if source == device:
                piece.rank = -1
                direct = sources.region[task] == wanted
            else:
                piece.rank = remote
                remote += 1
            number += 1
        direct = direct and number == assembly.first_piece + 1
        assembly.copied_bytes = 0 if direct else readers.region_elements[wanted] * item_bytes
    sentinel = assemblies[len(first_reader)]
    sentinel.device = sentinel.collective = -1
    sentinel.copied_bytes, sentinel.first_piece, sentinel.first_size = 0, number, len(sizes)
    return remote


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
def write_collectives(
    arena: Array, at: int, region: Array, source_device: Array, devices: int, summable: int
) -> int:
    """Write the collectives of a value fragment; return the fragment's words.

    The same as `graph.collectives.recognize`, which is its oracle. region: the number of each assembly's.
    """
    value, assemblies, pieces = value_header(arena, at), assemblies_of(arena, at), pieces_of(arena, at)
    ptr, members = find_components(arena, at, source_device, devices)
    collective_count = served = 0
    for component in range(len(ptr) - 1):
        group = members[ptr[component] : ptr[component + 1]]
        kind = kind_of(arena, at, group, region, source_device, devices, summable)
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
    last_in = np.full(len(source_device), -1, np.int64)
    for number in range(collective_count):
        collective = collectives[number]
        collective.first_assembly, collective.first_source = member, task
        for index in range(value.assemblies):
            if assemblies[index].collective != number:
                continue
            served_assemblies[member] = index
            member += 1
            if task == collective.first_source + len(source_device):
                continue  # all tasks are sources already
            for piece in range(assemblies[index].first_piece, assemblies[index + 1].first_piece):
                source = pieces[piece].source
                if last_in[source] != number:
                    last_in[source] = number
                    arena[task_at + task] = source
                    task += 1
        measure_collective(arena, at, number, member, source_device)
    collectives[collective_count].first_source = task
    if served == len(members):
        # All that travels is served: it is ranked already.
        value.transfers = 0
        return int(task_at + task - at)
    rank = 0
    for covered in range(2):
        for number in range(value.assemblies):
            assembly = assemblies[number]
            if (assembly.collective >= 0) != (covered == 1):
                continue
            for index in range(assembly.first_piece, assemblies[number + 1].first_piece):
                if pieces[index].rank >= 0:
                    pieces[index].rank = rank
                    rank += 1
        if covered == 0:
            value.transfers = rank
    return int(task_at + task - at)


@inner_with_arrays
def find_components(arena: Array, at: int, source_device: Array, devices: int) -> tuple[Array, Array]:
    """Return the assemblies that pieces between devices connect, within one reading: pointers, and assemblies."""
    value, assemblies, pieces = value_header(arena, at), assemblies_of(arena, at), pieces_of(arena, at)
    readers = readers_of(arena, at)
    leader = np.arange(value.readings * devices)
    node_of = np.full(value.assemblies, -1, np.int64)
    for number in range(value.assemblies):
        base = readers[assemblies[number].first_reader].reading * devices
        first, last = assemblies[number].first_piece, assemblies[number + 1].first_piece
        remote = False
        for piece in range(first, last):
            remote = remote or pieces[piece].rank >= 0
        if remote:
            node_of[number] = base + assemblies[number].device
            for piece in range(first, last):
                there = find(leader, base + source_device[pieces[piece].source])
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
    source_device: Array,
    devices: int,
    summable: int,
) -> int:
    """Return which collective serves exactly the connected assemblies of `group`, or -1."""
    assemblies, pieces, sizes = assemblies_of(arena, at), pieces_of(arena, at), sizes_of(arena, at)
    is_reader = np.zeros(devices, np.bool_)
    is_source = np.zeros(devices, np.bool_)
    task_on = np.full(devices, -1, np.int64)
    seen_by = np.full(devices, -1, np.int64)
    leading, behind = assemblies[group[0]], assemblies[group[0] + 1]
    count = behind.first_piece - leading.first_piece
    for number in range(leading.first_piece, behind.first_piece):
        task = pieces[number].source
        task_on[source_device[task]] = task
    sums = summable != 0
    same_tasks = same_region = full = even = level = True
    for index in range(len(group)):
        assembly = assemblies[group[index]]
        if is_reader[assembly.device]:
            return -1
        is_reader[assembly.device] = True
        first, last = assembly.first_piece, assemblies[group[index] + 1].first_piece
        first_size = assembly.first_size
        same_tasks = same_tasks and last - first == count
        full = full and last - first == len(group)
        same_region = same_region and region[group[index]] == region[group[0]]
        level = level and assembly.copied_bytes == leading.copied_bytes
        for number in range(first, last):
            task, size_bytes = pieces[number].source, sizes[first_size + number - first]
            device = source_device[task]
            if seen_by[device] == index:
                return -1
            seen_by[device] = index
            is_source[device] = True
            same_tasks = same_tasks and task_on[device] == task
            sums = sums and size_bytes == assembly.copied_bytes
            even = even and size_bytes == sizes[first_size]
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
def measure_collective(arena: Array, at: int, number: int, member_end: int, source_device: Array) -> None:
    """Write root and bytes of a collective, as `graph.collectives.moved` finds them."""
    assemblies, pieces, collective = (
        assemblies_of(arena, at),
        pieces_of(arena, at),
        collectives_of(arena, at)[number],
    )
    served, kind, sizes = served_assemblies_of(arena, at), collective.kind, sizes_of(arena, at)
    whole = largest = 0
    root = -1
    for member in range(collective.first_assembly, member_end):
        assembly, behind = assemblies[served[member]], assemblies[served[member] + 1]
        if kind == REDUCE_SCATTER:
            whole += assembly.copied_bytes
            continue
        # But for an all-to-all the first assembly's pieces tell all.
        if member > collective.first_assembly and kind != ALL_TO_ALL:
            continue
        for index in range(assembly.first_piece, behind.first_piece):
            piece, size_bytes = pieces[index], sizes[assembly.first_size + index - assembly.first_piece]
            if kind == ALL_TO_ALL:
                if piece.rank >= 0:
                    whole += size_bytes
                    largest = max(largest, size_bytes)
            elif kind == ALL_GATHER:
                whole += size_bytes
            else:
                whole = size_bytes
            if kind == BROADCAST:
                root = source_device[piece.source]
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
