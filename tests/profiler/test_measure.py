"""Measuring in this process: what is counted and reported, never how long it took."""

import gc
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graph.calls import LocalCall
from graph.operators import Slot, TensorSpec
from profiler.call_inputs import MOST_SETS, CallInputs, cache_bytes, random_tensor, storage_sizes
from profiler.devices import PhysicalDevice, available_devices
from profiler.measure import (
    FailedMeasurement,
    Measurement,
    MeasureOptions,
    PhaseOutcome,
    _Session,
    describe_error,
    failed,
    measure_call,
    phases,
    summarize,
)
from profiler.timers import CpuTimer, synchronize, timer_for
from profiler.updates import update_call
from tests.profiler.examples import impossible_matrix_product, incomplete_gamma, matrix_product

QUICK = MeasureOptions(repetitions=5, budget_s=0.001, maximum_repetitions=6)


@pytest.fixture
def device() -> PhysicalDevice:
    return available_devices("cpu")[0]


def _measured(outcomes: tuple[PhaseOutcome, ...]) -> list[Measurement]:
    assert [outcome for outcome in outcomes if isinstance(outcome, FailedMeasurement)] == []
    return [outcome for outcome in outcomes if isinstance(outcome, Measurement)]


def test_forward_and_backward_are_measured(device: PhysicalDevice) -> None:
    call = matrix_product(64, 32, 16)
    forward, backward = _measured(measure_call(call, device, QUICK))
    assert (forward.phase, backward.phase) == ("forward", "backward")
    for outcome in (forward, backward):
        assert outcome.digest == call.digest
        assert 5 <= len(outcome.samples_s) <= 6
        assert 0 < outcome.minimum_s <= outcome.p10_s <= outcome.median_s <= max(outcome.samples_s)
        assert outcome.minimum_s == min(outcome.samples_s)


def test_call_without_gradients_has_no_backward(device: PhysicalDevice) -> None:
    (forward,) = _measured(measure_call(matrix_product(8, 8, 8, (False, False)), device, QUICK))
    assert forward.phase == "forward"


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_updates_are_measured(device: PhysicalDevice, optimizer: str) -> None:
    (update,) = _measured(measure_call(update_call(optimizer, 4096), device, QUICK))
    assert update.phase == "update"
    tensors = {"sgd": 2, "momentum": 3, "adam": 4}[optimizer]
    assert update.peak_bytes == tensors * 4096 * 4


def test_peak_counts_what_is_alive_once(device: PhysicalDevice) -> None:
    forward, backward = _measured(measure_call(matrix_product(64, 32, 16), device, QUICK))
    inputs, output = 4 * (64 * 32 + 32 * 16), 4 * 64 * 16
    # The factors, which autograd saves, are the inputs themselves.
    assert forward.peak_bytes == inputs + output
    # Output and its gradient, and the gradients of both inputs.
    assert backward.peak_bytes == inputs + 2 * output + inputs


def test_heads_of_an_attention_lie_between_the_rows_as_where_they_are_split_off(
    device: PhysicalDevice,
) -> None:
    heads, mask = TensorSpec((2, 3, 5, 4), "float32"), TensorSpec((2, 3, 5, 5), "float32")
    call = LocalCall(
        "aten.scaled_dot_product_attention.default",
        tuple((name, Slot(number)) for number, name in enumerate(("query", "key", "value", "attn_mask"))),
        (heads, heads, heads, mask),
        (heads,),
        (True, True, True, False),
    )
    subject = CallInputs(call, device, seed=0)
    done = subject.forward()
    subject.draw_gradients(done)
    *queries, drawn = done.inputs
    for value in (*queries, *done.gradients, *subject.forward().gradients):
        assert value.transpose(1, 2).is_contiguous()
    assert all(value.requires_grad for value in queries)
    assert drawn.is_contiguous()


def test_longer_measuring_ends_at_its_cap(device: PhysicalDevice) -> None:
    options = MeasureOptions(budget_s=60.0, maximum_s=60.0, maximum_repetitions=7)
    (forward,) = _measured(measure_call(matrix_product(8, 8, 8, (False, False)), device, options))
    assert len(forward.samples_s) == 7


def test_past_the_time_cap_three_samples_are_enough(device: PhysicalDevice) -> None:
    options = MeasureOptions(repetitions=20, maximum_s=0.0)
    for outcome in _measured(measure_call(matrix_product(8, 8, 8), device, options)):
        assert len(outcome.samples_s) == 3


def test_failure_is_an_outcome_with_its_reason(device: PhysicalDevice) -> None:
    call = impossible_matrix_product()
    outcomes = measure_call(call, device, QUICK)
    assert [(outcome.digest, outcome.phase) for outcome in outcomes] == [
        (call.digest, "forward"),
        (call.digest, "backward"),
    ]
    for outcome in outcomes:
        assert isinstance(outcome, FailedMeasurement)
        assert "shapes cannot be multiplied" in outcome.reason
        assert "\n" not in outcome.reason


def test_exhausted_memory_is_an_outcome(device: PhysicalDevice) -> None:
    outcomes = measure_call(update_call("sgd", 2**50), device, QUICK)
    assert isinstance(outcomes[0], FailedMeasurement)
    assert "memory" in outcomes[0].reason


