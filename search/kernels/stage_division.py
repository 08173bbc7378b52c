"""The inner step of the dynamic program over pipeline stages: a stage is put before divisions of all that follows it.

Shape letters: B boundaries between segments, O ways to split a stage.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from search.kernels.cache import quick_entry
from search.kernels.records import Array


class RunCosts(NamedTuple):
    """What every run of segments takes and keeps, by the boundary where it ends (rows) and where it begins.

    Numbers with a fraction, in nanoseconds and bytes: of a micro-batch, once a step; and kept of weights, their
    gradients and state, and of a micro-batch.
    """

    micro_ns_BB: Array
    once_ns_BB: Array
    static_bytes_BB: Array
    kept_bytes_BB: Array


class StageLimits(NamedTuple):
    """What a stage must keep to: so many micro-batches in flight within so many bytes, and a bound on the most.

    repeated: how many micro-batches there are but for one.
    """

    in_flight: float
    capacity_bytes: float
    repeated: float
    bound_ns: float


class Suffixes(NamedTuple):
    """The least sums of all that is from a device on, by option and boundary; where the first stage ends.

    next_OB: the option of the stage after it, by the boundary where that one begins.
    """

    sum_ns_OB: Array
    end_OB: Array
    next_OB: Array


@quick_entry
def put_stage_before(
    of_runs: RunCosts,
    limits: StageLimits,
    ahead_ns_OB: Array,
    transfer_ns_OB: Array,
    found: Suffixes,
    option: int,
) -> None:
    """Write the least sums of a stage with all that follows it, of equal ones the first option and boundary.

    Args:
        of_runs: of the stage, split as its option is.
        limits: of the stage; transfers keep to the bound as well.
        ahead_ns_OB: of what follows, by the option of the next stage and the boundary where that begins.
        transfer_ns_OB: of the transfer to the next stage, by the same.
        found: written in the row of the option; its sums were infinite.
        option: of the stage.
    """
    sum_ns_B, end_B = found.sum_ns_OB[option], found.end_OB[option]
    options, boundaries = ahead_ns_OB.shape
    for boundary in range(boundaries):
        ahead_ns, following = inf, 0
        for number in range(options):
            transfer_ns = transfer_ns_OB[number, boundary]
            sum_ns = ahead_ns_OB[number, boundary] + transfer_ns
            if sum_ns < ahead_ns and limits.repeated * transfer_ns < limits.bound_ns:
                ahead_ns, following = sum_ns, number
        found.next_OB[option, boundary] = following
        if ahead_ns == inf:
            continue
        micro_ns_B, once_ns_B = of_runs.micro_ns_BB[boundary], of_runs.once_ns_BB[boundary]
        static_B, kept_B = of_runs.static_bytes_BB[boundary], of_runs.kept_bytes_BB[boundary]
        for begin in range(boundary):
            # No branch, so that the processor's wide instructions can be used.
            fits = static_B[begin] + limits.in_flight * kept_B[begin] <= limits.capacity_bytes
            fits &= limits.repeated * micro_ns_B[begin] + once_ns_B[begin] < limits.bound_ns
            sum_ns = micro_ns_B[begin] + ahead_ns
            is_less = fits & (sum_ns < sum_ns_B[begin])
            sum_ns_B[begin] = sum_ns if is_less else sum_ns_B[begin]
            end_B[begin] = boundary if is_less else end_B[begin]
