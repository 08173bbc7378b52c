"""The stages of a traced module, in plain PyTorch: generated files hold all that follows the imports here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree


class LossOnly(nn.Module):
    """Returns the scalar loss in what a module returns."""

    def __init__(self, module: nn.Module, loss_of: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.module = module
        self._loss_of = loss_of

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._loss_of(self.module(*args, **kwargs))


def trace(
    module: nn.Module, loss_of: Callable[[Any], torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> ExportedProgram:
    """Return the functional program of a module in training mode, whose result is the scalar loss."""
    training = {part: part.training for part in module.modules()}
    module.train()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the exporter's own internals
            program = torch.export.export(LossOnly(module, loss_of), tuple(args), dict(kwargs), strict=False)
            functional: ExportedProgram = program.run_decompositions({})
            return functional
    finally:
        for part, mode in training.items():
            part.training = mode


class Splitter:
    """Cuts a traced program into stages; each begins at a node, by name, the first at the first node.

    draws: keep dropout; without it a stage does as in evaluation mode.
    """

    def __init__(
        self, program: ExportedProgram, module: nn.Module, firsts: Sequence[str], *, draws: bool
    ) -> None:
        self.module = module
        self.draws = draws
        self.count = len(firsts)
        self.calls = [node for node in program.graph.nodes if node.op == "call_function"]
        names = {node.name for node in self.calls}
        for first in firsts[1:]:
            if first not in names:
                raise RuntimeError(f"torch.export makes no node {first} here; export the strategy again")
        self.stage: dict[fx.Node, int] = {}
        self.inputs: list[fx.Node] = []
        self.attributes: dict[fx.Node, str] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self._read_signature(program)
        number = 0
        for node in self.calls:
            while number + 1 < self.count and node.name == firsts[number + 1]:
                number += 1
            self.stage[node] = number
        self.differentiable = self._differentiable()
        by_name = {node.name: node for node in program.graph.nodes}
        self.loss = next(
            by_name[spec.arg.name]
            for spec in program.graph_signature.output_specs
            if spec.kind is OutputKind.USER_OUTPUT
        )
        self.updates = [
            (str(spec.target).removeprefix("module."), by_name[spec.arg.name])
            for spec in program.graph_signature.output_specs
            if spec.kind is OutputKind.BUFFER_MUTATION
        ]
        # The last stage that needs each value; the loss is needed in the last one.
        self.needed: dict[fx.Node, int] = {self.loss: self.count - 1}
        for node in self.calls:
            for source in node.all_input_nodes:
                if source in self.stage:
                    self.needed[source] = max(self.needed.get(source, 0), self.stage[node])

    def _read_signature(self, program: ExportedProgram) -> None:
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        for node in program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                if isinstance(node.meta.get("val"), torch.Tensor):
                    self.inputs.append(node)
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                self.attributes[node] = f"traced_{node.name}"
                self.constants[f"traced_{node.name}"] = program.constants[spec.target]
            else:
                self.attributes[node] = str(spec.target).removeprefix("module.")

    def _differentiable(self) -> set[fx.Node]:
        """Return the nodes through which a gradient may flow."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        result = {
            node
            for node, name in self.attributes.items()
            if name in parameters and parameters[name].requires_grad
        }
        for node in self.calls:
            value = node.meta.get("val")
            floating = not isinstance(value, torch.Tensor) or value.is_floating_point()
            stopped = node.target is torch.ops.aten.detach.default or not floating
            if not stopped and not result.isdisjoint(node.all_input_nodes):
                result.add(node)
        return result

    def crossing(self, number: int) -> list[fx.Node]:
        """Return the values that enter a stage from the one before it, also those that it hands through."""
        if number == 0:
            return []
        return [node for node in self.calls if self.stage[node] < number <= self.needed.get(node, -1)]

    def part(self, number: int) -> nn.Module:
        """Return a stage as a module: values of the stage before it by position, inputs of the module by keyword."""
        received = self.crossing(number)
        own = [node for node in self.calls if self.stage[node] == number]
        graph = fx.Graph()
        nodes = {node: graph.placeholder(f"received_{index}") for index, node in enumerate(received)}
        self._copy(graph, nodes, own)
        for buffer, value in self.updates:
            if value in nodes and self.stage.get(value) == number:
                graph.call_method("copy_", (graph.get_attr(buffer), nodes[value]))
        if number == self.count - 1:
            graph.output(graph.call_method("reshape", (nodes[self.loss], 1)))
        else:
            sent = [graph.call_method("contiguous", (nodes[node],)) for node in self.crossing(number + 1)]
            graph.output(tuple(sent))
        return self._module(graph)

    def targets_of(self, name: str) -> tuple[nn.Module, int]:
        """Return a module that computes the targets of a call from inputs alone, and the target that is ignored."""
        call = next(node for node in self.calls if node.name == name)
        wanted: Any = call.args[1]
        ignored: Any = call.args[4] if len(call.args) > 4 else call.kwargs.get("ignore_index", -100)
        needed = {wanted}
        for node in reversed(self.calls):
            if node in needed:
                needed.update(node.all_input_nodes)
        graph = fx.Graph()
        nodes: dict[fx.Node, fx.Node] = {}
        self._copy(graph, nodes, [node for node in self.calls if node in needed])
        graph.output(nodes[wanted])
        return self._module(graph), int(ignored)

    def _copy(self, graph: fx.Graph, nodes: dict[fx.Node, fx.Node], own: Sequence[fx.Node]) -> None:
        for index, node in enumerate(self.inputs):
            nodes[node] = graph.placeholder(f"input_{index}")
        used = {source for node in own for source in node.all_input_nodes}
        renewed = {buffer for buffer, _ in self.updates}
        for node, name in self.attributes.items():
            if node in used:
                nodes[node] = graph.get_attr(name)
                if name in renewed:
                    # The backward keeps what it read, and the next micro-batch renews the buffer before.
                    nodes[node] = graph.call_method("clone", (nodes[node],))
        for node in own:
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
            if not self.draws and node.target is torch.ops.aten.native_dropout.default:
                nodes[node].update_arg(2, False)  # noqa: FBT003 - torch's signature
            if not self.draws and node.target is torch.ops.aten.scaled_dot_product_attention.default:
                if len(node.args) > 4:
                    nodes[node].update_arg(4, 0.0)
                nodes[node].kwargs = {
                    name: 0.0 if name == "dropout_p" else value for name, value in nodes[node].kwargs.items()
                }

    def _module(self, graph: fx.Graph) -> nn.Module:
        targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        tensors: dict[str, Any] = dict(self.constants)
        tensors.update(self.module.named_buffers(remove_duplicate=False))
        tensors.update(self.module.named_parameters(remove_duplicate=False))
        part = fx.GraphModule(nn.Module(), fx.Graph())
        for name in sorted(targets):
            owner: nn.Module = part
            *path, attribute = name.split(".")
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            tensor = tensors[name]
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(attribute, tensor)
            else:
                owner.register_buffer(attribute, tensor, persistent=name not in self.constants)
        part.graph = graph
        return part

    def like(self, nodes: Sequence[fx.Node]) -> tuple[torch.Tensor, ...]:
        """Return tensors without data of the shapes of values that cross a cut."""
        return tuple(
            torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta").requires_grad_(
                node in self.differentiable
            )
            for node in nodes
        )

    def readers(self) -> dict[str, set[int]]:
        """Return the stages that read each parameter, by name."""
        result: dict[str, set[int]] = {}
        for node, name in self.attributes.items():
            if node in self.differentiable:
                result.setdefault(name, set()).update(
                    self.stage[user] for user in node.users if user in self.stage
                )
        return result


