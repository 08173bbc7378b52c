"""From results to the study's tables: pure functions, whose rows are numbers; `scripts.studies.show` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.benchmarks.result import Row
from scripts.studies.cells import CLUSTERS, K80, PAPER_NETWORKS, StudyCell, batch_of
from scripts.studies.paper import NMT_TRANSFERS, REPORTED
from scripts.studies.results import FOUND, StudyResult

# A gain that is told apart from none.
AHEAD = 1.0005
# A gap that leaves nothing worth looking for.
SMALL_GAP = 0.05


@dataclass(frozen=True, slots=True)
class StudyTable:
    """Rows of equal columns. formats: how a column's numbers are written, as of `format`."""

    name: str
    title: str
    rows: tuple[Row, ...]
    formats: dict[str, str] = field(default_factory=dict)


def ratio(slower: float | None, faster: float | None) -> float | None:
    """Return how many times as fast a step of `faster` seconds is as one of `slower`; None where one is not known."""
    return None if slower is None or faster is None else slower / faster


def is_weak(cell: StudyCell) -> bool:
    """Return whether every device has the published batch, as in the study's cells."""
    return cell.batch_size == cell.devices * batch_of(cell.network, cell.preset)


def throughput_table(results: Sequence[StudyResult]) -> StudyTable:
    """Return one row a cell of the study: samples a second of every strategy, and the speedups of the found one."""
    rows: list[Row] = []
    for result in results:
        found_s = result.time_s(FOUND)
        rows.append(
            {
                "network": result.cell.network,
                "cluster": result.cell.topology,
                "devices": result.cell.devices,
                "data parallel /s": result.throughput("data-parallel"),
                "expert /s": result.throughput(result.expert),
                "OptCNN /s": result.throughput("optcnn"),
                "best baseline": result.best_baseline,
                "found /s": result.throughput(FOUND),
                "over data parallel": ratio(result.time_s("data-parallel"), found_s),
                "over expert": ratio(result.time_s(result.expert), found_s),
                "over OptCNN": ratio(result.time_s("optcnn"), found_s),
                "over best baseline": ratio(_best_s(result), found_s),
                "gap %": _scaled(result.document.get("gap"), 100),
                "search s": result.document.get("search_s"),
                "proposals": result.document.get("proposals"),
            }
        )
    speedups = dict.fromkeys(
        ("over data parallel", "over expert", "over OptCNN", "over best baseline"), ".2f"
    )
    rates = dict.fromkeys(("data parallel /s", "expert /s", "OptCNN /s", "found /s"), ",.0f")
    return StudyTable(
        "throughput",
        "Samples a second, each device with the published batch",
        tuple(rows),
        {**rates, **speedups, "gap %": ".1f", "search s": ".1f", "proposals": ",d"},
    )


def paper_table(results: Sequence[StudyResult]) -> StudyTable:
    """Return one row a range of the paper: our speedup with the batch read as of each device, and as of all."""
    by_place = {
        (is_weak(result.cell), result.cell.network, result.cell.topology, result.cell.devices): result
        for result in results
    }
    rows: list[Row] = []
    for reported in REPORTED:
        row: Row = {
            "network": reported.network,
            "cluster": reported.topology,
            "devices": reported.devices,
            "over": reported.over,
            "paper": f"{reported.low:g} to {reported.high:g}",
        }
        for name, weak in (("batch each", True), ("batch in all", False)):
            result = by_place.get((weak, reported.network, reported.topology, reported.devices))
            speedup = None
            if result is not None:
                over = result.expert if reported.over == "expert" else reported.over
                speedup = ratio(result.time_s(over), result.time_s(FOUND))
            row[name] = speedup
            row[f"{name}:"] = None if speedup is None else reported.verdict(speedup)
        if row["batch each"] is not None or row["batch in all"] is not None:
            rows.append(row)
    return StudyTable(
        "paper",
        "Speedups beside the paper's ranges; the published batch for each device, and for all devices together",
        tuple(rows),
        {"batch each": ".2f", "batch in all": ".2f"},
    )


def step_table(results: Sequence[StudyResult]) -> StudyTable:
    """Return the parts of steps on the clusters' full sizes: computing of a mean device, and transfers."""
    ends = {(topology, counts[-1]) for topology, counts in CLUSTERS.items()}
    rows: list[Row] = []
    for result in results:
        cell = result.cell
        if (cell.topology, cell.devices) not in ends:
            continue
        row: Row = {
            "network": cell.network,
            "cluster": cell.topology,
            "devices": cell.devices,
            "batch": cell.batch_size,
        }
        for name, short in (("data-parallel", "data parallel"), (result.expert, "expert"), (FOUND, "found")):
            stored = result.strategy(name) or {}
            row |= {
                f"{short} ms": _scaled(stored.get("step_time_s"), 1e3),
                f"{short}: computing ms": _scaled(stored.get("compute_s"), 1e3 / cell.devices),
                f"{short}: GB": _scaled(stored.get("bytes_moved"), 1e-9),
            }
        rows.append(row)
    formats = {name: ",.1f" for row in rows for name in row if name.endswith(("ms", "GB"))}
    return StudyTable("steps", "What makes up a step on the whole clusters", tuple(rows), formats)


