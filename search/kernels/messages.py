"""Pieces of values as messages between devices: their routes, their times, and the time of a whole exchange."""

from __future__ import annotations

from search.kernels.cache import entry, inner, quick_entry
from search.kernels.collective_formulas import curve_s
from search.kernels.fragments import (
    assemblies_of,
    collectives_of,
    loads_of,
    piece_sources_of,
    read_assemblies_of,
    sizes_of,
    source_devices_of,
    transfer_times_of,
    value_header,
)
from search.kernels.records import Array, ExchangeLinks


@inner
def transfer_ns(links: ExchangeLinks, pair: int, size_bytes: int) -> int:
    """Return the nanoseconds of a transfer: measured, or the same expression as `Topology.transfer_time_s`, rounded."""
    if len(links.segments):
        begin, end = links.segments[pair, 0], links.segments[pair, 1]
        if begin < end:
            return int(curve_s(links.curve, begin, end, size_bytes) * 1e9 + 0.5)
    return int((links.latency_s_DD[pair] + size_bytes / links.bandwidth_DD[pair]) * 1e9 + 0.5)


@inner
def route_set(links: ExchangeLinks, source: int, destination: int) -> int:
    """Return the resource set of a message from a device to another one (`ResourceSets`)."""
    return len(links.node_D) * (1 + source) + destination


@inner
def gradient_ns(arena: Array, at: int, number: int, position: int, remote: int, links: ExchangeLinks) -> int:
    """Return the nanoseconds in which the gradient of a remote piece of an assembly goes back by itself.

    Pieces that a collective serves have no time of their own: few of their gradients go back by themselves.
    remote: how many come from other devices before it.
    """
    assembly = assemblies_of(arena, at)[number]
    if assembly.collective < 0:
        return int(transfer_times_of(arena, at)[assembly.first_transfer + remote].back_ns)
    source = source_devices_of(arena, at)[piece_sources_of(arena, at)[assembly.first_piece + position]]
    size_bytes = sizes_of(arena, at)[assembly.first_size + position]
    return transfer_ns(links, assembly.device * len(links.node_D) + source, size_bytes)


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
    """Return the nanoseconds of a value's exchange by itself, forward or back: those of the busiest link."""
    link_ns[:] = 0
    value, loads = value_header(arena, at), loads_of(arena, at)
    for number in range(len(loads)):
        load = loads[number]
        link_ns[load.link] = load.back_ns if back else load.forward_ns
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
    assemblies, pieces, collectives, times = (
        assemblies_of(arena, at),
        piece_sources_of(arena, at),
        collectives_of(arena, at),
        transfer_times_of(arena, at),
    )
    device_T = source_devices_of(arena, at)
    read_assemblies = read_assemblies_of(arena, at)
    for task in range(len(read_assemblies)):
        number = read_assemblies[task]
        assembly = assemblies[number]
        served_by, transfer = assembly.collective, assembly.first_transfer
        reader = task // reader_replicas
        for index in range(assembly.first_piece, assembly.first_piece + assembly.pieces):
            source = pieces[index] // source_replicas
            there_ns = back_ns = 0
            if device_T[pieces[index]] != assembly.device and sure:
                if served_by >= 0:
                    there_ns, back_ns = collectives[served_by].run_ns, collectives[served_by].back_ns
                else:
                    there_ns, back_ns = times[transfer].run_ns, times[transfer].back_ns
                    transfer += 1
            if there[source, reader] < 0 or there_ns < there[source, reader]:
                there[source, reader] = there_ns
            if back[reader, source] < 0 or back_ns < back[reader, source]:
                back[reader, source] = back_ns
