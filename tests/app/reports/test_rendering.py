"""The HTML of a report in a real browser: every figure is drawn, and no name can do anything but be shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.services.report import figures
from app.services.report.data import CostPoint, Costs, MeasuredStrategy, SearchCurve
from app.services.report.report import ReportTable, Section, render
from app.services.timeline.timeline import Slice, StepTimeline
from tests.app.reports.browser import browser, opened

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 2</script>",
    '"><img src=x onerror="window.hacked = 3">',
    "<a href='javascript:window.hacked = 4'>mlp</a>",
    "{{ 7 * 7 }}{% raw %}",
    "<!-- <b>bold</b> &lt;i&gt;",
    "%{y} ${window.hacked = 5}",
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


def sections(name: str) -> list[Section]:
    """Return a section for each figure, with that name wherever the database has one."""
    curve = SearchCurve(1, name, name, name, "finished", 30, 0.4, 0.2, 2.0, (0, 10, 30), (0.4, 0.3, 0.2))
    pairs = [
        MeasuredStrategy(name, name, name, "c0ffee", name, 0.2, 0.25),
        MeasuredStrategy("other", "local", "8, float32, sgd", "ab", "search", 0.1, 0.1),
    ]
    points = tuple(
        CostPoint(name, phase, size, 4 * size, size * 1e-9)
        for phase in ("forward", "backward")
        for size in (10, 100)
    )
    slices = (
        Slice("forward", name, f"forward {name}[0]", 0, 400_000),
        Slice("wait", name, name, 400_000, 900_000),
    )
    both = StepTimeline(1_000_000, (slices, slices), {name: (Slice("transfer", name, name, 0, 5),)})
    drawn = {
        "searches": figures.search_curves([curve]),
        "scatter": figures.predicted_against_measured(pairs),
        "costs": figures.cost_curves(Costs(name, points)),
        "timeline": figures.timeline({"simulated": both, "measured": both}),
        "memory": figures.memory({name: (2**20, 2**21), "expert": (2**20, 2**20)}, (2**30, 2**30)),
    }
    table = ReportTable((name, "step"), ((name, "1 ms"),))
    return [Section(key, name, name, figure, (table,)) for key, figure in drawn.items()]


def test_every_figure_is_drawn_offline_and_nothing_is_said(chromium: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(render("Soapstone", "a test", sections("mlp")), encoding="utf-8")
    with opened(chromium, file) as page:
        drawn = page.figures()
        page.assert_quiet()
    expected = {"searches": 1, "scatter": 3, "costs": 2, "timeline": 3, "memory": 2}
    assert {name: len(figure["traces"]) for name, figure in drawn.items()} == expected
    for name, figure in drawn.items():
        assert figure["groups"] == expected[name], name
        assert figure["marks"] >= expected[name], name
        assert figure["width"] > 300, name


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_shown_letter_by_letter(chromium: Any, tmp_path: Path, name: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(render(name, name, sections(name)), encoding="utf-8")
    with opened(chromium, file) as opened_page:
        page = opened_page.page
        opened_page.assert_quiet()
        assert page.title() == " ".join(name.split())
        assert page.locator("h1").text_content() == name
        assert page.locator("td").first.text_content() == name
        shown = page.evaluate("[...document.querySelectorAll('svg text')].map(text => text.textContent)")
        assert name in shown
        assert page.evaluate("typeof window.hacked") == "undefined"
        assert page.locator("main img, main a[href^='javascript'], main script").count() == 0


def test_a_script_that_a_name_brought_in_would_not_run(chromium: Any, tmp_path: Path) -> None:
    """The second lock: were escaping ever forgotten, the page's policy runs no script but the report's own."""
    text = render("Soapstone", "a test", sections("mlp"))
    broken = text.replace(
        "<main>", "<main><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    )
    assert broken != text
    file = tmp_path / "report.html"
    file.write_text(broken, encoding="utf-8")
    with opened(chromium, file) as page:
        assert page.page.evaluate("typeof window.hacked") == "undefined"
        assert any("Content Security Policy" in message for message in page.messages)


def test_the_file_needs_nothing_from_elsewhere_and_holds_plotly_once() -> None:
    text = render("Soapstone", "a test", sections("mlp"))
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert re.findall(r"\b(?:src|href)\s*=", markup) == []
    assert re.findall(r"url\(|@import", markup) == []
    assert text.count("plotly.js v") == 1
    assert len(text) < 8e6


@pytest.mark.parametrize("name", HOSTILE)
def test_the_figures_stay_one_json_document(name: str) -> None:
    text = render("Soapstone", "a test", sections(name))
    (document,) = re.findall(
        r'<script type="application/json" id="figures">(.*?)</script>', text, flags=re.DOTALL
    )
    assert json.loads(document) == {section.name: section.figure for section in sections(name)}
    assert not set(document) & {"<", ">", "&"}


def test_a_long_timeline_keeps_its_longest_slices() -> None:
    slices = tuple(Slice("forward", "fc", "fc", 10 * n, 10 * n + 1 + n % 7) for n in range(30_000))
    (trace,) = figures.timeline({"simulated": StepTimeline(300_000, (slices,))})["data"]
    starts = trace["x"][::4]
    assert len(starts) == figures.SLICES_SHOWN
    longest = {n * 10 / 1e6 for n in range(30_000) if n % 7 >= 3}
    assert longest <= set(starts)
