"""Operator graphs that are kept on disk: the same as imported ones, or not used at all."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from app.services.models import graph_cache as kept_graphs
from app.services.models.models import ModelRequest, import_graph, requested_model
from graph.canonical import canonical_json
from graph.document import graph_from_document, graph_to_document
from graph.operators import OperatorGraph
from graph.zoo import hugging_face_names, zoo_names
from tests.app.conftest import Command

QUICK = ("gpt2", "inception", "nmt")
MLP = ModelRequest("mlp", "small", 8)

# Begins as `app` does, but with sources that may have been changed a moment ago.
COMMAND = """
import sys
from app.services.models import graph_cache as kept_graphs
kept_graphs._LOADED_S += 1e6
from app.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
sys.stderr.write(f"imported: {sorted({'pandas', 'torch'} & sys.modules.keys())}")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep graphs in a folder of the test's own, whenever the sources were changed."""
    monkeypatch.setenv("SOAPSTONE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_graphs, "_LOADED_S", 1e12)
    return tmp_path / "cache" / "graphs"


@pytest.fixture(scope="module")
def mlp() -> OperatorGraph:
    """Return a small graph."""
    return import_graph(MLP, batch_norm="synchronized").graph


def key_of(request: ModelRequest, batch_norm: str = "synchronized") -> str:
    found = kept_graphs.key_of(request, batch_norm)
    assert found is not None
    return found


def assert_same(one: OperatorGraph, other: OperatorGraph) -> None:
    assert one == other
    # Equality does not tell 1 from 1.0 and True.
    assert repr(one) == repr(other)
    assert one.digest == other.digest


def check_kept_is_imported(name: str) -> None:
    request = requested_model(name, "small", None, "bfloat16" if name == "gpt2" else "float32")
    imported = import_graph(request, batch_norm="local")
    kept = kept_graphs.find(key_of(request, "local"))
    assert kept is not None
    assert_same(kept[0], imported.graph)
    again = import_graph(request, batch_norm="local")
    assert_same(again.graph, imported.graph)
    assert (again.request, again.batch_size) == (request, imported.batch_size)


@pytest.mark.parametrize("name", QUICK)
def test_a_kept_graph_is_the_imported_one(name: str) -> None:
    check_kept_is_imported(name)


def test_a_kept_graph_of_hugging_face_is_the_imported_one() -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    check_kept_is_imported("hf-llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*zoo_names(), *hugging_face_names()} - {*QUICK, "hf-llama"}))
def test_every_kept_graph_is_the_imported_one(name: str) -> None:
    if name.startswith("hf-"):
        pytest.importorskip("transformers", reason="the extra hf is not installed")
    check_kept_is_imported(name)


@pytest.mark.parametrize(
    "changed",
    [
        replace(MLP, name="alexnet"),
        replace(MLP, preset="paper"),
        replace(MLP, batch_size=16),
        replace(MLP, batch_size=None),
        replace(MLP, precision="bfloat16"),
    ],
)
def test_another_network_size_or_precision_has_another_key(changed: ModelRequest) -> None:
    assert key_of(changed) != key_of(MLP)


def test_another_batch_norm_mode_has_another_key() -> None:
    assert key_of(MLP, "local") != key_of(MLP)


def test_tf32_has_the_graph_of_float32() -> None:
    assert key_of(replace(MLP, precision="tf32")) == key_of(MLP)


def test_where_a_command_runs_does_not_matter() -> None:
    assert key_of(replace(MLP, folder="/elsewhere")) == key_of(MLP)


def test_changed_sources_have_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(MLP)
    copied = tmp_path / "copied"
    shutil.copytree(kept_graphs._SOURCES[0], copied)
    monkeypatch.setattr(kept_graphs, "_SOURCES", (copied, *kept_graphs._SOURCES[1:]))
    assert key_of(MLP) == before
    with (copied / "rules" / "convolution.py").open("a") as file:
        file.write("# another rule\n")
    after = key_of(MLP)
    assert after != before
    (copied / "zoo" / "new.py").write_text("")
    assert key_of(MLP) not in (before, after)


def test_another_package_or_variable_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(MLP)
    (tmp_path / "installed-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with_package = key_of(MLP)
    monkeypatch.setattr(kept_graphs, "_ENVIRONMENT", {"TRANSFORMERS_OFFLINE": "1"})
    assert len({before, with_package, key_of(MLP)}) == 3


def test_doubts_have_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_graphs.key_of(ModelRequest("package.module:factory"), "synchronized") is None
    assert kept_graphs.key_of(replace(MLP, preset="huge"), "synchronized") is None
    # Sources that were changed after this process began.
    monkeypatch.setattr(kept_graphs, "_LOADED_S", 0.0)
    assert kept_graphs.key_of(MLP, "synchronized") is None


def test_compiled_sources_alone_have_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(kept_graphs, "_SOURCES", (tmp_path / "empty", *kept_graphs._SOURCES[1:]))
    assert kept_graphs.key_of(MLP, "synchronized") is None


def test_a_package_that_may_be_edited_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notches").mkdir()
    (tmp_path / "notches" / "__init__.py").write_text("")
    about = tmp_path / "notches-2.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: notches\nVersion: 2.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert kept_graphs._version("notches") == "2.5"
    (about / "direct_url.json").write_text('{"url": "file:///home", "dir_info": {"editable": true}}')
    assert kept_graphs._version("notches") is None
    (about / "direct_url.json").unlink()
    # A folder of that name that comes first.
    (tmp_path / "first" / "notches").mkdir(parents=True)
    (tmp_path / "first" / "notches" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "first")
    assert kept_graphs._version("notches") is None
    assert kept_graphs._version("no-such-package") is None


def _signed(text: str) -> bytes:
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode()


def _with_endless_batches(text: bytes) -> bytes:
    """A checksum that is right, of a number of samples that no integer is."""
    return _signed(text.decode().partition("\n")[2].replace('"batch_size":8', '"batch_size":1e999', 1))


def _with_another_graph(text: bytes) -> bytes:
    """A checksum that is right, of a graph that is not the one whose digest it names."""
    document = json.loads(text.partition(b"\n")[2])
    document["graph"]["inputs"] = document["graph"]["inputs"][::-1]
    return _signed(canonical_json(document))


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda text: text[:-1],
        lambda text: text[: len(text) // 2],
        lambda text: text.replace(b"float32", b"float64", 1),
        lambda _: bytes(range(256)),
        lambda _: _signed("[]"),
        lambda _: _signed("{}"),
        lambda _: _signed("[" * 100_000),
        lambda _: _signed('{"key": 1}'),
        _with_another_graph,
        _with_endless_batches,
    ],
)
def test_a_damaged_or_foreign_file_is_a_miss_and_written_anew(
    mlp: OperatorGraph, folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    key = key_of(MLP)
    kept_graphs.keep(key, mlp, 8)
    (file,) = folder.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert kept_graphs.find(key) is None
    assert_same(import_graph(MLP, batch_norm="synchronized").graph, mlp)
    assert file.read_bytes() == good


def test_the_graph_of_another_key_is_a_miss(mlp: OperatorGraph, folder: Path) -> None:
    kept_graphs.keep("a" * 64, mlp, 8)
    (folder / f"{'a' * 64}.json").rename(folder / f"{'b' * 64}.json")
    assert kept_graphs.find("b" * 64) is None


def test_a_document_of_another_graph_is_refused(mlp: OperatorGraph) -> None:
    document = graph_to_document(mlp)
    assert_same(graph_from_document(json.loads(json.dumps(document))), mlp)
    document["digest"] = "0" * 64
    with pytest.raises(ValueError, match="digest is"):
        graph_from_document(document)


def test_a_folder_that_cannot_be_written_keeps_nothing(
    mlp: OperatorGraph, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / f"{'a' * 64}.json").mkdir(parents=True)
    kept_graphs.keep("a" * 64, mlp, 8)
    assert kept_graphs.find("a" * 64) is None
    assert [path.name for path in folder.iterdir()] == [f"{'a' * 64}.json"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SOAPSTONE_CACHE_DIR", str(tmp_path / "file"))
    assert_same(import_graph(MLP, batch_norm="synchronized").graph, mlp)
    assert kept_graphs.kept() == (0, 0)
    assert kept_graphs.clear() == 0


def test_the_oldest_make_room(mlp: OperatorGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_graphs, "MOST_KEPT", 3)
    for letter in "abcde":
        kept_graphs.keep(letter * 64, mlp, 8)
    assert kept_graphs.kept()[0] == 3
    assert kept_graphs.find("e" * 64) is not None


def test_processes_at_once_keep_and_find_whole_graphs(mlp: OperatorGraph, folder: Path) -> None:
    kept_graphs.keep("a" * 64, mlp, 8)
    code = (
        "from app.services.models import graph_cache as kept_graphs\n"
        "graph = kept_graphs.find('a' * 64)[0]\n"
        "for _ in range(100):\n"
        "    kept_graphs.keep('b' * 64, graph, 8)\n"
        "    assert kept_graphs.find('b' * 64)[0] == graph\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    found = 0
    while any(process.poll() is None for process in both):
        kept = kept_graphs.find("b" * 64)
        if kept is not None:
            assert_same(kept[0], mlp)
            found += 1
    assert [process.returncode for process in both] == [0, 0]
    assert found > 0
    assert len(list(folder.iterdir())) == 2


def test_a_search_of_a_kept_graph_imports_neither_torch_nor_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{tmp_path}/x.sqlite")
    sizes = ("mlp", "--preset", "small", "--batch-size", "8")
    search = ("search", "--model", *sizes, "--topology", "hgx-h100", "--devices", "2", "--proposals", "4")

    def run(*arguments: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *arguments, "--json"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    _, said = run("models", "show", *sizes)
    assert "torch" in said.rpartition("imported: ")[2]
    found, said = run(*search)
    assert said.endswith("imported: []")
    assert json.loads(found)["proposals"] == 4


def test_cache_says_where_graphs_are_and_clears_them(
    command: Command, mlp: OperatorGraph, folder: Path
) -> None:
    assert "0 graphs" in command("models", "cache").output
    kept_graphs.keep("a" * 64, mlp, 8)
    shown = command("models", "cache", "--json").document
    assert (shown["folder"], shown["graphs"]) == (str(folder), 1)
    assert shown["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert command("models", "cache", "--clear", "--json").document["removed"] == 1
    assert list(folder.iterdir()) == []
