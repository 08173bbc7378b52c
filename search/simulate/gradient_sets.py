"""How many devices sum the gradient of a weight, by its reader's configuration: without deriving a fragment."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from graph.axes import Degrees
from search.simulate.arrays import GrowingArray
from search.simulate.fragment_classes import StaticClass
from search.simulate.regions import FEWEST_DEGREES, IntArray, Regions

# Instead of how many parts there are, where that is not known: more than devices, so that the quotient is 0.
UNKNOWN_PARTS = 1 << 62


class GradientSets:
    """The sets of devices that sum gradients, by configurations that were added."""

    def __init__(self, regions: Regions, weights: Sequence[StaticClass]) -> None:
        self._regions = regions
        # The number of the operand of the one operator that reads a weight, or -1: the last row of `_parts_PD`.
        self._operand_W = np.array(
            [weight.readers[0].number if len(weight.readers) == 1 else -1 for weight in weights], np.int64
        )
        self.clear()

    def clear(self) -> None:
        """Forget all configurations and degrees."""
        # Of a configuration, the devices of its tasks, or 0 where two of them are on one device.
        self._device_count_C = GrowingArray(np.int64)
        # Of an operand under given degrees, into how many disjoint parts it is cut; 0 until that is asked.
        self._parts_PD = self._unasked(FEWEST_DEGREES)

    def _unasked(self, columns: int) -> IntArray:
        parts_PD = np.zeros((int(self._operand_W.max(initial=-1)) + 2, columns), np.int64)
        parts_PD[-1] = UNKNOWN_PARTS
        return parts_PD

    def add(self, devices: Sequence[int]) -> None:
        """Add the devices of the next configuration."""
        self._device_count_C.extend([len(devices) if len(set(devices)) == len(devices) else 0])

    def sizes(
        self, weights: IntArray, configurations: IntArray, degrees: IntArray, listed: Sequence[Degrees]
    ) -> IntArray:
        """Return how many devices sum the gradient of each part of some weights; 0 where its fragment must tell.

        Args:
            weights: their numbers.
            configurations: of each weight, the number of the configuration of the operator that reads it.
            degrees: of each weight, the number of its degrees, a place in `listed`.
        """
        while len(listed) > self._parts_PD.shape[1]:
            self._parts_PD = np.concatenate([self._parts_PD, self._unasked(self._parts_PD.shape[1])], axis=1)
        operands = self._operand_W[weights]
        parts = self._parts_PD[operands, degrees]
        for place in np.flatnonzero(parts == 0).tolist():
            operand, number = int(operands[place]), int(degrees[place])
            axes = self._regions.cutting_axes(operand)
            parts[place] = self._parts_PD[operand, number] = (
                UNKNOWN_PARTS if axes is None else prod(listed[number][axis] for axis in axes)
            )
        sizes: IntArray = self._device_count_C.items[configurations] // parts
        return sizes