@dataclass
class RankPipeline:
    """What a rank needs for a step: its schedule and stages, how inputs are cut, and how losses are weighed.

    shared: for each group of ranks that read the same parameters in several stages, these parameters.
    counted: computes the targets whose number weighs a micro-batch, None where all weigh alike; `ignored` is the
        target that does not count.
    """

    schedule: Any
    parts: list[nn.Module]
    micro_batches: int
    dims: dict[int, int]
    shared: list[tuple[dist.ProcessGroup, list[nn.Parameter]]]
    group: dist.ProcessGroup
    last_rank: int
    counted: nn.Module | None = None
    ignored: int = 0

    def shares(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return how much of the loss of the whole batch each micro-batch's loss is."""
        if self.counted is None:
            return torch.full((self.micro_batches,), 1.0 / self.micro_batches, dtype=torch.float64)
        counts = []
        for index in range(self.micro_batches):
            inputs = micro_batch(leaves, self.dims, self.micro_batches, index)
            targets = self.counted(*inputs)
            counts.append((targets != self.ignored).sum())
        stacked = torch.stack(counts).double()
        return stacked / stacked.sum()

    def step(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """Do forwards and backwards on a batch that every rank holds whole; return the whole batch's loss."""
        leaves = tensors_of(args, kwargs)
        shares = self.shares(leaves).to(leaves[0].device)
        losses: list[torch.Tensor] = []
        inputs = {f"input_{index}": leaf for index, leaf in enumerate(leaves)}
        self.schedule.step(target=shares, losses=losses, **inputs)
        for group, parameters in self.shared:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
        loss = torch.zeros((), dtype=torch.float64, device=leaves[0].device)
        if losses:
            loss = torch.stack([one.detach().reshape(()).double() for one in losses]).sum()
        dist.broadcast(loss, self.last_rank, group=self.group)
        return loss


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among a module's arguments, keywords last."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def micro_batch(
    leaves: Sequence[torch.Tensor], dims: dict[int, int], count: int, index: int
) -> list[torch.Tensor]:
    """Return the inputs of one of `count` micro-batches."""
    return [leaf.chunk(count, dims[place])[index] for place, leaf in enumerate(leaves)]


def arguments_of(
    args: Sequence[Any], kwargs: dict[str, Any], dims: dict[int, int], count: int, index: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of one of `count` micro-batches."""
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    parts = iter(micro_batch(tensors_of(args, kwargs), dims, count, index))
    leaves = [next(parts) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    result: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, structure)
    return result


def weighed(loss: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the part of a micro-batch in the loss of the whole batch; its gradients add up to the whole batch's."""
    return (loss * share.to(loss.dtype)).sum()


SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


def pipeline_of(
    splitter: Splitter, mesh: DeviceMesh, schedule: str, micro_batches: int, dims: dict[int, int]
) -> RankPipeline:
    """Return this rank's part of a pipeline: stages are on the ranks in turn."""
    group = mesh.get_group("pipeline")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    on_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device(mesh.device_type)
    parts, stages = [], []
    for number in range(rank, splitter.count, ranks):
        part = splitter.part(number)
        last = number == splitter.count - 1
        sent = (torch.empty(1, dtype=splitter.loss.meta["val"].dtype, device="meta").requires_grad_(),)
        stages.append(
            PipelineStage(
                part,
                number,
                splitter.count,
                device,
                input_args=splitter.like(splitter.crossing(number)),
                output_args=sent if last else splitter.like(splitter.crossing(number + 1)),
                group=group,
            )
        )
        parts.append(part)
    specs = {f"input_{place}": TensorChunkSpec(dim) for place, dim in dims.items()}
    chosen = SCHEDULES[schedule](
        stages if schedule == "interleaved" else stages[0],
        micro_batches,
        loss_fn=weighed,
        kwargs_chunk_spec=specs,
        scale_grads=False,
    )
    shared = []
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, readers in splitter.readers().items():
        of_ranks = tuple(sorted({number % ranks for number in readers}))
        if len(of_ranks) > 1:
            groups.setdefault(of_ranks, []).append(name)
    for of_ranks, names in sorted(groups.items()):
        made = dist.new_group([dist.get_global_rank(group, one) for one in of_ranks])
        if rank in of_ranks:
            shared.append((made, [splitter.module.get_parameter(name) for name in sorted(names)]))
    last_rank = dist.get_global_rank(group, (splitter.count - 1) % ranks)
    return RankPipeline(chosen, parts, micro_batches, dims, shared, group, last_rank)
