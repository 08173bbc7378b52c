"""The ablation of the walk's moves: how chains are compared, and that it runs."""

from math import inf, isclose

import pytest

from scripts.benchmarks import moves
from scripts.benchmarks.moves import ALL, MovesRow, compared, ratio, table, variants
from search.algorithms.chain import SearchOptions
from search.algorithms.moves import MoveShares, shares_for


def row(variant: str, best_s: float, *, network: str = "a", seed: int = 0, proposals: int = 100) -> MovesRow:
    return MovesRow(network, "random", seed, variant, 9.0, best_s, proposals, 10)


def test_each_chain_is_compared_with_that_of_all_moves_from_the_same_start() -> None:
    rows = [row(ALL, 1.0), row(ALL, 4.0, seed=1), row("x", 2.0, proposals=50), row("x", 2.0, seed=1)]
    lines = compared(rows)
    assert list(lines.time) == [2.0, 0.5]
    assert list(lines.proposals) == [0.5, 1.0]
    assert isclose(ratio(lines.time), 1.0)


def test_what_fits_no_memory_counts_as_worse_and_not_in_the_mean() -> None:
    rows = [row(ALL, 1.0), row(ALL, inf, seed=1), row(ALL, inf, seed=2), row(ALL, 2.0, seed=3)]
    rows += [row("x", inf), row("x", 1.0, seed=1), row("x", inf, seed=2), row("x", 3.0, seed=3)]
    lines = compared(rows)
    assert list(lines.time) == [inf, 0.0, 1.0, 1.5]
    assert isclose(ratio(lines.time), 1.5**0.5)
    (shown,) = table(lines)
    assert shown["better / worse"] == "1 / 2 of 4"


def test_the_table_has_a_column_for_each_network() -> None:
    rows = [row(ALL, 1.0), row("x", 1.1), row(ALL, 1.0, network="b"), row("x", 1.0, network="b")]
    (shown,) = table(compared(rows))
    assert (shown["a"], shown["b"], shown["all"]) == ("1.10", "1.00", f"{1.1**0.5:.3f}")


def test_every_kind_of_move_is_left_out_once() -> None:
    full, beta = shares_for(moves.DEVICES), SearchOptions().beta
    all_variants = variants()
    colder = {name: one for name, one in all_variants.items() if one.beta != beta}
    assert all(one.shares == full and f"{one.beta:g}" in name for name, one in colder.items())
    found = {name: one.shares for name, one in all_variants.items() if one.beta == beta}
    assert found.pop(ALL) == full
    assert found.pop("fresh draws alone") == MoveShares(0, 0, 0, 0, 0, 0, 0)
    one_group = found.pop("one group at a time")
    assert (one_group.alike, one_group.sharing, one_group.spread, one_group.hybrid) == (0, 0, 0, 0)
    assert one_group.copy_like == full.copy_like
    assert set(found) == {f"without {name}" for name in full.__slots__ if getattr(full, name)}
    assert all(getattr(shares, name.split()[1]) == 0 for name, shares in found.items())


@pytest.mark.slow
def test_the_ablation_runs() -> None:
    result = moves.run(quick=True)
    assert [one["moves"] for one in result["table"]] == list(variants())[1:]
    assert all(one["value"] > 0 for one in result["measurements"])
