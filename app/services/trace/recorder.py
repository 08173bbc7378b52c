"""From a search to its trace: every configuration gets a code for the draw or the copy that it came from.

A code is a number of one search. Configurations that were met lately keep theirs; one that comes back after
long may get another, so that what is kept in memory does not grow with the search.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from app.db.records import DEEPEST_COPY, SearchOutcome
from app.db.rows import EntryRow, Others, PlacementFamily, ProposalRows, StartEntry
from app.db.trace import ProposalTrace
from app.services.progress import Progress
from graph.axes import Degrees
from graph.canonical import canonical_json
from graph.errors import DatabaseError
from graph.strategy import Configuration, Strategy
from search.algorithms.moves import Part, keeps_order
from search.algorithms.proposal_log import ChainSnapshot
from search.space.groups import Group, Member, follow
from search.space.placements import Drawn, Permuted, ProposalOrigin, recognized

if TYPE_CHECKING:
    from search.algorithms.proposal_log import ProposalBatch

# Start, stride, seed, base, axes and devices of a `ConfigurationEntry`, of which its family has some.
DeviceColumns = tuple[
    int | None, int | None, int | None, int | None, tuple[int, ...] | None, tuple[int, ...] | None
]

MOST_KNOWN = 1 << 17
"""Codes that are kept in memory, to be used again."""


class Codes:
    """Gives configurations their codes."""

    def __init__(self, device_count: int, first: int = 0) -> None:
        """Begin at a code that no configuration has yet."""
        self._device_count = device_count
        self._next = first
        self._known: dict[Any, int] = {}
        # What the codes of drawn ones stand for.
        self._drawn: dict[int, Drawn] = {}
        # Of copies; how deep a copy is that was made before `_since` is not known any more.
        self._depth: dict[int, int] = {}
        self._since = first
        self._rows: list[EntryRow] = []

    def take_new(self) -> list[EntryRow]:
        """Return the entries of codes since the last call, in the order of the codes."""
        rows, self._rows = self._rows, []
        return rows

    def of_proposals(
        self, batch: ProposalBatch, current: Mapping[int, dict[int, int]]
    ) -> tuple[list[int], Others]:
        """Return the codes of the proposed configurations, and those of further heads that the proposals change.

        `current`, the codes of every chain's heads, goes along.
        """
        codes: list[int] = []
        rows: list[int] = []
        heads: list[int] = []
        further: list[int] = []
        for row, (chain, head, origin, configuration, accepted) in enumerate(
            zip(
                batch.chain.tolist(),
                batch.operator.tolist(),
                batch.origin,
                batch.configurations,
                batch.accepted.tolist(),
                strict=True,
            )
        ):
            head_codes = current[chain]
            code = self._of(origin, configuration, head_codes, {})
            codes.append(code)
            if accepted:
                head_codes[head] = code
            if parts := batch.others.get(row):
                their_heads, their_codes = self._of_parts(parts, head_codes, {head: code})
                rows += [row] * len(their_heads)
                heads += their_heads
                further += their_codes
                if accepted:
                    head_codes.update(zip(their_heads, their_codes, strict=True))
        return codes, Others(*(np.array(column, np.int64) for column in (rows, heads, further)))

    def _of_parts(
        self, parts: Sequence[Part], current: Mapping[int, int], given: dict[int, int]
    ) -> tuple[list[int], list[int]]:
        """Return heads and codes of a proposal's further parts; add them to `given`, the codes of its parts by head."""
        heads: list[int] = []
        codes: list[int] = []
        for part in parts:
            code = self._of(part.origin, part.configuration, current, given)
            part_heads = part.heads
            heads += part_heads
            if len(part_heads) == 1:
                given[part_heads[0]] = code
                codes.append(code)
            else:
                given.update(dict.fromkeys(part_heads, code))
                codes += [code] * len(part_heads)
        return heads, codes

    def _of(
        self,
        origin: ProposalOrigin,
        configuration: Configuration,
        current: Mapping[int, int],
        given: Mapping[int, int],
    ) -> int:
        if isinstance(origin, Drawn):
            return self.of_drawn(origin)
        base = given.get(origin.head)
        if base is None:
            base = current[origin.head]
        return base if origin.axes is None else self.of_copy(base, origin.axes, configuration)

    def of_drawn(self, drawn: Drawn) -> int:
        """Return the code of a drawn configuration."""
        # Tuples as keys, since dataclasses take four times as long to be found.
        degrees, placement = drawn.degrees, drawn.placement
        if isinstance(placement, Permuted):
            seed = placement.seed
            code = self._known.get((degrees, seed))
            if code is None:
                code = self._new((degrees, seed), "permuted", degrees, (None, None, seed, None, None, None))
                self._drawn[code] = drawn
            return code
        start, stride = placement.start, placement.stride
        code = self._known.get((degrees, start, stride))
        if code is None:
            code = self._new(
                (degrees, start, stride), "strided", degrees, (start, stride, None, None, None, None)
            )
            self._drawn[code] = drawn
        return code

    def of_copy(self, base: int, axes: tuple[int, ...], configuration: Configuration) -> int:
        """Return the code of a configuration that was copied from another code's.

        The first devices of what was drawn are drawn likewise: then of several operators that a split is carried over
        to few have codes of their own.
        """
        code = self._known.get((base, axes))
        if code is not None:
            return code
        drawn = self._drawn.get(base)
        if drawn is not None and keeps_order(axes, drawn.degrees):
            code = self.of_drawn(Drawn(configuration.degrees, drawn.placement))
            self._known[base, axes] = code
            return code
        depth = self._depth_of(base) + 1
        if depth > DEEPEST_COPY:
            return self.of_listed(configuration)
        code = self._new((base, axes), "copied", configuration.degrees, (None, None, None, base, axes, None))
        self._depth[code] = depth
        return code

    def _depth_of(self, code: int) -> int:
        return self._depth.get(code, 0 if code >= self._since else DEEPEST_COPY)

    def of_listed(self, configuration: Configuration) -> int:
        """Return the code of a configuration of which only the list of devices is known."""
        degrees, devices = configuration.degrees, configuration.devices
        placement = recognized(devices, self._device_count)
        if placement is not None:
            return self.of_drawn(Drawn(degrees, placement))
        key = ("listed", degrees, devices)
        code = self._known.get(key)
        if code is None:
            code = self._new(key, "listed", degrees, (None, None, None, None, None, devices))
        return code

    def _new(self, key: Any, family: PlacementFamily, degrees: Degrees, devices: DeviceColumns) -> int:
        """Return a new code, and make its entry."""
        code = self._next
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
            self._drawn.clear()
            self._depth.clear()
            self._since = code
        self._next = code + 1
        self._known[key] = code
        self._rows.append((code, family, self._device_count, degrees, *devices))
        return code


