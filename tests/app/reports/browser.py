"""A headless Chromium of the system, offline, that tells what a page printed, asked for and failed at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The first start of a browser on a busy machine.
PATIENCE_MS = 120_000


@dataclass
class Opened:
    """A page that has drawn all its figures."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return what is drawn, by figure: names of traces, and how many of them have lines, points or bars."""
        script = """() => Object.fromEntries([...document.querySelectorAll(".figure")].map(place => [
            place.id.replace("figure-", ""),
            {
                traces: place.data.filter(trace => trace.visible !== "legendonly").map(trace => trace.name),
                groups: place.querySelectorAll("g.trace").length,
                marks: place.querySelectorAll("g.trace path").length,
                width: place.querySelector("svg.main-svg").getBoundingClientRect().width,
            },
        ]))"""
        found: dict[str, dict[str, Any]] = self.page.evaluate(script)
        return found

    def dismiss(self, dialog: Any) -> None:
        """Note a dialog, which no report opens, and close it."""
        self.messages.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def assert_quiet(self) -> None:
        """Check that nothing was printed, nothing failed, and nothing but the file was asked for."""
        assert self.messages == []
        assert all(url.startswith(("file:", "blob:", "data:")) for url in self.requests)


@contextmanager
def browser() -> Iterator[Any]:
    """Start Chromium; skip where the system has none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH")
    from playwright.sync_api import sync_playwright

    # Chromium refuses to run as root inside its sandbox.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=found, args=[*arguments, "--disable-dev-shm-usage"], timeout=PATIENCE_MS
        )
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(started: Any, file: Path) -> Iterator[Opened]:
    """Open a report offline and wait until it has drawn its figures."""
    context = started.new_context(offline=True, viewport={"width": 1250, "height": 900})
    page = context.new_page()
    result = Opened(page)
    page.on("console", lambda message: result.messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: result.messages.append(f"error: {error}"))
    page.on("dialog", result.dismiss)
    page.on("request", lambda request: result.requests.append(request.url))
    try:
        page.goto(file.as_uri(), timeout=PATIENCE_MS)
        page.wait_for_function("document.body.dataset.drawn !== undefined", timeout=PATIENCE_MS)
        yield result
    finally:
        context.close()
