"""Placement: every operator whole on one device, at the least makespan of a model, exactly, by a solver.

A mixed-integer program over `search.bounds.whole_placement`: a binary variable for each unit and device, the begin of
each task, and for each two units the share of each pair of devices that they are on, which says how long messages take
and whether both wait for one device. HiGHS solves it; small graphs alone, since its bound is weak where tasks wait for
each other. The simulator knows what shares links and what memory is freed, so the strategy is the best of this model
and of placements, and nothing else.

Source: DLPlacer (Pal et al., IEEE Micro 2019, arXiv:1907.13257), an integer program for the same purpose; HiGHS
(Huangfu and Hall, Mathematical Programming Computation 2018).
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graph.errors import StrategyError, UsageError
from graph.strategy import Strategy
from search.algorithms.algorithm import Algorithm, AlgorithmContext, AlgorithmResult
from search.algorithms.best_tracker import simulated
from search.bounds.whole_placement import PlacementModel, placement_model
from search.parallel.fork import WorkFailure, can_fork, fork
from search.problem import Problem

# Binary variables, and constraints of the program, up to which a solver is asked.
MOST_BINARIES = 64
MOST_ROWS = 12_000
# Of the solver's search. Nodes, and not seconds, so that the same problem has the same result.
MOST_NODES = 20_000
# Times are scaled so that all of them together are so many units; the solver's tolerances are absolute.
HORIZON = 1_000.0


@dataclass(frozen=True, slots=True)
class PlacementSolution:
    """The strategy of the least makespan, and the device of each unit."""

    strategy: Strategy
    makespan_ns: int
    devices: tuple[int, ...]


def place(model: PlacementModel) -> PlacementSolution:
    """Return the placement of the least makespan.

    Raises:
        UsageError: the solver is not installed, the graph is too large for it, or it does not end.
        StrategyError: no placement fits the devices' memories.
    """
    devices = len(model.capacity_bytes_D)
    if model.units * devices > MOST_BINARIES:
        raise UsageError(
            f"placement: {model.units} groups of operators on {devices} devices are {model.units * devices} choices, "
            f"must be at most {MOST_BINARIES}; take fewer devices or algorithm greedy"
        )
    program = _Program(model)
    if len(program.rows) > MOST_ROWS:
        raise UsageError(
            f"placement: {len(model.unit_T)} forwards and backwards make {len(program.rows)} constraints, must be at "
            f"most {MOST_ROWS}; take fewer devices or algorithm greedy"
        )
    chosen = _solved(program, _highs())
    return PlacementSolution(model.strategy(chosen), model.makespan_ns(chosen), chosen)


def _highs() -> Any:
    """Return the solver's package.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("highspy")
    except ModuleNotFoundError:
        raise UsageError(
            "placement: package highspy is not installed, must be; install it with pip install 'soapstone[exact]'"
        ) from None


def _solved(program: _Program, highspy: Any) -> tuple[int, ...]:
    """Solve a program in a copy of this process: the solver writes to standard output, and Ctrl-C does not reach it."""
    if not can_fork():
        return program.solve(highspy)
    process = fork(lambda connection: connection.send(program.solve(highspy)))
    try:
        answer = process.connection.recv()
    except EOFError:
        raise UsageError(
            "placement: the solver's process was ended, must end by itself; free memory, or take algorithm greedy"
        ) from None
    finally:
        process.end()
    if isinstance(answer, WorkFailure):
        raise answer.error
    chosen: tuple[int, ...] = answer
    return chosen


