"""Train a module of one's own under a strategy: in a script that torchrun starts, or alone on one device.

import torch, runtime

trainer = runtime.parallelize(
    module, "strategy.json", args, kwargs,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
)
for images, labels in loader:              # the same whole batch on every rank
    loss = trainer.step(images, labels)
module.load_state_dict(trainer.state_dict())
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph.collective_algorithms import chosen_algorithms
from graph.errors import RuntimeFailure, StrategyError
from graph.operators import OperatorGraph
from graph.schedule import micro_batches_from_json
from graph.strategy import Strategy, read_document, strategy_from_json
from graph.substitutions.rewriting import rewritten
from graph.substitutions.substitution import Substitution, substitutions_from_json
from runtime.training.options import TrainingOptions, imported

if TYPE_CHECKING:
    import torch
    from torch import nn

    from graph.importing.outputs import Outputs
    from runtime.training.trainer import MakeOptimizer, Trainer

DEFAULT_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class StrategyFile:
    """A strategy as a file has it: configurations by operator name, for a graph that is known by its digest alone."""

    source: str
    document: Mapping[str, Any]

    @property
    def graph_digest(self) -> str:
        """The digest of the graph that it is for."""
        return str(self.document.get("graph"))

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of the operators that it configures."""
        entries = self.document.get("operators")
        return tuple(entries) if isinstance(entries, Mapping) else ()

    @property
    def substitutions(self) -> tuple[Substitution, ...]:
        """The substitutions that the graph has which it is for."""
        return substitutions_from_json(self.document.get("substitutions", []))


def _require_one_batch(strategy: StrategyFile | Strategy) -> None:
    """Refuse a strategy of several micro-batches, before its graph, which is of one of them, is compared."""
    micro_batches = (
        micro_batches_from_json(strategy.document.get("micro_batches", {}))
        if isinstance(strategy, StrategyFile)
        else strategy.micro_batches
    )
    if micro_batches.count > 1:
        raise StrategyError(
            f"strategy: has {micro_batches.text}, which app run executes, must have one here; call backward several "
            "times before step, or choose another strategy"
        )


def load_strategy(path: str | Path) -> StrategyFile:
    """Return the strategy that `app strategy export` wrote; `parallelize` fits it to its graph.

    Raises:
        StrategyError: the file cannot be read, or is no strategy.
    """
    document = read_document(Path(path))
    if not isinstance(document, Mapping):
        raise StrategyError(f"strategy file {path}: is no strategy, must be one; export it again")
    return StrategyFile(str(path), document)


def parallelize(  # noqa: PLR0913 - users' options, each by its name
    module: nn.Module,
    strategy: Strategy | StrategyFile | str | Path,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: MakeOptimizer,
    batch_norm: str = "synchronized",
    batches: str = "whole",
    outputs: Sequence[str] = (),
    seed: int = 0,
    device: str | torch.device | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Trainer:
    """Return a trainer of `module` under `strategy`. Every rank calls it; the strategy's device r is rank r.

    The ranks are the default process group where it is initialized, else those that torchrun's environment variables
    describe (NCCL between GPUs, gloo between CPUs), else this process alone. The module stays the user's: it gives
    structure, names and, on rank 0, the values to start from; elsewhere it may be on the meta device.

    Args:
        module: returns a scalar loss, or an object whose `.loss` is one, a dict with one under "loss", or a tuple that
            begins with one. It is trained in training mode.
        strategy: for the module's graph at the example's sizes: a path of a file, what `load_strategy` returned, or
            a `Strategy`.
        args: example inputs. They fix all sizes but for smaller batches; numbers among them stay as they are.
        kwargs: further example inputs.
        optimizer: makes a torch optimizer from the rank's parameters (`Parameters`), which are parts of the weights.
            An element-wise one (SGD, Adam, AdamW, ...) updates parts exactly as it would update the whole.
        batch_norm: "synchronized" (statistics of the whole batch) or "local" (of each part), as in the search.
        batches: "whole" (every rank is given the same whole batch) or "sharded" (each rank is given its own samples, as
            a `DistributedSampler` deals them out: the ranks' in their order are the batch of the example's sizes, and
            inputs of the example's shape are the same on all ranks).
        outputs: names of tensors in the module's result beside the loss ("logits", "hidden_states.0", "1"), for
            `Trainer.outputs`; one stands for all whose names it begins ("hidden_states" for all of its parts).
        seed: of dropout: a draw depends on (seed, step, operator, global index), not on the strategy.
        device: where this rank computes. Default: the GPU of its local rank, else the CPU.
        timeout_s: how long a rank waits for another.

    Raises:
        UsageError: `optimizer` is no function, or an option is none of its values.
        ImportFailure: the module cannot be exported.
        StrategyError: the strategy is for another graph, or needs more ranks; the message names what differs.
        RuntimeFailure: the ranks disagree about what to train, or cannot meet.

    What one rank refuses is refused on all of them.
    """
    import torch.distributed as dist

    from graph.plan import build_plan
    from runtime.communication import World
    from runtime.ranks.ranks import (
        everywhere,
        join_ranks,
        nodes_of,
        own_device,
        own_host,
        prepare_groups,
        rank_variable,
    )
    from runtime.training.batches import require_free, require_kind
    from runtime.training.optimizer_state import require_factory
    from runtime.training.trainer import Trainer

    example = (tuple(args), dict(kwargs or {}))
    own = own_device(device)
    joined = join_ranks(own, timeout_s)
    size = dist.get_world_size() if dist.is_initialized() else 1

    wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)

    def prepared() -> tuple[OperatorGraph, Strategy, Outputs | None]:
        require_factory(optimizer)
        require_free(example[1])
        require_kind(batches)
        graph_of_example, results = imported(module, *example, batch_norm, wanted)
        chosen = load_strategy(strategy) if isinstance(strategy, str | Path) else strategy
        _require_one_batch(chosen)
        if isinstance(chosen, StrategyFile):
            graph_of_example = rewritten(graph_of_example, chosen.substitutions)
        return (
            graph_of_example,
            _fitted(chosen, graph_of_example, size, module, example, batch_norm),
            results,
        )

    graph, chosen, results = everywhere(prepared)
    agreed = {"seed": seed, "batches": batches, "outputs": wanted}
    hosts = _agree(graph, chosen, agreed, own_host())
    options = TrainingOptions(batch_norm, batches, wanted, seed, own, timeout_s, nodes_of(hosts))
    plan = build_plan(graph, chosen, options.node_of, every_element=True)
    if (plan.updates_late or plan.gathers_late) and rank_variable("RANK", 0) == 0:
        policy = chosen.synchronization.policy
        what = (
            "backward waits for all sums of gradients"
            if plan.updates_late
            else "update waits for all gathers"
        )
        warnings.warn(
            f"strategy: its policy {policy} is executed by app run alone; here the {what}, as the optimizer, clipping "
            "and loss scaling are yours",
            stacklevel=2,
        )
    all_reduces = chosen_algorithms(chosen.collective_algorithms)
    prepare_groups(plan, size, timeout_s, all_reduces)
    return Trainer(
        module, plan, World(size, all_reduces), example, optimizer, options, results, leaves_group=joined
    )


