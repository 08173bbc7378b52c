"""A search whose chains share weights: what they visited is rebuilt as it was."""

from __future__ import annotations

from tests.app.conftest import Command

ARGUMENTS = (
    "--model", "mlp", "--preset", "small", "--topology", "p100-cluster", "--devices", "2", "--fresh",
)  # fmt: skip


def test_a_chain_that_shares_weights_is_rebuilt_as_it_was_and_none_that_is_not_there(
    command: Command,
) -> None:
    found = command(
        "search",
        *ARGUMENTS,
        "--proposals",
        "8",
        "--chains",
        "1",
        "--optimizer",
        "adam",
        "--share-weights",
        "--json",
    ).document
    assert [one["found_for"] for one in found["known"]] == ["baseline zero", "baseline fsdp"]
    for chain, known in enumerate(found["known"], start=1):
        rebuilt = command(
            "strategy", "rebuild", str(found["search"]), "--chain", str(chain), "--step", "0", "--json"
        ).document
        assert rebuilt["digest"] == known["digest"]
        visited = command("strategy", "rebuild", str(found["search"]), "--chain", str(chain), "--json")
        assert visited.code == 0, visited
    refused = command("strategy", "rebuild", str(found["search"]), "--chain", "99", "--step", "0")
    assert refused.code == 2
    assert "has no chain 99" in refused.errors