class _Program:
    """The rows and columns of the program. A row: coefficients by column, at least a number."""

    def __init__(self, model: PlacementModel) -> None:
        self.model = model
        self.devices = range(len(model.capacity_bytes_D))
        self.rows: list[tuple[dict[int, float], float]] = []
        self.upper: list[float] = []
        longest = int(model.task_ns_TD.max(axis=1).sum() + model.update_ns_UD.max(axis=1).sum())
        longest += sum(int(edge.between_ns_DD.max()) for edge in model.edges)
        self.scale = HORIZON / max(longest, 1)
        self.on = [[self._column(1.0) for _ in self.devices] for _ in range(model.units)]
        self.binaries = len(self.upper)
        self.begin = [self._column(HORIZON) for _ in model.unit_T]
        self.makespan = self._column(HORIZON)
        self.both = {
            pair: [[self._column(1.0) for _ in self.devices] for _ in self.devices]
            for pair in itertools.combinations(range(model.units), 2)
        }
        self._places()
        self._messages()
        self._devices_in_turn()
        self._ends()

    def _column(self, upper: float) -> int:
        self.upper.append(upper)
        return len(self.upper) - 1

    def _at_least(self, terms: Sequence[tuple[int, float]], bound: float) -> None:
        row: dict[int, float] = {}
        for column, coefficient in terms:
            row[column] = row.get(column, 0.0) + coefficient
        self.rows.append((row, bound))

    def _equal(self, terms: Sequence[tuple[int, float]], bound: float) -> None:
        self._at_least(terms, bound)
        self._at_least([(column, -coefficient) for column, coefficient in terms], -bound)

    def _together(self, one: int, other: int) -> list[tuple[int, int, int]]:
        """Return the columns of two units on each pair of devices, with the devices."""
        table = self.both[min(one, other), max(one, other)]
        return [
            (table[here][there] if one < other else table[there][here], here, there)
            for here in self.devices
            for there in self.devices
        ]

    def _duration(self, task: int) -> list[tuple[int, float]]:
        unit = self.model.unit_T[task]
        return [
            (self.on[unit][device], self.scale * float(self.model.task_ns_TD[task, device]))
            for device in self.devices
        ]

    def _after(self, task: int, before: int) -> list[tuple[int, float]]:
        """Return the terms of how long after the end of one task another begins."""
        ended = [(column, -taken) for column, taken in self._duration(before)]
        return [(self.begin[task], 1.0), (self.begin[before], -1.0), *ended]

    def _places(self) -> None:
        model = self.model
        for columns in self.on:
            self._equal([(column, 1.0) for column in columns], 1.0)
        for (one, other), table in self.both.items():
            for device in self.devices:
                here = [(table[device][there], 1.0) for there in self.devices]
                self._equal([*here, (self.on[one][device], -1.0)], 0.0)
                there = [(table[here][device], 1.0) for here in self.devices]
                self._equal([*there, (self.on[other][device], -1.0)], 0.0)
        for device in self.devices:
            # In parts of the capacity, which is of any size.
            share = model.kept_bytes_U / max(int(model.capacity_bytes_D[device]), 1)
            if share.sum() > 1:
                terms = [(self.on[unit][device], -float(share[unit])) for unit in range(model.units)]
                self._at_least(terms, -1.0)

    def _messages(self) -> None:
        unit_of = self.model.unit_T
        for edge in self.model.edges:
            travel = [
                (column, -self.scale * float(edge.between_ns_DD[here, there]))
                for column, here, there in self._together(unit_of[edge.source], unit_of[edge.reader])
                if here != there
            ]
            self._at_least([*self._after(edge.reader, edge.source), *travel], 0.0)

    def _devices_in_turn(self) -> None:
        """A task begins after the ends of those before it on its device; of each unit the last before it is enough."""
        last: dict[int, int] = {}
        for task, unit in enumerate(self.model.unit_T):
            for other, before in last.items():
                terms = self._after(task, before)
                if other == unit:
                    self._at_least(terms, 0.0)
                    continue
                same = [
                    (column, -HORIZON) for column, here, there in self._together(unit, other) if here == there
                ]
                self._at_least([*terms, *same], -HORIZON)
            last[unit] = task

    def _ends(self) -> None:
        model = self.model
        update = self.scale * model.update_ns_UD.astype(np.float64)
        ends = {unit: task for task, unit in enumerate(model.unit_T)}
        for unit, task in ends.items():
            # The unit's own update, and those of the units on its device.
            terms = [(self.makespan, 1.0), (self.begin[task], -1.0)]
            terms += [(column, -taken) for column, taken in self._duration(task)]
            terms += [(self.on[unit][device], -float(update[unit, device])) for device in self.devices]
            for other in range(model.units):
                if other != unit:
                    terms += [
                        (column, -float(update[other, here]))
                        for column, here, there in self._together(unit, other)
                        if here == there
                    ]
            self._at_least(terms, 0.0)
        # Implied, but a better bound: what a device does takes as long as it takes.
        for device in self.devices:
            terms = [(self.makespan, 1.0)]
            for task, unit in enumerate(model.unit_T):
                terms.append((self.on[unit][device], -self.scale * float(model.task_ns_TD[task, device])))
            terms += [(self.on[unit][device], -float(update[unit, device])) for unit in range(model.units)]
            self._at_least(terms, 0.0)

    def solve(self, highspy: Any) -> tuple[int, ...]:
        """Return the device of each unit.

        Raises:
            UsageError: the solver does not end.
            StrategyError: no placement fits the devices' memories.
        """
        columns, rows = len(self.upper), len(self.rows)
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = columns, rows
        program.col_cost_ = np.eye(1, columns, self.makespan)[0]
        program.col_lower_, program.col_upper_ = np.zeros(columns), np.array(self.upper)
        program.row_lower_ = np.array([bound for _, bound in self.rows])
        program.row_upper_ = np.full(rows, highspy.kHighsInf)
        program.integrality_ = [highspy.HighsVarType.kInteger] * self.binaries + [
            highspy.HighsVarType.kContinuous
        ] * (columns - self.binaries)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.cumsum([0, *(len(row) for row, _ in self.rows)])
        program.a_matrix_.index_ = np.array([column for row, _ in self.rows for column in row])
        program.a_matrix_.value_ = np.array([value for row, _ in self.rows for value in row.values()])
        solver = highspy.Highs()
        for option, value in {
            "output_flag": False,
            "threads": 1,
            "random_seed": 0,
            "mip_rel_gap": 0.0,
            "mip_abs_gap": 1e-9,
            "mip_feasibility_tolerance": 1e-9,
            "primal_feasibility_tolerance": 1e-9,
            "mip_max_nodes": MOST_NODES,
        }.items():
            solver.setOptionValue(option, value)
        solver.passModel(program)
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            raise StrategyError(
                "placement: no placement of whole operators fits the devices' memories, must fit; take more devices, a "
                "smaller batch or algorithm mcmc"
            )
        if status != highspy.HighsModelStatus.kOptimal:
            raise UsageError(
                f"placement: the solver proved nothing in {MOST_NODES} nodes, must end; take fewer devices or "
                "algorithm greedy"
            )
        values = solver.getSolution().col_value
        return tuple(max(self.devices, key=lambda device: values[columns[device]]) for columns in self.on)


def _algorithm(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    began = time.monotonic()
    placement = place(placement_model(problem))
    cost = simulated(problem, placement.strategy, context.options.order)
    return AlgorithmResult(
        "placement",
        placement.strategy,
        cost.seconds,
        proposals=1,
        accepted=1,
        seconds=time.monotonic() - began,
        proven=f"the least makespan ({placement.makespan_ns / 1e6:.3f} ms) of whole operators, without contention",
    )


ALGORITHMS: Mapping[str, Algorithm] = {"placement": _algorithm}
