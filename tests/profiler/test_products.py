"""Products of sizes between those of networks."""

from __future__ import annotations

import math

import pytest

from graph.calls import LocalCall
from graph.operators import Slot, TensorSpec
from graph.rules import bytes_moved, flops
from profiler.call_inputs import CallInputs
from profiler.devices import cpu_devices
from profiler.products import products_between, resized, sizes
from tests.profiler.examples import matrix_product, rectifier


def _linear(leading: tuple[int, ...], inner: int, columns: int, *, bias: bool = True) -> LocalCall:
    shapes = [(*leading, inner), (columns, inner)] + [(columns,)] * bias
    return LocalCall(
        target="aten.linear.default",
        arguments=(("input", Slot(0)), ("weight", Slot(1)), ("bias", Slot(2) if bias else None)),
        inputs=tuple(TensorSpec(shape, "float32") for shape in shapes),
        outputs=(TensorSpec((*leading, columns), "float32"),),
        gradients=(True,) * len(shapes),
    )


def _batched(batch: int, rows: int, inner: int, columns: int) -> LocalCall:
    return LocalCall(
        target="aten.bmm.default",
        arguments=(("self", Slot(0)), ("mat2", Slot(1))),
        inputs=(TensorSpec((batch, rows, inner), "float32"), TensorSpec((batch, inner, columns), "float32")),
        outputs=(TensorSpec((batch, rows, columns), "float32"),),
        gradients=(True, True),
    )


NETWORK = [
    *[_linear((4, 8), 16, 64), _linear((2, 8), 64, 16), _linear((4, 4), 32, 32)],
    *[_linear((64,), 8, 16, bias=False), _linear((8,), 128, 4, bias=False)],
    *[_batched(8, 1, 32, 40), _batched(2, 16, 8, 8), matrix_product(8, 64, 16), rectifier(1000)],
]


@pytest.mark.parametrize("seed", range(3))
def test_products_lie_between_those_of_the_networks(seed: int) -> None:
    drawn = products_between(NETWORK, 40, seed)
    assert len(drawn) >= 25
    assert len({call.digest for call in [*drawn, *NETWORK]}) == len(drawn) + len(NETWORK)
    for call in drawn:
        alike = [
            one
            for one in NETWORK
            if (one.target, one.arguments, len(one.inputs)) == (call.target, call.arguments, len(call.inputs))
        ]
        for size, known in zip(sizes(call), zip(*map(sizes, alike), strict=True), strict=True):
            assert min(known) <= size <= max(known)
            step = max(1, 2 ** math.floor(math.log2(size)) // 8)
            assert size % step == 0 or size in (min(known), max(known))
        assert flops(call) <= max(map(flops, alike))
        assert bytes_moved(call) <= max(map(bytes_moved, alike))


def test_drawn_products_can_be_executed_and_give_what_they_declare() -> None:
    device = cpu_devices(1)[0]
    for call in products_between(NETWORK, 12, 0):
        made = CallInputs(call, device, 0).forward().outputs
        assert [tuple(one.shape) for one in made] == [spec.shape for spec in call.outputs]


def test_sizes_and_resized_are_inverse() -> None:
    for call in NETWORK[:-1]:
        assert resized(call, sizes(call)) == call


def test_same_seed_draws_the_same_whatever_the_order_of_calls() -> None:
    drawn = products_between(NETWORK, 20, 1)
    assert products_between(reversed(NETWORK), 20, 1) == drawn
    assert products_between(NETWORK, 20, 2) != drawn


def test_nothing_to_draw_from_gives_nothing() -> None:
    assert products_between([rectifier(10)], 20, 0) == []
    assert products_between([matrix_product(8, 8, 8)], 20, 0) == []
