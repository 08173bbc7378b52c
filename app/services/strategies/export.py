"""`app strategy export`: a stored strategy as a file, for Soapstone or for PyTorch alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.db.failures import as_written
from app.db.records import GraphRecord, StrategyRecord
from app.db.references import required
from app.db.store import Store
from app.services.files import checked_target, replacing
from app.services.models.models import (
    ModelRequest,
    batch_size_of,
    build_and_import,
    build_model,
    graph_keywords,
    stored_request,
)
from app.services.stored import strategy_of
from graph.errors import RuntimeFailure, StrategyError, UsageError
from graph.schedule import micro_batches_from_json
from graph.texts import one_of

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from runtime.dtensor.writer import PlanOrigin

FORMATS = ("json", "dtensor", "pipelining")
PLANS = {"dtensor": "DTensor plan", "pipelining": "pipeline"}
"""Formats that are Python files, with what their files have."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A strategy that was written to a file; `checked` is the last line of its plan's own check, None without one.

    processes: as many as the file's check takes.
    micro_batches: their number and schedule, as in the file; empty where the step goes through its batch at once.
    """

    strategy: StrategyRecord
    checked: str | None = None
    processes: int = 1
    micro_batches: Mapping[str, Any] = field(default_factory=dict)


def export_strategy(
    database: str | None, reference: str, file: Path, file_format: str, *, check: bool = False
) -> Exported:
    """Write a stored strategy to `file`; nothing is written where that cannot be done.

    Args:
        database: where strategies are stored; None: the default.
        reference: a strategy's id or digest.
        file: to write.
        file_format: "json" (what `app run` reads) "dtensor" or "pipelining" (Python files: `runtime.dtensor`,
            `runtime.pipelining`).
        check: run the Python file first, on as many gloo processes as the strategy has devices.

    Raises:
        UsageError: no such strategy or format, or the file cannot be written.
        StrategyError: no mesh or pipeline expresses the strategy, or PyTorch does not run its plan.
        RuntimeFailure: the plan's results differ from the plain module's.
        ImportFailure: the strategy's model cannot be imported any more.
    """
    one_of(FORMATS, file_format, "--format")
    if check and file_format not in PLANS:
        raise UsageError(
            "--check: runs a file of --format dtensor or pipelining, must be given with one; add --format dtensor"
        )
    with Store.open(database, to_read=True) as store:
        target = checked_target(file, store.database, "file")
        record = store.strategy(reference)
        graph = required(store.graph(record.graph_id), "graphs", record.graph_id)
    document = json.loads(record.document)
    checked, processes = None, record.device_count
    if file_format == "json":
        text = json.dumps(_in_order(document, graph), indent=1) + "\n"
    else:
        text, processes = _plan_text(record, graph, file_format)
        if check:
            checked = _checked(record, text, PLANS[file_format], processes)
    with replacing(target, "file") as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Exported(record, checked, processes, document.get("micro_batches", {}))


def _checked(record: StrategyRecord, source: str, plan: str, processes: int) -> str:
    """Run a plan's own check on gloo processes and return its last line."""
    from runtime.dtensor.plan_check import check_plan
    from runtime.launch.torchrun import DEFAULT_TIMEOUT_S

    plan_check = check_plan(source, processes, DEFAULT_TIMEOUT_S)
    where = f"strategy {record.digest[:12]}"
    if plan_check.failure:
        raise StrategyError(
            f"{where}: its {plan} does not run ({plan_check.failure}), must run on "
            f"{processes} processes; export it with --format json"
        )
    if not plan_check.equal:
        raise RuntimeFailure(
            f"{where}: its {plan} computes something else ({plan_check.summary}), must equal the plain module; "
            "export it with --format json"
        )
    return plan_check.summary


def _in_order(document: dict[str, Any], graph: GraphRecord) -> dict[str, Any]:
    """Return a strategy's document with operators and weights in the order of the graph, for human readers."""
    described = json.loads(graph.document)
    names = {
        "operators": [operator["name"] for operator in described["operators"]],
        "sharding": [value[0] for value in described["values"]],
    }
    orders = {key: {name: index for index, name in enumerate(of)} for key, of in names.items()}
    ordered = {
        key: dict(sorted(entries.items(), key=lambda entry: orders[key].get(entry[0], len(orders[key]))))
        if key in orders
        else entries
        for key, entries in document.items()
    }
    head = {key: ordered[key] for key in ("format", "graph") if key in ordered}
    return head | ordered


def _plan_text(record: StrategyRecord, graph_record: GraphRecord, file_format: str) -> tuple[str, int]:
    """Return the Python source of a strategy's DTensor plan or pipeline, and the number of its processes."""
    import torch

    from runtime.dtensor import writer as dtensor
    from runtime.dtensor.plan import make_plan
    from runtime.pipelining import writer as pipelining
    from runtime.pipelining.plan import make_stage_plan

    micro_batches = micro_batches_from_json(json.loads(record.document).get("micro_batches", {}))
    if file_format == "dtensor" and micro_batches.count > 1:
        raise StrategyError(
            f"strategy {record.digest[:12]}: goes through the batch in micro-batches, must go through it at once to be "
            "a DTensor plan; export it as a file of Soapstone or with --format pipelining, or export another one"
        )
    with as_written(f"table graphs, row {graph_record.id}, column model"):
        request = stored_request(graph_record.model, f"graph {graph_record.name}")
    if request.substitutions:
        raise StrategyError(
            f"strategy {record.digest[:12]}: is for a graph with substitutions, must be for the one imported, to be "
            "a plan of modules; export it with --format json"
        )
    batch_norm = json.loads(graph_record.document)["batch_norm"]
    built, graph = build_and_import(request, batch_norm)
    strategy = strategy_of(record, graph)
    # The graph's row may be of a search with other micro-batches: a plan is for one of its graph's.
    of_graph = graph_keywords(request)
    if file_format == "pipelining":
        size = batch_size_of(request) // request.micro_batches * micro_batches.count
        whole = {**of_graph, "batch_size": size}
        origin = _origin(request, whole, record, graph)
        with torch.device("meta"):
            built = build_model(**whole)
        stages = make_stage_plan(graph, strategy, built)
        return pipelining.source_text(stages, origin), stages.ranks
    for reason, present in (
        ("shares weights, must share none", strategy.sharding),
        ("makes activations again, must keep all", strategy.recomputation),
    ):
        if present:
            raise StrategyError(
                f"strategy {record.digest[:12]}: {reason} to be a DTensor plan; export it as a file of Soapstone, or "
                "export another one"
            )
    plan = make_plan(graph, strategy, *built)
    return dtensor.source_text(plan, _origin(request, of_graph, record, graph)), record.device_count


def _origin(
    request: ModelRequest, of_file: dict[str, Any], record: StrategyRecord, graph: OperatorGraph
) -> PlanOrigin:
    """Return how a file builds its module; of_file: the arguments of `build_model` for its batch."""
    from runtime.dtensor.writer import PlanOrigin

    size = of_file["batch_size"]
    keywords: dict[str, Any] = {} if size is None else {"batch_size": size}
    factory = request.name
    if request.is_zoo:
        factory = "graph.zoo:build"
        keywords = {"name": request.name, "preset": request.preset, **keywords}
    if request.precision != "float32":
        # It converts the module; a user's own is found on the path, as by its name alone.
        factory = "app.services.models.models:build_model"
        keywords = {**of_file, "folder": ""}
    return PlanOrigin(graph.name, record.digest, graph.digest, factory, keywords)
