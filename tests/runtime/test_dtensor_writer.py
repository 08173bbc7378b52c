"""The generated file: what it says is what DTensor does, and no name in it is code."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from graph.operators import OperatorGraph
from graph.strategy import Strategy
from runtime.dtensor.mesh import REPLICATE, layout_on, shard
from runtime.dtensor.plan import ParallelPlan
from runtime.dtensor.samples import DataDim, LossShare
from runtime.dtensor.styles import Style
from runtime.dtensor.writer import PlanOrigin, source_text
from search.space import baselines
from tests.runtime.dtensor_cases import (
    Network,
    by_operator,
    graph_of,
    own,
    sequence,
    write_plan,
    zoo,
)

HOSTILE = (
    'a"""\nimport os; os._exit(7)\n"""',
    "a'); exit(7); ('",
    "a\\",
    "a\n# b\r\n\x0c\x00",
    "a\u2028exit(7)\u0085\U0001f600\ud800",
    "{exit(7)}%s",
    "[!a]*?",
)


def hostile_plan(name: str) -> ParallelPlan:
    """Return a plan in which everything that a model names is called `name`."""
    style = Style("ColwiseParallel", (("input_layouts", REPLICATE), ("output_layouts", shard(-1))))
    root = Style(
        "PrepareModuleInput",
        (("input_kwarg_layouts", {name: REPLICATE}), ("desired_input_kwarg_layouts", {name: REPLICATE})),
    )
    return ParallelPlan(
        mesh=(("data", 2), ("tensor", 2)),
        styles=(("", root), (name, style)),
        tied=((f"{name}.weight", f"{name}.other"),),
        blocks=(name,),
        data=DataDim(((0, 0),), LossShare(mean=True)),
    )


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_no_name_becomes_code(name: str) -> None:
    """The tree of the file is that of a harmless name, but for the texts in it."""

    def tree(used: str) -> tuple[str, list[str]]:
        origin = PlanOrigin(used, used, used, f"{used}:{used}", {used: used, "number": 3})
        text = source_text(hostile_plan(used), origin)
        assert text.isascii()
        parsed = ast.parse(text)
        texts = []
        for node in ast.walk(parsed):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
                node.value = ""
        return ast.dump(parsed), texts

    harmless, _ = tree("harmless")
    found, texts = tree(name)
    assert found == harmless
    assert {f"{name}:{name}", f"{name}.weight", f"{name}.other", name} <= set(texts)
    comments = source_text(hostile_plan(name), PlanOrigin(name, name, name, "a:b")).splitlines()[:11]
    assert all(line.startswith("#") for line in comments)


def test_the_keywords_of_a_factory_must_be_scalars() -> None:
    with pytest.raises(TypeError, match="list is no scalar"):
        source_text(hostile_plan("a"), PlanOrigin("a", "b", "c", "d:e", {"widths": [1, 2]}))


@pytest.fixture
def fake_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rank 0 of a group of two whose collectives move nothing: placements are real, values are not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def load(file: Path) -> ModuleType:
    """Import a generated file."""
    spec = importlib.util.spec_from_file_location("generated_plan", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def borders(generated: Any) -> dict[str, tuple[str, str]]:
    """Do a step of a generated file; return the placements in which modules with weights got input and gave output."""
    mesh = generated.make_mesh()
    module, args, kwargs = generated.build("cpu")
    module = generated.parallelize(module, mesh)
    seen: dict[str, tuple[str, str]] = {}

    def placement(tensor: torch.Tensor) -> str:
        assert isinstance(tensor, DTensor)
        (one,) = tensor.placements
        return f"{type(one).__name__.removeprefix('_')}({one.dim if one.is_shard() else ''})"  # type: ignore[attr-defined]

    def watch(path: str, watched: nn.Module) -> None:
        watched.register_forward_hook(
            lambda _, inputs, output: seen.update({path: (placement(inputs[0]), placement(output))})
        )

    for path, part in module.named_modules():
        if path and any(True for _ in part.parameters(recurse=False)):
            watch(path, part)
    generated.step(module, mesh, args, kwargs)
    return seen


def megatron(graph: OperatorGraph) -> Strategy:
    return baselines.megatron(graph, 2)


@pytest.mark.parametrize(
    ("network", "choose"),
    [
        (zoo("mlp"), megatron),
        (zoo("bert-large"), megatron),
        (zoo("mlp"), lambda graph: baselines.expert(graph, 2)),
        (own("block"), lambda graph: by_operator(graph, sequence, 2)),
    ],
    ids=["mlp", "bert", "expert", "sequence"],
)
@pytest.mark.usefixtures("fake_group")
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
def test_modules_read_and_make_what_the_strategy_says(network: Network, choose: Any, tmp_path: Path) -> None:
    """What DTensor gives each module is what its tasks read; what it hands on is what functions after it read."""
    generated = load(write_plan(network, choose, tmp_path / "plan.py"))
    graph = graph_of(network)
    strategy = choose(graph)
    layout = layout_on(graph, strategy, (2,))
    seen = borders(generated)
    assert seen
    module, _, _ = network.build()
    tied = dict(graph.aliases)
    for path, (read, made) in seen.items():
        embeds = isinstance(module.get_submodule(path), nn.Embedding)
        weight = tied.get(f"{path}.weight", f"{path}.weight")
        (index,) = {
            reader
            for reader, _ in graph.consumers[weight]
            if (graph.operators[reader].target == "aten.embedding.default") == embeds
        }
        assert read == str(layout.inputs[index][1 if embeds else 0][0]), path
        given = {
            str(layout.inputs[reader][slot][0])
            for reader, slot in graph.consumers[graph.operators[index].outputs[0]]
            if graph.operators[reader].target not in ("aten.linear.default", "aten.layer_norm.default")
        }
        assert not given or {made} == given, path


def test_the_file_needs_no_soapstone(tmp_path: Path) -> None:
    """It imports PyTorch and the standard library; the network's own package is named in FACTORY."""
    file = write_plan(zoo("bert-large"), lambda graph: baselines.megatron(graph, 2, 2), tmp_path / "plan.py")
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
        )
    }
    assert imported == {"collections", "contextlib", "importlib", "os", "sys", "torch", "typing"}
    assert "eval(" not in file.read_text().replace("module.eval()", "")
    assert "exec(" not in file.read_text()
