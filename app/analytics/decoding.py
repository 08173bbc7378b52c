"""The devices of every proposed configuration as a view in DuckDB's SQL, as `app.services.trace.replay` decodes them.

The trace keeps of a list of devices what it was drawn or copied from (`search.space.placements`,
`search.algorithms.moves.copied`), since a list of a thousand would take most of its space. The view joins a copy with
what it was copied from, down to `DEEPEST_COPY`, before it decodes anything, so that only the rows that a query asks
for are decoded.
"""

from __future__ import annotations

from app.db.records import DEEPEST_COPY

_MASK = f"{2**64 - 1}::UHUGEINT"


def _times(value: str, factor: int) -> str:
    """Return a product of 64-bit numbers, modulo 2^64."""
    return f"(({value}::UHUGEINT * {factor}::UHUGEINT) & {_MASK})::UBIGINT"


MACROS = {
    "product_of(numbers)": "list_reduce(numbers, lambda one, other: one * other, 1::BIGINT)",
    # Entry `place` of 0, stride, 2 stride, ..., 1, stride + 1, ...: the first `count % stride` rounds are longer.
    "strided_place(place, stride, count)": """
CASE WHEN place < count % stride * (count // stride + 1)
     THEN place // (count // stride + 1) + place % (count // stride + 1) * stride
     ELSE count % stride + (place - count % stride * (count // stride + 1)) // (count // stride)
          + (place - count % stride * (count // stride + 1)) % (count // stride) * stride
END""",
    "strided_devices(start, stride, tasks, count)": """
list_transform(range(tasks), lambda task: strided_place((start + task) % count, stride, count)::INTEGER)""",
    # SplitMix64, as `search.space.placements.permutation_of`; a transformation for each step, so that none is done
    # twice.
    "times_1(numbers)": f"list_transform(numbers, lambda one: {_times('one', 0x9E3779B97F4A7C15)})",
    "times_2(numbers)": f"list_transform(numbers, lambda one: {_times('xor(one, one >> 30)', 0xBF58476D1CE4E5B9)})",
    "times_3(numbers)": f"list_transform(numbers, lambda one: {_times('xor(one, one >> 27)', 0x94D049BB133111EB)})",
    "permuted_devices(seed, tasks, count)": """
list_transform(
    list_grade_up(
        list_transform(
            times_3(times_2(times_1(list_transform(range(count), lambda device:
                (seed::UBIGINT << 32) + (device + 1)::UBIGINT)))),
            lambda one: xor(one, one >> 31)))[:tasks],
    lambda place: (place - 1)::INTEGER)""",
    # Each task's place among the tasks that it was copied from: its part along an axis counts along that axis there.
    "copied_devices(axes, degrees, from_degrees, from_devices)": """
list_select(from_devices, list_transform(range(product_of(degrees)), lambda task:
    1 + coalesce(list_sum(list_transform(range(len(axes)), lambda axis:
        CASE WHEN axes[axis + 1] < 0 THEN 0
        ELSE task // product_of(degrees[axis + 2:]) % degrees[axis + 1]
             * product_of(from_degrees[axes[axis + 1] + 2:])
        END)), 0)::BIGINT))""",
    "drawn_devices(family, degrees, device_count, start, stride, seed, devices)": """
CASE family WHEN 'strided' THEN strided_devices(start, stride, product_of(degrees), device_count)
            WHEN 'permuted' THEN permuted_devices(seed, product_of(degrees), device_count)
            ELSE devices
END""",
}
"""The macros that the view is made of, in an order in which each may use those before it."""


def _decoded(depth: int) -> str:
    """Return the devices of the row that was joined at a depth."""
    row = f"code_{depth}"
    columns = ", ".join(
        f"{row}.{name}"
        for name in ("family", "degrees", "device_count", "start", "stride", "seed", "devices")
    )
    drawn = f"drawn_devices({columns})"
    if depth == DEEPEST_COPY:
        return drawn
    origin = f"code_{depth + 1}"
    copied = f"copied_devices({row}.axes, {row}.degrees, {origin}.degrees, {_decoded(depth + 1)})"
    return f"CASE WHEN {row}.family = 'copied' THEN {copied} ELSE {drawn} END"


_JOINS = "\n".join(
    f"LEFT JOIN proposal_configurations AS code_{depth + 1}"
    f" ON code_{depth + 1}.search = code_{depth}.search AND code_{depth + 1}.configuration = code_{depth}.base"
    for depth in range(DEEPEST_COPY)
)

PROPOSAL_DEVICES = f"""
SELECT code_0.search, code_0.configuration, code_0.degrees, {_decoded(0)} AS devices
FROM proposal_configurations AS code_0
{_JOINS}
"""
