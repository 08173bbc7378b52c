"""Results of cells as files: one a cell, written as a whole when it is finished, which makes a study resumable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graph.errors import UsageError
from scripts.studies import experts
from scripts.studies.cells import RECURRENT, StudyCell

FOUND = "found"


@dataclass(frozen=True, slots=True)
class StudyResult:
    """A finished cell and its document (`scripts.studies.running`). Times are of strategies that fit the memory."""

    cell: StudyCell
    document: dict[str, Any]

    @property
    def failure(self) -> str | None:
        """Why there is no strategy, or None."""
        failure: str | None = self.document["failure"]
        return failure

    @property
    def strategies(self) -> dict[str, dict[str, Any]]:
        """The figures of the found strategy and of the baselines, by name; empty where nothing fits."""
        strategies: dict[str, dict[str, Any]] = self.document.get("strategies", {})
        return strategies

    @property
    def expert(self) -> str:
        """The name of the experts' strategy that the paper compares this network with."""
        return experts.NAME if self.cell.network in RECURRENT and self.cell.devices > 1 else "expert"

    def strategy(self, name: str) -> dict[str, Any] | None:
        """Return a strategy's figures; of the expert's, where it is data parallelism itself, those of that."""
        same = "data-parallel" if name == "expert" else name
        return self.strategies.get(name, self.strategies.get(same))

    def time_s(self, name: str) -> float | None:
        """Return the step time of a strategy; None where there is none, or it does not fit."""
        if name == "optcnn":
            optcnn = self.document.get("optcnn")
            return None if optcnn is None else optcnn["step_time_s"]
        strategy = self.strategy(name)
        return strategy["step_time_s"] if strategy is not None and strategy["feasible"] else None

    def throughput(self, name: str) -> float | None:
        """Return samples a second of a strategy; None as of `time_s`."""
        time_s = self.time_s(name)
        return None if time_s is None else self.cell.batch_size / time_s

    @property
    def best_baseline(self) -> str | None:
        """The name of the fastest baseline that fits, the first of equals."""
        times = {name: self.time_s(name) for name in self.strategies if name != FOUND}
        fitting = {name: time_s for name, time_s in times.items() if time_s is not None}
        return min(fitting, key=lambda name: fitting[name]) if fitting else None

    def chain_best_s(self, *starts: str) -> float | None:
        """Return the best step time of chains from these starts; None where none of their strategies fitted."""
        bests = [
            chain["best_s"]
            for chain in self.document.get("chains", ())
            if chain["start"] in starts and chain["best_s"]
        ]
        if "optcnn" in starts and (time_s := self.time_s("optcnn")) is not None:
            bests.append(time_s)
        return min(bests, default=None)


class Folder:
    """The folder of a study: cells' files, the database where no other is given, tables and plots."""

    def __init__(self, path: Path) -> None:
        """Make the folder where it is missing.

        Raises:
            UsageError: it cannot be made.
        """
        self.path = path
        try:
            self._cells.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--results: {path} cannot be made ({error.strerror}), must be a folder; choose another"
            ) from None

    @property
    def _cells(self) -> Path:
        return self.path / "cells"

    @property
    def database(self) -> str:
        """URL of the database that belongs to the folder."""
        return f"sqlite:///{self.path.resolve() / 'study.sqlite'}"

    def write(self, cell: StudyCell, document: dict[str, Any]) -> None:
        """Store the document of a cell; a kill leaves the whole file or none."""
        self.write_text(f"cells/{cell.key}.json", json.dumps(document, indent=1, sort_keys=True) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file as a whole."""
        path = self.path / name
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(path)

    def read(self, cell: StudyCell) -> StudyResult | None:
        """Return the result of a cell, or None where it is not finished.

        Raises:
            UsageError: its file is damaged, or of another version of the study.
        """
        path = self._cells / f"{cell.key}.json"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["format"] != 1 or document["cell"] != cell.to_json():
                raise ValueError("of another version")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path.name}: is no result of this study ({error}), must be one; delete it, and it is searched again"
            ) from None
        return StudyResult(cell, document)

    def finished(self, cells: Iterable[StudyCell]) -> list[StudyResult]:
        """Return the results of those cells that are finished, in their order."""
        return [result for cell in cells if (result := self.read(cell)) is not None]
