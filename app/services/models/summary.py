"""`app models show`: a summary of an imported network."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from app.services.models.models import ImportedModel
from graph.axes import AxisKind


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """All operators of one type; `rule` says by which rule they split, "none" where they run whole for lack of one."""

    target: str
    count: int
    rule: str
    axes: str
    flops: float
    share: float


@dataclass(frozen=True, slots=True)
class AxisRow:
    """An axis along which an operator can be split into at most `size` parts; `kind` is that of SOAP."""

    name: str
    kind: str
    size: int | str


# Of an operator that runs whole.
NO_AXIS = AxisRow("-", "-", "-")


@dataclass(frozen=True, slots=True)
class OperatorAxes:
    """An operator of the graph by its name, and its axes as strategy files name them."""

    name: str
    target: str
    axes: tuple[AxisRow, ...]


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Operators, parameters, operations, and operators that cannot be split, with the reason.

    batch_size: of a step. All else is of one of its micro-batches.
    """

    name: str
    batch_size: int
    micro_batches: int
    operators: int
    groups: int
    parameters: int
    forward_flops: float
    splittable_share: float
    rows: tuple[OperatorRow, ...]
    unsplit: tuple[tuple[str, str], ...]
    axes: tuple[OperatorAxes, ...]

    def reasons(self) -> list[tuple[str, list[str]]]:
        """Return each reason why operators run unsplit, with the names of these operators."""
        named: dict[str, list[str]] = {}
        for name, reason in self.unsplit:
            named.setdefault(reason, []).append(name)
        return list(named.items())

    def to_json(self, *, axes: bool = False) -> dict[str, Any]:
        """Return the report as a JSON document; with the axes of every operator if asked."""
        return {
            **({"axes": [asdict(operator) for operator in self.axes]} if axes else {}),
            "name": self.name,
            "batch_size": self.batch_size,
            "micro_batches": self.micro_batches,
            "operators": self.operators,
            "groups": self.groups,
            "parameters": self.parameters,
            "forward_flops": self.forward_flops,
            "splittable_share": self.splittable_share,
            "types": [
                {
                    "target": row.target,
                    "count": row.count,
                    "rule": row.rule,
                    "axes": row.axes,
                    "flops": row.flops,
                }
                for row in self.rows
            ],
            "unsplit": dict(self.unsplit),
        }


def described(model: ImportedModel) -> ModelReport:
    """Return the summary of a network."""
    from graph.rules import flops, whole_call
    from graph.rules.registry import rule_name
    from search.space.groups import find_groups

    graph = model.graph
    counts: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    axes: dict[str, list[str]] = {}
    splittable = 0.0
    for operator in graph.operators:
        amount = flops(whole_call(graph, operator))
        counts[operator.target] += 1
        operations[operator.target] += int(amount)
        names = axes.setdefault(operator.target, [])
        real = [axis for axis in operator.space.axes if axis.kind is not AxisKind.REPLICA]
        names.extend(axis.name for axis in real if axis.name not in names)
        splittable += amount if real else 0.0
    total = float(sum(operations.values()))
    rows = [
        OperatorRow(
            target,
            count,
            rule_name(target),
            ", ".join(axes[target]) or "-",
            operations[target],
            operations[target] / (total or 1.0),
        )
        for target, count in counts.items()
    ]
    return ModelReport(
        name=graph.name,
        batch_size=model.batch_size,
        micro_batches=model.request.micro_batches,
        operators=len(graph.operators),
        groups=len(find_groups(graph)),
        parameters=sum(weight.spec.elements for weight in graph.weights),
        forward_flops=total,
        splittable_share=splittable / total if total else 1.0,
        rows=tuple(sorted(rows, key=lambda row: (-row.flops, row.target))),
        unsplit=graph.unsplit,
        axes=tuple(
            OperatorAxes(
                operator.name,
                operator.target,
                tuple(
                    AxisRow(axis.name, axis.kind.value, axis.size)
                    for axis in operator.space.axes
                    if axis.kind is not AxisKind.REPLICA
                ),
            )
            for operator in graph.operators
        ),
    )
