"""Substitutions as a user has them: shown, run, searched, stored, exported, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.services.models.models import stored_request
from app.services.search import substitution_searches
from graph.errors import DamagedDataError
from tests.app.conftest import USERS_NETWORK, Command

HEADS = """
class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = torch.nn.Linear(8, 6), torch.nn.Linear(8, 6), torch.nn.Linear(6, 4)
    def forward(self, x, y):
        joined = torch.relu(self.left(x)) * torch.sigmoid(self.right(x))
        return torch.nn.functional.cross_entropy(self.last(joined), y)
class Product(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(8, 6), torch.nn.Linear(8, 6)
    def forward(self, x):
        return (self.left(x) * self.right(x)).mean()
class Single(Product):
    def forward(self, x):
        return self.right(torch.relu(self.left(x))).mean()
def single(batch_size=4):
    one = Single()
    one.right = torch.nn.Linear(6, 6)
    return one, (torch.randn(batch_size, 8),), {}
def product(batch_size=4):
    return Product(), (torch.randn(batch_size, 8),), {}
def heads(batch_size=4):
    return Heads(), fine(batch_size)[1], {}
"""
OWN = ("--model", "own_heads:heads", "--batch-size", "4")
HERE = ("--device", "cpu", "--devices", "2", "--on-miss", "estimate")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the user's own network be in the current folder."""
    (tmp_path / "own_heads.py").write_text(USERS_NETWORK + HEADS)
    monkeypatch.chdir(tmp_path)


def test_show_lists_rules_and_operators(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = {"rule": "merge-linears", "operators": ["linear", "linear_1"]}
    split = {"rule": "split-cross-entropy", "operators": ["cross_entropy_loss.sums"]}
    assert command("models", "show", "own_heads:heads", "--substitutions", "--json").document == [
        merged,
        split,
        {"rule": "fuse-pointwise", "operators": ["relu", "sigmoid", "mul"]},
        {"rule": "fuse-linear-activation", "operators": ["linear", "relu"]},
        {"rule": "fuse-linear-activation", "operators": ["linear_1", "sigmoid", "mul"]},
    ]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert command("models", "show", "own_heads:heads", "--substitutions", "--json").document == [
        merged,
        split,
    ]
    assert "no rule applies" in command("models", "show", "own_heads:single", "--substitutions").output


def test_without_a_compiler_nothing_fused_is_begun(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    baseline = ("run", *OWN, *HERE, "--strategy", "data-parallel")
    unity = ("search", *OWN, *HERE, "--algorithm", "unity")
    for words in (baseline, ("search", *OWN, *HERE), unity):
        refused = command(*words, "--fuse")
        assert refused.code == 2
        assert "--fuse: no-such-compiler is not there, must be for torch.compile" in refused.errors
    file = tmp_path / "fused.json"
    fusion = [{"rule": "fuse-pointwise", "operators": ["relu", "sigmoid", "mul"]}]
    file.write_text(json.dumps({"format": 1, "operators": {}, "substitutions": fusion}))
    refused = command("run", *OWN, *HERE, "--strategy", str(file))
    assert refused.code == 2
    assert f"strategy {file}: no-such-compiler is not there" in refused.errors
    monkeypatch.undo()
    refused = command("run", *OWN, *HERE, "--strategy", str(file), "--fuse")
    assert (refused.code, "--fuse: is for a baseline" in refused.errors) == (2, True)


@pytest.mark.slow
def test_a_fused_strategy_is_run_and_equal_to_the_module(command: Command) -> None:
    words = ("run", *OWN, *HERE, "--strategy", "data-parallel", "--iterations", "1", "--warmup", "0")
    document = command(*words, "--fuse", "--verify", "--json").document
    assert document["verified"]
    names = {row["name"] for row in document["deviations"] if row["what"] == "eager gradient"}
    assert {"left.weight", "right.weight", "left.bias", "right.bias"} <= names
    unity = ("search", *OWN, *HERE, "--algorithm", "unity", "--fuse", "--proposals", "20", "--no-confirm")
    evaluated = command(*unity, "--workers", "1", "--json").document["evaluated"]
    rules = {one["rule"] for row in evaluated for one in row["substitutions"]}
    assert rules == {"merge-linears", "fuse-pointwise", "fuse-linear-activation"}


def test_a_strategy_with_substitutions_is_searched_exported_imported_run_and_equal_to_the_module(
    command: Command, tmp_path: Path
) -> None:
    search = (
        "search",
        *OWN,
        *HERE,
        "--algorithm",
        "unity",
        "--proposals",
        "20",
        "--no-confirm",
        "--workers",
        "1",
    )
    report = command(*search, "--json").document
    assert {len(row["substitutions"]) for row in report["evaluated"]} == {0, 1, 2}
    plain, joint = report["searches"]
    assert plain["substitutions"] == []
    best = report["best"]["predictions"][0]["predicted_step_time_s"]
    assert best == min(plain["predicted_step_time_s"], joint["predicted_step_time_s"])
    refused = command("search", "--resume", str(joint["search"]))
    assert (refused.code, "is finished" in refused.errors) == (2, True)
    assert command("db", "check").code == 0

    merged = ("search", *OWN, *HERE, "--substitute", "--proposals", "20", "--no-confirm", "--workers", "1")
    digest = command(*merged, "--json").document["predictions"][0]["digest"]
    file = tmp_path / "merged.json"
    assert command("strategy", "export", digest[:12], "--output", str(file)).code == 0
    document = json.loads(file.read_text())
    assert document["substitutions"] == [
        {"rule": "merge-linears", "operators": ["linear", "linear_1"]},
        {"rule": "split-cross-entropy", "operators": ["cross_entropy_loss.sums"]},
    ]
    assert "linear+linear_1" in document["operators"]
    unchanged = command("query", "SELECT min(id) AS id FROM strategies", "--json").document[0]["id"]
    refused = command("strategy", "diff", str(unchanged), digest[:12])
    assert refused.code == 2
    assert "batch size 4, 2 substitutions), must be for" in refused.errors
    assert "batch size 4) as strategy" in refused.errors
    for plan in ("dtensor", "pipelining"):
        refused = command(
            "strategy", "export", digest[:12], "--format", plan, "--output", str(tmp_path / "plan.py")
        )
        assert (refused.code, "is for a graph with substitutions" in refused.errors) == (2, True)
    ran = ("run", *OWN, *HERE, "--iterations", "1", "--warmup", "0", "--json", "--strategy")
    assert command(*ran, str(file)).document["verified"] is None
    verified = command(*ran, digest[:12], "--verify").document
    assert verified["verified"]
    names = {row["name"] for row in verified["deviations"] if row["what"] == "eager gradient"}
    assert {"left.weight", "right.weight", "left.bias", "right.bias"} <= names


def test_a_classifier_and_its_loss_split_by_classes_are_equal_to_the_module(command: Command) -> None:
    words = (
        "run",
        "--model",
        "own_heads:fine",
        "--batch-size",
        "6",
        *HERE,
        "--iterations",
        "1",
        "--warmup",
        "0",
    )
    document = command(*words, "--strategy", "insightface", "--substitute", "--verify", "--json").document
    assert document["verified"]
    file = f"strategy export {document['digest'][:12]} --output split.json".split()
    assert command(*file).code == 0
    operators = json.loads(Path("split.json").read_text())["operators"]
    for name in ("exp_sums", "nll_sums"):
        assert operators[f"cross_entropy_loss.sums.{name}"]["degrees"] == {"class": 2}


def test_a_joint_search_begins_with_stored_strategies_that_have_substitutions(command: Command) -> None:
    cluster = ("--topology", "p100-cluster", "--nodes", "1", "--devices", "2", "--workers", "1", "--json")
    product = ("search", *cluster, "--model", "own_heads:product", "--batch-size")
    merged = command(*product, "4096", "--substitute", "--proposals", "400").document["predictions"][0]
    unity = ("--algorithm", "unity", "--proposals", "0", "--chains", "1")

    joint = command(*product, "4096", *unity).document
    first, second = joint["best"]["known"]  # and the best baseline of that graph
    assert first == {
        "digest": merged["digest"],
        "used": merged["digest"],
        "found_for": "batch size 4096 on 2 devices with 1 substitution",
    }
    assert second["found_for"] == first["found_for"]
    plain, found = joint["searches"]
    assert found["predicted_step_time_s"] <= merged["predicted_step_time_s"] < plain["predicted_step_time_s"]
    assert command(*product, "4096", *unity, "--fresh").document["best"]["known"] == []

    # Those that are named are transferred; that of the graph as imported is one for the first search.
    named = ("--start", merged["digest"][:12], "--start", plain["digest"][:12])
    document = command(*product, "2048", *unity, *named).document
    known = [
        json.loads(
            command(
                "query", f"SELECT options FROM searches WHERE id = {search['search']}", "--json"
            ).document[0]["options"]
        )["known"]
        for search in document["searches"]
    ]
    assert [[start["digest"] for start in starts] for starts in known] == [
        [plain["digest"]],
        [merged["digest"]],
    ]
    assert all(start["used"] != start["digest"] for (start,) in known)
    assert {len(row["substitutions"]) for row in document["evaluated"]} == {0, 1}

    searches = command("query", "SELECT count(*) AS n FROM searches", "--json").document
    refused = command("search", *cluster, *OWN, *unity, "--start", merged["digest"][:12])
    assert refused.code == 2
    assert (
        "is a strategy of own_heads:product, must fit this own_heads:heads (its operators" in refused.errors
    )
    assert command("query", "SELECT count(*) AS n FROM searches", "--json").document == searches


def test_ctrl_c_after_the_first_search_shows_what_that_found(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(substitution_searches, "search_jointly", interrupted)
    report = command(
        "search", *OWN, *HERE, "--algorithm", "unity", "--proposals", "20", "--no-confirm", "--json"
    )
    assert report.code == 130, report
    (search,) = report.document["searches"]
    assert (search["substitutions"], report.document["best"]["search"]) == ([], search["search"])


@pytest.mark.parametrize("batch", ["4096", pytest.param("4", marks=pytest.mark.slow)])
def test_the_joint_search_finds_what_an_exhaustive_one_over_all_sets_and_configurations_finds(
    command: Command, batch: str
) -> None:
    """Of a network of four operators on two devices: large, and small, where one device is best."""
    network = (
        "--model",
        "own_heads:product",
        "--batch-size",
        batch,
        "--topology",
        "p100-cluster",
        "--nodes",
        "1",
    )
    own = ("search", *network, "--devices", "2", "--fresh", "--workers", "1", "--json")
    steps = [
        command(*own, "--algorithm", "exhaustive", *options).document["predictions"][0][
            "predicted_step_time_s"
        ]
        for options in ((), ("--substitute",))
    ]
    joint = command(*own, "--algorithm", "unity", "--proposals", "600").document
    assert joint["best"]["predictions"][0]["predicted_step_time_s"] == pytest.approx(min(steps), rel=1e-9)


def test_options_and_files_that_do_not_fit_are_refused_in_a_line(command: Command, tmp_path: Path) -> None:
    refused = command("search", *OWN, *HERE, "--algorithm", "unity", "--substitute")
    assert refused.code == 2
    assert "--substitute: is what --algorithm unity chooses itself, must be left out" in refused.errors
    plain = ("--model", "own_heads:single", "--batch-size", "4", *HERE)
    refused = command("search", *plain, "--algorithm", "unity")
    assert refused.code == 2
    assert "no rule applies to own_heads:single, at least one must; choose mcmc" in refused.errors

    file = tmp_path / "wrong.json"
    for substitutions, said in (
        ("merge", "must be a list of rules"),
        ([{"rule": "merge-linears"}], "must have the name of a rule and a list of operators"),
        ([{"rule": "merge-lines", "operators": []}], "did you mean merge-linears"),
        ([{"rule": "merge-linears", "operators": ["linear", "nobody"]}], "operator nobody is unknown"),
        ([{"rule": "merge-linears", "operators": ["linear", "linear_2"]}], "these operators are no match"),
        ([{"rule": "merge-linears", "operators": ["linear", "linear_1"]}] * 2, "is in another one already"),
    ):
        file.write_text(json.dumps({"format": 1, "operators": {}, "substitutions": substitutions}))
        refused = command("run", *OWN, *HERE, "--strategy", str(file))
        assert (refused.code, len(refused.errors.strip().splitlines()[-1:])) == (2, 1)
        assert said in refused.errors
    refused = command("run", *OWN, *HERE, "--strategy", str(file), "--substitute")
    assert refused.code == 2
    assert "--substitute: is for a baseline" in refused.errors


def test_a_stored_model_with_damaged_substitutions_is_said_to_be_damaged() -> None:
    with pytest.raises(DamagedDataError, match="graph 1: substitutions: has an entry"):
        stored_request({"name": "mlp", "substitutions": [{"rule": 1}]}, "graph 1")