def transfer_table(results: Sequence[StudyResult]) -> StudyTable:
    """Return NMT's transfers and computing on 64 K80 beside the paper's, for both readings of the batch."""
    rows: list[Row] = []
    for result in results:
        cell = result.cell
        if (cell.network, cell.topology, cell.devices) != ("nmt", K80, 64):
            continue
        for name, (paper_bytes, paper_s) in NMT_TRANSFERS.items():
            stored = result.strategy(result.expert if name == "expert" else name)
            if stored is None:
                continue
            rows.append(
                {
                    "strategy": name,
                    "batch": cell.batch_size,
                    "step ms": stored["step_time_s"] * 1e3,
                    "transfers GB": stored["bytes_moved"] / 1e9,
                    "paper GB": paper_bytes / 1e9,
                    "computing s": stored.get("compute_s"),
                    "paper s": paper_s,
                }
            )
    formats = {"step ms": ".1f", "transfers GB": ".1f", "computing s": ".1f"}
    return StudyTable(
        "transfers", "NMT on 64 K80: what one step transfers and computes", tuple(rows), formats
    )


def zoo_table(results: Sequence[StudyResult]) -> StudyTable:
    """Return one row a cell of the zoo: found with and without baselines among the starts, best baseline, bound."""
    rows: list[Row] = []
    for result in results:
        baseline_s = _best_s(result)
        found_s = result.time_s(FOUND)
        without_s = result.chain_best_s("random", "optcnn")
        rows.append(
            {
                "network": result.cell.network,
                "cluster": result.cell.topology,
                "devices": result.cell.devices,
                "batch": result.cell.batch_size,
                "best baseline": result.best_baseline,
                "ms": _scaled(baseline_s, 1e3),
                "found ms": _scaled(found_s, 1e3),
                "gain": ratio(baseline_s, found_s),
                "without baselines ms": _scaled(without_s, 1e3),
                "its gain": ratio(baseline_s, without_s),
                "random starts ms": _scaled(result.chain_best_s("random"), 1e3),
                "bound ms": _scaled(result.document.get("lower_bound_s"), 1e3),
                "gap %": _scaled(result.document.get("gap"), 100),
                "why": why(result),
            }
        )
    times = dict.fromkeys(("ms", "found ms", "without baselines ms", "random starts ms", "bound ms"), ",.1f")
    return StudyTable(
        "zoo",
        "The zoo against its baselines, the published batch for all devices together",
        tuple(rows),
        {**times, "gain": ".3f", "its gain": ".3f", "gap %": ".1f"},
    )


def why(result: StudyResult) -> str:
    """Return the verdict of a zoo's row in a few words: ahead, or the reason why not."""
    if result.failure is not None:
        return "nothing fits the memory"
    gain = ratio(_best_s(result), result.time_s(FOUND))
    if gain is None:
        return "ahead: no baseline fits"
    ahead = gain >= AHEAD
    alone = ratio(_best_s(result), result.chain_best_s("random", "optcnn"))
    if ahead:
        return (
            "ahead, also without" if alone is not None and alone >= AHEAD else "ahead, with baselines alone"
        )
    gap = result.document.get("gap")
    if gap is not None and gap <= SMALL_GAP:
        return f"none can be ahead by over {gap * 100:.1f} %"
    return f"none found in {result.document['proposals']:,} proposals"


def summary(results: Sequence[StudyResult]) -> dict[str, int]:
    """Return how many cells of the zoo came out how."""
    texts = [why(result) for result in results]
    counts = {"cells": len(texts)}
    return counts | {
        name: sum(text.startswith(beginning) for text in texts)
        for name, beginning in (
            ("ahead", "ahead"),
            ("ahead without baselines", "ahead, also without"),
            ("none can be", "none can"),
            ("not ahead", "none found"),
            ("nothing fits", "nothing"),
        )
    }


def study_tables(results: Sequence[StudyResult]) -> list[StudyTable]:
    """Return the tables of the paper's networks that have rows."""
    ours = [result for result in results if result.cell.network in PAPER_NETWORKS]
    weak = [result for result in ours if is_weak(result.cell)]
    tables = [throughput_table(weak), paper_table(ours), step_table(ours), transfer_table(ours)]
    return [table for table in tables if table.rows]


def _best_s(result: StudyResult) -> float | None:
    name = result.best_baseline
    return None if name is None else result.time_s(name)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
