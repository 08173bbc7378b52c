"""Run the study: search the cells that are not finished, then print its tables. Exit code 2: a wrong option."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from graph.errors import SoapstoneError, UsageError
from scripts.studies import plots, show, tables
from scripts.studies.cells import CLUSTERS, TABLES, Request, StudyCell, cells, study_cells, unique, zoo_cells
from scripts.studies.results import FOUND, Folder, StudyResult
from scripts.studies.workers import DONE, FAILED, search_all

RESULTS = ".soapstone/study"
INTERRUPTED_CODE = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study and return the exit code."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept: the same command goes on", file=sys.stderr)
        return INTERRUPTED_CODE
    except SoapstoneError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/study",
        description="Search the networks of FlexFlow's paper on models of its clusters, and the zoo, against all "
        "baselines. What is finished is not searched again.",
    )
    parser.add_argument("--table", default="all", choices=(*TABLES, "all"), help="which part; default: all")
    parser.add_argument("--networks", help="of the zoo, joined by commas; default: those of the table")
    parser.add_argument("--devices", help="numbers joined by commas; default: those of the table")
    parser.add_argument("--budget", type=int, help="proposals a search; default: 3000 to 1500, by devices")
    parser.add_argument("--seed", type=int, default=0, help="of the searches; default: 0")
    parser.add_argument("--results", default=RESULTS, help=f"folder of what is finished; default: {RESULTS}")
    parser.add_argument("--database", help="URL or path; default: study.sqlite in the folder of results")
    parser.add_argument("--workers", type=int, default=2, help="processes; default: 2")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="begin no search after so long")
    parser.add_argument("--quick", action="store_true", help="a few small networks, few proposals")
    parser.add_argument("--show", action="store_true", help="search nothing, show what is finished")
    parser.add_argument("--json", action="store_true", help="print the tables' numbers as one JSON object")
    return parser


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _run(options: argparse.Namespace) -> int:
    request = _request(options)
    wanted = cells(request)
    folder = Folder(Path(options.results))
    database = _database(options.database, folder)
    missing = [cell for cell in wanted if folder.read(cell) is None]
    failed = 0
    if missing and not options.show:
        failed = _search(missing, wanted, folder, database, options)
    results = folder.finished(wanted)
    _report(results, request, folder, as_json=options.json, total=len(wanted))
    return 1 if failed else 0


def _request(options: argparse.Namespace) -> Request:
    if options.workers < 1:
        raise UsageError(f"--workers: is {options.workers}, must be at least 1; raise it")
    return Request(
        tables=TABLES if options.table == "all" else (options.table,),
        networks=None if options.networks is None else unique(options.networks.split(",")),
        devices=None if options.devices is None else _numbers(options.devices),
        budget=options.budget,
        seed=options.seed,
        quick=options.quick,
    )


def _numbers(text: str) -> tuple[int, ...]:
    words = unique(text.split(","))
    if not all(word.strip().isdecimal() for word in words):
        raise UsageError(f"--devices: is {text}, must be numbers joined by commas; correct it")
    return tuple(int(word) for word in words)


def _database(given: str | None, folder: Folder) -> str:
    """Return the database, made and up to date: two workers must not both make it."""
    from app.db.store import Store

    database = folder.database if given is None else given
    with Store.open(database):
        return database


def _search(
    missing: Sequence[StudyCell],
    wanted: Sequence[StudyCell],
    folder: Folder,
    database: str,
    options: argparse.Namespace,
) -> int:
    """Search the missing cells, a line a cell on standard error; return the number of failures."""
    count, failed = len(wanted) - len(missing), 0
    endings = search_all(
        missing, folder.path, database, workers=options.workers, stop_after_s=options.stop_after
    )
    for ending in endings:
        count += ending.how == DONE
        failed += ending.how == FAILED
        text = ending.text if ending.how != DONE else _line(folder.read(ending.cell))
        print(
            f"[{count}/{len(wanted)}] {ending.cell.title}: {text} ({ending.seconds:.0f} s)",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return failed


def _line(result: StudyResult | None) -> str:
    if result is None or result.failure is not None:
        return "nothing fits the memory"
    found_s, name = result.time_s(FOUND), result.best_baseline
    gain = tables.ratio(result.time_s(name) if name is not None else None, found_s)
    over = "no baseline fits" if gain is None else f"{gain:.2f} x {name}"
    return f"found {0.0 if found_s is None else found_s * 1e3:.1f} ms, {over}"


def _report(
    results: Sequence[StudyResult], request: Request, folder: Folder, *, as_json: bool, total: int
) -> None:
    """Print the tables, and write them and the plots into the folder of results."""
    made: list[tables.StudyTable] = []
    counts: dict[str, int] = {}
    if "study" in request.tables:
        made += tables.study_tables(results)
        for topology in CLUSTERS:
            wanted = {cell for cell in study_cells(request) if cell.topology == topology}
            shown = [result for result in results if result.cell in wanted]
            if shown:
                plot = plots.throughput_plot(shown, f"Samples a second and device on {topology}")
                folder.write_text(f"throughput-{topology}.svg", plot)
    if "zoo" in request.tables:
        of_zoo = set(zoo_cells(request))
        zoo = [result for result in sorted(results, key=_zoo_order) if result.cell in of_zoo]
        counts = tables.summary(zoo)
        made += [tables.zoo_table(zoo)] if zoo else []
    document = show.document(made, counts, finished=len(results), cells=total)
    folder.write_text("tables.json", json.dumps(document, indent=1) + "\n")
    folder.write_text("tables.md", show.markdown(made))
    if as_json:
        print(json.dumps(document))
    else:
        show.print_tables(made, counts, Console(width=None if sys.stdout.isatty() else 220))
        if len(results) < total:
            print(f"{total - len(results)} of {total} searches are not finished: the same command goes on")


def _zoo_order(result: StudyResult) -> tuple[str, int]:
    return result.cell.network, result.cell.devices


if __name__ == "__main__":
    sys.exit(main())
