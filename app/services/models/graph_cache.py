"""Operator graphs of Soapstone's own networks, kept on disk: the next command that needs one imports no torch.

A kept graph is a file of the user's cache folder, named by a digest of all that shapes the graph: network, preset,
batch size, number format and batch-norm mode; Soapstone's sources that decide it; Python, the packages that are
installed, and the environment variables that torch and transformers read. Any doubt is a miss: a user's own network,
torch or transformers installed from a folder that may be edited, sources that changed while this process runs, a file
that is not exactly what was written. Files are written as a whole or not at all, so that any number of processes may
keep and read at once; one that cannot be written is not kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import graph as graph_package
from app.db.failures import MALFORMED
from app.folders import user_folder
from graph.canonical import canonical_json, digest
from graph.document import graph_from_document, graph_to_document
from graph.errors import GraphError
from graph.training import TENSOR_DTYPES
from graph.zoo import zoo_entry

if TYPE_CHECKING:
    from app.services.models.models import ModelRequest
    from graph.operators import OperatorGraph

ENVIRONMENT_VARIABLE = "SOAPSTONE_CACHE_DIR"
"""Names another folder than the user's cache folder."""
MOST_KEPT = 200
# Of the environment, what may change how torch or transformers build or export a module.
_READ_VARIABLES = ("TORCH", "PYTORCH", "TRANSFORMERS", "HF_", "USE_")
# Before torch is imported, which sets some of its own.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name.startswith(_READ_VARIABLES)}
# Files by which drivers of accelerators show: what transformers chooses may depend on there being one.
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")
# What decides a graph: files, and folders with all that is in them.
_SOURCES = (*map(Path, graph_package.__path__), Path(__file__), Path(__file__).with_name("models.py"))
# Modules of this process are those on disk only if these have not changed since about when it began.
_LOADED_S = time.time()
_LOADING_S = 2.0


def folder() -> Path | None:
    """Return where graphs are kept; it is not created here. None: nowhere."""
    cache = user_folder("cache", ENVIRONMENT_VARIABLE)
    return None if cache is None else cache / "graphs"


def key_of(request: ModelRequest, batch_norm: str) -> str | None:
    """Return the digest of all that shapes a network's graph, or None where that is not known for certain."""
    if not request.is_zoo:
        return None
    entry = zoo_entry(request.name)
    if request.preset not in entry.presets:
        return None
    packages = ["torch", "transformers"] if entry.extra else ["torch"]
    versions = [_version(name) for name in packages]
    sources = _sources_digest()
    if sources is None or None in versions:
        return None
    return digest(
        {
            "name": request.name,
            "preset": request.preset,
            "batch_size": request.batch_size,
            "dtype": TENSOR_DTYPES[request.precision],
            "batch_norm": batch_norm,
            "sources": sources,
            "python": [sys.version, platform.machine()],
            "packages": [versions, sorted(_installed())],
            "environment": _ENVIRONMENT,
            "accelerators": [os.path.exists(path) for path in _ACCELERATORS],
        }
    )


def find(key: str) -> tuple[OperatorGraph, int] | None:
    """Return the graph that is kept under a key, and its batch size; None where there is none that can be trusted."""
    try:
        path = _path(key)
        if path is None or not path.is_file():  # a link to a device has no end
            return None
        checksum, _, text = path.read_text("ascii").partition("\n")
        if checksum != hashlib.sha256(text.encode()).hexdigest():
            return None
        document = json.loads(text)
        if document["key"] != key:
            return None
        return graph_from_document(document["graph"]), index(document["batch_size"])
    except (OSError, *MALFORMED, GraphError):
        return None


def keep(key: str, graph: OperatorGraph, batch_size: int) -> None:
    """Keep a graph under a key; where the folder cannot be written, nothing is kept and nothing said."""
    text = canonical_json({"key": key, "graph": graph_to_document(graph), "batch_size": batch_size})
    target = _path(key)
    if target is None:
        return
    with suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        for path in _oldest_first()[:-MOST_KEPT]:
            path.unlink(missing_ok=True)


def kept() -> tuple[int, int]:
    """Return how many graphs are kept, and their bytes."""
    sizes = []
    for path in _files():
        with suppress(OSError):
            sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)


def clear() -> int:
    """Remove all kept graphs; return how many there were."""
    count = 0
    for path in _files():
        with suppress(OSError):
            path.unlink()
            count += 1
    return count


def _path(key: str) -> Path | None:
    place = folder()
    return None if place is None else place / f"{key}.json"


def _files() -> list[Path]:
    place = folder()
    try:
        return [] if place is None else [path for path in place.iterdir() if path.suffix == ".json"]
    except OSError:
        return []


def _oldest_first() -> list[Path]:
    written = []
    for path in _files():
        with suppress(OSError):
            written.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(written)]


def _version(package: str) -> str | None:
    """Return the version of an installed package; None where it has none, or where its files may be edited.

    What is imported must be what the version is of: another folder of that name may come first on the path.
    """
    try:
        found = importlib.metadata.distribution(package)
        origin: dict[str, Any] = json.loads(found.read_text("direct_url.json") or "{}")
        spec = importlib.util.find_spec(package)
    except (importlib.metadata.PackageNotFoundError, ImportError, OSError, ValueError):
        return None
    if spec is None or spec.origin is None or origin.get("dir_info", {}).get("editable"):
        return None
    imported, installed = Path(spec.origin).resolve(), Path(str(found.locate_file(package))).resolve()
    return found.version if imported.is_relative_to(installed) else None


def _installed() -> set[str]:
    """Return the names of the folders that say which package is installed in which version."""
    found: set[str] = set()
    for place in sys.path:
        with suppress(OSError):
            found.update(name for name in os.listdir(place or ".") if name.endswith(".dist-info"))
    return found


def _sources_digest() -> str | None:
    """Return the digest of the sources that decide a graph; None where they are not there or changed just now."""
    hashed = hashlib.sha256()
    count = 0
    try:
        for place in _SOURCES:
            for path in sorted(place.rglob("*.py")) if place.is_dir() else (place,):
                if path.stat().st_mtime > _LOADED_S - _LOADING_S:
                    return None
                text = path.read_bytes()
                hashed.update(f"{path.name} {len(text)}\n".encode())
                hashed.update(text)
                count += 1
    except OSError:
        return None
    # Where there are compiled files alone, nothing says what is in them.
    return hashed.hexdigest() if count > len(_SOURCES) else None
