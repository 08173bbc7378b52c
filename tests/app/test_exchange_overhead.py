"""What an exchange costs inside a step: from recorded steps, and from a real network on two processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.services.costs.exchange_overhead import BLOCKS, EXCHANGES, exchange_time, overhead_jobs
from graph.plan import build_plan
from profiler.devices import cpu_devices
from profiler.link_worker import ExchangeTime
from profiler.links import LinkOptions, probe_links
from runtime.jobs.job import JobResult
from runtime.observe.spans import WEIGHT_GRADIENTS, Label, Span

QUICK = LinkOptions(
    p2p_sizes=(1024,), all_reduce_sizes=(1024,), exchange_sizes=(1024,), limit_s=100.0, most_again=0
)


def result(*steps: tuple[tuple[tuple[str, str, int], ...], ...]) -> JobResult:
    """A recorded job: of each step and rank, (kind, subject, nanoseconds) one after the other."""
    recorded = []
    for step in steps:
        ranks = []
        for rank in step:
            spans, start = [], 0
            for kind, subject, length in rank:
                spans.append(Span(Label(kind, subject, subject), start, start + length))
                start += length
            ranks.append(tuple(spans))
        recorded.append(tuple(ranks))
    return JobResult((), (), (), None, (), recorded=tuple(recorded))


def test_copies_waits_and_what_autograd_takes_more_are_counted_and_nothing_else() -> None:
    split = result(
        (
            (
                ("forward", "conv", 500),
                ("copy", "x", 1000),
                ("wait", "x", 2000),
                ("runtime", "autograd", 900),
                ("runtime", "releases", 70),
                ("copy", WEIGHT_GRADIENTS, 4000),
                ("wait", WEIGHT_GRADIENTS, 8000),
            ),
            (("copy", "x", 3000), ("runtime", "autograd", 1100)),
        )
    )
    whole = result(((("forward", "conv", 500), ("runtime", "autograd", 600)),))
    expected_ns = (1000 + 2000 + 900 + 3000 + 1100) / 2 - 600
    assert exchange_time(split, whole).device_s == pytest.approx(expected_ns / 1e9 / EXCHANGES)


def test_of_what_hosts_issue_the_same_is_counted() -> None:
    def issued(*spans: tuple[str, str, int]) -> JobResult:
        alone = tuple(Span(Label(kind, subject, subject), 0, 0, host_ns) for kind, subject, host_ns in spans)
        return JobResult((), (), (), None, (), recorded=((alone, alone),))

    split = issued(
        ("forward", "conv", 500), ("copy", "x", 70), ("wait", "x", 20), ("runtime", "autograd", 9),
        ("copy", WEIGHT_GRADIENTS, 4000),
    )  # fmt: skip
    whole = issued(("forward", "conv", 500), ("runtime", "autograd", 6))
    time = exchange_time(split, whole, on_gpu=True)
    assert time.device_s == 0
    assert time.host_s == pytest.approx((70 + 20 + 9 - 6) / 1e9 / EXCHANGES)


def test_one_disturbed_step_does_not_count() -> None:
    calm, disturbed = ((("copy", "x", 1000),),), ((("copy", "x", 10**9),),)
    whole = result(((("forward", "conv", 500),),))
    time = exchange_time(result(calm, disturbed, calm), whole)
    assert time.device_s == pytest.approx(1000 / 1e9 / EXCHANGES)


def test_an_exchange_that_costs_nothing_is_not_negative() -> None:
    split = result(((("copy", "x", 10),),))
    time = exchange_time(split, result(((("runtime", "autograd", 600),),)))
    assert time == ExchangeTime(0.0)


def test_the_network_exchanges_as_often_as_is_counted_on_two_devices_and_never_on_one() -> None:
    jobs = overhead_jobs(60.0)
    split = build_plan(jobs.split.graph, jobs.split.strategy, jobs.split.node_of)
    forward = [
        value for value, assemblies in split.exchanges.items() if any(a.remote_pieces for a in assemblies)
    ]
    gradients = {transfer.value for found in split.gradient_transfers.values() for transfer in found}
    moments = [value for value in forward if "moments" in value]
    assert len(moments) == BLOCKS
    assert len(moments) + len(gradients.intersection(moments)) == EXCHANGES
    whole = build_plan(jobs.whole.graph, jobs.whole.strategy, jobs.whole.node_of)
    assert not any(a.remote_pieces for assemblies in whole.exchanges.values() for a in assemblies)


def test_two_processes_measure_an_exchange() -> None:
    jobs = overhead_jobs(100.0)
    quick = replace(jobs, split=replace(jobs.split, recorded=2), whole=replace(jobs.whole, recorded=2))
    probe = probe_links(cpu_devices(2), QUICK, quick)
    assert probe.exchange is not None
    assert probe.exchange.device_s > 0
    # On a CPU the device is the host.
    assert probe.issue_s is None
