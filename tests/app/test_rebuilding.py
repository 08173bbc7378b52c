"""Any strategy that a search visited is rebuilt from its trace, and a stopped search goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from app.analytics.duck import connect
from app.db import chunk_files, chunks, trace
from app.db.records import DEEPEST_COPY
from app.db.rows import ConfigurationEntry
from app.db.store import Store
from app.db.trace import ProposalTrace
from app.services.trace import recorder
from app.services.trace.recorder import Codes
from app.services.trace.replay import TraceReader
from graph.axes import tasks
from graph.errors import DamagedDataError, UsageError
from graph.strategy import Configuration, Strategy
from search.algorithms import proposal_log
from search.algorithms.activation_checkpointing import everything
from search.algorithms.chain import Chain, SearchOptions
from search.algorithms.moves import ONE_GROUP, Moves, MoveShares, copied
from search.algorithms.proposal_log import Proposal
from search.evaluate.incremental import IncrementalEvaluation
from search.outcome import Outcome
from search.space.baselines import fsdp
from search.space.placements import Drawn, Permuted, Strided, permutation_of, place, recognized
from tests.app.walks import Walked, begin, read, rows, walk, walked
from tests.quick import seeds
from tests.search.builders import branches, random_anywhere, unrolled

__all__ = ["walked"]
DEVICES = 6
GRAPHS = {"branches": branches, "unrolled": unrolled}
# More moves of several groups than of one.
FAR = MoveShares(alike=0.3, sharing=0.2, spread=0.3, hybrid=0.3, grid=0.3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "x.sqlite") as opened:
        yield opened


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints and chunks every few proposals, merged at once."""
    monkeypatch.setattr(proposal_log, "BATCH", 7)
    monkeypatch.setattr(trace, "FLUSH_ROWS", 10)
    monkeypatch.setattr(trace, "MOST_SMALL", 3)


def interrupt_at(number: int) -> Callable[[int], None]:
    def interrupt(count: int) -> None:
        if count == number:
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize("seed", seeds(1, 3))
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.usefixtures("small_pieces")
def test_every_visited_strategy_is_rebuilt(store: Store, walked: Walked, name: str, seed: int) -> None:
    """Also those of a start whose operators follow no head, and whose tasks share devices."""
    graph = GRAPHS[name]()
    odd = random_anywhere(graph, DEVICES, np.random.default_rng(seed))
    # Hot, so that much is accepted; random and known chains are among these.
    options = SearchOptions(proposals=400, chains=5, seed=seed, beta=3, shares=FAR)
    search_id = begin(store, options)
    walk(store, search_id, graph, DEVICES, options, known=[odd])
    assert {chain for chain, _ in walked.visited} == set(range(6))
    assert walked.visited[5, 0] == odd.configurations
    reader = TraceReader(store, search_id)
    keys = sorted(walked.visited)
    some = np.random.default_rng(seed).choice(len(keys), 40, replace=False).tolist()
    for chain, step in {*(keys[drawn] for drawn in some), *((chain, 0) for chain in range(6))}:
        configurations = walked.visited[chain, step]
        rebuilt = Strategy(graph.digest, reader.configurations(chain, step))
        assert rebuilt.digest == Strategy(graph.digest, configurations).digest, (chain, step)


