"""Searches one cell, through the services of `app search`, and returns the results as a JSON document.

All of it is in the database as of any search: `app query` sees searches, strategies, simulations and proposals. What a
chain found by itself is asked of the proposals: a random start, or OptCNN's, is a search without a baseline. Where a
baseline that no chain began at is faster than what all of them found, a second search begins there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from app.services.progress import Progress
from app.services.search.report import Prediction, SearchReport
from app.services.search.request import SearchRequest
from graph.errors import StrategyError, UsageError
from scripts.studies import experts
from scripts.studies.cells import RECURRENT, STARTS, StudyCell

BETA = 300.0
FORMAT = 1
BEST_BASELINE = "best baseline"

CHAIN_BESTS = """
SELECT chain, min(simulated_ns) FILTER (simulated_ns > 0) / 1e9 AS best_s
FROM proposals WHERE search = {search} GROUP BY chain ORDER BY chain
"""

Document = dict[str, Any]


def run_cell(cell: StudyCell, database: str, progress: Progress) -> Document | None:
    """Search a cell; return its document, or None where it was interrupted: begun again, it has the same result.

    A network that nothing fits has the reason as its `failure`.

    Raises:
        SoapstoneError: a name or number that cannot be used.
        KeyboardInterrupt: it was interrupted before anything was found.
    """
    from app.services.search.search import run_search

    expert = _predicted_expert(cell, database, progress)
    starts = () if expert is None else (expert["digest"],)
    document: Document = {"format": FORMAT, "cell": cell.to_json(), "failure": None, "optcnn_failure": None}
    try:
        report = run_search(_request(cell, cell.algorithms, starts), database, progress)
    except UsageError as error:
        if not str(error).startswith("optcnn:"):
            raise
        document["optcnn_failure"] = str(error)
        report = run_search(_request(cell, "mcmc", starts), database, progress)
    except StrategyError as error:
        return {**document, "failure": str(error)}
    if report.interrupted:
        return None
    document |= _found(cell, report, expert, database)
    start = _ahead_of_the_walk(report)
    if start is None:
        return document
    again = run_search(_request(cell, "mcmc", (start.digest,), again=True), database, progress)
    return None if again.interrupted else {**document, **_improved(document, again, database)}


def _request(
    cell: StudyCell, algorithms: str, starts: tuple[str, ...], *, again: bool = False
) -> SearchRequest:
    """Return the request of a cell's search; `again`: of the one from the best baseline, with a chain's budget."""
    from app.services.models.models import requested_model

    # Fresh: a result must not depend on what was searched before.
    return SearchRequest(
        model=requested_model(cell.network, cell.preset, cell.batch_size),
        topology=cell.topology,
        devices=cell.devices,
        nodes=None,
        processor=None,
        optimizer="sgd",
        batch_norm="synchronized",
        proposals=cell.proposals // cell.chains if again else cell.proposals,
        chains=1 if again else cell.chains,
        seed=cell.seed,
        beta=BETA,
        order="program",
        time_limit_s=None,
        on_miss="estimate",
        fresh=not starts,
        starts=starts,
        algorithm=algorithms,
        compare_baselines=not again,
        # The study has processes of its own.
        workers=1,
    )


def _ahead_of_the_walk(report: SearchReport) -> Prediction | None:
    """Return the best baseline where it is faster than all algorithms' results: a start that they did not have."""
    times_s = [algorithm.step_time_s for algorithm in report.algorithms if algorithm.step_time_s is not None]
    best = report.best_baseline
    return best if best.feasible and best.step_time_s < min(times_s, default=float("inf")) else None


