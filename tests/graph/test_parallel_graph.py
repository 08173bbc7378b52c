"""Parallel computation graphs: chains do to index sets what exchanges do, and strategies come back as they were."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from math import gcd, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.axes import UNBOUNDED, AxisKind, operand_region, operand_regions, part_of
from graph.errors import StrategyError
from graph.intervals import Region, full_region
from graph.operator_ranges import OperatorRange
from graph.operators import Operator, OperatorGraph
from graph.parallel_graph import (
    OperatorSplit,
    ParallelChain,
    ParallelGraph,
    derived_chain,
    parallel_graph,
    strategy_of,
)
from graph.parallel_tensor import (
    MachineView,
    ParallelDim,
    ParallelKind,
    ParallelOperator,
    ParallelTensor,
    PlacedTensor,
    common_sizes,
    machine_view,
    merged,
    refined,
    simplified,
)
from graph.plan import build_plan
from graph.schedule import MicroBatches, Schedule
from graph.strategy import Configuration, Sharding, Strategy
from graph.synchronization import Policy, Synchronization
from search.space.baselines import all_baselines, data_parallel, fsdp, megatron, single_device
from tests.graphs import small_graph
from tests.search.builders import branches, joined, statistics, two_layers, unrolled, viewed

DEVICES = 16
MOST_PARTS = 8
MOST_ELEMENTS = 5000  # of values whose elements are gone through one by one
BUILT = {graph.__name__: graph for graph in (two_layers, branches, joined, statistics, unrolled, viewed)}
ZOO = {"mlp": 8, "alexnet": 8, "gpt2": 4}


@cache
def network(name: str) -> OperatorGraph:
    if name in BUILT:
        return BUILT[name]()
    return small_graph(name, ZOO[name])


def random_view(degrees: tuple[int, ...], rng: np.random.Generator) -> MachineView:
    """A view whose degrees follow each other in a random order and direction, with gaps where there is room."""
    extents = tuple(degree for degree in degrees if degree > 1)
    gap = int(rng.integers(1, DEVICES // prod(extents) + 1))
    strides = [0] * len(extents)
    for place in rng.permutation(len(extents)):
        strides[place] = gap * int(rng.choice([-1, 1]))
        gap *= extents[place]
    reached = [(extent - 1) * stride for extent, stride in zip(extents, strides, strict=True)]
    lowest, highest = sum(min(0, end) for end in reached), sum(max(0, end) for end in reached)
    return MachineView(int(rng.integers(-lowest, DEVICES - highest)), extents, tuple(strides))


def random_configuration(operator: Operator, rng: np.random.Generator) -> Configuration:
    """A configuration that Unity can express: whole where a random one cannot."""
    axes = operator.space.axes
    degrees = [1] * len(axes)
    for _ in range(int(rng.integers(0, 4))):
        axis = int(rng.integers(len(axes)))
        factor = int(rng.choice([2, 3, 4]))
        evenly = axes[axis].size == UNBOUNDED or not axes[axis].size % (degrees[axis] * factor)
        if evenly and prod(degrees) * factor <= MOST_PARTS:
            degrees[axis] *= factor
    view = random_view(tuple(degrees), rng)
    split = OperatorSplit(operator, tuple(degrees), view)
    try:
        for slot in range(len(operator.inputs)):
            split.input(slot)
        for position in range(len(operator.outputs)):
            split.output(position)
    except StrategyError:
        return Configuration((1,) * len(axes), (int(rng.integers(DEVICES)),))
    return Configuration(tuple(degrees), view.devices)


def random_strategy(graph: OperatorGraph, seed: int) -> Strategy:
    rng = np.random.default_rng(seed)
    return Strategy(graph.digest, tuple(random_configuration(operator, rng) for operator in graph.operators))


def parts(tensor: ParallelTensor) -> list[frozenset[int]]:
    """The elements of every part, by slicing an array of their numbers; a list entry for each copy and sum."""
    factors = [factor for dim in tensor.dims for factor in dim]
    numbers = np.arange(prod(factor.size for factor in factors)).reshape([factor.size for factor in factors])
    result = []
    for point in product(*(range(factor.degree) for factor in factors)):
        lengths = [factor.size // factor.degree for factor in factors]
        slices = [
            slice(index * length, (index + 1) * length) for index, length in zip(point, lengths, strict=True)
        ]
        result += [frozenset(numbers[tuple(slices)].ravel().tolist())] * (tensor.copies * tensor.sums)
    return result


def elements(region: Region, shape: tuple[int, ...]) -> frozenset[int]:
    """The numbers of a region's elements in its tensor."""
    numbers = np.arange(prod(shape)).reshape(shape)
    for dim, indexes in enumerate(region):
        numbers = np.take(numbers, [i for low, high in indexes for i in range(low, high)], axis=dim)
    return frozenset(numbers.ravel().tolist())


