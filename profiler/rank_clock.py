"""The clock of one rank's device, for work that the ranks of a group do together.

On a GPU the marks around such work lie behind a sleep and a meeting of all devices. All of it is issued while the
device sleeps, so that neither the hosts' time to issue it nor the time at which each of them came counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from profiler.devices import PhysicalDevice
from profiler.process_groups import wait_for_device
from profiler.timers import synchronize, timer_for

if TYPE_CHECKING:
    import torch

Work = Callable[[], object]
# Whether something is true on all ranks; all of them ask.
Everywhere = Callable[[bool], bool]


class RankClock:
    """Times work on one rank, and lets the ranks of a process group agree (None: the group of all ranks)."""

    def __init__(self, device: PhysicalDevice) -> None:
        self.device = device
        self.on_gpu = device.processor == "cuda"
        self._timer = timer_for(device.torch_name)

    def warm_up(self) -> None:
        """Bring the device's clock to what it is under load."""
        self._timer.warm_up()

    def restart(self) -> None:
        """Forget what was learned of the work: that of other work is wanted next."""
        self._timer.restart()

    def seconds(self, work: Work, meet: Work, everywhere: Everywhere, before: Work = lambda: None) -> float:
        """Return the seconds that `work` takes on this rank's device; all ranks of the group must call it.

        Args:
            work: what is timed.
            meet: communication of the group, which ends on all ranks at once; issued, and waited for by no host.
            everywhere: asks the ranks of the group.
            before: this rank's own work, done before and not timed.
        """
        if not self.on_gpu:
            meet()
            before()
            return self.own_seconds(work)

        def begin() -> None:
            before()
            meet()

        while True:
            times = self._timer.time(begin, work)
            if everywhere(times is not None) and times is not None:
                return times[-1].device_s

    def occupied_s(self, work: Work, meet: Work, everywhere: Everywhere) -> float:
        """Return the seconds for which `work` occupies the device: of a CPU device, its process's own CPU seconds.

        On a core, what communication takes from computation is CPU time of its threads, and unlike the clock on the
        wall it does not count what other programs take.
        """
        if self.on_gpu:
            return self.seconds(work, meet, everywhere)
        meet()
        start = time.process_time()
        work()
        return time.process_time() - start

    def own_seconds(self, work: Work) -> float:
        """Return the seconds from now until `work` is done."""
        synchronize(self.device.torch_name)
        start = self._timer.mark()
        work()
        return self._timer.elapsed_s(start, self._timer.mark())

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return a float32 tensor of about so many bytes that was written to."""
        import torch

        return torch.zeros(max(1, size_bytes // 4), dtype=torch.float32, device=self.device.torch_name)

    def meet(self, group: Any = None) -> None:
        """Issue an all-reduce of one number; not dist.barrier, which warns without a device id."""
        import torch.distributed as dist

        dist.all_reduce(self.buffer(4), group=group)

    def barrier(self, group: Any = None) -> None:
        """Wait until all ranks of the group are here."""
        self.meet(group)
        wait_for_device(self.device.torch_name)

    def least(self, values: Sequence[float], group: Any = None) -> list[float]:
        """Return the least of each value on all ranks of a group."""
        import torch
        import torch.distributed as dist

        least = torch.tensor(values, dtype=torch.float64, device=self.device.torch_name)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        return [float(value) for value in least.tolist()]

    def agree(self, wish: float, most: int, group: Any = None) -> int:
        """Return the least of the wishes of all ranks of a group, between 1 and `most`."""
        return int(self.least([min(float(most), max(1.0, wish))], group)[0])

    def everywhere(self, condition: bool) -> bool:  # noqa: FBT001 - of one meaning
        """Return whether something is true on all ranks."""
        return bool(self.least([float(condition)])[0])