def _improved(document: Document, again: SearchReport, database: str) -> Document:
    """Return the changed entries of a document after the search from the best baseline."""
    strategies = dict(document["strategies"])
    if again.best.step_time_s < strategies["found"]["step_time_s"]:
        strategies["found"] = _stored(again.best)
        _add_compute(strategies, database)
    found_s = strategies["found"]["step_time_s"]
    chains = _chains(again, ["data-parallel", BEST_BASELINE], database)
    return {
        "strategies": strategies,
        "again": again.search_id,
        "chains": [*document["chains"], *chains],
        "proposals": document["proposals"] + again.proposals,
        "search_s": document["search_s"] + again.seconds,
        "gap": found_s / document["lower_bound_s"] - 1 if document["lower_bound_s"] else None,
    }


def _predicted_expert(cell: StudyCell, database: str, progress: Progress) -> Document | None:
    """Store and predict the experts' strategy of a recurrent network, so that a chain can start from it."""
    if cell.network not in RECURRENT or cell.devices == 1:
        return None
    from app.db.store import Store
    from app.services.models.models import import_graph
    from app.services.predict.predict import find_target, predict, prepare
    from graph.training import Training

    request = _request(cell, cell.algorithms, ())
    model = import_graph(request.model, batch_norm=request.batch_norm)
    training = Training(model.batch_size, "float32", request.optimizer, request.batch_norm)
    with Store.open(database) as store:
        target = find_target(store, cell.topology, progress, devices=cell.devices)
        with prepare(store, model, target, training, "estimate", progress) as setting:
            strategy = experts.by_depth(model.graph, target.topology)
            strategy_id, simulation = predict(store, setting, strategy, "expert")
    return {
        "digest": strategy.digest,
        "strategy": strategy_id,
        "step_time_s": simulation.step_time_s,
        "bytes_moved": simulation.bytes_moved,
        "compute_s": sum(simulation.compute_s),
        "peak_bytes": max(simulation.peak_memory_bytes),
        "feasible": simulation.feasible,
    }


def _stored(prediction: Prediction) -> Document:
    return {
        "digest": prediction.digest,
        "strategy": prediction.strategy_id,
        "step_time_s": prediction.step_time_s,
        "bytes_moved": prediction.bytes_moved,
        "peak_bytes": max(prediction.peak_memory_bytes),
        "feasible": prediction.feasible,
    }


def _found(cell: StudyCell, report: SearchReport, expert: Document | None, database: str) -> Document:
    strategies: Document = {} if expert is None else {experts.NAME: expert}
    for entry in report.predictions:
        strategies[entry.name] = _stored(entry)
    _add_compute(strategies, database)
    optcnn = next((entry for entry in report.algorithms if entry.name == "optcnn"), None)
    walk = report.algorithms[-1]
    starts = [*STARTS[: cell.chains], *[experts.NAME] * len(report.starts), *(["optcnn"] if optcnn else [])]
    return {
        "search": report.search_id,
        "strategies": strategies,
        "optcnn": None if optcnn is None else asdict(optcnn),
        "chains": _chains(report, starts, database),
        "proposals": walk.proposals,
        "search_s": report.seconds,
        "walk_s": walk.seconds,
        "lower_bound_s": report.bound.seconds if report.bound is not None else None,
        "lower_bound_by": report.bound.kind if report.bound is not None else None,
        "lower_bound_whole": report.bound.whole if report.bound is not None else None,
        "gap": report.gap,
    }


def _add_compute(strategies: Document, database: str) -> None:
    """Add the seconds that all devices together compute, which a report leaves out."""
    from app.db.store import Store

    with Store.open(database) as store:
        for stored in strategies.values():
            # A strategy may have been predicted for another topology too; its step takes another time there.
            for simulation in store.simulations(strategy_id=stored["strategy"]):
                if simulation.step_time_s == stored["step_time_s"]:
                    stored["compute_s"] = simulation.compute_s


def _chains(report: SearchReport, starts: Sequence[str], database: str) -> list[Document]:
    """Return where every chain of the walk began, and the best that it simulated; None where nothing fitted."""
    from app import open_database

    with open_database(database) as stored:
        rows = stored.sql(CHAIN_BESTS.format(search=report.search_id)).fetchall()
    return [{"start": starts[chain], "best_s": best_s} for chain, best_s in rows]
