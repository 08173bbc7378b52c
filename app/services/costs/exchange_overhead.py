"""The overhead of an exchange in a training step, beyond its messages: measured in steps of a small network.

A link's latency, measured with bare messages, lacks what the runtime does about them: cutting and putting together,
starting, leaving autograd's backward and entering it again, and waiting for a rank that is late. So a network whose
synchronized batch norms exchange their moments, forward and backward, is executed on two ranks and on one, with every
instruction's time recorded. On GPUs steps are issued while the device sleeps, and the host's time is recorded beside.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from profiler.link_worker import ExchangeTime
from runtime.jobs.job import Job, JobResult, run_job
from runtime.jobs.models import ModelReference
from runtime.observe.spans import WEIGHT_GRADIENTS, RecordedSteps, Span

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from profiler.devices import PhysicalDevice

BLOCKS = 12
CHANNELS = 64
IMAGE = 28
BATCH_SIZE = 2
WARM_UP_STEPS = 2
RECORDED_STEPS = 5
# Forward and backward, each batch norm exchanges its moments; the gradient of the first is not needed.
EXCHANGES = 2 * BLOCKS - 1


@dataclass(frozen=True, slots=True)
class OverheadJobs:
    """The network's step on two ranks, which exchange, and on one rank; executed one after the other.

    A picklable function of a rank's device, for processes that form a group.
    """

    split: Job
    whole: Job
    timeout_s: float

    def __call__(self, device: PhysicalDevice) -> ExchangeTime | None:
        """Execute both in this rank's process group; return on rank 0 the time of an exchange."""
        split = run_job(self.split, device.torch_name, self.timeout_s)
        whole = run_job(self.whole, device.torch_name, self.timeout_s)
        if split is None or whole is None:
            return None
        return exchange_time(split, whole, on_gpu=device.processor == "cuda")


def network(batch_size: int = BATCH_SIZE) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return convolutions with a batch norm behind each, of sizes that leave no code or data in a core's caches.

    The convolutions' weights are frozen: their gradients' all-reduces are measured by themselves.
    """
    import torch
    from torch import nn

    layers: list[nn.Module] = []
    for _ in range(BLOCKS):
        convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False).requires_grad_(
            requires_grad=False
        )
        layers += [convolution, nn.BatchNorm2d(CHANNELS), nn.ReLU()]

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layers(images).square().mean()
            return result

    return Network(), (torch.randn(batch_size, CHANNELS, IMAGE, IMAGE),), {}


def overhead_jobs(timeout_s: float) -> OverheadJobs:
    """Return the jobs that the ranks of a probe execute."""
    from graph.importer import import_module
    from graph.training import Training
    from search.space.baselines import data_parallel, single_device

    module, args, kwargs = network()
    graph: OperatorGraph = import_module(module, args, kwargs, name="exchanges")
    split = Job(
        graph=graph,
        strategy=data_parallel(graph, 2),
        node_of=(0, 0),
        training=Training(batch_size=BATCH_SIZE),
        model=ModelReference(f"{__name__}:{network.__name__}"),
        iterations=0,
        warmup=WARM_UP_STEPS,
        recorded=RECORDED_STEPS,
        asleep=True,
    ).without_caches()
    return OverheadJobs(split, replace(split, strategy=single_device(graph), node_of=(0,)), timeout_s)


def exchange_time(split: JobResult, whole: JobResult, *, on_gpu: bool = False) -> ExchangeTime:
    """Return the time of one exchange beyond its messages, of a rank, from the recorded steps of both jobs.

    What a rank spends on copies, on waits and inside autograd, less what autograd takes where nothing is exchanged;
    the median over the steps of the mean over the ranks. on_gpu: spans have the times of hosts, too.
    """
    split_s, whole_s = (_besides_operators_s(job.recorded) for job in (split, whole))
    device_s, host_s = (
        max(0.0, with_exchanges - without) / EXCHANGES
        for with_exchanges, without in zip(split_s, whole_s, strict=True)
    )
    return ExchangeTime(device_s, host_s if on_gpu else None)


def _besides_operators_s(recorded: RecordedSteps) -> tuple[float, float]:
    """Return seconds of devices and of hosts beside operators: the median over the steps of the mean over the ranks."""
    steps = [[[span for span in spans if _is_besides(span)] for spans in step] for step in recorded]
    device_ns = (
        statistics.mean(sum(span.end_ns - span.start_ns for span in spans) for spans in step)
        for step in steps
    )
    host_ns = (statistics.mean(sum(span.host_ns for span in spans) for spans in step) for step in steps)
    return statistics.median(device_ns) / 1e9, statistics.median(host_ns) / 1e9


def _is_besides(span: Span) -> bool:
    kind, subject = span.label.kind, span.label.subject
    return (kind in ("copy", "wait") and subject != WEIGHT_GRADIENTS) or (
        kind == "runtime" and subject == "autograd"
    )
