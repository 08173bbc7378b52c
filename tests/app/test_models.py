"""`app models`: what comes with Soapstone, and what is in a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from graph.zoo import hugging_face_names, zoo_names
from tests.app.conftest import Command

USERS = """
import torch
from torch import nn


class Users(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.linalg.matrix_exp(self.linear(x)).sum() + torch.linalg.matrix_exp(x).sum()


def users(batch_size=4):
    return Users(), (torch.randn(batch_size, 4, 4),), {}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x):
        return (nn.functional.dropout(self.linear(x), self.rates[2]) * self.scale).mean()


def scaled(batch_size=4):
    return Scaled(), (torch.randn(batch_size, 4),), {}


def broken():
    return Scaled().half_of_it(), (), {}
"""


def test_list_holds_our_networks_and_those_of_an_extra(command: Command) -> None:
    listed = command("models", "list", "--json").document
    assert [one["name"] for one in listed] == [*zoo_names(), *hugging_face_names()]
    assert {one["name"]: one["extra"] for one in listed} == {
        **dict.fromkeys(zoo_names()),
        **dict.fromkeys(hugging_face_names(), "hf"),
    }
    printed = command("models", "list").output
    assert all(name in printed for name in (*zoo_names(), *hugging_face_names()))


def test_show_reports_operators_rules_parameters_and_what_can_be_split(command: Command) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    shown = command("models", "show", "hf-llama", "--preset", "small", "--json").document
    assert shown["splittable_share"] >= 0.99
    assert shown["unsplit"] == {}
    assert shown["operators"] == sum(one["count"] for one in shown["types"])
    rules = {one["target"]: one["rule"] for one in shown["types"]}
    assert rules["aten.linear.default"] == "linear"
    assert rules["aten.scaled_dot_product_attention.default"] == "attention"
    assert "none" not in rules.values()
    hidden, intermediate, shared = 24, 20, 8
    layer = 2 * hidden**2 + 2 * hidden * shared + 3 * hidden * intermediate + 2 * hidden
    assert shown["parameters"] == 2 * layer + 2 * 53 * hidden + hidden


def test_every_operator_is_listed_with_its_axes_as_strategy_files_name_them(command: Command) -> None:
    arguments = ("models", "show", "mlp", "--preset", "small", "--axes")
    operators = command(*arguments, "--json").document["axes"]
    assert [operator["name"] for operator in operators][:3] == ["linear", "relu", "linear_1"]
    assert operators[0]["axes"] == [
        {"name": "sample", "kind": "sample", "size": 4},
        {"name": "channel", "kind": "parameter", "size": 24},
        {"name": "in", "kind": "reduction", "size": 12},
    ]
    printed = command(*arguments).output
    for operator in operators:
        assert operator["name"] in printed


def test_show_names_what_has_no_rule(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_network.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    shown = command("models", "show", "users_network:users", "--json").document
    assert {one["target"]: one["rule"] for one in shown["types"]}["aten.linalg_matrix_exp.default"] == "none"
    assert set(shown["unsplit"].values()) == {"runs whole: aten.linalg_matrix_exp.default has no rule"}
    printed = command("models", "show", "users_network:users").output
    assert "2 x runs whole: aten.linalg_matrix_exp.default has no rule: " in printed


def test_a_module_that_reads_numbers_when_built_is_imported_with_data(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On meta there are none: neither for `.item()` in its constructor, nor in a tensor that is no buffer."""
    (tmp_path / "reading_network.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    shown = command("models", "show", "reading_network:scaled", "--json").document
    assert {"soapstone.dropout", "soapstone.constant"} <= {one["target"] for one in shown["types"]}
    failed = command("models", "show", "reading_network:broken")
    line = USERS.splitlines().index("    return Scaled().half_of_it(), (), {}") + 1
    assert failed.errors.startswith(
        f"error: model reading_network:broken: its factory failed at reading_network.py:{line} (AttributeError: "
    )
    assert failed.errors.count("\n") == 1


def test_ranks_that_build_a_network_import_no_database() -> None:
    """A run's ranks import this module, each of them anew."""
    code = "import sys, app.services.models.models; print([m for m in ('sqlalchemy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
