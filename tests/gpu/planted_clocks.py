"""Clocks as Soapstone must not have them on GPUs, for tests that plant them: they read the host's time."""

from __future__ import annotations

import time

from profiler.timers import CudaTimer, Elapsed, Work, synchronize


class NeverAsleep(CudaTimer):
    """Events around work that is issued to an idle device: the first of them fires at once."""

    @property
    def waits(self) -> bool:
        return True


class OfTheHost(CudaTimer):
    """The host's clock around the issuing of work, for which it does not wait."""

    def time(self, *stretches: Work, noted: Work = lambda: None) -> list[Elapsed]:
        noted()
        return [self._elapsed(work) for work in stretches]

    def _elapsed(self, work: Work) -> Elapsed:
        began_s = time.perf_counter()
        work()
        return Elapsed(time.perf_counter() - began_s, 0.0)


class OfTheWaitingHost(OfTheHost):
    """The host's clock around work for which it waits."""

    def _elapsed(self, work: Work) -> Elapsed:
        def waited_for() -> None:
            work()
            synchronize(self.device)

        synchronize(self.device)
        return super()._elapsed(waited_for)