def held(placed: PlacedTensor) -> dict[int, frozenset[int]]:
    devices = placed.view.devices
    assert len(set(devices)) == len(devices) == placed.tensor.parts
    return dict(zip(devices, parts(placed.tensor), strict=True))


def check_effect(operator: ParallelOperator, before: ParallelTensor, after: ParallelTensor) -> None:
    """Check what an operator does to parts as sets of elements."""
    counts = [Counter(parts(tensor)) for tensor in (before, after)]
    if operator.kind in (ParallelKind.PIPELINE, ParallelKind.BATCH):
        assert before == after
        return
    if operator.kind in (ParallelKind.COMBINE, ParallelKind.PARTITION):
        large, small = counts if operator.kind is ParallelKind.PARTITION else counts[::-1]
        assert len(small) == len(large) * operator.degree
        for whole in large:
            inside = [part for part in small if part <= whole]
            assert len(inside) == operator.degree
            assert frozenset[int]().union(*inside) == whole
            assert {len(part) * operator.degree for part in inside} == {len(whole)}
            assert {small[part] for part in inside} == {large[whole]}
        return
    few, many = counts if operator.kind is ParallelKind.REPLICATE else counts[::-1]
    assert many == Counter({part: number * operator.degree for part, number in few.items()})


def check_chain(chain: ParallelChain) -> None:
    """Check every operator's effect, from the source without the copies that are discarded to the target."""
    source, target = chain.source.tensor, chain.target.tensor
    tensor = replace(source, copies=gcd(source.copies, target.copies))
    for operator, result in zip(chain.operators, chain.results, strict=True):
        check_effect(operator, tensor, result.tensor)
        assert operator.apply(tensor) == result.tensor
        tensor = result.tensor
        gathers = operator.kind in (ParallelKind.REDUCE, ParallelKind.COMBINE)
        ends = {*chain.source.view.devices, *chain.target.view.devices}
        assert set(held(result)) <= (ends if gathers else set(chain.target.view.devices))
    assert tensor == target
    distinct = [operator for operator in chain.operators if operator.dim is not None]
    assert len({(operator.dim, operator.factor, operator.kind) for operator in distinct}) == len(distinct)


def check_regions(graph: OperatorGraph, strategy: Strategy, parallel: ParallelGraph) -> None:
    """Check that chains begin with what producers make and end with what readers need."""
    plan = build_plan(graph, strategy, [0] * DEVICES)
    for index, (operator, placed) in enumerate(zip(graph.operators, parallel.operators, strict=True)):
        configuration = strategy.configurations[index]
        axes = operator.space.axes
        for slot, chain in enumerate(placed.inputs):
            shape = graph.value_by_name[operator.inputs[slot]].spec.shape
            if prod(shape) > MOST_ELEMENTS:
                continue
            check_chain(chain)
            operand = operator.space.inputs[slot]
            needed = operand_regions(axes, operand, configuration.degrees)
            there = held(chain.target)
            reads_all = operand_region(operand, [part_of(axis, 1, 0) for axis in axes]) == full_region(shape)
            for region, device in zip(needed, configuration.devices, strict=True):
                read = elements(region, shape)
                assert read == there[device] if reads_all else read <= there[device]
            if operator.inputs[slot] not in graph.producer:
                continue
            producer, position = graph.producer[operator.inputs[slot]]
            source = graph.operators[producer].space
            regions = operand_regions(
                source.axes, source.outputs[position], strategy.configurations[producer].degrees
            )
            made = held(chain.source)
            assert made == {
                device: elements(region, shape)
                for region, device in zip(regions, strategy.configurations[producer].devices, strict=True)
            }
            assembled = {
                assembly.device: assembly
                for assembly in plan.exchanges[operator.inputs[slot]]
                for reader in assembly.readers
                if (reader.operator, reader.slot) == (index, slot)
            }
            sent = any(assembly.remote_pieces for assembly in assembled.values())
            if not chain.operators:
                assert chain.moves == sent or not reads_all
            for assembly in assembled.values():
                counts = Counter(e for piece in assembly.pieces for e in elements(piece.region, shape))
                # Each of as many partial sums as the chain reduces.
                assert set(counts.values()) == {chain.source.tensor.sums}
                assert there[assembly.device] >= counts.keys()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", [*BUILT, *ZOO])
