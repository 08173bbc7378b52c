"""Operator graphs in the cache on disk: the same as imported ones, or not used at all."""

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

from app.services.models import graph_cache
from app.services.models.models import ModelRequest, import_graph, requested_model
from graph.canonical import canonical_json
from graph.document import graph_from_document, graph_to_document
from graph.operators import OperatorGraph
from graph.zoo import hugging_face_names, zoo_names
from search.parallel.fork import can_fork
from tests.app.conftest import Command

QUICK = ("densenet121", "gpt2", "nmt")
MLP = ModelRequest("mlp", "small", 8)

# Runs `app`, and says which heavy packages it imported.
COMMAND = """
import sys
from app.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
sys.stderr.write(f"imported: {sorted({'pandas', 'torch'} & sys.modules.keys())}")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache graphs in a folder of the test's own."""
    monkeypatch.setenv("SOAPSTONE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


@pytest.fixture(scope="module")
def mlp() -> OperatorGraph:
    """Return a small graph."""
    return import_graph(MLP, batch_norm="synchronized").graph


def key_of(request: ModelRequest, batch_norm: str = "synchronized") -> str:
    found = graph_cache.key_of(request, batch_norm)
    assert found is not None
    return found


def assert_same(one: OperatorGraph, other: OperatorGraph) -> None:
    assert one == other
    # Equality does not tell 1 from 1.0 and True.
    assert repr(one) == repr(other)
    assert one.digest == other.digest


def check_cached_is_imported(name: str) -> None:
    request = requested_model(name, "small", None, "bfloat16" if name == "gpt2" else "float32")
    imported = import_graph(request, batch_norm="local")
    cached = graph_cache.load(key_of(request, "local"))
    assert cached is not None
    assert_same(cached[0], imported.graph)
    again = import_graph(request, batch_norm="local")
    assert_same(again.graph, imported.graph)
    assert (again.request, again.batch_size) == (request, imported.batch_size)


@pytest.mark.parametrize("name", QUICK)
def test_a_cached_graph_is_the_imported_one(name: str) -> None:
    check_cached_is_imported(name)


def test_a_cached_graph_of_hugging_face_is_the_imported_one() -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    check_cached_is_imported("hf-llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*zoo_names(), *hugging_face_names()} - {*QUICK, "hf-llama"}))
def test_every_cached_graph_is_the_imported_one(name: str) -> None:
    if name.startswith("hf-"):
        pytest.importorskip("transformers", reason="the extra hf is not installed")
    check_cached_is_imported(name)


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
    copied = tmp_path / "copied"
    shutil.copytree(graph_cache.SOURCES[0], copied)
    before = graph_cache.sources_digest([copied])
    assert before == graph_cache.sources_digest(graph_cache.SOURCES[:1])
    with (copied / "rules" / "convolution.py").open("a") as file:
        file.write("# another rule\n")
    after = graph_cache.sources_digest([copied])
    (copied / "zoo" / "new.py").write_text("")
    assert len({before, after, graph_cache.sources_digest([copied])}) == 3
    key = key_of(MLP)
    monkeypatch.setattr(graph_cache, "_IMPORTED", after)
    assert key_of(MLP) != key


def test_another_package_or_variable_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(MLP)
    (tmp_path / "installed-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with_package = key_of(MLP)
    monkeypatch.setattr(graph_cache, "_ENVIRONMENT", {"TRANSFORMERS_OFFLINE": "1"})
    assert len({before, with_package, key_of(MLP)}) == 3


def test_doubts_have_no_key() -> None:
    assert graph_cache.key_of(ModelRequest("package.module:factory"), "synchronized") is None
    assert graph_cache.key_of(replace(MLP, preset="huge"), "synchronized") is None


def test_nothing_is_cached_where_sources_changed_after_the_process_began(
    mlp: OperatorGraph, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changed.py").write_text("")
    monkeypatch.setattr(graph_cache, "SOURCES", (tmp_path,))
    assert_same(import_graph(MLP, batch_norm="synchronized").graph, mlp)
    assert not folder.exists()


def test_compiled_sources_alone_have_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    assert graph_cache.sources_digest([tmp_path / "empty", *graph_cache.SOURCES]) is None
    monkeypatch.setattr(graph_cache, "_IMPORTED", None)
    assert graph_cache.key_of(MLP, "synchronized") is None


def test_a_package_that_may_be_edited_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notches").mkdir()
    (tmp_path / "notches" / "__init__.py").write_text("")
    about = tmp_path / "notches-2.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: notches\nVersion: 2.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert graph_cache._is_installed("notches")
    (about / "direct_url.json").write_text('{"url": "file:///home", "dir_info": {"editable": true}}')
    assert not graph_cache._is_installed("notches")
    (about / "direct_url.json").unlink()
    # A folder of that name that comes first.
    (tmp_path / "first" / "notches").mkdir(parents=True)
    (tmp_path / "first" / "notches" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "first")
    assert not graph_cache._is_installed("notches")
    assert not graph_cache._is_installed("no-such-package")


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
    graph_cache.save(key, mlp, 8)
    (file,) = folder.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert graph_cache.load(key) is None
    assert_same(import_graph(MLP, batch_norm="synchronized").graph, mlp)
    assert file.read_bytes() == good


def test_the_graph_of_another_key_is_a_miss(mlp: OperatorGraph, folder: Path) -> None:
    graph_cache.save("a" * 64, mlp, 8)
    (folder / f"{'a' * 64}.json").rename(folder / f"{'b' * 64}.json")
    assert graph_cache.load("b" * 64) is None


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
    graph_cache.save("a" * 64, mlp, 8)
    assert graph_cache.load("a" * 64) is None
    assert [path.name for path in folder.iterdir()] == [f"{'a' * 64}.json"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SOAPSTONE_CACHE_DIR", str(tmp_path / "file"))
    assert_same(import_graph(MLP, batch_norm="synchronized").graph, mlp)
    assert graph_cache.contents() == (0, 0)
    assert graph_cache.clear() == 0


def test_the_oldest_make_room(mlp: OperatorGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MOST_GRAPHS", 3)
    for letter in "abcde":
        graph_cache.save(letter * 64, mlp, 8)
    assert graph_cache.contents()[0] == 3
    assert graph_cache.load("e" * 64) is not None


def test_processes_at_once_keep_and_find_whole_graphs(mlp: OperatorGraph, folder: Path) -> None:
    graph_cache.save("a" * 64, mlp, 8)
    code = (
        "from app.services.models import graph_cache\n"
        "graph = graph_cache.load('a' * 64)[0]\n"
        "for _ in range(100):\n"
        "    graph_cache.save('b' * 64, graph, 8)\n"
        "    assert graph_cache.load('b' * 64)[0] == graph\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    found = 0
    while any(process.poll() is None for process in both):
        cached = graph_cache.load("b" * 64)
        if cached is not None:
            assert_same(cached[0], mlp)
            found += 1
    assert [process.returncode for process in both] == [0, 0]
    assert found > 0
    assert len(list(folder.iterdir())) == 2


@pytest.mark.skipif(not can_fork(), reason="processes are not forked here")
def test_a_search_imports_neither_torch_nor_pandas_and_its_network_beside_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{tmp_path}/x.sqlite")
    sizes = ("mlp", "--preset", "small", "--batch-size", "8")
    options = ("--topology", "hgx-h100", "--devices", "2", "--proposals", "4", "--fresh")
    search = ("search", "--model", *sizes, *options)

    def run(*arguments: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *arguments, "--json"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    first, said = run(*search, "--workers", "2")
    assert said.endswith("imported: []")
    (file,) = folder.iterdir()
    cached_at = file.stat().st_mtime_ns
    later, said = run(*search, "--workers", "2")
    assert said.endswith("imported: []")
    assert file.stat().st_mtime_ns == cached_at
    assert json.loads(first)["predictions"] == json.loads(later)["predictions"]
    _, said = run(*search, "--workers", "1", "--batch-norm", "local")
    assert "torch" in said.rpartition("imported: ")[2]


def test_cache_says_where_graphs_are_and_clears_them(
    command: Command, mlp: OperatorGraph, folder: Path
) -> None:
    assert "0 graphs" in command("models", "cache").output
    graph_cache.save("a" * 64, mlp, 8)
    shown = command("models", "cache", "--json").document
    assert (shown["folder"], shown["graphs"]) == (str(folder), 1)
    assert shown["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert command("models", "cache", "--clear", "--json").document["removed"] == 1
    assert list(folder.iterdir()) == []
