"""Estimates against rooflines computed by hand."""

import random
from dataclasses import replace
from math import log2
from statistics import median

import pytest

from graph.calls import LocalCall
from graph.errors import CostError
from graph.operators import Slot, TensorSpec
from graph.topology import DeviceKind
from profiler.estimate import (
    Estimator,
    Observation,
    PhaseWork,
    estimate,
    roofline_s,
    work_of,
)
from profiler.updates import update_call
from tests.profiler.examples import matrix_product, rectifier

KIND = DeviceKind(
    name="by hand",
    processor="cuda",
    peak_flops=(("float32", 1e12), ("float16", 4e12)),
    memory_bytes=2**30,
    memory_bandwidth_bytes_per_s=1e11,
    launch_latency_s=1e-5,
)


def test_roofline_is_bound_by_arithmetic() -> None:
    time_s = roofline_s(PhaseWork(1e9, 1.0), KIND, arithmetic_efficiency=0.5, memory_efficiency=1.0)
    assert time_s == pytest.approx(1e9 / 0.5e12 + 1e-5)


def test_roofline_is_bound_by_memory() -> None:
    time_s = roofline_s(PhaseWork(1.0, 1e9), KIND, arithmetic_efficiency=1.0, memory_efficiency=0.5)
    assert time_s == pytest.approx(1e9 / 0.5e11 + 1e-5)


def test_nothing_to_do_takes_a_launch() -> None:
    assert roofline_s(PhaseWork(0.0, 0.0), KIND) == 1e-5


def test_precision_chooses_the_peak() -> None:
    single = roofline_s(PhaseWork(1e12, 0.0, "float32"), KIND, arithmetic_efficiency=1.0)
    half = roofline_s(PhaseWork(1e12, 0.0, "float16"), KIND, arithmetic_efficiency=1.0)
    other = roofline_s(PhaseWork(1e12, 0.0, "bfloat16"), KIND, arithmetic_efficiency=1.0)
    assert (single, half, other) == pytest.approx((1.00001, 0.25001, 1.00001))


def test_work_of_a_matrix_product() -> None:
    call = matrix_product(100, 200, 300)
    forward, backward = work_of(call, "forward"), work_of(call, "backward")
    moved = 4 * (100 * 200 + 200 * 300 + 100 * 300)
    assert forward == PhaseWork(2 * 100 * 200 * 300, moved, "float32")
    assert backward.flops == 2 * forward.flops
    assert backward.size_bytes == moved + 4 * (100 * 200 + 200 * 300)


def test_backward_to_one_factor_is_half_the_work() -> None:
    both = work_of(matrix_product(100, 200, 300), "backward")
    one = work_of(matrix_product(100, 200, 300, (False, True)), "backward")
    assert one.flops == both.flops / 2


def test_work_of_an_update() -> None:
    assert work_of(update_call("momentum", 1000), "update") == PhaseWork(4000, 5 * 4000, "float32")


def test_missing_phase_is_named() -> None:
    with pytest.raises(
        CostError, match=r"aten\.mm\.default: has no phase update, must be one of forward, backward"
    ):
        work_of(matrix_product(2, 2, 2), "update")


def test_data_sheet_estimates_by_hand() -> None:
    forward_s, backward_s = estimate(matrix_product(1000, 1000, 1000), KIND)
    assert forward_s == pytest.approx(2e9 / 0.6e12 + 1e-5)
    assert backward_s == pytest.approx(4e9 / 0.6e12 + 1e-5)
    assert estimate(matrix_product(10, 10, 10, (False, False)), KIND)[1] == 0.0
    update_s, nothing = estimate(update_call("sgd", 10**6), KIND)
    assert update_s == pytest.approx(12e6 / 0.8e11 + 1e-5)
    assert nothing == 0.0


def test_estimates_grow_with_flops() -> None:
    times = [estimate(matrix_product(size, size, size), KIND) for size in (256, 512, 1024, 2048)]
    assert times == sorted(times)
    latency = KIND.launch_latency_s
    assert (times[3][0] - latency) / (times[2][0] - latency) == pytest.approx(8.0)


def _observations() -> list[Observation]:
    sizes = (64, 128, 256, 512, 1024)
    products = [matrix_product(size, size, size) for size in sizes]
    ratios = (3.0, 2.5, 2.0, 1.5, 1.0)
    return [
        Observation(call, "forward", ratio * roofline_s(work_of(call, "forward"), KIND))
        for call, ratio in zip(products, ratios, strict=True)
    ]


def random_product(generator: random.Random) -> LocalCall:
    rows, inner, columns = (generator.randint(1, 2000) for _ in range(3))
    return matrix_product(rows, inner, columns)


