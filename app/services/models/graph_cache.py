"""Graph cache: operator graphs of Soapstone's own networks on disk, so that the next command imports no torch.

A graph is a file of the user's cache folder, named by a digest of the request and of the versions that it was exported
with: Soapstone's sources, Python, all installed packages, and the environment variables that torch and transformers
read. Any doubt is a miss: a network of the user's own, torch or transformers imported from a folder that may be edited,
sources that changed while this process runs, a file that is not as it was written.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

import graph as graph_package
from app.db.failures import MALFORMED
from app.folders import user_folder
from graph.canonical import canonical_json, digest
from graph.document import graph_from_document, graph_to_document
from graph.errors import GraphError, SoapstoneError
from graph.training import TENSOR_DTYPES
from graph.zoo import zoo_entry

if TYPE_CHECKING:
    from app.services.models.models import ModelRequest
    from graph.operators import OperatorGraph

ENVIRONMENT_VARIABLE = "SOAPSTONE_CACHE_DIR"
"""Names another folder than the user's cache folder."""
MOST_GRAPHS = 200
# Of the environment, what may change how torch or transformers build or export a module; before torch sets its own.
_ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name.startswith(("TORCH", "PYTORCH", "TRANSFORMERS", "HF_", "USE_"))
}
# Files by which drivers of accelerators show: what transformers chooses may depend on there being one.
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")
SOURCES = (*map(Path, graph_package.__path__), Path(__file__).parent)
"""The folders whose modules decide a graph."""


def sources_digest(folders: Sequence[Path]) -> str | None:
    """Return the digest of all Python sources in folders; None where one has none, as with compiled files alone."""
    hashes = []
    try:
        for source_folder in folders:
            paths = sorted(source_folder.rglob("*.py"))
            if not paths:
                return None
            hashes += [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in paths]
    except OSError:
        return None
    return digest(hashes)


# Of the modules as they are in this process: their files may change later.
_IMPORTED = sources_digest(SOURCES)


def folder() -> Path | None:
    """Return the folder of the graphs, which need not exist; None where the user has no cache folder."""
    cache = user_folder("cache", ENVIRONMENT_VARIABLE)
    return None if cache is None else cache / "graphs"


def key_of(request: ModelRequest, batch_norm: str) -> str | None:
    """Return the digest of a request and of all versions, or None for a graph that must be exported anew."""
    if not request.is_zoo or _IMPORTED is None:
        return None
    entry = zoo_entry(request.name)
    packages = ("torch", "transformers") if entry.extra else ("torch",)
    if request.preset not in entry.presets or not all(map(_is_installed, packages)):
        return None
    return digest(
        {
            "name": request.name,
            "preset": request.preset,
            "batch_size": request.batch_size,
            "micro_batches": request.micro_batches,
            "dtype": TENSOR_DTYPES[request.precision],
            "batch_norm": batch_norm,
            "sources": _IMPORTED,
            "python": [sys.version, platform.machine()],
            "packages": _installed(),
            "environment": _ENVIRONMENT,
            "accelerators": [os.path.exists(path) for path in _ACCELERATORS],
        }
    )


def load(key: str) -> tuple[OperatorGraph, int] | None:
    """Return the graph of a key and its batch size; None where there is none, or a damaged one."""
    path = _path(key)
    try:
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


def save(key: str, graph: OperatorGraph, batch_size: int) -> None:
    """Write a graph under a key; nothing where the folder cannot be written, or sources changed meanwhile."""
    from app.services.files import replacing  # not at the top: workers of a run need no database

    path = _path(key)
    text = canonical_json({"key": key, "graph": graph_to_document(graph), "batch_size": batch_size})
    with suppress(OSError, SoapstoneError):
        if path is None or sources_digest(SOURCES) != _IMPORTED:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "graph cache") as temporary:
            temporary.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}", "ascii")
        for oldest, _ in _files()[:-MOST_GRAPHS]:
            oldest.unlink(missing_ok=True)


def contents() -> tuple[int, int]:
    """Return the number of graphs, and their size in bytes."""
    sizes = [size_bytes for _, size_bytes in _files()]
    return len(sizes), sum(sizes)


def clear() -> int:
    """Remove all graphs; return how many there were."""
    count = 0
    for path, _ in _files():
        with suppress(OSError):
            path.unlink()
            count += 1
    return count


def _path(key: str) -> Path | None:
    cache = folder()
    return None if cache is None else cache / f"{key}.json"


def _files() -> list[tuple[Path, int]]:
    """Return the files of the graphs, oldest first, each with its size in bytes."""
    files = []
    cache = folder()
    with suppress(OSError):
        for path in () if cache is None else cache.glob("*.json"):
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime_ns, path, status.st_size))
    return [(path, size_bytes) for _, path, size_bytes in sorted(files)]


def _is_installed(package: str) -> bool:
    """Return whether a package is imported from where its distribution was installed, and may not be edited there."""
    try:
        distribution = importlib.metadata.distribution(package)
        editable = '"editable": true' in (distribution.read_text("direct_url.json") or "")
        spec = importlib.util.find_spec(package)
    except (importlib.metadata.PackageNotFoundError, ImportError, OSError, ValueError):
        return False
    if spec is None or spec.origin is None or editable:
        return False
    installed = Path(str(distribution.locate_file(package))).resolve()
    return Path(spec.origin).resolve().is_relative_to(installed)


def _installed() -> list[str]:
    """Return the folders' names that say which package is installed in which version."""
    names: set[str] = set()
    for path in sys.path:
        with suppress(OSError):
            names.update(name for name in os.listdir(path or ".") if name.endswith(".dist-info"))
    return sorted(names)
