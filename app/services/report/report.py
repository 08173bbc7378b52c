"""`app report`: one HTML file that opens offline, with searches, predictions and measurements."""

from __future__ import annotations

import importlib.util
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.db.records import utc_now
from app.db.references import Referred
from app.db.store import Store
from app.services.files import checked_target, replacing
from app.services.progress import Progress
from app.services.report import figures
from app.services.report.data import Filter, ReportData, read_report_data
from app.services.report.graph import strategy_on_graph
from app.services.report.parallel_graph import drawn_parallel_graph
from app.services.timeline.attribution import Attribution, attribute
from app.services.timeline.simulated_step import SimulatedStep, step_of_execution, step_of_strategy
from app.services.timeline.store import Recording, find_recording, read_recording, recording_path
from app.services.timeline.trace import timelines_of
from graph.errors import SoapstoneError, UsageError

STRATEGIES_COMPARED = 5
ROWS_SHOWN = 15


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """The options of `app report`: filters, and the step to draw (None: chosen from the stored ones)."""

    output: Path
    model: str | None
    topology: str | None
    search: int | None
    execution: int | None
    strategy: str | None


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of a section."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report; without a figure, its text says why."""

    name: str
    title: str
    text: str
    figure: figures.Figure | None = None
    tables: tuple[ReportTable, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """The step that is drawn, and its recording where there is one."""

    step: SimulatedStep
    recording: Recording | None
    attribution: Attribution | None
    peaks: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """A written report: its file, and the names of the sections with and without a figure."""

    file: Path
    size_bytes: int
    drawn: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {
            "file": str(self.file),
            "size_bytes": self.size_bytes,
            "drawn": list(self.drawn),
            "left_out": dict(self.left_out),
        }


def write_report(request: ReportRequest, database: str | None, progress: Progress) -> WrittenReport:
    """Write the report; a part for which nothing is stored says so instead.

    Raises:
        UsageError: the extra is not installed, what was asked for is not stored, or the file cannot be written.
    """
    _require_extra()
    with Store.open(database, to_read=True) as store:
        target = checked_target(request.output, store.database, "--output")
        wanted = _checked(store, request)
        drawn, reason = _drawn(store, request, wanted, progress)
        name = store.database.name
        with progress.stage("reading the database"):
            data = read_report_data(store.database, wanted)
    sections = (*_sections(data), *_step_sections(drawn, reason))
    title = "Soapstone" if request.model is None else f"Soapstone: {request.model}"
    text = render(title, f"{name}, {utc_now():%Y-%m-%d %H:%M} UTC", sections)
    with replacing(target, "--output") as temporary:
        temporary.write_text(text, encoding="utf-8")
    return WrittenReport(
        request.output,
        len(text.encode()),
        tuple(section.name for section in sections if section.figure is not None),
        tuple(
            (section.name, section.text)
            for section in sections
            if section.figure is None and not section.tables
        ),
    )


def render(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Return the HTML of a report. All texts are escaped; scripts run only where this function put them."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    environment = Environment(
        loader=PackageLoader("app", "reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    drawn = {section.name: section.figure for section in sections if section.figure is not None}
    return environment.get_template("report.html").render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        nonce=secrets.token_hex(16),
        figures=Markup(_script_json(drawn)),
        plotly=Markup(get_plotlyjs()),
    )


def _script_json(document: object) -> str:
    """Return JSON that cannot end, or open anything inside, the script element that holds it."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _require_extra() -> None:
    missing = [name for name in ("plotly", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"app report: {' and '.join(missing)} is not installed, must be; run pip install 'soapstone[report]'"
        )


def _checked(store: Store, request: ReportRequest) -> Filter:
    """Return the filter that a request means.

    Raises:
        UsageError: the database has no such search, network or topology.
    """
    if request.execution is not None and request.strategy is not None:
        raise UsageError("app report: takes --execution or --strategy, must not have both; leave one out")
    wanted = Filter(request.model, request.topology, request.search)
    if request.search is not None:
        search = store.search(request.search)
        names = Referred("graphs", ((graph.id, graph.name) for graph in store.graphs()))
        wanted = replace(wanted, model=wanted.model or names[search.graph_id])
    for option, name, stored in (
        ("--model", request.model, {graph.name for graph in store.graphs()}),
        ("--topology", request.topology, {topology.name for topology in store.topologies()}),
    ):
        if name is not None and name not in stored:
            raise UsageError(
                f"{option}: is {name}, must be stored; stored are {', '.join(sorted(stored)) or 'none'}"
            )
    return wanted


def _drawn(
    store: Store, request: ReportRequest, wanted: Filter, progress: Progress
) -> tuple[DrawnStep | None, str]:
    """Return the step to draw, or None and why there is none."""
    if request.execution is not None:
        execution = store.execution(request.execution)
        step = step_of_execution(store, execution, progress)
        recorded = recording_path(store, execution).is_file()
        return _with_peaks(store, step, read_recording(store, execution) if recorded else None), ""
    reference = request.strategy or _chosen(store, wanted)
    if reference is None:
        return None, "No strategy is stored yet: app search, then app run."
    try:
        step = step_of_strategy(store, reference, request.topology, progress)
    except SoapstoneError as error:
        if request.strategy is not None:
            raise
        # Nobody asked for this strategy: the rest of the report stands without it.
        return None, f"Strategy {reference} cannot be drawn: {error}."
    recording = find_recording(store, step.record.id, step.topology_id, step.training_id)
    return _with_peaks(store, step, recording), ""


def _chosen(store: Store, wanted: Filter) -> str | None:
    """Return the id of the strategy to draw: that of the newest recorded run, else of the newest run, else search."""
    graphs = Referred("graphs", ((graph.id, graph.name) for graph in store.graphs()))
    topologies = Referred("topologies", ((topology.id, topology.name) for topology in store.topologies()))
    strategies = {strategy.id: strategy for strategy in store.strategies(limit=10_000)}
    runs = [
        run
        for run in store.executions(limit=1000)
        if run.status == "finished"
        and run.strategy_id in strategies
        and wanted.model in (None, graphs[strategies[run.strategy_id].graph_id])
        and wanted.topology in (None, topologies[run.topology_id])
    ]
    recorded = [run for run in runs if recording_path(store, run).is_file()]
    if recorded or runs:
        return str((recorded or runs)[0].strategy_id)
    for search in store.searches(limit=1000):
        alike = wanted.model in (None, graphs[search.graph_id]) and wanted.topology in (
            None,
            topologies[search.topology_id],
        )
        if search.best_strategy_id is not None and alike:
            return str(search.best_strategy_id)
    return None


def _with_peaks(store: Store, step: SimulatedStep, recording: Recording | None) -> DrawnStep:
    """Add the peaks of the other strategies that are stored for the same graph, topology and training."""
    peaks = {f"this one, {step.record.digest[:12]}": step.simulation.peak_memory_bytes}
    ranked = store.best_strategies(
        step.record.graph_id, step.topology_id, step.training_id, limit=STRATEGIES_COMPARED
    )
    for stored in ranked:
        if stored.strategy.id != step.record.id:
            peaks[f"{stored.strategy.source} {stored.strategy.digest[:12]}"] = stored.simulation.peak_bytes
    attribution = None if recording is None else attribute(step.simulation, recording)
    return DrawnStep(step, recording, attribution, peaks)


def _sections(data: ReportData) -> tuple[Section, ...]:
    """Return the sections about the database itself."""
    best = ReportTable(
        (
            "model",
            "topology",
            "batch, training",
            "strategies",
            "best predicted",
            "speedup",
            "best measured",
            "speedup",
        ),
        tuple(
            (
                summary.model,
                summary.topology,
                summary.training,
                str(summary.strategies),
                _ms(summary.best_predicted_s),
                _ratio(summary.predicted_speedup),
                _ms(summary.best_measured_s),
                _ratio(summary.measured_speedup),
            )
            for summary in data.summaries
        ),
    )
    costs = data.costs
    return (
        Section(
            "best",
            "Best strategies",
            "Speedups are over data parallelism." if data.summaries else "No strategy is stored yet.",
            tables=(best,) if data.summaries else (),
        ),
        Section(
            "searches",
            "Searches",
            "The best simulated step after so many proposals, of the newest searches."
            if data.curves
            else "No search is stored for this choice.",
            figures.search_curves(data.curves) if data.curves else None,
        ),
        Section(
            "scatter",
            "Predicted against measured",
            f"{len(data.pairs)} strategies that were run. Above the line, a step took longer than predicted."
            if data.pairs
            else "No strategy of this choice was run yet: app run.",
            figures.predicted_against_measured(data.pairs) if data.pairs else None,
        ),
        Section(
            "costs",
            "Operator costs over size",
            f"Measured on {costs.device_kind}; types with fewer measurements are off, and come on by a click."
            if costs is not None
            else "No operator was measured yet: app profile.",
            figures.cost_curves(costs) if costs is not None else None,
        ),
    )


def _step_sections(drawn: DrawnStep | None, reason: str) -> tuple[Section, ...]:
    """Return the sections about one strategy's step."""
    titles = {
        "timeline": "Timeline",
        "graph": "Strategy on the operator graph",
        "pcg": "Parallel computation graph",
        "memory": "Memory per device",
    }
    if drawn is None:
        return tuple(Section(name, title, reason) for name, title in titles.items())
    step, recording = drawn.step, drawn.recording
    timelines = timelines_of(step, recording)
    of = (
        f"{step.graph.name}, batch size {step.training.batch_size}, on {step.topology.name}, strategy "
        f"{step.record.digest[:12]} ({step.record.source})"
    )
    measured = (
        "no run of it recorded its steps (app run --profile)"
        if recording is None
        else f"a typical recorded one {_ms(recording.typical.step_ns / 1e9)} (execution {recording.execution_id})"
    )
    pcg, pcg_text = drawn_parallel_graph(step)
    peaks = figures.memory(
        drawn.peaks,
        [step.topology.kind_of(device.index).memory_bytes for device in step.topology.devices],
    )
    return (
        Section(
            "timeline",
            titles["timeline"],
            f"{of}: simulated step {_ms(step.simulation.step_time_s)}, {measured}. {_scheduling(drawn)}",
            figures.timeline(timelines),
            () if drawn.attribution is None else _attribution_tables(drawn.attribution),
        ),
        Section(
            "graph",
            titles["graph"],
            f"{of}. Colour: degrees and devices; size: simulated time.",
            strategy_on_graph(step, timelines["simulated"]),
        ),
        Section("pcg", titles["pcg"], f"{of}. {pcg_text}", pcg),
        Section("memory", titles["memory"], f"{of}, and others that are stored: predicted peaks.", peaks),
    )


def _scheduling(drawn: DrawnStep) -> str:
    """Return a sentence on the scheduling efficiency of a step: the share of the time that a good order can save."""
    simulated = f"Scheduling efficiency {drawn.step.simulation.efficiency * 100:.1f} %"
    recorded = None if drawn.attribution is None else drawn.attribution.recorded
    return (
        f"{simulated}." if recorded is None else f"{simulated}, recorded {recorded.efficiency * 100:.1f} %."
    )


def _attribution_tables(attribution: Attribution) -> tuple[ReportTable, ...]:
    columns = ("kind", "what", "predicted", "measured", "difference")
    return tuple(
        ReportTable(
            columns,
            tuple(
                (row.kind, row.subject, _ms(row.predicted_s), _ms(row.measured_s), _ms(row.difference_s))
                for row in rows
            ),
        )
        for rows in (attribution.by_kind, attribution.rows[:ROWS_SHOWN])
    )


def _ms(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s * 1e3:.3f} ms"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
