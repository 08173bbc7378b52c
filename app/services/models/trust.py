"""Trust: the functions of a user's own modules that may be run where a stored document names them.

A database, or what is in it, may come from somebody else, and a model in it is a name such as "package.module:factory":
to import that is to run it. So it is followed only if the user has named it by --model, in this command or an earlier
one, and it is in the same files as then. That is kept in a file of the user's state folder, never in a database.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from stat import S_IWOTH
from types import ModuleType
from typing import TypedDict

from app.folders import user_folder
from graph.errors import SoapstoneError, UsageError

ENVIRONMENT_VARIABLE = "SOAPSTONE_STATE_DIR"
"""Names another folder than the user's state folder."""
# Named by --model in this process, where nothing could be kept.
_not_kept: list[object] = []


class _Consent(TypedDict):
    """A function that the user has named, and the files that its import runs."""

    model: str
    files: list[str]


def consents_file() -> Path | None:
    """Return the file of the functions that the user has named, which need not exist; None without a state folder."""
    folder = user_folder("state", ENVIRONMENT_VARIABLE)
    return None if folder is None else folder / "models.json"


def remember(model: str, folder: str) -> None:
    """Keep that the user has named a function by --model; for this process alone where the file cannot be written.

    folder: where modules are looked for, after everything installed.
    """
    from app.services.files import replacing  # not at the top: workers of a run need no database

    entry = _entry(model, folder)
    consents = _consents()
    if not entry["files"] or entry in consents:
        return
    file = consents_file()
    if file is None or _is_of_others(file):
        _not_kept.append(entry)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, "models named by --model:") as temporary:
            temporary.write_text(json.dumps([*consents, entry], indent=1) + "\n", encoding="utf-8")
    except (OSError, SoapstoneError):
        _not_kept.append(entry)


def trusted_folder(model: str, folder: str) -> str:
    """Return where to look for the modules of a function that a stored document names: `folder`, if it is from there.

    Else nowhere but among what is installed, "": what such a module imports must not come from where the user is.

    Raises:
        UsageError: the user has not named the function where it is now.
    """
    entry = _entry(model, folder)
    if not entry["files"] or entry not in _consents():
        raise UsageError(
            f"model {model}: comes from the database, must be named by you to be run from here; add --model {model} "
            "if you trust it"
        )
    package = Path(folder).resolve() / model.partition(":")[0].partition(".")[0]
    first = Path(entry["files"][0])
    # Not just somewhere below: an environment with all that is installed may be there.
    return folder if first.is_relative_to(package) or first == package.with_suffix(first.suffix) else ""


def is_function_name(model: str) -> bool:
    """Return whether a text is of the form "package.module:function"."""
    module_name, _, function_name = model.partition(":")
    return all(part.isidentifier() for part in (*module_name.split("."), function_name))


class FolderFinder:
    """Finds modules in a folder after everything installed, so that none there ever shadows a package.

    `sys.path` is not enough: the packages of an editable install are found after all of it, and worker processes
    inherit it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a top-level module is in the folder, or None."""
        return PathFinder.find_spec(name, [self.folder], target) if path is None else None


def _entry(model: str, folder: str) -> _Consent:
    return {"model": model, "files": _files(model, folder)}


def _files(model: str, folder: str) -> list[str]:
    """Return the files that an import of a function's module would run, outermost package first; nothing is run.

    It ends before what only a package itself can find.
    """
    if not is_function_name(model):
        return []
    files: list[str] = []
    name, locations = "", None
    for part in model.partition(":")[0].split("."):
        name = f"{name}.{part}" if name else part
        spec = _found(name, locations, folder)
        if spec is None:
            break
        if spec.origin is not None:  # else a package without a file of its own
            files.append(str(Path(spec.origin).resolve()) if spec.has_location else spec.origin)
        locations = None if spec.submodule_search_locations is None else [*spec.submodule_search_locations]
        if locations is None:
            break
    return files


def _found(name: str, locations: list[str] | None, folder: str) -> ModuleSpec | None:
    """Return the file of a module, as an import finds it."""
    for finder in (*sys.meta_path, FolderFinder(folder)):
        with suppress(Exception):  # of somebody's own
            spec = finder.find_spec(name, locations, None)
            if spec is not None:
                return spec
    return None


def _consents() -> list[object]:
    file = consents_file()
    content = None
    with suppress(OSError, ValueError, RecursionError):
        if file is not None and not _is_of_others(file):
            content = json.loads(file.read_text("utf-8"))
    return [*(content if isinstance(content, list) else []), *_not_kept]


def _is_of_others(file: Path) -> bool:
    """Return whether somebody else may have written a file: it is another user's (as under sudo), or open to all."""
    try:
        status = file.stat()
    except OSError:
        return False
    return os.name == "posix" and (status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & S_IWOTH))
