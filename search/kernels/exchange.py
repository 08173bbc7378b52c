"""The fragment of a value: pieces from devices that make it to devices that read it, and collectives among them."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner, inner_with_arrays, quick_entry
from search.kernels.collective_formulas import curve_s
from search.kernels.fragments import (
    ASSEMBLY_WORDS,
    COLLECTIVE_WORDS,
    LOAD_WORDS,
    PIECE_WORDS,
    READER_WORDS,
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
    value_header,
)
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
    collectives_at = (
        VALUE_WORDS + ASSEMBLY_WORDS * (count + 1) + PIECE_WORDS * pieces
        + READER_WORDS * reader_count + readings + reader_count + source_count + 1 + by_source_words(pieces)
    )  # fmt: skip
    words = collectives_at + COLLECTIVE_WORDS * (count + 1) + count + pieces
    if at + words + LOAD_WORDS * links.busy_2L.shape[1] > len(arena):
        return -int(words + LOAD_WORDS * links.busy_2L.shape[1])
    value = value_header(arena, at)
    value.assemblies, value.pieces, value.readers, value.sources = count, pieces, reader_count, source_count
    value.readings, value.collectives_at, value.collectives = readings, collectives_at, 0
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
    return words + write_loads(arena, at, words, links)


@inner
def write_loads(arena: Array, at: int, loads_at: int, links: ExchangeLinks) -> int:
    """Write what the transfers of a value take of links, after all else; return the words that this takes."""
    value, pieces, busy_2L, devices = (
        value_header(arena, at),
        pieces_of(arena, at),
        links.busy_2L,
        len(links.node_D),
    )
    value.loads_at, value.loads = loads_at, 0
    if value.transfers == 0:
        return 0
    for number in range(len(pieces)):
        piece = pieces[number]
        if 0 <= piece.rank < value.transfers:
            there, back = piece.resource_set - devices, piece.back_resource_set - devices
            for index in range(links.link_ptr[there], links.link_ptr[there + 1]):
                busy_2L[0, links.link[index]] += piece.run_ns
            for index in range(links.link_ptr[back], links.link_ptr[back + 1]):
                busy_2L[1, links.link[index]] += piece.back_ns
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
    return int(LOAD_WORDS * count)


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
    devices, replicas = len(links.node_D), sources.replicas
    assemblies, pieces = assemblies_of(arena, at), pieces_of(arena, at)
    number = remote = 0
    for reader_index in range(len(first_reader)):
        reader = first_reader[reader_index]
        device, wanted = readers.device[reader], readers.region[reader]
        assembly = assemblies[reader_index]
        assembly.device, assembly.first_piece, assembly.collective = device, number, -1
        direct = False
        for overlap in range(overlaps.pointers[wanted], overlaps.pointers[wanted + 1]):
            task = choose_replica(sources.device, overlaps.group[overlap] * replicas, replicas, device, links)
            source = sources.device[task]
            piece = pieces[number]
            piece.source, piece.assembly = task, reader_index
            piece.size_bytes = overlaps.elements[overlap] * item_bytes
            if source == device:
                piece.resource_set = piece.back_resource_set = piece.rank = -1
                piece.run_ns = piece.back_ns = 0
                direct = sources.region[task] == wanted
            else:
                there, back = source * devices + device, device * devices + source
                piece.resource_set, piece.back_resource_set, piece.rank = (
                    devices + there,
                    devices + back,
                    remote,
                )
                piece.run_ns = transfer_ns(links, there, piece.size_bytes)
                piece.back_ns = transfer_ns(links, back, piece.size_bytes)
                remote += 1
            number += 1
        direct = direct and number == assembly.first_piece + 1
        assembly.copied_bytes = 0 if direct else readers.region_elements[wanted] * item_bytes
    sentinel = assemblies[len(first_reader)]
    sentinel.device = sentinel.collective = -1
    sentinel.copied_bytes, sentinel.first_piece = 0, number
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
        for piece in pieces:
            in_collective = assemblies[piece.assembly].collective >= 0
            if piece.rank >= 0 and in_collective == (covered == 1):
                piece.rank = rank
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
    assemblies, pieces = assemblies_of(arena, at), pieces_of(arena, at)
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
        same_tasks = same_tasks and last - first == count
        full = full and last - first == len(group)
        same_region = same_region and region[group[index]] == region[group[0]]
        level = level and assembly.copied_bytes == leading.copied_bytes
        for number in range(first, last):
            piece = pieces[number]
            device = source_device[piece.source]
            if seen_by[device] == index:
                return -1
            seen_by[device] = index
            is_source[device] = True
            same_tasks = same_tasks and task_on[device] == piece.source
            sums = sums and piece.size_bytes == assembly.copied_bytes
            even = even and piece.size_bytes == pieces[first].size_bytes
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
    served, kind = served_assemblies_of(arena, at), collective.kind
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
            piece = pieces[index]
            if kind == ALL_TO_ALL:
                if piece.rank >= 0:
                    whole += piece.size_bytes
                    largest = max(largest, piece.size_bytes)
            elif kind == ALL_GATHER:
                whole += piece.size_bytes
            else:
                whole = piece.size_bytes
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


@inner
def transfer_ns(links: ExchangeLinks, pair: int, size_bytes: int) -> int:
    """Return the nanoseconds of a transfer: measured, or the same expression as `Topology.transfer_time_s`, rounded."""
    if len(links.segments):
        begin, end = links.segments[pair, 0], links.segments[pair, 1]
        if begin < end:
            return int(curve_s(links.curve, begin, end, size_bytes) * 1e9 + 0.5)
    return int((links.latency_s_DD[pair] + size_bytes / links.bandwidth_DD[pair]) * 1e9 + 0.5)


@quick_entry
def exchanges_ns(
    arena: Array,
    at_N: Array,
    resource_ptr: Array,
    resource: Array,
    devices: int,
    link_ns: Array,
    ns_N2: Array,
) -> None:
    """Write the nanoseconds of exchanges of values, forward and back, see `exchange_ns`. link_ns: scratch."""
    for number in range(len(at_N)):
        for back in range(2):
            ns_N2[number, back] = exchange_ns(
                arena, at_N[number], resource_ptr, resource, devices, link_ns, back
            )


@inner
def exchange_ns(
    arena: Array, at: int, resource_ptr: Array, resource: Array, devices: int, link_ns: Array, back: int
) -> int:
    """Return what a value's exchange takes by itself: the busiest link's time, forward or back."""
    link_ns[:] = 0
    value = value_header(arena, at)
    for piece in pieces_of(arena, at):
        if 0 <= piece.rank < value.transfers:
            resource_set = piece.back_resource_set if back else piece.resource_set
            run_ns = piece.back_ns if back else piece.run_ns
            for index in range(resource_ptr[resource_set], resource_ptr[resource_set + 1]):
                link_ns[resource[index] - devices] += run_ns
    for number in range(value.collectives):
        collective = collectives_of(arena, at)[number]
        resource_set = collective.back_resource_set if back else collective.resource_set
        run_ns = collective.back_ns if back else collective.run_ns
        for index in range(resource_ptr[resource_set], resource_ptr[resource_set + 1]):
            link_ns[resource[index] - devices] += run_ns
    longest_ns = 0
    for run_ns in link_ns:
        longest_ns = max(longest_ns, run_ns)
    return longest_ns


@entry
def exchange_by_part(
    arena: Array, at: int, source_replicas: int, reader_replicas: int, sure: int, there: Array, back: Array
) -> None:
    """Write how long pieces travel from part to part of a value fragment with one reading.

    The least over a part's replicas. Unless `sure`, a piece that travels counts as nothing: with the value's other
    readers it may be in a collective that is cheaper than this one.
    """
    assemblies, pieces, collectives = (
        assemblies_of(arena, at),
        pieces_of(arena, at),
        collectives_of(arena, at),
    )
    read_assemblies = read_assemblies_of(arena, at)
    for task in range(len(read_assemblies)):
        number = read_assemblies[task]
        served_by = assemblies[number].collective
        reader = task // reader_replicas
        for index in range(assemblies[number].first_piece, assemblies[number + 1].first_piece):
            piece = pieces[index]
            source = piece.source // source_replicas
            there_ns = back_ns = 0
            if piece.rank >= 0 and sure:
                if served_by >= 0:
                    there_ns, back_ns = collectives[served_by].run_ns, collectives[served_by].back_ns
                else:
                    there_ns, back_ns = piece.run_ns, piece.back_ns
            if there[source, reader] < 0 or there_ns < there[source, reader]:
                there[source, reader] = there_ns
            if back[reader, source] < 0 or back_ns < back[reader, source]:
                back[reader, source] = back_ns