def test_failing_backward_leaves_the_forward(device: PhysicalDevice) -> None:
    call = incomplete_gamma(100)
    forward, backward = measure_call(call, device, QUICK)
    assert isinstance(forward, Measurement)
    assert isinstance(backward, FailedMeasurement)
    assert "igamma" in backward.reason


def test_garbage_collector_is_left_as_found(device: PhysicalDevice) -> None:
    assert gc.isenabled()
    measure_call(matrix_product(8, 8, 8), device, QUICK)
    assert gc.isenabled()


def test_phases_of_calls() -> None:
    assert phases(matrix_product(2, 2, 2)) == ("forward", "backward")
    assert phases(matrix_product(2, 2, 2, (False, False))) == ("forward",)
    assert phases(update_call("adam")) == ("update",)
    assert [outcome.phase for outcome in failed(matrix_product(2, 2, 2), "why")] == ["forward", "backward"]


@given(st.lists(st.floats(1e-9, 10.0), min_size=1, max_size=40))
def test_statistics_are_ordered(samples: list[float]) -> None:
    outcome = summarize("digest", "forward", samples, 0)
    assert outcome.minimum_s <= outcome.p10_s <= outcome.median_s <= max(samples)
    assert outcome.samples_s == tuple(samples)


def test_long_reasons_are_cut() -> None:
    text = describe_error(RuntimeError("first line\n" + "x" * 1000))
    assert text.startswith("RuntimeError: first line x")
    assert len(text) == 300
    assert text.endswith("...")


def test_inputs_rotate_beyond_the_cache(device: PhysicalDevice) -> None:
    subject = CallInputs(matrix_product(256, 256, 256), device, seed=0)
    first = subject.forward()
    subject.draw_gradients(first)
    subject.rotate()
    passes = [subject.forward() for _ in range(MOST_SETS)]
    blocks = storage_sizes([value for done in passes for value in done.inputs])
    assert sum(blocks.values()) > min(cache_bytes(device), (MOST_SETS - 1) * 2 * 4 * 256 * 256)
    assert subject.forward().inputs[0] is passes[0].inputs[0]
    # Copies compute the same, and each can be differentiated.
    expected = subject.backward(passes[0])
    for done in passes[1:]:
        torch.testing.assert_close(done.outputs, passes[0].outputs)
        torch.testing.assert_close(subject.backward(done), expected)


def test_inputs_larger_than_the_cache_are_few(device: PhysicalDevice) -> None:
    elements = 2 * cache_bytes(device) // 4
    subject = CallInputs(update_call("sgd", elements), device, seed=0)
    subject.rotate()
    places = {subject.forward().inputs[0].data_ptr() for _ in range(6)}
    assert len(places) == 2


def test_random_tensors_are_the_same_for_the_same_seed(device: PhysicalDevice) -> None:
    spec = matrix_product(500, 300, 2).inputs[0]
    first, second = random_tensor(spec, device, 1), random_tensor(spec, device, 1)
    assert first.shape == (500, 300)
    assert first.is_contiguous()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first, random_tensor(spec, device, 2))


def test_cpu_clock_counts_seconds() -> None:
    timer = CpuTimer()
    assert timer.elapsed_s(1_000_000_000, 3_500_000_000) == pytest.approx(2.5)
    assert timer.elapsed_s(timer.mark(), timer.mark()) >= 0
    assert isinstance(timer_for("cpu"), CpuTimer)
    synchronize("cpu")


def test_process_clock_stands_still_while_others_compute() -> None:
    computed, passed = timer_for("cpu", of_process=True), timer_for("cpu")
    starts = computed.mark(), passed.mark()
    time.sleep(0.5)
    assert passed.elapsed_s(starts[1], passed.mark()) >= 0.5
    assert computed.elapsed_s(starts[0], computed.mark()) < 0.25
    sum(range(10**6))
    assert computed.elapsed_s(starts[0], computed.mark()) > 0


@pytest.mark.cuda
def test_gpu_measures_with_events() -> None:
    device = available_devices("cuda")[0]
    forward, backward = _measured(measure_call(matrix_product(512, 512, 512), device, QUICK))
    assert 0 < forward.minimum_s <= forward.p10_s <= forward.median_s
    assert backward.peak_bytes >= 4 * 512 * 512 * 6
    outcomes = measure_call(matrix_product(2**20, 2**20, 2**20), device, QUICK)
    assert all(isinstance(outcome, FailedMeasurement) for outcome in outcomes)


def test_a_warm_call_has_one_set_of_inputs_and_holds_no_results(device: PhysicalDevice) -> None:
    for warm in (False, True):
        session = _Session(replace(matrix_product(64, 32, 16), warm=warm), device, QUICK)
        forward, backward = _measured(session.run())
        assert session.subject.sets == (1 if warm else MOST_SETS)
        assert {forward.digest, backward.digest} == {session.call.digest}
        held = [session.subject.forward().inputs[0] for _ in range(3)]
        assert (held[0] is held[1]) == warm
