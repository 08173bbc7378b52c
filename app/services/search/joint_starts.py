"""Stored strategies, with substitutions or without, as starts of a joint search of `app search --algorithm unity`.

Those that --start names; else the fastest that are stored for the same topology and training of graphs that the moves
of the search make.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.db.records import StrategyRecord, TaskOrder
from app.db.store import Store
from app.services.models.models import ImportedModel, rewritten_model
from app.services.predict.predict import Setting
from app.services.search.start_strategies import MOST, StartStrategy, misfit, start_of
from app.services.search.substitution_moves import OfferedMoves, rewriting_of, substitutions_of
from graph.errors import StrategyError, UsageError
from graph.substitutions.rewriting import needs_compiler
from graph.substitutions.substitution import Substitution, substitutions_from_json
from graph.texts import counted
from search.algorithms.joint import JointStart
from search.algorithms.rewritings import Rewriting
from search.space.strategy_transfer import adapt


@dataclass(frozen=True, slots=True)
class StoredStart:
    """A start as it is stored, and the rewriting that makes its graph."""

    record: StrategyRecord
    rewriting: Rewriting


def given_joint_starts(
    store: Store, model: ImportedModel, moves: OfferedMoves, references: Sequence[str]
) -> list[StoredStart]:
    """Return the strategies of these ids or digests, which --start gives.

    Raises:
        UsageError: there is no such strategy, its substitutions are not those of moves, or it is for another network.
    """
    starts: dict[str, StoredStart] = {}
    name = model.graph.name
    for reference in references:
        record = store.strategy(reference)
        count = record.device_count
        rewriting, others = rewriting_of(moves, _substitutions(record))
        if others:
            remedy = "add --fuse" if needs_compiler(others) else f"see app models show {name} --substitutions"
            raise UsageError(
                f"--start {reference}: has the substitution {others[0].text}, must have those that this search offers, "
                f"each with all whose calls are the same; {remedy}, name another strategy, or leave it out"
            )
        try:
            adapt(json.loads(record.document), count, _made(model, moves, rewriting).graph, count)
        except StrategyError as error:
            raise misfit(store, name, reference, record, error) from None
        starts[record.digest] = StoredStart(record, rewriting)
    return list(starts.values())


def known_joint_starts(
    store: Store, setting: Setting, moves: OfferedMoves, order: TaskOrder
) -> list[StoredStart]:
    """Return the best strategies stored for the setting's topology and training, of graphs with substitutions.

    Baselines among them: a search begins with those of the graph as imported alone.
    """
    found = []
    for other in store.searched_settings(setting.model.graph.name, baselines=True):
        same = (other.topology_id, other.training_id) == (setting.topology_id, setting.training_id)
        if same and other.graph_id != setting.graph_id:
            found += store.best_strategies(
                other.graph_id, setting.topology_id, setting.training_id, task_order=order, limit=MOST
            )
    found.sort(key=lambda stored: (stored.simulation.step_time_s, stored.strategy.digest))
    starts: list[StoredStart] = []
    for stored in found:
        record = stored.strategy
        rewriting, others = rewriting_of(moves, _substitutions(record))
        if rewriting and not others and len(starts) < MOST:
            # Networks of one name may be of several sizes, with the same substitutions.
            graph = store.graph_by_digest(_made(setting.model, moves, rewriting).graph.digest)
            if graph is not None and graph.id == record.graph_id:
                starts.append(StoredStart(record, rewriting))
    return starts


def joint_start(
    store: Store, setting: Setting, moves: OfferedMoves, start: StoredStart
) -> tuple[StartStrategy, JointStart]:
    """Return a stored start as it is used: transferred, if it is for another setting."""
    model = _made(setting.model, moves, start.rewriting)
    graph = store.graph_by_digest(model.graph.digest)
    used = start_of(replace(setting, model=model, graph_id=0 if graph is None else graph.id), start.record)
    if count := len(substitutions_of(moves, start.rewriting)):
        used = replace(used, found_for=f"{used.found_for} with {counted(count, 'substitution')}")
    return used, JointStart(f"known {used.digest[:12]}", start.rewriting, used.strategy)


def _substitutions(record: StrategyRecord) -> tuple[Substitution, ...]:
    return substitutions_from_json(json.loads(record.document).get("substitutions", []))


def _made(model: ImportedModel, moves: OfferedMoves, rewriting: Rewriting) -> ImportedModel:
    """Return the model of a rewriting."""
    return rewritten_model(model, substitutions_of(moves, rewriting)) if rewriting else model