def test_chains_agree_with_regions_and_strategies_come_back(name: str, seed: int) -> None:
    graph = network(name)
    strategy = random_strategy(graph, seed)
    parallel = parallel_graph(graph, strategy)
    assert strategy_of(parallel, graph) == strategy
    check_regions(graph, strategy, parallel)


@pytest.mark.parametrize("name", [*BUILT, *ZOO])
def test_baselines_come_back_where_their_parts_are_even(name: str) -> None:
    graph = network(name)
    expressible = []
    for baseline in all_baselines(graph, 2):
        try:
            parallel = parallel_graph(graph, baseline.strategy)
        except StrategyError:
            continue
        assert strategy_of(parallel, graph) == baseline.strategy
        if name in BUILT:
            check_regions(graph, baseline.strategy, parallel)
        expressible.append(baseline.name)
    assert {"data-parallel", "single-device", "megatron-2"} <= set(expressible)


def test_random_strategies_have_every_kind_of_operator_and_factors() -> None:
    chains = [
        chain
        for name in BUILT
        for seed in range(8)
        for chain in parallel_graph(network(name), random_strategy(network(name), seed)).chains
    ]
    operators = [operator for chain in chains for operator in chain.operators]
    kinds = Counter(operator.kind for operator in operators)
    assert min(kinds[kind] for kind in list(ParallelKind)[:4]) > 20
    assert any(len(operator.sizes) > 1 for operator in operators)
    assert any(chain.moves for chain in chains)
    assert any(chain.source.tensor.copies > chain.target.tensor.copies for chain in chains)


def configured(graph: OperatorGraph, **of: tuple[dict[str, int], tuple[int, ...]]) -> Strategy:
    """A strategy of some operators' degrees by axis and devices; the others are whole on device 0."""
    configurations = []
    for operator in graph.operators:
        named, devices = of.get(operator.name.replace(".", "_"), ({}, (0,)))
        degrees = tuple(named.get(axis.name, 1) for axis in operator.space.axes)
        configurations.append(Configuration(degrees, devices))
    return Strategy(graph.digest, tuple(configurations))


def texts(graph: OperatorGraph, strategy: Strategy) -> dict[str, list[str]]:
    placed = parallel_graph(graph, strategy).operators
    return {operator.name: [chain.text for chain in operator.inputs] for operator in placed}


def test_data_parallelism_partitions_samples_and_replicates_weights() -> None:
    graph = two_layers()
    strategy = data_parallel(graph, 4)
    chains = texts(graph, strategy)
    assert chains["first"] == ["Partition(0, 4)", "Replicate(4)"]
    assert chains["relu"] == [""]
    assert chains["second"] == ["", "Replicate(4)"]
    first = parallel_graph(graph, strategy).operators[0]
    assert first.view == MachineView(0, (4,), (1,))
    assert first.outputs == (ParallelTensor(((ParallelDim(8, 4),), (ParallelDim(16),))),)


