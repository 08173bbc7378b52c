"""Strategies by the names that users give them: a baseline, `best`, a file, an id or a digest."""

from __future__ import annotations

import os
import re
from math import prod
from pathlib import Path

from app.db.records import TASK_ORDERS, RankedStrategy, StrategySource
from app.db.store import Store
from app.services.predict.predict import Setting
from graph.errors import UsageError
from graph.schedule import Schedule
from graph.strategy import Strategy
from graph.texts import counted, shown

# Baselines that not every network has on any number of devices.
_OTHERS = (
    "operator-placement",
    "stanza",
    "hugectr-localized",
    "hugectr-distributed",
    "insightface",
    "zero",
    "fsdp",
)
_MADE = ("best", "data-parallel", "single-device", "expert", *_OTHERS)
_MADE_PREFIXES = ("megatron", "mesh-", "3d-")
# Data x tensor x pipeline degree, then the schedule, of interleaved the stages a group, and ZeRO-2.
_THREE_D = re.compile(
    r"3d-([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,5})"
    rf"(-{Schedule.GPIPE}|-{Schedule.ZERO_BUBBLE}|-{Schedule.INTERLEAVED}-[1-9]\d{{0,5}})?(-zero)?",
    re.ASCII,
)


def follows_graph(reference: str) -> bool:
    """Return whether a name means a strategy that is made for the graph, whatever it is of, or its best stored one."""
    return reference in _MADE or reference.startswith(_MADE_PREFIXES)


def check_name(reference: str) -> None:
    """Refuse a name of 3-D parallelism that there is of no network, before anything is imported.

    Raises:
        UsageError: it is none.
    """
    if reference.startswith("3d-") and not _THREE_D.fullmatch(reference):
        raise UsageError(
            f"strategy {shown(reference)}: is no 3-D parallelism, must be 3d- with the degrees of data, tensor and "
            "pipeline parallelism, as in 3d-2x1x4, then -gpipe, -zero-bubble or -interleaved-2 but for 1f1b, then "
            "perhaps -zero; correct it"
        )


def _check_degrees(reference: str, count: int) -> None:
    degrees = _THREE_D.fullmatch(reference)
    if degrees is not None and (taken := prod(map(int, degrees.groups()[:3]))) != count:
        raise UsageError(
            f"strategy {reference}: is for {counted(taken, 'device')}, must be for all {count}; choose other degrees"
        )


def _best(store: Store, setting: Setting) -> RankedStrategy | None:
    """Return the stored strategy of the lowest prediction: in the runtime's own order, else in another."""
    for order in TASK_ORDERS:
        ranked = store.best_strategy(
            setting.graph_id, setting.topology_id, setting.training_id, task_order=order
        )
        if ranked is not None:
            return ranked
    return None


def _tensor_degree(reference: str, count: int) -> int:
    """Return the tensor-parallel degree that `megatron-N` names; all devices where it names none.

    Raises:
        UsageError: it does not divide the number of devices.
    """
    _, _, degree_text = reference.partition("-")
    degree = int(degree_text) if degree_text.isdecimal() else 0
    if not degree_text and reference == "megatron":
        degree = count
    if degree < 1 or count % degree:
        divisors = ", ".join(str(divisor) for divisor in range(1, count + 1) if count % divisor == 0)
        raise UsageError(
            f"strategy {reference}: has tensor-parallel degree {degree_text or 'none'}, must be one that divides "
            f"{count} devices: {divisors}; name it as in megatron-{count}"
        )
    return degree


_SOURCES: tuple[StrategySource, ...] = (
    "data-parallel",
    "single-device",
    "expert",
    "operator-placement",
    "stanza",
    "hugectr",
    "insightface",
    "zero",
    "fsdp",
    "megatron",
    "mesh",
)


def source_of(baseline: str) -> StrategySource:
    """Return the source under which a baseline is stored: megatron-4, megatron-8 and 3d-2x2x2 are all of megatron."""
    if baseline.startswith("3d-"):
        return "megatron"
    return next(source for source in _SOURCES if baseline == source or baseline.startswith(f"{source}-"))


def _other_baseline(setting: Setting, reference: str) -> tuple[Strategy, StrategySource]:
    """Return a baseline that not every network and number of devices has, 3-D parallelism (`3d-2x2x2`) among them.

    Raises:
        UsageError: this network has none of that name on so many devices.
    """
    from app.services.predict.problem import problem_of
    from search.algorithms.staging import pipeline_baselines
    from search.space.baselines import named_baselines

    graph, count = setting.model.graph, len(setting.topology.devices)
    _check_degrees(reference, count)  # before costs are measured
    of_kind = (
        pipeline_baselines(problem_of(setting))
        if reference.startswith("3d-")
        else named_baselines(graph, count)
    )
    named = {baseline.name: baseline.strategy for baseline in of_kind}
    if reference not in named:
        raise UsageError(
            f"strategy {reference}: is none of {graph.name} on {count} devices, must be one of {', '.join(named)}; "
            "choose another"
        )
    return named[reference], source_of(reference)


def named_strategy(store: Store, setting: Setting, reference: str) -> tuple[Strategy, StrategySource]:
    """Return the strategy of a user's reference: a baseline's name, `best`, a file, an id or a digest.

    `megatron-4` is tensor parallel on 4 devices, and data parallel over the rest; `3d-2x2x2` is data, tensor and
    pipeline parallel, in stages that are balanced by the setting's costs.

    Raises:
        UsageError: nothing is stored under that name.
        StrategyError: the file's or the row's strategy does not fit the graph or the devices.
    """
    from app.services.stored import strategy_of
    from graph.strategy import read_strategy
    from search.space import baselines

    graph, count = setting.model.graph, len(setting.topology.devices)
    if reference == "data-parallel":
        return baselines.data_parallel(graph, count), "data-parallel"
    if reference == "single-device":
        return baselines.single_device(graph), "single-device"
    if reference == "expert":
        return baselines.expert(graph, count), "expert"
    if reference == "megatron" or reference.startswith("megatron-"):
        degree = _tensor_degree(reference, count)
        return baselines.megatron(graph, degree, count // degree), "megatron"
    if reference in _OTHERS or reference.startswith(("mesh-", "3d-")):
        return _other_baseline(setting, reference)
    if reference == "best":
        ranked = _best(store, setting)
        if ranked is None:
            raise UsageError(
                f"strategy best: none is stored for {graph.name} on {setting.topology.name} at batch size "
                f"{setting.training.batch_size}, must be; run app search first"
            )
        record = ranked.strategy
    elif Path(reference).suffix == ".json" or os.path.isfile(reference):
        strategy = read_strategy(Path(reference), graph, count)
        return strategy.with_synchronization(strategy.synchronization), "import"
    else:
        record = store.strategy(reference)
    return strategy_of(record, graph, count), record.source
