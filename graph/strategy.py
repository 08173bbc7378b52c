"""Strategy S: every operator's configuration, every weight's sharding, recomputation, what is compiled, all-reduces.

See `graph.recomputation`, `graph.stretches`, `graph.collective_algorithms`, `graph.synchronization` and
`graph.schedule` for the rest.

Sources: FlexFlow (arXiv:1807.05358) section 4; any degrees whose parts are not empty, any device for each task. ZeRO
(arXiv:1910.02054) and PyTorch FSDP (arXiv:2304.11277) for the sharding of weights.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from graph.axes import AxisKind, Degrees, tasks
from graph.canonical import canonical_json, digest
from graph.collective_algorithms import (
    CollectiveAlgorithms,
    algorithms_from_json,
    algorithms_to_json,
    check_algorithms,
)
from graph.errors import StrategyError
from graph.operator_ranges import OperatorRanges, check_ranges, ranges_from_json, ranges_to_json
from graph.operators import Operator, OperatorGraph
from graph.recomputation import needed_at
from graph.schedule import (
    ONE_BATCH,
    GradientSums,
    MicroBatches,
    Schedule,
    check_micro_batches,
    micro_batches_from_json,
    micro_batches_to_json,
    stages_of,
)
from graph.substitutions.substitution import substitutions_from_json, substitutions_to_json
from graph.synchronization import (
    BY_DEFAULT,
    Policy,
    Synchronization,
    synchronization_from_json,
    synchronization_to_json,
)
from graph.texts import meant, shown, unreadable

FORMAT = 1

LARGEST_FILE_BYTES = 2**28
"""A thousand operators on a thousand devices, each replicated on all, take some 16 MB."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """How one operator runs: a degree for each of its axes (replica last), and the device of each task.

    Tasks are in row-major order of their coordinates. Two tasks may share a device.
    """

    degrees: Degrees
    devices: tuple[int, ...]


class Sharding(StrEnum):
    """The tensors of a weight that its holders, the devices with the same elements, share among each other.

    NONE: nothing; each sums all gradients, keeps all optimizer state, and makes the whole update.
    OPTIMIZER: gradients and optimizer state (ZeRO-2): gradients are reduce-scattered, each device updates its share of
        the weight, and updated shares are all-gathered.
    PARAMETERS: the weight as well (ZeRO-3, FSDP): it is kept in shares, and all-gathered before its first use in the
        forward and again before its first use in the backward.
    """

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"


@dataclass(frozen=True)
class Strategy:
    """A configuration for every operator, in the graph's order, bound to the graph by its digest.

    sharding: one entry for each of the graph's weights, or none at all where no weight is shared.
    recomputation: the groups of operators whose activations are made again in the backward.
    compiled: the ranges of operators that each device executes as one function compiled by torch.compile.
    collective_algorithms: the algorithm of all-reduces over some groups of devices; of others the cheapest counts.
    synchronization: in which pieces and in which order gradients are summed, and updated weights gathered.
    micro_batches: in how many parts a step goes through its batch, and in which order; the graph is of one part.
    """

    graph_digest: str
    configurations: tuple[Configuration, ...]
    sharding: tuple[Sharding, ...] = ()
    recomputation: OperatorRanges = ()
    compiled: OperatorRanges = ()
    collective_algorithms: CollectiveAlgorithms = ()
    synchronization: Synchronization = BY_DEFAULT
    micro_batches: MicroBatches = ONE_BATCH

    def __post_init__(self) -> None:
        if self.sharding and all(level is Sharding.NONE for level in self.sharding):
            # One form for one strategy, so that equal ones have one digest.
            object.__setattr__(self, "sharding", ())

    def sharding_of(self, weight: int) -> Sharding:
        """Return the sharding of the weight of that number, in the graph's order."""
        return self.sharding[weight] if self.sharding else Sharding.NONE

    def with_configurations(self, configurations: tuple[Configuration, ...]) -> Strategy:
        """Return a strategy of other configurations, with the same sharding, recomputation and sums of gradients.

        None of it is compiled.
        """
        return replace(self, configurations=configurations, compiled=())

    def with_synchronization(self, synchronization: Synchronization) -> Strategy:
        """Return the strategy with its weights synchronized by a policy.

        One form for one step: tic and tac order gathers of weights whose update is shared; where none is, it is fifo.
        """
        if synchronization.orders_gathers and Sharding.OPTIMIZER not in self.sharding:
            synchronization = replace(synchronization, policy=Policy.FIFO)
        return replace(self, synchronization=synchronization)

    def in_micro_batches(
        self, count: int, schedule: Schedule | None = None, gradients: GradientSums | None = None
    ) -> Strategy:
        """Return the strategy with so many micro-batches, in a schedule, whose gradients are summed last or in each.

        None: as its own, where it has several.
        """
        own = self.micro_batches
        same = schedule in (None, own.schedule) and own.count > 1
        wanted = MicroBatches(
            count,
            schedule or own.schedule,
            own.credits if same else (),
            gradients or own.gradients,
        )
        return self if wanted == self.micro_batches else replace(self, micro_batches=wanted)

    def to_json(self, graph: OperatorGraph) -> dict[str, Any]:
        """Return the strategy as a document for humans: degrees by axis name, degrees of one left out.

        So are weights of which nothing is shared, and whatever else the strategy says nothing of. With it stand the
        substitutions that its graph has.
        """
        names = [operator.name for operator in graph.operators]
        shared = {
            weight.name: level.value
            for weight, level in zip(graph.weights, self.sharding, strict=False)
            if level is not Sharding.NONE
        }
        optional = {
            "sharding": shared,
            **{key: ranges_to_json(names, ranges) for key, ranges in self._ranges().items()},
            "collective_algorithms": algorithms_to_json(self.collective_algorithms),
            "synchronization": synchronization_to_json(self.synchronization),
            "micro_batches": micro_batches_to_json(self.micro_batches),
            "substitutions": substitutions_to_json(graph.substitutions),
        }
        return {
            **{key: said for key, said in optional.items() if said},
            "format": FORMAT,
            "graph": self.graph_digest,
            "operators": {
                operator.name: {
                    "degrees": {
                        axis.name: degree
                        for axis, degree in zip(operator.space.axes, configuration.degrees, strict=True)
                        if degree != 1
                    },
                    "devices": list(configuration.devices),
                }
                for operator, configuration in zip(graph.operators, self.configurations, strict=True)
            },
        }

    @cached_property
    def digest(self) -> str:
        """The sha256 over graph digest, degrees and devices, and over what else the strategy says."""
        document: list[Any] = [
            FORMAT,
            self.graph_digest,
            [[list(c.degrees), list(c.devices)] for c in self.configurations],
        ]
        if self.sharding:
            document.append({"sharding": [level.value for level in self.sharding]})
        for key, ranges in self._ranges().items():
            document.append({key: [[group.first, group.last] for group in ranges]})
        if self.collective_algorithms:
            document.append({"collective_algorithms": algorithms_to_json(self.collective_algorithms)})
        if self.synchronization != BY_DEFAULT:
            document.append({"synchronization": synchronization_to_json(self.synchronization)})
        if self.micro_batches != ONE_BATCH:
            document.append({"micro_batches": micro_batches_to_json(self.micro_batches)})
        return digest(document)

    def _ranges(self) -> dict[str, OperatorRanges]:
        """Return the ranges of operators that there are, by their key in documents."""
        ranges = {"recomputation": self.recomputation, "compiled": self.compiled}
        return {key: groups for key, groups in ranges.items() if groups}

    @property
    def device_count(self) -> int:
        """One more than the highest device used."""
        return 1 + max(device for configuration in self.configurations for device in configuration.devices)

    def validate(self, graph: OperatorGraph, device_count: int) -> None:
        """Check every configuration against its operator and the number of devices.

        Raises:
            StrategyError: naming the operator and what does not fit.
        """
        if self.graph_digest != graph.digest:
            raise StrategyError(
                f"strategy: is for graph {self.graph_digest[:12]}, must be for {graph.name} "
                f"({graph.digest[:12]}); search again or pass the model and sizes that it was made for"
            )
        if len(self.configurations) != len(graph.operators):
            raise StrategyError(
                f"strategy: has {len(self.configurations)} configurations, must have {len(graph.operators)}, "
                f"one for each operator of {graph.name}; export it again"
            )
        for operator, configuration in zip(graph.operators, self.configurations, strict=True):
            check_configuration(operator, configuration, device_count)
        check_sharding(graph, self.sharding)
        for key, ranges in self._ranges().items():
            check_ranges(graph, ranges, key)
        check_algorithms(self.collective_algorithms, device_count)
        if Sharding.PARAMETERS in self.sharding and self.synchronization.policy is Policy.P3:
            raise StrategyError(
                "synchronization: policy p3 is for weights that every holder keeps whole between steps, must be fifo, "
                "tic or tac where weights are kept in shares; choose one, or share their optimizer alone"
            )
        self.check_micro_batches(graph)

    def check_micro_batches(self, graph: OperatorGraph) -> None:
        """Check that a step of the strategy can go through its micro-batches; part of `validate`.

        Raises:
            StrategyError: naming what does not go with them.
        """
        if self.micro_batches == ONE_BATCH:
            return
        check_micro_batches(self.micro_batches, graph, self.configurations)
        self._check_shares(graph)
        if self.synchronization.policy is not Policy.FIFO:
            raise StrategyError(
                f"synchronization: policy {self.synchronization.policy} is for a step in one batch, must be fifo with "
                f"{self.micro_batches.text}; choose one of the two"
            )
        if self.compiled:
            raise StrategyError(
                f"strategy: has {self.micro_batches.text}, and compiled operators, must have one of the two; leave "
                "compiled out"
            )

    def _check_shares(self, graph: OperatorGraph) -> None:
        if Sharding.PARAMETERS not in self.sharding:
            return
        whole = never_in_shares(graph, self)
        for weight, level in zip(graph.weights, self.sharding, strict=False):
            if level is not Sharding.PARAMETERS or weight.name not in whole:
                continue
            if self.micro_batches.splits_backward:
                raise StrategyError(
                    f"weight {weight.name}: is kept in shares with schedule {self.micro_batches.schedule.value}, must "
                    f"be whole for the weight parts of its backwards; share its {Sharding.OPTIMIZER} alone, or choose "
                    "another schedule"
                )
            raise StrategyError(
                f"weight {weight.name}: is kept in shares and read by several pipeline stages, or made again behind "
                f"its own, must be of one with {self.micro_batches.count} micro-batches; share its "
                f"{Sharding.OPTIMIZER} alone"
            )


