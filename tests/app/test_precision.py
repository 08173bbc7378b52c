"""`--precision` through the command line: what is measured, searched, run and imported again, and what is refused."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from app.db.records import EnvironmentRecord
from app.db.store import Store
from app.services.costs.machine import put_kind
from app.services.costs.operator_costs import DatabaseCosts
from app.services.costs.precisions import environments_of
from graph.topology import DeviceKind
from tests.app.conftest import USERS_NETWORK, Command
from tests.app.db import samples
from tests.profiler.examples import matrix_product

TWO_CPUS = ("--device", "cpu", "--devices", "2")
MLP = ("--model", "mlp", "--preset", "small")
BFLOAT16 = ("--precision", "bfloat16")
NETWORK = f"""{USERS_NETWORK}
def half(batch_size=6):
    module, (x, y), _ = fine(batch_size)
    return module.to(torch.bfloat16), (x.to(torch.bfloat16), y), {{}}
class Distances(Net):
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.b(torch.relu(self.a(x))) + torch.pdist(self.a(x)).sum(), y)
def distances(batch_size=6):
    return Distances(), (torch.randn(batch_size, 8), torch.randint(4, (batch_size,))), {{}}
"""


@pytest.fixture
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder, with a user's own networks."""
    (tmp_path / "precise.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return "precise"


def rows(database: Path, query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.usefixtures("known_links")
def test_a_network_is_profiled_searched_run_and_traced_in_bfloat16(
    command: Command, database: Path, tmp_path: Path
) -> None:
    profiled = command("profile", *MLP, *TWO_CPUS, *BFLOAT16, "--json")
    assert profiled.code == 0, profiled
    assert profiled.document["measured"] == profiled.document["needed"] > 0
    dtypes = {
        dtype
        for (key,) in rows(database, "SELECT key FROM op_signatures")
        for dtype, _ in json.loads(str(key))["inputs"]
    }
    # Sums of losses are in float32, targets are whole numbers.
    assert dtypes == {"bfloat16", "float32", "int64"}

    searched = command("search", *MLP, *TWO_CPUS, *BFLOAT16, "--proposals", "20")
    assert searched.code == 0, searched
    assert "run it: app run --model mlp --preset small --precision bfloat16 --device cpu" in searched.output
    assert "100.0 %" in searched.output

    run = command(
        "run", *MLP, *TWO_CPUS, *BFLOAT16, "--strategy", "data-parallel", "--iterations", "2", "--verify",
        "--profile", "--json",
    )  # fmt: skip
    assert run.code == 0, run
    assert run.document["verified"] is True
    assert {one["what"] for one in run.document["deviations"]} >= {"gradient", "gradient in bfloat16"}

    # Each of these imports the stored graph again.
    trace = tmp_path / "trace.json"
    for again in (
        ("trace", "--execution", "1", "--output", str(trace)),
        ("strategy", "show", run.document["digest"]),
        ("strategy", "export", run.document["digest"], str(tmp_path / "plan.py"), "--format", "dtensor"),
    ):
        assert command(*again).code == 0, again
    assert "'precision': 'bfloat16'" in (tmp_path / "plan.py").read_text().replace('"', "'")
    assert [
        json.loads(str(one))["precision"] for (one,) in rows(database, "SELECT document FROM trainings")
    ] == ["bfloat16"]


def test_bfloat16_halves_memory_and_shares_no_graph_with_float32(command: Command, database: Path) -> None:
    arguments = ("search", *MLP, "--topology", "p100-cluster", "--devices", "2", "--proposals", "5", "--json")
    found = {
        precision: command(*arguments, "--fresh", "--precision", precision).document
        for precision in ("float32", "bfloat16", "float16")
    }
    memory = {
        precision: [max(one["peak_memory_bytes"]) for one in document["predictions"]]
        for precision, document in found.items()
    }
    assert memory["bfloat16"] == memory["float16"]
    # Targets and the sums of losses keep their size.
    for half, single in zip(memory["bfloat16"][1:], memory["float32"][1:], strict=True):
        assert 0.5 <= half / single < 0.52
    assert len(rows(database, "SELECT DISTINCT digest FROM graphs")) == 3


def test_tf32_has_the_graph_of_float32_and_the_peaks_of_its_own(command: Command, database: Path) -> None:
    arguments = (
        "search", "--model", "candle-uno", "--batch-size", "4096", "--topology", "hgx-h100", "--devices", "2",
        "--proposals", "5", "--fresh", "--json", "--precision",
    )  # fmt: skip
    single, tf32 = (command(*arguments, precision).document for precision in ("float32", "tf32"))
    times = [document["predictions"][1]["predicted_step_time_s"] for document in (single, tf32)]
    assert times[1] < 0.8 * times[0]
    assert len(rows(database, "SELECT digest FROM graphs")) == 1
    assert len(rows(database, "SELECT digest FROM trainings")) == 2


def test_costs_of_tf32_and_float32_are_never_mixed(database: Path) -> None:
    kind = DeviceKind("gpu", "cuda", (("float32", 1e12), ("tf32", 8e12)), 2**30, 1e11, 1e-6)
    facts = samples.environment().facts
    with Store.open(database) as store:
        kind_id = put_kind(store, kind)
        ids = {}
        for name, matmul, cudnn in (
            ("float32", False, False),
            ("tf32", True, True),
            ("unclear", False, True),
        ):
            told = {**facts, "matmul_tf32": matmul, "cudnn_tf32": cudnn}
            ids[name] = store.put_environment(EnvironmentRecord(told))
        plain = store.put_environment(EnvironmentRecord(facts))
        assert environments_of(store, "tf32") == (ids["tf32"],)
        assert set(environments_of(store, "float32")) == {ids["float32"], plain}
        assert environments_of(store, "bfloat16") == environments_of(store, "float32")
        store.put_op_costs(kind_id, ids["float32"], [samples.op_cost(1, time_s=3.0)])
        store.put_op_costs(kind_id, ids["tf32"], [samples.op_cost(1, time_s=1.0, at=5)])
        for precision, time_s in (("float32", 3.0), ("tf32", 1.0)):
            (stored,) = store.op_costs(kind_id, environments_of(store, precision)).values()
            assert stored.minimum_s == time_s
        # From the data sheet: 8 times the rate where arithmetic bounds, and the same where memory does.
        sources = [
            DatabaseCosts(store, kind, None, None, "estimate", precision=precision)
            for precision in ("float32", "tf32")
        ]
        products = [source.resolve([matrix_product(4096, 4096, 4096)], "gpu")[0] for source in sources]
        assert products[0].forward_s / products[1].forward_s == pytest.approx(8, rel=0.01)
        assert len({source.update_cost("adam", "float32", "gpu") for source in sources}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("known_links")
def test_a_users_own_module_runs_in_float16(command: Command, networks: str) -> None:
    run = command(
        "run", "--model", f"{networks}:fine", *TWO_CPUS, "--precision", "float16", "--strategy", "data-parallel",
        "--iterations", "1", "--on-miss", "estimate", "--verify", "--json",
    )  # fmt: skip
    assert run.code == 0, run
    assert run.document["verified"] is True


def test_a_users_own_module_in_another_format_is_not_taken_for_float32(
    command: Command, networks: str
) -> None:
    refused = command("models", "show", f"{networks}:half")
    assert refused.code == 2
    assert refused.errors == (
        f"error: model {networks}:half: weight a.weight is bfloat16, must be float32 as all weights are for this "
        "--precision; pass --precision bfloat16\n"
    )
    assert command("models", "show", f"{networks}:half", *BFLOAT16).code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("known_links")
def test_an_operator_without_a_kernel_for_the_format_is_a_failed_measurement(
    command: Command, database: Path, networks: str
) -> None:
    searched = command(
        "search", "--model", f"{networks}:distances", *TWO_CPUS, *BFLOAT16, "--proposals", "5", "--json"
    )
    assert searched.code == 0, searched
    assert searched.document["predictions"][0]["shares"]["estimated"] > 0
    failures = rows(
        database,
        "SELECT DISTINCT target, failure FROM op_costs JOIN op_signatures ON op_signatures.id = signature_id "
        "WHERE failure IS NOT NULL",
    )
    assert [str(target) for target, _ in failures] == ["aten.pdist.default"]
    assert "not implemented for 'BFloat16'" in str(failures[0][1])
    run = command(
        "run", "--model", f"{networks}:distances", *TWO_CPUS, *BFLOAT16, "--strategy", "single-device"
    )
    assert run.code == 1
    assert run.errors.splitlines()[-1].startswith("error: rank 0: NotImplementedError: ")
    assert "Traceback" not in run.errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("profile", *MLP, "--device", "cpu", "--precision", "tf32"),
            "--precision tf32: device cpu:0 is no GPU, must be of GPUs with TF32",
        ),
        (
            ("search", *MLP, *TWO_CPUS, "--precision", "tf32"),
            "--precision tf32: device cpu:0 is no GPU, must be of GPUs with TF32",
        ),
        (
            ("run", *MLP, *TWO_CPUS, "--precision", "tf32"),
            "--precision tf32: device cpu:0 is no GPU, must be of GPUs with TF32",
        ),
        (
            ("search", *MLP, "--topology", "p100-cluster", "--precision", "tf32"),
            "--precision tf32: device kind P100-SXM2 of p100-cluster has no peak_flops of tf32",
        ),
        (
            ("search", *MLP, "--precision", "float8"),
            "--precision: is float8, must be one of float32, tf32, bfloat16, float16",
        ),
        (
            ("profile", *MLP, "--device", "cpu", "--precision", "float8"),
            "precision: is float8, must be one of float32, tf32, bfloat16, float16",
        ),
        (
            ("profile", *MLP, "--device", "cpu", "--precision", "float16", "--optimizer", "adam"),
            "optimizer: is adam with precision float16",
        ),
    ],
)
def test_what_cannot_be_is_one_line(command: Command, arguments: tuple[str, ...], message: str) -> None:
    done = command(*arguments)
    assert done.code == 2
    errors = done.errors.splitlines()
    assert errors[-1].startswith(f"error: {message}")
    assert "Traceback" not in done.errors