def _fitted(
    strategy: Strategy | StrategyFile,
    graph: OperatorGraph,
    size: int,
    module: nn.Module,
    example: tuple[Any, Any],
    batch_norm: str,
) -> Strategy:
    """Return the strategy as one of the graph's.

    Raises:
        StrategyError: it is for another graph, is malformed, or needs more ranks.
    """
    if strategy.graph_digest != graph.digest:
        other = "local" if batch_norm == "synchronized" else "synchronized"
        if imported(module, *example, other, ())[0].digest == strategy.graph_digest:
            raise StrategyError(
                f'strategy: is for batch_norm="{other}", must be for "{batch_norm}"; pass batch_norm="{other}"'
            )
        raise StrategyError(_difference(strategy, graph))
    if isinstance(strategy, Strategy):
        needed = strategy.device_count
        chosen = strategy
    else:
        # Read for as many devices as there may be, so that the error names too few ranks as such.
        chosen = strategy_from_json(strategy.document, graph, _MOST_DEVICES)
        needed = chosen.device_count
    if needed > size:
        raise StrategyError(
            f"strategy: is for {needed} devices, there must be a process for each and "
            f"{'is' if size == 1 else 'are'} {size}; start more: "
            f"torchrun --nproc-per-node {needed}"
        )
    chosen.validate(graph, size)
    return chosen


_MOST_DEVICES = 1 << 20


def _difference(strategy: Strategy | StrategyFile, graph: OperatorGraph) -> str:
    """Return one line on the difference between a strategy's graph and this one."""
    where = f"strategy {strategy.source}" if isinstance(strategy, StrategyFile) else "strategy"
    advice = "pass the module and inputs of the sizes that it was searched for, or search again"
    own = {operator.name for operator in graph.operators}
    if isinstance(strategy, Strategy):
        count = len(strategy.configurations)
        if count != len(own):
            return f"{where}: is for a graph of {count} operators, must be for {graph.name} with {len(own)}; {advice}"
    else:
        named = set(strategy.operators)
        unknown = [name for name in strategy.operators if name not in own]
        missing = [operator.name for operator in graph.operators if operator.name not in named]
        if unknown or missing:
            parts = []
            if unknown:
                parts.append(f"has {len(unknown)} operators that {graph.name} has not ({unknown[0]}, ...)")
            if missing:
                parts.append(f"lacks {len(missing)} of its operators ({missing[0]}, ...)")
            return f"{where}: {' and '.join(parts)}, must be for the same graph; {advice}"
    inputs = ", ".join(
        f"{name} {list(graph.value_by_name[name].spec.shape)} {graph.value_by_name[name].spec.dtype}"
        for name in graph.inputs
    )
    return (
        f"{where}: is for the same operators at other sizes or dtypes (graph {strategy.graph_digest[:12]}), must be "
        f"for {graph.name} with {inputs} (graph {graph.digest[:12]}); {advice}"
    )


def _agree(graph: OperatorGraph, strategy: Strategy, options: Mapping[str, Any], host: str) -> list[str]:
    """Check that all ranks train the same; return their hosts.

    Raises:
        RuntimeFailure: one of them has another graph, strategy or option.
    """
    from runtime.ranks.ranks import gather_everywhere

    reports = gather_everywhere(({"graph": graph.digest, "strategy": strategy.digest, **options}, host))
    first = reports[0][0]
    for rank, (report, _) in enumerate(reports):
        for what, value in report.items():
            if value != first[what]:
                raise RuntimeFailure(
                    f"rank {rank}: has {what} {str(value)[:12]}, must have that of rank 0, {str(first[what])[:12]}; "
                    "pass the same module sizes, strategy and options on every rank"
                )
    return [host for _, host in reports]