def check_sharding(graph: OperatorGraph, sharding: tuple[Sharding, ...]) -> None:
    """Check the sharding against the graph's weights.

    Raises:
        StrategyError: naming the weight and what does not fit.
    """
    if sharding and len(sharding) != len(graph.weights):
        raise StrategyError(
            f"strategy: says of {len(sharding)} weights how they are shared, must say so of {len(graph.weights)} or of "
            "none; export it again"
        )
    for weight, level in zip(graph.weights, sharding, strict=False):
        if level is Sharding.PARAMETERS and weight.name in stays_whole(graph):
            raise StrategyError(
                f"weight {weight.name}: is kept in shares and read after the backward, to renew a buffer, must be "
                f"whole then; share its {Sharding.OPTIMIZER} alone"
            )


def stays_whole(graph: OperatorGraph) -> frozenset[str]:
    """Return the weights whose memory is read after the last forward, when sharded weights are no longer gathered.

    By operators that renew buffers, themselves or through views; or as the loss or a buffer's new value, where these
    are views of a weight.
    """
    late = [graph.loss, *(value for _, value in graph.buffer_updates)]
    names = [name for index in graph.order.of_buffers for name in graph.weights_read[index]]
    return frozenset(names).union(*(graph.weights_behind[value] for value in late))


