"""How gradients are summed, as a user has it: run, searched, stored, shown, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.services.search.policies import candidates
from graph.strategy import Sharding
from graph.synchronization import Policy
from tests.app.conftest import Command

NETWORK = (
    "--model",
    "mlp",
    "--preset",
    "small",
    "--device",
    "cpu",
    "--devices",
    "2",
    "--on-miss",
    "estimate",
)
RUN = ("run", *NETWORK, "--strategy", "data-parallel", "--iterations", "3", "--warmup", "1", "--json")


@pytest.mark.usefixtures("known_links")
def test_a_run_sums_in_slices_and_updates_in_the_next_forward(command: Command) -> None:
    done = command(*RUN, "--policy", "p3:1024", "--verify", "--profile", "--optimizer", "adam")
    assert done.code == 0, done
    assert done.document["verified"]
    said = {"policy": "p3", "slice_bytes": 1024}
    assert done.document["synchronization"] == said
    assert len(done.document["step_times_s"]) == 3
    plain = command(*RUN, "--optimizer", "adam")
    assert plain.document["synchronization"] == {}
    assert plain.document["digest"] != done.document["digest"]
    assert done.document["losses"] == pytest.approx(plain.document["losses"], rel=1e-5)
    shown = command("strategy", "show", done.document["digest"], "--json").document
    assert shown["synchronization"] == said
    assert "p3, slices of 1,024 bytes" in command("strategy", "show", done.document["digest"]).output
    assert command("strategy", "export", done.document["digest"], "sliced.json").code == 0
    stored = Path("sliced.json")
    assert json.loads(stored.read_text())["synchronization"] == said
    again = command(*RUN, "--strategy", str(stored), "--optimizer", "adam")
    stored.unlink()
    assert again.document["digest"] == done.document["digest"]
    compared = command("compare", "--execution", str(done.document["execution"]), "--json")
    assert compared.code == 0, compared
    assert 0 <= compared.document["recorded_scheduling_efficiency"] <= 1


@pytest.mark.usefixtures("known_links")
def test_a_run_updates_shares_and_gathers_them_in_the_next_forward(command: Command) -> None:
    zero = (*RUN, "--strategy", "zero", "--optimizer", "adam")
    plain = command(*zero)
    for policy, stored, shown in (
        ("tac:1024", {"policy": "tac", "bucket_bytes": 1024}, "tac, buckets of 1,024 bytes"),
        ("p3:1024", {"policy": "p3", "slice_bytes": 1024}, "p3, slices of 1,024 bytes"),
    ):
        done = command(*zero, "--policy", policy, "--verify", "--profile")
        assert done.code == 0, done
        assert done.document["verified"]
        assert done.document["synchronization"] == stored
        assert done.document["losses"] == pytest.approx(plain.document["losses"], rel=1e-5)
        assert shown in command("strategy", "show", done.document["digest"]).output
        compared = command("compare", "--execution", str(done.document["execution"]), "--json")
        assert compared.code == 0, compared
        assert 0 <= compared.document["recorded_scheduling_efficiency"] <= 1


@pytest.mark.usefixtures("known_links")
def test_a_policy_that_changes_nothing_stores_no_strategy_of_its_own(command: Command) -> None:
    """Where no update is shared there is no gather to put in order: the step of tic is that of fifo."""
    plain = command(*RUN).document["digest"]
    sized = command(*RUN, "--policy", "fifo:1024").document["digest"]
    for strategy, policy, digest in (
        ("data-parallel", "tic", plain),
        ("data-parallel", "tac", plain),
        ("data-parallel", "tic:1024", sized),
        ("fsdp", "tic", command(*RUN, "--strategy", "fsdp").document["digest"]),
    ):
        done = command(*RUN, "--strategy", strategy, "--policy", policy)
        assert done.document["digest"] == digest
    said = "--policy tic: orders gathers of weights whose update is shared, and none is; the step is that of fifo\n"
    assert said in command(*RUN[:-1], "--policy", "tic").errors
    zero = command(*RUN, "--strategy", "zero", "--policy", "tic")
    assert zero.document["synchronization"] == {"policy": "tic", "bucket_bytes": 26214400}
    assert said not in command(*RUN[:-1], "--strategy", "zero", "--policy", "tic").errors
    # A file says tic all the same.
    assert command("strategy", "export", plain, "late.json").code == 0
    file = Path("late.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "synchronization": {"policy": "tic"}}))
    stored = command("strategy", "list", "--json").document
    assert command("strategy", "import", str(file), "--json").document["digest"] == plain
    assert command(*RUN, "--strategy", str(file)).document["digest"] == plain
    file.unlink()
    assert command("strategy", "list", "--json").document == stored
    search = ("search", *NETWORK, "--proposals", "20", "--no-confirm", "--fresh", "--json")
    best = command(*search).document["predictions"][0]["digest"]
    stored = command("strategy", "list", "--json").document
    late = command(*search, "--policy", "tic")
    assert late.document["predictions"][0]["digest"] == best
    assert command("strategy", "list", "--json").document == stored
    assert said in command(*search[:-1], "--policy", "tic").errors


@pytest.mark.usefixtures("known_links")
def test_a_search_takes_the_policy_that_is_asked_for_or_the_fastest(command: Command) -> None:
    search = ("search", *NETWORK, "--proposals", "20", "--no-confirm", "--json")
    plain = command(*search)
    assert plain.document["synchronization"] == {}
    sliced = command(*search, "--policy", "p3:4096")
    assert sliced.code == 0, sliced
    assert sliced.document["synchronization"] == {"policy": "p3", "slice_bytes": 4096}
    best = sliced.document["predictions"][0]
    shown = command("strategy", "show", best["digest"], "--json").document
    assert shown["synchronization"] == sliced.document["synchronization"]
    assert shown["simulated_step_time_s"] == pytest.approx(best["predicted_step_time_s"])
    auto = command(*search, "--policy", "auto")
    assert auto.code == 0, auto
    fastest = [found.document["predictions"][0]["predicted_step_time_s"] for found in (auto, plain)]
    assert fastest[0] <= fastest[1]


@pytest.mark.slow
@pytest.mark.usefixtures("known_links")
def test_what_is_compiled_keeps_the_policy(command: Command) -> None:
    search = ("search", *NETWORK[:-1], "measure", "--proposals", "20", "--no-confirm", "--json")
    done = command(*search, "--policy", "p3:4096", "--compile")
    assert done.code == 0, done
    digest = done.document["predictions"][0]["digest"]
    shown = command("strategy", "show", digest, "--json").document
    assert (
        shown["synchronization"] == done.document["synchronization"] == {"policy": "p3", "slice_bytes": 4096}
    )
    assert shown["compiled"] == done.document["compiled"]


@pytest.mark.parametrize("words", [RUN, ("search", *NETWORK)])
def test_a_policy_that_is_none_is_refused_before_anything_is_begun(
    command: Command, words: tuple[str, ...]
) -> None:
    refused = command(*words, "--policy", "p4")
    assert refused.code == 2
    assert "--policy: is p4, must be fifo, p3, tic, tac, or" in refused.errors
    assert refused.errors.count("\n") == 1


@pytest.mark.usefixtures("known_links")
def test_weights_that_are_kept_in_shares_are_not_summed_in_slices(command: Command) -> None:
    refused = command(*RUN, "--strategy", "fsdp", "--policy", "p3")
    assert refused.code == 2
    assert refused.errors.startswith(
        "error: synchronization: policy p3 is for weights that every holder keeps whole between steps"
    )
    assert len(refused.errors.splitlines()) == 1


def test_auto_tries_what_a_strategy_may_have() -> None:
    """Slices wherever weights are whole between steps, late gathers wherever an update is shared."""
    for levels, tried in (
        ((), {Policy.FIFO, Policy.P3}),
        ((Sharding.NONE, Sharding.OPTIMIZER), {Policy.FIFO, Policy.TIC, Policy.P3}),
        ((Sharding.OPTIMIZER, Sharding.PARAMETERS), {Policy.FIFO, Policy.TIC}),
        ((Sharding.NONE, Sharding.PARAMETERS), {Policy.FIFO}),
    ):
        assert {of.policy for of in candidates("auto", frozenset(levels))} == tried
        assert len(candidates("p3", frozenset(levels))) == (Sharding.PARAMETERS not in levels)
