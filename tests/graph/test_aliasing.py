"""What shares a weight's memory is known before it is freed: by torch's own schemas, through views of views."""

from __future__ import annotations

import torch

from graph.aliasing import may_alias
from graph.importer import import_module
from graph.strategy import Sharding, stays_whole
from search.space.baselines import fsdp

# Of torch's schemas that return what they were given: those of lists, dictionaries and devices, not of dense tensors.
OF_OTHERS = frozenset(
    """
    __getitem__ get keys pop setdefault as_tensor cpu cuda to_here local_value pin_memory ccol_indices col_indices
    crow_indices row_indices indices slice_inverse
    """.split()  # noqa: SIM905 - easier to read
)


def test_every_operator_that_returns_memory_of_its_inputs_is_known() -> None:
    names = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    }
    public = {name for name in names if not name.startswith("_")} - OF_OTHERS
    assert public
    assert [name for name in sorted(public) if not may_alias(f"aten.{name}.default")] == []
    assert not may_alias("aten.linear.default")


class Views(torch.nn.Module):
    """Weights read through views: one by a buffer's renewal, one that is the loss, one by operators of the loss."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.averaged = torch.nn.Parameter(torch.zeros(4, 4))
        self.plain = torch.nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("kept", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.averaged.t()
        with torch.no_grad():
            self.kept.copy_(0.5 * self.kept + seen.reshape(-1))
        x = torch.sin(x @ seen)
        return (torch.cos(x) @ self.plain.view(2, 8).view(4, 4).t()).sum()


class Scalar(torch.nn.Module):
    """A loss that is a weight's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - nothing depends on it
        return self.weight.view(-1)[0]


def test_who_reads_a_view_of_a_weight_reads_the_weight() -> None:
    graph = import_module(Views(), (torch.zeros(6, 4),), {}, name="views")
    readers = [graph.operators[index].target for index in graph.weight_readers["plain"]]
    assert readers[-1] in ("aten.mm.default", "aten.matmul.default")
    assert all(may_alias(target) for target in readers[:-1])
    assert len(readers) > len(graph.consumers["plain"])


def test_weights_whose_views_are_read_after_the_backward_stay_whole() -> None:
    graph = import_module(Views(), (torch.zeros(6, 4),), {}, name="views")
    assert stays_whole(graph) == {"averaged"}
    levels = dict(zip([one.name for one in graph.weights], fsdp(graph, 2).sharding, strict=True))
    assert levels == {"averaged": Sharding.OPTIMIZER, "plain": Sharding.PARAMETERS}
    assert stays_whole(import_module(Scalar(), (torch.zeros(2),), {}, name="scalar")) == {"weight"}