class TraceRecorder:
    """A search's observer that writes every start and proposal to the trace, and moves the bar."""

    def __init__(
        self,
        trace: ProposalTrace,
        groups: Sequence[Group],
        device_count: int,
        progress: Progress,
        name: str,
        *,
        resumed: Mapping[int, Mapping[int, int]] | None = None,
        recorded: RecordedProposals | None = None,
        first_code: int = 0,
    ) -> None:
        """Begin; of a search that is resumed, `resumed` holds the codes of every chain's heads where it goes on.

        `recorded` holds the proposals after that point that the trace has already.
        """
        self._trace = trace
        self._groups = groups
        self._codes = Codes(device_count, first_code)
        # By chain: the codes of its heads.
        self._current = {chain: dict(codes) for chain, codes in (resumed or {}).items()}
        self._recorded = recorded or RecordedProposals({})
        self._bar = WalkBar(progress, f"searching {name}")

    def on_start(
        self, chain: int, name: str, strategy: Strategy, heads: Mapping[int, ProposalOrigin] | None
    ) -> None:
        """Store where a chain begins: every head, and every operator that does not follow its head."""
        entries = []
        codes: dict[int, int] = {}
        for group in self._groups:
            head = strategy.configurations[group.head]
            drawn = (heads or {}).get(group.head)
            codes[group.head] = (
                self._codes.of_drawn(drawn) if isinstance(drawn, Drawn) else self._codes.of_listed(head)
            )
            entries.append(StartEntry(chain, name, group.head, codes[group.head]))
            for index, following in follow(group, head).items():
                own = strategy.configurations[index]
                if own != following:
                    entries.append(StartEntry(chain, name, index, self._codes.of_listed(own)))
        self._current[chain] = codes
        self._trace.add_entries(self._codes.take_new())
        self._trace.add_starts(sorted(entries, key=lambda entry: entry.operator))

    def on_proposals(self, batch: ProposalBatch) -> None:
        """Store a batch.

        Raises:
            DatabaseError: a resumed chain makes another proposal than it made before.
        """
        codes, others = self._codes.of_proposals(batch, self._current)
        simulated = np.asarray(batch.simulated_ns)
        rows = ProposalRows(
            chain=batch.chain,
            step=batch.step,
            operator=batch.operator,
            configuration=np.array(codes, np.int64),
            simulated_ns=np.where(simulated < 0, -1, simulated),
            bound_ns=np.where(simulated == -2, batch.bound_ns, -1),
            accepted=batch.accepted,
            others=others,
        )
        snapshots = batch.snapshots
        if snapshots is not None:
            rows = replace(rows, checkpoint=partial(snapshots_text, snapshots), outcome=_outcome(snapshots))
        self._trace.add_entries(self._codes.take_new())
        self._trace.add(self._recorded.without(rows))

    def progress(self, proposals: int, accepted: int, best_s: float) -> None:
        """Move the bar."""
        self._bar.move(proposals, accepted, best_s)