def test_columns_then_rows_need_one_replicate_and_one_reduce() -> None:
    graph, devices = two_layers(), (0, 1, 2, 3)
    strategy = configured(
        graph, first=({"out": 4}, devices), relu=({"d1": 4}, devices), second=({"in": 4}, devices)
    )
    chains = texts(graph, strategy)
    assert chains["first"] == ["Replicate(4)", "Partition(0, 4)"]
    assert chains["relu"] == [""]
    assert chains["second"] == ["", "Partition(1, 4)"]
    reader = next(operator for operator in graph.operators if "second" in operator.inputs)
    assert chains[reader.name] == ["Reduce(4)"]
    second = parallel_graph(graph, strategy).operators[2]
    assert second.outputs[0].text == "[8, 16], 4 partial sums"


def test_columns_alone_are_combined() -> None:
    graph = two_layers()
    chains = texts(graph, configured(graph, first=({"out": 4}, (3, 2, 1, 0))))
    assert chains["first"] == ["Replicate(4)", "Partition(0, 4)"]
    assert chains["relu"] == ["Combine(1, 4)"]
    assert parallel_graph(graph, configured(graph, first=({"out": 2}, (5, 1)))).operators[
        0
    ].view == MachineView(5, (2,), (-4,))


def test_degrees_with_a_common_divisor_are_not_gathered_more_than_that() -> None:
    graph = two_layers(samples=12)
    strategy = configured(graph, first=({"sample": 4}, (0, 1, 2, 3)), relu=({"d0": 6}, tuple(range(6))))
    assert texts(graph, strategy)["relu"] == ["Combine(0, 2), Partition(0, 3)"]
    chain = parallel_graph(graph, strategy).operators[1].inputs[0]
    assert chain.results[0].view == MachineView(0, (2,), (2,))
    assert chain.results[-1].view.devices == tuple(range(6))


def test_megatron_gathers_partial_sums_on_all_and_discards_copies_at_the_loss() -> None:
    graph = network("gpt2")
    strategy = megatron(graph, 2)
    parallel = parallel_graph(graph, strategy)
    counts = Counter(chain.text for chain in parallel.chains)
    assert counts["Reduce(2), Replicate(2)"] >= 4
    split = [operator.text for chain in parallel.chains for operator in chain.operators]
    assert any(" of " in text for text in split)  # heads, of queries, keys and values in one weight


def test_micro_batches_are_a_pipeline_of_inputs_and_a_batch_of_the_loss() -> None:
    graph = two_layers()
    strategy = replace(data_parallel(graph, 2), micro_batches=MicroBatches(4, Schedule.GPIPE))
    parallel = parallel_graph(graph, strategy)
    assert parallel.operators[0].inputs[0].text == "Pipeline(4), Partition(0, 2)"
    assert parallel.operators[0].inputs[1].text == "Replicate(2)"
    assert parallel.loss.text.endswith("Batch(4)")
    assert strategy_of(parallel, graph) == strategy
    check_regions(graph, strategy, parallel)


def test_micro_batches_of_one_sample_are_a_pipeline_too() -> None:
    graph = two_layers(samples=1)
    strategy = replace(single_device(graph), micro_batches=MicroBatches(4, Schedule.GPIPE))
    parallel = parallel_graph(graph, strategy)
    assert parallel.operators[0].inputs[0].text == "Pipeline(4)"
    assert parallel.loss.text == "Batch(4)"
    assert strategy_of(parallel, graph) == strategy
    check_regions(graph, strategy, parallel)


def test_documents_name_axes_and_machine_views() -> None:
    graph = two_layers()
    document = json.loads(json.dumps(parallel_graph(graph, data_parallel(graph, 4)).to_json(graph)))
    first = document["operators"][0]
    assert (first["name"], first["degrees"]) == ("first", {"sample": 4})
    assert first["view"] == {"start": 0, "strides": {"sample": 1}}
    assert [step["operator"] for step in first["inputs"][0]["operators"]] == ["Partition(0, 4)"]
    assert first["inputs"][0]["operators"][0]["tensor"] == "[8/4, 16]"


Change = Callable[[OperatorGraph], Strategy]

