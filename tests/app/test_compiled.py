"""What is compiled between communications, as a user has it: run, searched, stored, refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from app.services.predict.compiled_stretches import compiled_stretches, faster_stretches, with_compiled_costs
from graph.calls import LocalCall
from graph.compiled_calls import COMPILED
from graph.strategy import Strategy
from graph.training import Training
from search.cost.cost_table import CostTable, OperatorCost, Origin, UpdateCost
from search.simulate.simulator import simulate_tasks
from search.simulate.task_graph import TaskGraphBuilder, TaskKind
from search.space.baselines import data_parallel
from tests.app.conftest import Command
from tests.runtime.oracle import graph_of
from tests.search.builders import devices

RUN = (
    "run", "--model", "mlp", "--preset", "small", "--device", "cpu", "--devices", "2", "--strategy", "data-parallel",
    "--on-miss", "estimate", "--iterations", "2", "--warmup", "1", "--json",
)  # fmt: skip


class Costs:
    """A call takes 1 ms forward and 2 ms backward, with 0.1 and 0.2 ms of its host; a compiled one as it is told."""

    def __init__(self, compiled_s: float | None) -> None:
        self._compiled_s = compiled_s

    def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost]:  # noqa: ARG002 - a protocol
        return [self._cost(call) for call in calls]

    def _cost(self, call: LocalCall) -> OperatorCost:
        if call.target != COMPILED:
            return OperatorCost(1e-3, 2e-3, Origin.MEASURED, 1e-4, 2e-4)
        if self._compiled_s is None:
            return OperatorCost(1e-9, 1e-9, Origin.ESTIMATED)
        return OperatorCost(self._compiled_s, 2 * self._compiled_s, Origin.MEASURED, 1e-4, 2e-4)

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:  # noqa: ARG002
        return UpdateCost(0.0, Origin.MEASURED)


def compiled(strategy: Strategy, table: CostTable) -> Strategy:
    ranges = faster_stretches(graph_of("perceptron"), strategy, devices(strategy.device_count), table)
    return replace(strategy, compiled=ranges)


def test_stretches_that_are_measured_to_be_faster_are_compiled_and_no_others() -> None:
    strategy = data_parallel(graph_of("perceptron"), 1)
    # One stretch of all operators, each of 3 ms.
    graph = graph_of("perceptron")
    count = len(graph.order.of_loss)
    assert len(compiled(strategy, CostTable(Costs(1e-3 * count * 0.99))).compiled) == 1
    assert compiled(strategy, CostTable(Costs(1e-3 * count * 1.5))).compiled == ()
    assert compiled(strategy, CostTable(Costs(None))).compiled == ()


def test_a_compiled_stretch_takes_its_own_time_in_the_simulation() -> None:
    graph, topology, table = graph_of("perceptron"), devices(1), CostTable(Costs(4e-3))
    strategy = compiled(data_parallel(graph, 1), table)
    stretches = compiled_stretches(graph, strategy, topology)
    (of,) = stretches
    assert [index for index, _ in of.parts] == list(graph.order.of_loss)
    tasks = TaskGraphBuilder(graph, topology, table, Training(batch_size=4)).build(strategy)
    changed = with_compiled_costs(tasks, stretches, table)
    for kind, whole_ns in ((TaskKind.FORWARD, 4_000_000), (TaskKind.BACKWARD, 8_000_000)):
        own = changed.kind_T == kind
        assert changed.run_ns_T[own].sum() == whole_ns
        assert (changed.run_ns_T[own] <= tasks.run_ns_T[own]).all()
    # Its host issues one call each way.
    others = (len(of.parts) - 1) * 100_000 + (sum(call.has_backward for _, call in of.parts) - 1) * 200_000
    saved = tasks.launched_ns_T.max() - changed.launched_ns_T.max()
    assert saved == others
    assert simulate_tasks(changed).step_time_s < simulate_tasks(tasks).step_time_s
    assert compiled_stretches(graph, replace(strategy, compiled=()), topology) == []


@pytest.mark.usefixtures("known_links")
def test_a_run_compiles_what_is_between_communications(command: Command) -> None:
    done = command(*RUN, "--compile")
    assert done.code == 0, done
    assert done.document["compiled"]
    plain = command(*RUN)
    assert plain.document["compiled"] == []
    assert plain.document["digest"] != done.document["digest"]
    assert done.document["losses"] == pytest.approx(plain.document["losses"], rel=1e-6)
    shown = command("strategy", "show", done.document["digest"], "--json").document
    assert shown["compiled"] == done.document["compiled"]
    assert command("strategy", "export", done.document["digest"], "compiled.json").code == 0
    stored = Path("compiled.json")
    document = json.loads(stored.read_text())
    assert document["compiled"] == done.document["compiled"]
    # A file that compiles over a communication is refused before anything is started.
    names = list(document["operators"])
    document["compiled"] = [[names[0], names[-1]]]
    stored.write_text(json.dumps(document))
    refused = command(*RUN, "--strategy", str(stored))
    stored.unlink()
    assert refused.code == 2
    assert "communicate in between" in refused.errors
    assert refused.errors.count("\n") <= 3


def test_without_a_compiler_nothing_is_begun(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for words in (
        RUN,
        ("search", "--model", "mlp", "--preset", "small", "--device", "cpu", "--devices", "2"),
    ):
        refused = command(*words, "--compile")
        assert refused.code == 2
        assert "--compile: no-such-compiler is not there, must be for torch.compile" in refused.errors


def test_a_search_for_devices_that_are_not_here_says_that_nothing_was_measured(command: Command) -> None:
    searched = command(
        "search", "--model", "mlp", "--preset", "small", "--topology", "p100-cluster", "--devices", "2",
        "--algorithm", "greedy", "--proposals", "4", "--compile",
    )  # fmt: skip
    assert searched.code == 0, searched
    said = (
        "was measured to be faster compiled: p100-cluster[:2] has no device of this machine to measure it on"
    )
    assert said in searched.errors