@pytest.mark.usefixtures("small_pieces")
def test_every_configuration_is_what_was_proposed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what was rejected, of all its groups; and where copies of copies are cut and codes forgotten."""
    monkeypatch.setattr("app.services.trace.recorder.DEEPEST_COPY", 2)
    monkeypatch.setattr("app.services.trace.recorder.MOST_KNOWN", 20)
    proposed: dict[tuple[int, int], tuple[object, ...]] = {}
    step = Chain.step

    def step_and_tell(chain: Chain, moves: Moves, record: Callable[[Proposal], None]) -> None:
        def tell(proposal: Proposal) -> None:
            others = tuple(
                sorted((head, part.configuration) for part in proposal.others for head in part.heads)
            )
            proposed[proposal.chain, proposal.step] = (proposal.operator, proposal.configuration, others)
            record(proposal)

        step(chain, moves, tell)

    monkeypatch.setattr(Chain, "step", step_and_tell)
    graph = unrolled()
    options = SearchOptions(proposals=500, chains=3, seed=1, beta=3, shares=FAR)
    search_id = begin(store, options)
    odd = random_anywhere(graph, DEVICES, np.random.default_rng(1))
    walk(store, search_id, graph, DEVICES, options, known=[odd])
    assert {key: (*row[:2], row[5]) for key, row in rows(store, search_id).items()} == proposed
    assert any(len(others) > 3 for *_, others in rows(store, search_id).values())
    families = set(read(store, search_id, "configurations")["family"].to_pylist())
    assert families == {"strided", "permuted", "copied", "listed"}


@pytest.mark.usefixtures("small_pieces")
def test_every_configuration_is_read_in_sql(store: Store) -> None:
    """In the view as in Python, copies of copies included."""
    options = SearchOptions(proposals=600, chains=3, seed=2, beta=1, shares=FAR)
    search_id = begin(store, options)
    odd = random_anywhere(branches(), DEVICES, np.random.default_rng(2))
    walk(store, search_id, branches(), DEVICES, options, known=[odd])
    entries = read(store, search_id, "configurations").to_pydict()
    base = dict(zip(entries["configuration"], entries["base"], strict=True))
    assert any(base.get(code) is not None for code in base.values()), "a copy of a copy"
    expected = TraceReader(store, search_id).decode(base)
    with connect(store.database) as connection:
        found = connection.execute("SELECT configuration, degrees, devices FROM proposal_devices").fetchall()
    assert {code: Configuration(tuple(degrees), tuple(listed)) for code, degrees, listed in found} == expected


@pytest.mark.parametrize("count", [1, 2, 7, 12, 1024])
def test_every_family_and_depth_is_read_in_sql(store: Store, count: int) -> None:
    """All strides, seeds up to the largest, and copies along any axes as deep as there are."""
    search_id = begin(store, SearchOptions())
    rng = np.random.default_rng(count)
    codes = Codes(count)
    expected: dict[int, Configuration] = {}
    drawn: list[Strided | Permuted] = [Permuted(0), Permuted(7), Permuted(2**32 - 1)]
    drawn += [Strided(count * 2 // 3, stride) for stride in range(1, min(count, 12) + 1)]
    for placement in drawn:
        middle = round(count**0.5)
        for degrees in ((count, 1, 1), (1, count // middle, 1), (middle, count // middle, 1)):
            code = codes.of_drawn(Drawn(degrees, placement))
            expected[code] = Configuration(degrees, place(placement, tasks(degrees), count))
            for _ in range(DEEPEST_COPY):
                axes = ((0, 1), (1, 0), (0, -1), (-1, 1))[int(rng.integers(2 if rng.random() < 0.9 else 4))]
                copy = copied(axes, expected[code])
                code = codes.of_copy(code, axes, copy)
                expected[code] = copy
    entries = [ConfigurationEntry(*row) for row in codes.take_new()]
    if count >= 12:  # copies of fewer devices are mostly in the order of what was drawn
        depth: dict[int | None, int] = {None: 0}
        for entry in entries:
            depth[entry.configuration] = 1 + depth[entry.base] if entry.family == "copied" else 0
        assert sum(deep > 0 for deep in depth.values()) > 10 * DEEPEST_COPY
        assert max(depth.values()) == DEEPEST_COPY
    assert all(entry.family != "listed" for entry in entries)
    with ProposalTrace(store, search_id) as trace_:
        trace_.add_entries(entries)
    with connect(store.database) as connection:
        found = connection.execute("SELECT configuration, degrees, devices FROM proposal_devices").fetchall()
    assert {code: Configuration(tuple(degrees), tuple(listed)) for code, degrees, listed in found} == expected


@pytest.mark.parametrize("count", [6, 12])
def test_copies_that_keep_the_order_of_devices_are_of_what_was_drawn(count: int) -> None:
    """So that the operators that a split is carried over to share a code, and others have none of their own."""
    codes = Codes(count)
    drawn = Drawn((count // 2, 2, 1), Permuted(3))
    code = codes.of_drawn(drawn)
    configuration = Configuration(drawn.degrees, place(drawn.placement, count, count))
    for axes, same in {
        (0, 1): (count // 2, 2, 1),
        (0, -1, 1, -1): (count // 2, 1, 2, 1, 1),
        (-1, -1): (1, 1, 1),
    }.items():
        assert codes.of_copy(code, axes, copied(axes, configuration)) == codes.of_drawn(
            Drawn(same, drawn.placement)
        )
    swapped = codes.of_copy(code, (1, 0), copied((1, 0), configuration))
    assert swapped != codes.of_drawn(Drawn((2, count // 2, 1), drawn.placement))
    assert [row[1] for row in codes.take_new()] == ["permuted"] * 3 + ["copied", "permuted"]


@pytest.mark.parametrize("seed", seeds(1, 4))
@pytest.mark.usefixtures("small_pieces")
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(store: Store, seed: int) -> None:
    """Proposal by proposal, whatever the moment, and twice in a row; one chain shares weights and makes much again."""
    graph = unrolled()
    odd = random_anywhere(graph, DEVICES, np.random.default_rng(seed))
    known = [odd, replace(fsdp(graph, DEVICES), recomputation=everything(graph))]
    options = SearchOptions(proposals=300, chains=4, seed=seed, beta=20, shares=FAR)
    whole = begin(store, options)
    expected = walk(store, whole, graph, DEVICES, options, known=known)

    stopped = begin(store, options)
    first, second = np.random.default_rng(seed).integers(1, 180, 2).tolist()
    result = walk(store, stopped, graph, DEVICES, options, known=known, interrupt=interrupt_at(first))
    assert result.interrupted
    before = rows(store, stopped)
    # The proposal during which it was interrupted counts for nothing.
    assert len(before) == first - 1
    result = walk(
        store, stopped, graph, DEVICES, options, known=known, resumed=True, interrupt=interrupt_at(second)
    )
    assert result.interrupted
    result = walk(store, stopped, graph, DEVICES, options, known=known, resumed=True)

    assert not result.interrupted
    assert rows(store, stopped) == rows(store, whole)
    assert (result.strategy, result.step_time_s) == (expected.strategy, expected.step_time_s)
    assert (result.proposals, result.accepted) == (expected.proposals, expected.accepted)
    assert result.chains == expected.chains
    assert {chain.start for chain in result.chains if chain.strategy.sharding} >= {"known 1"}
    assert {chain.start for chain in result.chains if chain.strategy.recomputation} >= {"known 1"}


@pytest.mark.usefixtures("small_pieces")
def test_an_older_search_is_rebuilt_read_in_sql_and_goes_on(store: Store, walked: Walked) -> None:
    """Its chunks lack the columns of proposals that change several groups; those that follow have them."""
    graph = unrolled()
    alone = SearchOptions(proposals=200, chains=2, seed=1, beta=3, shares=ONE_GROUP)
    whole, stopped = begin(store, alone), begin(store, alone)
    expected = walk(store, whole, graph, DEVICES, alone)
    walk(store, stopped, graph, DEVICES, alone, interrupt=interrupt_at(90))
    for path in chunks.trace_folder(store, stopped).glob("chunk-*"):
        text = chunk_files.read_text(path, chunk_files.CHECKPOINT)
        table = parquet.read_table(path).replace_schema_metadata()
        older = table.drop_columns(["other_operators", "other_configurations"])
        parquet.write_table(chunk_files.with_text(older, chunk_files.CHECKPOINT, text), path)
    reader = TraceReader(store, stopped)
    last = reader.last_step(1)
    assert reader.configurations(1, last) == walked.visited[1, last]

    def in_sql() -> list[tuple[int, int]]:
        with connect(store.database) as connection:
            return connection.execute(
                f"SELECT count(*), count(other_operators) FROM proposals WHERE search = {stopped}"
            ).fetchall()

    assert in_sql() == [(89, 0)]
    result = walk(store, stopped, graph, DEVICES, alone, resumed=True)
    assert (result.strategy, result.chains) == (expected.strategy, expected.chains)
    assert in_sql() == [(200, 0)]
    assert rows(store, stopped) == rows(store, whole)


@pytest.mark.usefixtures("small_pieces")
def test_every_change_of_a_proposal_is_read_in_sql(store: Store) -> None:
    """Each further operator beside its code, in order."""
    options = SearchOptions(proposals=300, chains=2, seed=3, beta=3, shares=FAR)
    search_id = begin(store, options)
    walk(store, search_id, unrolled(), DEVICES, options)
    with connect(store.database) as connection:
        found = connection.execute(
            "SELECT chain, step, other_operator, degrees, devices FROM ("
            "SELECT search, chain, step, unnest(other_operators) AS other_operator, "
            "unnest(other_configurations) AS configuration FROM proposals) "
            "JOIN proposal_devices USING (search, configuration)"
        ).fetchall()
    expected = {
        (*key, operator, configuration)
        for key, row in rows(store, search_id).items()
        for operator, configuration in row[5]
    }
    assert len(found) == len(expected) > 300
    assert {
        (*key, Configuration(tuple(degrees), tuple(listed))) for *key, degrees, listed in found
    } == expected


def test_a_search_that_wrote_nothing_begins_again(store: Store) -> None:
    graph = branches()
    options = SearchOptions(proposals=60, chains=2, seed=1)
    whole, stopped = begin(store, options), begin(store, options)
    walk(store, whole, graph, DEVICES, options)
    walk(store, stopped, graph, DEVICES, options, interrupt=interrupt_at(1))
    walk(store, stopped, graph, DEVICES, options, resumed=True)
    assert rows(store, stopped) == rows(store, whole)


@pytest.mark.usefixtures("small_pieces")
def test_other_costs_are_no_continuation(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SearchOptions(proposals=100, chains=2, seed=1)
    search_id = begin(store, options)
    walk(store, search_id, branches(), DEVICES, options, interrupt=interrupt_at(60))
    current = IncrementalEvaluation.current

    def slower(evaluation: IncrementalEvaluation) -> Outcome:
        was = current(evaluation)
        return Outcome(was.excess_bytes, was.step_time_ns + 1)

    monkeypatch.setattr(IncrementalEvaluation, "current", slower)
    with pytest.raises(UsageError, match=r"was at .* ms, is at .* must be the same to go on"):
        walk(store, search_id, branches(), DEVICES, options, resumed=True)


def test_a_known_strategy_changes_no_other_chain(store: Store) -> None:
    graph = branches()
    options = SearchOptions(proposals=200, chains=3, seed=1)
    fresh, warm = begin(store, options), begin(store, options)
    found = walk(store, fresh, graph, DEVICES, options)
    better = walk(store, warm, graph, DEVICES, options, known=[found.strategy])
    known = rows(store, warm)
    assert {key: row for key, row in known.items() if key[0] < 3} == rows(store, fresh)
    assert sum(chain == 3 for chain, _ in known) == 200 // 3
    assert better.step_time_s <= found.step_time_s


def test_what_was_never_visited_is_one_line(store: Store) -> None:
    options = SearchOptions(proposals=20, chains=2, seed=1)
    search_id = begin(store, options)
    walk(store, search_id, branches(), DEVICES, options)
    reader = TraceReader(store, search_id)
    with pytest.raises(UsageError, match="chain 1 has no step 11, must be between 0 and 10"):
        reader.configurations(1, 11)
    with pytest.raises(UsageError, match="has no chain 2"):
        reader.configurations(2, 0)
    with pytest.raises(UsageError, match="its trace has no starts"):
        TraceReader(store, begin(store, options)).groups()
    with pytest.raises(UsageError, match="was ended before a chain began"):
        TraceReader(store, begin(store, options)).configurations(0, 0)
    path = next(chunks.trace_folder(store, search_id).glob("configurations-*"))
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(DamagedDataError, match=f"trace chunk {path}: is no whole Parquet file"):
        TraceReader(store, search_id).configurations(0, 1)


def test_device_lists_are_found_again_in_their_families() -> None:
    for device_count in (1, 2, 5, 8, 12):
        for start in range(device_count):
            assert place(Strided(start, 1), device_count, device_count)[0] == start
            for stride in range(1, device_count + 1):
                for count in range(1, device_count + 1):
                    listed = place(Strided(start, stride), count, device_count)
                    assert len(set(listed)) == count
                    found = recognized(listed, device_count)
                    assert found is None or place(found, count, device_count) == listed
                    if stride == 1 or (count > 1 and listed[1] == listed[0] + stride):
                        assert found is not None
    assert recognized((1, 1), 2) is None
    assert recognized((0, 2, 1), 3) == Strided(0, 2)
    assert recognized((2, 0, 1, 3), 4) is None


def test_a_seed_means_its_permutation_for_ever() -> None:
    """Traces keep seeds: the lists that these give must never change."""
    assert permutation_of(0, 8).tolist() == [2, 4, 6, 5, 1, 7, 0, 3]
    assert permutation_of(2**32 - 1, 8).tolist() == [5, 2, 4, 7, 1, 6, 3, 0]
    drawn = [permutation_of(seed, 5).tolist() for seed in range(5000)]
    assert {tuple(sorted(one)) for one in drawn} == {(0, 1, 2, 3, 4)}
    assert len({tuple(one) for one in drawn}) == 120


def test_a_thousand_devices_take_no_list() -> None:
    codes = Codes(1024)
    code = codes.of_listed(Configuration((1024, 1), tuple(range(1024))))
    (entry,) = (ConfigurationEntry(*row) for row in codes.take_new())
    assert (entry.configuration, entry.family, entry.devices) == (code, "strided", None)
    assert tasks(tuple(entry.degrees)) == 1024
    assert place(Permuted(7), 1024, 1024) != place(Permuted(8), 1024, 1024)


def test_no_copy_is_deeper_than_sql_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a base that was forgotten, or met before the search was resumed, nobody knows how deep a copy it is."""
    monkeypatch.setattr(recorder, "MOST_KNOWN", 5)
    codes, code = Codes(4, first=20), 19
    for number in range(40):
        swapped = (1, 0) if number % 2 else (0, 1)
        code = codes.of_copy(code, swapped, Configuration((2, 2), (3, 1, 2, 0)))
    depth = dict.fromkeys(range(20), DEEPEST_COPY)
    for entry in (ConfigurationEntry(*row) for row in codes.take_new()):
        depth[entry.configuration] = 0 if entry.base is None else depth[entry.base] + 1
    assert max(depth.values()) == DEEPEST_COPY