def never_in_shares(graph: OperatorGraph, strategy: Strategy) -> frozenset[str]:
    """Return the weights that a strategy's micro-batches cannot keep in shares; of one batch there are none.

    A stage gathers a weight in its forward and in its backward of a micro-batch, and frees it at their end. So of
    stages that read the same weight each would need the others for its gathers, and a group that is made again in the
    backward of a later stage what it reads. Weight parts of a backward would need gathers of their own.
    """
    if strategy.micro_batches == ONE_BATCH:
        return frozenset()
    if strategy.micro_batches.splits_backward:
        return frozenset(weight.name for weight in graph.weights)
    stages = stages_of(graph, strategy.configurations, strategy.micro_batches.schedule)
    firsts = [stage.first for stage in stages]
    return frozenset(
        name
        for name, readers in graph.weight_readers.items()
        if len(stages) > 1
        and len(
            {
                bisect_right(firsts, needed)
                for reader in readers
                for needed in (reader, needed_at(strategy.recomputation, reader))
            }
        )
        > 1
    )


def with_whole_weights(graph: OperatorGraph, strategy: Strategy) -> Strategy:
    """Return a strategy that shares the optimizer alone of weights that cannot be kept in shares (`never_in_shares`).

    Raises:
        StrategyError: the schedule is interleaved, and groups of devices do not take turns.
    """
    if Sharding.PARAMETERS not in strategy.sharding:
        return strategy
    whole = never_in_shares(graph, strategy)
    levels = tuple(
        Sharding.OPTIMIZER if level is Sharding.PARAMETERS and weight.name in whole else level
        for weight, level in zip(graph.weights, strategy.sharding, strict=True)
    )
    return strategy if levels == strategy.sharding else replace(strategy, sharding=levels)