def test_measured_calls_are_estimated_close_to_what_they_took() -> None:
    estimator = Estimator.fit(KIND, _observations())
    for entry in _observations():
        found = estimator.estimate(entry.call, "forward")
        assert (found.origin, found.observations) == ("estimated", 5)
        assert found.time_s == pytest.approx(entry.time_s, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_a_ratio_that_changes_smoothly_with_the_sizes_is_found_between_them(seed: int) -> None:
    """As of a library that is the slower the smaller the matrices: what one ratio for all misses by far."""
    generator = random.Random(seed)

    def observed(call: LocalCall) -> Observation:
        ratio = 1 + 20 / log2(4 + work_of(call, "forward").flops)
        return Observation(call, "forward", ratio * estimate(call, KIND)[0])

    estimator = Estimator.fit(KIND, [observed(random_product(generator)) for _ in range(100)])
    errors = []
    for _ in range(50):
        truth = observed(random_product(generator))
        errors.append(abs(estimator.estimate(truth.call, "forward").time_s / truth.time_s - 1))
    assert median(errors) < 0.002
    assert max(errors) < 0.05


def test_a_device_that_is_slower_by_one_factor_is_estimated_exactly() -> None:
    generator = random.Random(3)
    calls = [random_product(generator) for _ in range(40)]
    observations = [Observation(call, "forward", 7 * estimate(call, KIND)[0]) for call in calls]
    estimator = Estimator.fit(KIND, observations[:20])
    for entry in observations[20:]:
        found = estimator.estimate(entry.call, "forward")
        assert found.time_s == pytest.approx(entry.time_s)
        assert found.error == pytest.approx(0.0)


def test_leading_dims_of_a_product_are_rows() -> None:
    """The same matrices, measured as two dims and asked for as three, are one family and cost the same."""

    def linear(leading: tuple[int, ...], inner: int, columns: int) -> LocalCall:
        shapes = ((*leading, inner), (columns, inner), (columns,))
        return LocalCall(
            target="aten.linear.default",
            arguments=(("input", Slot(0)), ("weight", Slot(1)), ("bias", Slot(2))),
            inputs=tuple(TensorSpec(shape, "float32") for shape in shapes),
            outputs=(TensorSpec((*leading, columns), "float32"),),
            gradients=(True, True, True),
        )

    generator = random.Random(6)
    flat = [linear((generator.randint(1, 500),), 64, generator.randint(1, 500)) for _ in range(30)]
    estimator = Estimator.fit(
        KIND,
        [Observation(call, "forward", generator.uniform(1, 2) * estimate(call, KIND)[0]) for call in flat],
    )
    for call in [linear((120,), 64, 40), *flat[:3]]:
        (rows, inner), (columns, _) = call.inputs[0].shape, call.inputs[1].shape
        folded = linear((1, rows), inner, columns)
        found = estimator.estimate(folded, "forward")
        assert found == estimator.estimate(call, "forward")
        assert found.observations == 30


def test_one_measurement_says_nothing_of_its_error() -> None:
    found = Estimator.fit(KIND, _observations()[:1]).estimate(matrix_product(5, 6, 7), "forward")
    assert (found.observations, found.error) == (1, None)


def test_another_family_takes_the_median_of_its_operator_type() -> None:
    half = matrix_product(300, 400, 500)
    half = replace(half, inputs=tuple(replace(spec, dtype="float16") for spec in half.inputs))
    found = Estimator.fit(KIND, _observations()).estimate(half, "forward")
    assert found.time_s == pytest.approx(2.0 * roofline_s(work_of(half, "forward"), KIND))
    assert (found.origin, found.observations) == ("estimated", 5)
    assert found.error == pytest.approx(1 / 3)


def test_other_types_use_the_median_over_all() -> None:
    other = rectifier(10**6)
    found = Estimator.fit(KIND, _observations()).estimate(other, "forward")
    assert found.time_s == pytest.approx(2.0 * roofline_s(work_of(other, "forward"), KIND))
    assert found.origin == "estimated"


def test_without_measurements_of_the_phase_the_data_sheet_speaks() -> None:
    call = matrix_product(300, 400, 500)
    for estimator in (Estimator.fit(KIND, _observations()), Estimator.fit(KIND, [])):
        found = estimator.estimate(call, "backward")
        assert found.time_s == estimate(call, KIND)[1]
        assert (found.origin, found.observations) == ("datasheet", 0)


def test_updates_do_not_learn_from_operators_nor_teach_them() -> None:
    call = update_call("sgd", 1000)
    taught = Estimator.fit(KIND, [Observation(call, "update", 1.0)])
    assert taught.estimate(matrix_product(2, 2, 2), "forward").origin == "datasheet"
    assert taught.estimate(call, "update").time_s == pytest.approx(1.0)
    assert Estimator.fit(KIND, _observations()).estimate(call, "update").origin == "datasheet"


def test_order_of_observations_does_not_matter() -> None:
    observations = _observations()
    shuffled = list(observations)
    random.Random(5).shuffle(shuffled)
    assert Estimator.fit(KIND, observations) == Estimator.fit(KIND, shuffled)