REFUSED: dict[str, tuple[Change, str]] = {
    "uneven": (
        lambda graph: configured(graph, first=({"sample": 3}, (0, 1, 2))),
        "operator first: degree of axis sample is 3, must divide its size 8",
    ),
    "no view": (
        lambda graph: configured(graph, first=({"sample": 4}, (0, 1, 3, 2))),
        "operator first: its devices 0 1 3 2 are no machine view",
    ),
    "one device": (
        lambda graph: configured(graph, relu=({"d0": 2}, (1, 1))),
        "operator relu: its devices 1 1 are no machine view, must be different ones",
    ),
    "shares": (lambda graph: fsdp(graph, 2), "weight first.weight: its holders share its parameters"),
    "optimizer": (
        lambda graph: replace(data_parallel(graph, 2), sharding=(Sharding.NONE, Sharding.OPTIMIZER)),
        "weight second.weight: its holders share its optimizer",
    ),
    "recomputation": (
        lambda graph: replace(data_parallel(graph, 2), recomputation=(OperatorRange(0, 1),)),
        "operator first: is made again in the backward, must be kept",
    ),
    "compiled": (
        lambda graph: replace(data_parallel(graph, 2), compiled=(OperatorRange(1, 2),)),
        "operator relu: is compiled with others, must be executed alone",
    ),
    "policy": (
        lambda graph: replace(data_parallel(graph, 2), synchronization=Synchronization(Policy.P3)),
        "strategy: chooses how gradients are summed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_has_no_operator_in_one_line(case: str) -> None:
    change, beginning = REFUSED[case]
    graph = two_layers()
    with pytest.raises(StrategyError) as refusal:
        parallel_graph(graph, change(graph))
    message = str(refusal.value)
    assert message.startswith(beginning)
    assert "parallel computation graph" in message
    assert message.isprintable()


def test_windows_that_overlap_are_refused() -> None:
    graph = branches()
    window = next(operator for operator in graph.operators if operator.name == "window")
    axis = next(axis for axis in window.space.axes if axis.kind is AxisKind.ATTRIBUTE)
    with pytest.raises(StrategyError, match=f"operator window: its parts along axis {axis.name} of relu"):
        parallel_graph(graph, configured(graph, window=({axis.name: 2}, (0, 1))))


def test_a_graph_that_does_not_follow_from_its_degrees_is_refused() -> None:
    graph = two_layers()
    parallel = parallel_graph(graph, data_parallel(graph, 2))
    wrong = replace(parallel.operators[1], inputs=parallel.operators[0].inputs[:1])
    changed = replace(parallel, operators=(parallel.operators[0], wrong, *parallel.operators[2:]))
    with pytest.raises(StrategyError, match="operator relu: its inputs or outputs"):
        strategy_of(changed, graph)
    with pytest.raises(StrategyError, match="operator of the loss"):
        strategy_of(replace(parallel, loss=parallel.operators[0].inputs[0]), graph)
    with pytest.raises(StrategyError, match="is for graph"):
        strategy_of(parallel_graph(graph, single_device(graph)), branches())


def test_invariants_of_parallel_tensors() -> None:
    with pytest.raises(StrategyError, match="degree is 3, must divide the size 8"):
        ParallelDim(8, 3)
    tensor = ParallelTensor(((ParallelDim(8, 4),),), 2)
    with pytest.raises(StrategyError, match="has 4 devices, must have 8"):
        PlacedTensor(tensor, MachineView(0, (4,), (1,)))
    with pytest.raises(StrategyError, match=r"Combine\(0, 3\): is applied to a tensor \[8/4\], 2 copies"):
        ParallelOperator(ParallelKind.COMBINE, 3, 0, 0, (8,)).apply(tensor)
    with pytest.raises(StrategyError, match=r"Partition\(0\.1 of 2 x 4, 2\)"):
        ParallelOperator(ParallelKind.PARTITION, 2, 0, 1, (2, 4)).apply(
            ParallelTensor(((ParallelDim(24, 3),),))
        )


@given(st.data())
def test_machine_views_are_found_again(data: st.DataObject) -> None:
    degrees = tuple(data.draw(st.lists(st.integers(1, 3), max_size=3)))
    view = random_view(
        degrees if prod(degrees) <= DEVICES else (), np.random.default_rng(data.draw(st.integers(0, 99)))
    )
    assert machine_view(view.extents, view.devices) == view
    for first, second in product(range(view.volume), repeat=2):
        devices = list(view.devices)
        devices[first], devices[second] = devices[second], devices[first]
        found = machine_view(view.extents, devices)
        assert found is None or found.devices == tuple(devices)


dims = st.lists(
    st.sampled_from([(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (6, 2)]), max_size=3
).map(lambda pairs: tuple(ParallelDim(*pair) for pair in pairs) or (ParallelDim(1),))


@given(dims)
def test_merged_factors_split_a_dim_alike(factors: tuple[ParallelDim, ...]) -> None:
    shorter = merged(factors)
    assert parts_of(shorter) == parts_of(factors)
    assert merged(shorter) == shorter
    assert refined(shorter, [factor.size for factor in factors]) == factors


@given(dims, dims)
def test_common_sizes_refine_both(left: tuple[ParallelDim, ...], right: tuple[ParallelDim, ...]) -> None:
    if prod(factor.size for factor in left) != prod(factor.size for factor in right):
        return
    sizes = common_sizes(left, right)
    if sizes is None:
        return
    for factors in (left, right):
        found = refined(factors, sizes)
        assert found is not None
        assert tuple(factor.size for factor in found) == sizes
        assert parts_of(found) == parts_of(factors)


def parts_of(factors: tuple[ParallelDim, ...]) -> list[frozenset[int]]:
    """The indexes of every part of a dim, in order, by slicing."""
    sizes = [factor.size for factor in factors]
    numbers = np.arange(prod(sizes)).reshape(sizes)
    result = []
    for point in product(*(range(factor.degree) for factor in factors)):
        slices = tuple(
            slice(index * (factor.size // factor.degree), (index + 1) * (factor.size // factor.degree))
            for index, factor in zip(point, factors, strict=True)
        )
        result.append(frozenset(numbers[slices].ravel().tolist()))
    return result


KINDS = ("Partition", "Combine", "Replicate", "Reduce")
SIZES = ((24,), (4, 6))


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from([2, 3]), st.sampled_from([(0, 0), (1, 0), (1, 1)]))
    )
)
def test_simplified_chains_do_the_same_in_canonical_form(
    drawn: list[tuple[str, int, tuple[int, int]]],
) -> None:
    start = ParallelTensor(((ParallelDim(24, 2),), (ParallelDim(4, 2), ParallelDim(6))), 1, 12)
    tensor, chain = start, []
    for kind, degree, (dim, factor) in drawn:
        of_dim = kind in ("Partition", "Combine")
        operator = (
            ParallelOperator(ParallelKind(kind), degree, dim, factor, SIZES[dim])
            if of_dim
            else ParallelOperator(ParallelKind(kind), degree)
        )
        try:
            tensor = operator.apply(tensor)
        except StrategyError:
            continue
        chain.append(operator)
    short = simplified(chain)
    result = start
    for operator in short:
        result = operator.apply(result)
    assert result == tensor
    assert simplified(short) == short
    places = [(operator.dim, operator.factor) for operator in short if operator.dim is not None]
    for place in set(places):
        degrees = [operator.degree for operator in short if (operator.dim, operator.factor) == place]
        assert len(degrees) == 1 or (len(degrees) == 2 and gcd(*degrees) == 1)
    order = ["Reduce", "Combine", "Partition", "Replicate"]
    ranks = [order.index(operator.kind) for operator in short]
    assert ranks == sorted(ranks)


def test_factors_that_do_not_fit_each_other_are_gathered_first() -> None:
    source = PlacedTensor(ParallelTensor(((ParallelDim(24, 4),),)), MachineView(0, (4,), (1,)))
    target = PlacedTensor(ParallelTensor(((ParallelDim(3), ParallelDim(8, 2)),)), MachineView(4, (2,), (1,)))
    chain = derived_chain("value", source, target)
    assert chain.text == "Combine(0, 4), Partition(0.1 of 3 x 8, 2)"
    check_chain(chain)