def check_configuration(operator: Operator, configuration: Configuration, device_count: int) -> None:
    """Check one configuration: degrees within sizes, as many devices as tasks, devices that exist.

    Raises:
        StrategyError: naming the operator and what does not fit.
    """
    axes = operator.space.axes
    if len(configuration.degrees) != len(axes):
        raise StrategyError(
            f"operator {operator.name}: has {len(configuration.degrees)} degrees, must have {len(axes)}, one for "
            "each axis; export the strategy again"
        )
    for axis, degree in zip(axes, configuration.degrees, strict=True):
        if degree == 1:  # most are, and a search checks millions
            continue
        if degree < 1 or (degree > axis.size and axis.kind is not AxisKind.REPLICA):
            raise StrategyError(
                f"operator {operator.name}: degree of axis {axis.name} is {shown(degree)}, must be between 1 and "
                f"{axis.size}; correct the strategy"
            )
    if len(configuration.devices) != tasks(configuration.degrees):
        raise StrategyError(
            f"operator {operator.name}: names {len(configuration.devices)} devices, must name "
            f"{tasks(configuration.degrees)}, one for each task; correct the strategy"
        )
    if min(configuration.devices) < 0 or max(configuration.devices) >= device_count:
        device = next(device for device in configuration.devices if not 0 <= device < device_count)
        raise StrategyError(
            f"operator {operator.name}: device {shown(device)} is not there, must be between 0 and "
            f"{device_count - 1}; correct the strategy or choose a larger topology"
        )


def strategy_from_json(document: Mapping[str, Any], graph: OperatorGraph, device_count: int) -> Strategy:
    """Return the validated strategy of a document that `Strategy.to_json` (or a person) wrote.

    Raises:
        StrategyError: unknown format, operator, axis, degree or device, or a missing operator.
    """
    check_format(document, "strategy file")
    keys = (
        "collective_algorithms", "compiled", "format", "graph", "micro_batches", "operators", "recomputation",
        "sharding", "substitutions", "synchronization",
    )  # fmt: skip
    _check_keys("strategy file", document, keys)
    if document.get("graph") != graph.digest:
        raise StrategyError(
            f"strategy file: is for graph {shown(document.get('graph'))[:12]}, must be for {graph.name} "
            f"({graph.digest[:12]}); pass the model and sizes that it was made for"
        )
    if substitutions_from_json(document.get("substitutions", [])) != graph.substitutions:
        raise StrategyError(
            f"strategy file: its substitutions are not those of {graph.name}, must be; import the model with them"
        )
    entries = document.get("operators")
    if not isinstance(entries, Mapping):
        raise StrategyError(
            "strategy file: operators is missing, must map operator names to configurations; export it again"
        )
    for name in entries:
        if name not in graph.operator_by_name:
            raise StrategyError(
                f"strategy file: operator {shown(name)} is unknown, must be of {graph.name}; see app models show --axes"
            )
    configurations = tuple(
        _configuration(operator, entries.get(operator.name)) for operator in graph.operators
    )
    places = {operator.name: index for index, operator in enumerate(graph.operators)}
    recomputation, compiled = (
        ranges_from_json(document.get(key, []), places, key) for key in ("recomputation", "compiled")
    )
    strategy = Strategy(
        str(document.get("graph")),
        configurations,
        _sharding(document, graph),
        recomputation,
        compiled,
        algorithms_from_json(document.get("collective_algorithms", [])),
        synchronization_from_json(document.get("synchronization", {})),
        micro_batches_from_json(document.get("micro_batches", {})),
    )
    strategy.validate(graph, device_count)
    return strategy


def check_format(document: object, where: str) -> None:
    """Check that a document is a strategy's, of a known version.

    Raises:
        StrategyError: naming what it is.
    """
    if not isinstance(document, Mapping) or not {"format", "operators"} & set(document):
        raise StrategyError(
            f"{where}: is no strategy, but {'other JSON' if isinstance(document, Mapping) else shown(document)}; must "
            "be a file that app strategy export wrote; check the path"
        )
    version = document.get("format")
    if not _is_integer(version) or version != FORMAT:
        given = "no version (an entry format)" if version is None else f"version {shown(version)}"
        raise StrategyError(
            f"{where}: has {given} of the format of strategies, must have {FORMAT}; export it with this Soapstone"
        )