class WalkBar:
    """Shows how far a search is: proposals a second, the share that is accepted, the best so far."""

    # How often it moves, and over how long proposals are counted.
    EVERY_S, WINDOW_S = 0.1, 2.0

    def __init__(self, progress: Progress, text: str) -> None:
        self._progress = progress
        self._text = text
        self._shown = 0
        self._show_at = 0.0
        # When, proposals: at the start of this window and of the last one. A search that is resumed begins with some.
        self._marks: list[tuple[float, int]] = []

    def move(self, proposals: int, accepted: int, best_s: float) -> None:
        """Show numbers, unless others have just been shown."""
        now = time.monotonic()
        if now < self._show_at:
            return
        self._show_at = now + self.EVERY_S
        if not self._marks or now - self._marks[-1][0] >= self.WINDOW_S:
            self._marks = [*self._marks[-1:], (now, proposals)]
        since, before = self._marks[0]
        rate = f", {(proposals - before) / (now - since):,.0f} proposals a second" if now > since else ""
        share = f", {accepted / proposals:.1%} accepted" if proposals else ""
        self._progress.advance(
            proposals - self._shown, f"{self._text}: best {best_s * 1e3:.1f} ms{rate}{share}"
        )
        self._shown = proposals


class RecordedProposals:
    """Proposals that a trace holds after the snapshot of a resumed chain, by chain and step."""

    def __init__(self, rows: Mapping[tuple[int, int], tuple[int, int, bool]]) -> None:
        """Take operator, simulated time (-1 for none) and acceptance of each."""
        self._rows = dict(rows)

    def without(self, batch: ProposalRows) -> ProposalRows:
        """Return the proposals that are not in the trace yet.

        Raises:
            DatabaseError: one that is there is another than that which the chain makes now.
        """
        if not self._rows:
            return batch
        new = np.ones(len(batch), dtype=bool)
        for row_index in range(len(batch)):
            key = int(batch.chain[row_index]), int(batch.step[row_index])
            row = self._rows.pop(key, None)
            if row is None:
                continue
            new[row_index] = False
            now = (
                int(batch.operator[row_index]),
                int(batch.simulated_ns[row_index]),
                bool(batch.accepted[row_index]),
            )
            if row != now:
                raise DatabaseError(
                    f"search: chain {key[0]} makes another proposal {key[1]} than it made before (operator, time in ns "
                    f"and acceptance are {now}, were {row}), must be the same to go on; start a new search"
                )
        columns = ("chain", "step", "operator", "configuration", "simulated_ns", "bound_ns", "accepted")
        moved_to = np.cumsum(new) - 1
        kept = new[batch.others.place]
        others = Others(
            moved_to[batch.others.place[kept]],
            batch.others.operator[kept],
            batch.others.configuration[kept],
        )
        return replace(batch, others=others, **{name: getattr(batch, name)[new] for name in columns})


def snapshots_text(chains: Sequence[ChainSnapshot]) -> str:
    """Return snapshots of chains as JSON."""
    return canonical_json([_plain(asdict(chain)) for chain in chains])


def snapshots_of(text: str) -> list[ChainSnapshot]:
    """Return the snapshots of chains in a text of `snapshots_text`."""
    snapshots = []
    for entry in json.loads(text):
        entry.pop("gained_at", None)  # in traces of older Soapstones, the same as `best_at`
        pairs = {name: (int(entry[name][0]), int(entry[name][1])) for name in ("initial", "current", "best")}
        snapshots.append(ChainSnapshot(**{**entry, **pairs}))
    return snapshots


def groups_text(groups: Sequence[Group]) -> str:
    """Return groups (which operators follow which head) as JSON."""
    return canonical_json(
        [[group.head, [[member.operator, list(member.axes)] for member in group.members]] for group in groups]
    )


def groups_of(text: str) -> list[Group]:
    """Return the groups in a text of `groups_text`."""
    return [
        Group(head, tuple(Member(operator, tuple(axes)) for operator, axes in members))
        for head, members in json.loads(text)
    ]


def _outcome(chains: Sequence[ChainSnapshot]) -> SearchOutcome:
    best = min(chain.best for chain in chains)
    return SearchOutcome(
        proposals=sum(chain.proposals for chain in chains),
        accepted=sum(chain.accepted for chain in chains),
        initial_time_s=_seconds(chains[0].initial),
        best_time_s=_seconds(best),
    )


def _seconds(outcome: tuple[int, int]) -> float | None:
    return outcome[1] / 1e9 if outcome[0] == 0 else None


def _plain(value: Any) -> Any:
    """Return numpy's numbers as Python's: the state of a generator may hold either."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