def _sharding(document: Mapping[str, Any], graph: OperatorGraph) -> tuple[Sharding, ...]:
    shared = document.get("sharding", {})
    if not isinstance(shared, Mapping):
        raise StrategyError(
            "strategy file: sharding is no map, must map names of weights to what is shared; correct it"
        )
    names = {weight.name for weight in graph.weights}
    for name, level in shared.items():
        if name not in names:
            raise StrategyError(
                f"strategy file: weight {shown(name)} is unknown, must be one of {graph.name}'s; see `app models show`"
            )
        if level not in tuple(Sharding):
            raise StrategyError(
                f"weight {name}: sharding is {shown(level)}, must be one of {', '.join(Sharding)}; choose one"
            )
    return tuple(Sharding(shared.get(weight.name, Sharding.NONE)) for weight in graph.weights)


def _configuration(operator: Operator, entry: object) -> Configuration:
    if not isinstance(entry, Mapping):
        raise StrategyError(
            f"strategy file: operator {operator.name} has no configuration, must have one; add degrees and devices"
        )
    _check_keys(f"operator {operator.name}", entry, ("degrees", "devices"))
    named = entry.get("degrees", {})
    devices = entry.get("devices")
    if not isinstance(named, Mapping) or not all(_is_integer(degree) for degree in named.values()):
        raise StrategyError(
            f"operator {operator.name}: degrees is not a map, must map axes to whole numbers; correct it"
        )
    if not isinstance(devices, list) or not all(_is_integer(device) for device in devices):
        raise StrategyError(
            f"operator {operator.name}: devices is not a list, must list whole numbers; correct it"
        )
    names = [axis.name for axis in operator.space.axes]
    for axis in named:
        if axis not in names:
            raise StrategyError(
                f"operator {operator.name}: axis {shown(axis)} is unknown, must be of {', '.join(names)}; correct it"
            )
    return Configuration(tuple(named.get(axis, 1) for axis in names), tuple(devices))


def _check_keys(where: str, entry: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Check that a document has no unknown keys, such as misspelt ones.

    Raises:
        StrategyError: naming the key, and the known one that it is like.
    """
    for key in entry:
        if key not in allowed:
            raise StrategyError(
                f"{where}: key {shown(key)} is unknown, must be one of {', '.join(allowed)}; "
                f"{meant(str(key), allowed, 'leave it out')}"
            )


def _is_integer(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def read_document(path: Path) -> Any:
    """Return the document of a strategy file; its content is not checked.

    Raises:
        StrategyError: the file cannot be read, is too large or is no JSON.
    """
    try:
        # Reading a pipe or a device may never end.
        if path.exists() and not path.is_file():
            raise StrategyError(f"strategy file {path}: is no regular file, must be one; check the path")
        if path.exists() and path.stat().st_size > LARGEST_FILE_BYTES:
            raise StrategyError(
                f"strategy file {path}: has {path.stat().st_size} bytes, must have at most {LARGEST_FILE_BYTES}; "
                "check the path"
            )
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise StrategyError(f"strategy file {path}: is empty, must be a strategy; export it again")
        document = json.loads(text, object_pairs_hook=_without_duplicates)
        check_format(document, f"strategy file {path}")
        return document
    except OSError as error:
        raise StrategyError(
            f"strategy file {path}: cannot be read ({unreadable(error)}), must be a readable file; check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise StrategyError(
            f"strategy file {path}: is not JSON ({unreadable(error)}), must be a strategy; export it again"
        ) from error


def read_strategy(path: Path, graph: OperatorGraph, device_count: int) -> Strategy:
    """Read and validate a strategy file.

    Raises:
        StrategyError: the file cannot be read, is no JSON, or does not fit.
    """
    return strategy_from_json(read_document(path), graph, device_count)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of pairs; a key that is there twice is an error."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        twice = next(
            key for position, (key, _) in enumerate(pairs) if key in {name for name, _ in pairs[:position]}
        )
        raise ValueError(f"{twice} is there twice")
    return entries


def strategy_text(strategy: Strategy, graph: OperatorGraph) -> str:
    """Return the canonical text of a strategy, for files and the database."""
    return canonical_json(strategy.to_json(graph))
