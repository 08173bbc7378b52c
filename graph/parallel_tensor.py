"""The nouns of a parallel computation graph: parallel tensors, parallelization operators, machine views.

A parallel tensor has a size and a degree for each dim, and two replica dims: copies, which are equal, and sums, which
are partial sums of the whole. A degree divides its size, and the product of all degrees is the number of parts.

    operator          forward                        backward
    Partition(d, k)   degree of dim d times k        Combine(d, k)
    Combine(d, k)     degree of dim d divided by k   Partition(d, k)
    Replicate(k)      copies times k                 Reduce(k)
    Reduce(k)         sums divided by k              Replicate(k)
    Pipeline(m)       one of m micro-batches         Batch(m)
    Batch(m)          all m micro-batches            Pipeline(m)

A dim that an operator reads as a product (rows x columns, heads x head size) may be split by one of the factors:
Partition(1.1 of 3 x 8, 2) splits the factor of 8 of dim 1. A degree of the outermost factor alone is one of the dim.

Source: Unity (OSDI 2022), section 3; one replica dim there is both, copies and sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise, product
from math import gcd, prod

from graph.errors import StrategyError


@dataclass(frozen=True, slots=True)
class MachineView:
    """The devices of parts: of the part at `point` it is start + sum of point[i] * strides[i].

    extents: the number of parts along each degree that is more than one, the last one fastest.
    """

    start: int
    extents: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def volume(self) -> int:
        """The number of parts."""
        return prod(self.extents)

    def device(self, point: Sequence[int]) -> int:
        """Return the device of the part at a point."""
        return self.start + sum(index * stride for index, stride in zip(point, self.strides, strict=True))

    def text(self, names: Iterable[str]) -> str:
        """Return the view as a sum, the degrees by their names: 0 + 2 sample + channel."""
        terms = [
            f"{'-' if stride < 0 else '+'} {'' if abs(stride) == 1 else f'{abs(stride)} '}{name}"
            for name, stride in zip(names, self.strides, strict=True)
        ]
        return " ".join([str(self.start), *terms])

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of all parts, the last degree fastest."""
        return tuple(self.device(point) for point in product(*(range(extent) for extent in self.extents)))


def machine_view(degrees: Sequence[int], devices: Sequence[int]) -> MachineView | None:
    """Return the machine view of a list of devices, None where it is none: it must be linear and name none twice."""
    extents = tuple(degree for degree in degrees if degree > 1)
    steps = [prod(extents[index + 1 :]) for index in range(len(extents))]
    view = MachineView(devices[0], extents, tuple(devices[step] - devices[0] for step in steps))
    linear = view.devices == tuple(devices) and len(set(devices)) == len(devices)
    return view if linear else None


@dataclass(frozen=True, slots=True)
class ParallelDim:
    """A dim of a parallel tensor, or a factor of one: a size, and a degree that divides it."""

    size: int
    degree: int = 1

    def __post_init__(self) -> None:
        if self.degree < 1 or self.size % self.degree:
            raise StrategyError(
                f"parallel tensor: degree is {self.degree}, must divide the size {self.size} of its dim; choose a "
                "degree that does"
            )

    @property
    def text(self) -> str:
        """The size, and the degree if there is one."""
        return str(self.size) if self.degree == 1 else f"{self.size}/{self.degree}"


Factors = tuple[ParallelDim, ...]


def merged(factors: Iterable[ParallelDim]) -> Factors:
    """Return the fewest factors that split a dim as these do: one, where its parts are contiguous."""
    result: list[ParallelDim] = []
    for factor in factors:
        outer = result[-1] if result else ParallelDim(1)
        if result and (factor.degree == 1 or outer.degree == outer.size):
            result[-1] = ParallelDim(outer.size * factor.size, outer.degree * factor.degree)
        else:
            result.append(factor)
    return tuple(result)


def refined(factors: Factors, sizes: Sequence[int]) -> Factors | None:
    """Return a dim's split as one of factors of the given sizes, None where it is none."""
    result = []
    remaining = [factor for factor in merged(factors) if factor.size > 1]
    for size in sizes:
        taken = ParallelDim(1)
        while taken.size < size:
            if not remaining:
                return None
            first = remaining.pop(0)
            if (size // taken.size) % first.size:
                cut = _cut(first, size // taken.size)
                if cut is None:
                    return None
                first, rest = cut
                remaining.insert(0, rest)
            pair = merged((taken, first))
            if len(pair) > 1:
                return None
            taken = pair[0]
        if taken.size != size:
            return None
        result.append(taken)
    return None if remaining else tuple(result)


def _cut(factor: ParallelDim, outer: int) -> tuple[ParallelDim, ParallelDim] | None:
    """Return a factor as two, of which the outer one has the given size; None where its parts are none of them."""
    inner, rest = divmod(factor.size, outer)
    if rest:
        return None
    if outer % factor.degree == 0:
        return ParallelDim(outer, factor.degree), ParallelDim(inner)
    if factor.degree % outer == 0 and inner % (factor.degree // outer) == 0:
        return ParallelDim(outer, outer), ParallelDim(inner, factor.degree // outer)
    return None


def common_sizes(left: Factors, right: Factors) -> tuple[int, ...] | None:
    """Return sizes of factors into which both splits of one dim can be refined; None where there are none."""
    cuts = {
        prod(factor.size for factor in factors[place:])
        for factors in (left, right)
        for place in range(len(factors))
    }
    inner = [*sorted(cuts, reverse=True), 1]
    if 0 in cuts or any(outer % following for outer, following in pairwise(inner)):
        return None
    sizes = tuple(outer // following for outer, following in pairwise(inner))
    return sizes if all(refined(factors, sizes) is not None for factors in (left, right)) else None


@dataclass(frozen=True, slots=True)
class ParallelTensor:
    """A tensor in parts: its dims, each as the fewest factors, and its replica dims."""

    dims: tuple[Factors, ...]
    copies: int = 1
    sums: int = 1

    def __post_init__(self) -> None:
        # One form for one split, so that equal ones compare equal.
        object.__setattr__(self, "dims", tuple(merged(factors) for factors in self.dims))

    @property
    def parts(self) -> int:
        """The number of parts."""
        return prod(factor.degree for factors in self.dims for factor in factors) * self.copies * self.sums

    @property
    def text(self) -> str:
        """Sizes and degrees: [8/2, 3 x 16/4], 2 copies."""
        dims = ", ".join(" x ".join(factor.text for factor in factors) for factors in self.dims)
        copies = f", {self.copies} copies" if self.copies > 1 else ""
        return f"[{dims}]{copies}" + (f", {self.sums} partial sums" if self.sums > 1 else "")


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A parallel tensor on devices: the extents of its view are its degrees in the order of dims, copies, sums."""

    tensor: ParallelTensor
    view: MachineView

    def __post_init__(self) -> None:
        if self.tensor.parts != self.view.volume:
            raise StrategyError(
                f"parallel tensor {self.tensor.text}: its machine view has {self.view.volume} devices, must have "
                f"{self.tensor.parts}, one for each part; correct the view"
            )

    @property
    def holders(self) -> tuple[frozenset[int], ...]:
        """For each part of which there are copies, and no partial sums, the devices that hold it."""
        devices, copies = self.view.devices, self.tensor.copies
        return tuple(frozenset(devices[first : first + copies]) for first in range(0, len(devices), copies))

    def first_devices(self, tensor: ParallelTensor, sizes: Sequence[Sequence[int]]) -> MachineView:
        """Return a view of fewer parts, each on the device of the first part of this tensor that it is made of.

        Where those are no machine view it is one of others of these devices.

        Args:
            tensor: of the same dims, with degrees that divide this one's.
            sizes: for each dim, the factors by which both are split.
        """
        here, there = (_degrees(parallel, sizes) for parallel in (self.tensor, tensor))
        steps = [
            prod(here[place + 1 :]) * (own // other)
            for place, (own, other) in enumerate(zip(here, there, strict=True))
        ]
        devices = self.view.devices
        chosen = [
            devices[sum(index * step for index, step in zip(point, steps, strict=True))]
            for point in product(*(range(degree) for degree in there))
        ]
        return machine_view(there, chosen) or self._some_devices(tensor.parts)

    def _some_devices(self, parts: int) -> MachineView:
        """Return a view of so many of the devices, a divisor of their number."""
        extents, strides = [], []
        for extent, stride in zip(self.view.extents, self.view.strides, strict=True):
            taken = gcd(extent, parts)
            parts //= taken
            if taken > 1:
                extents.append(taken)
                strides.append(stride * (extent // taken))
        return MachineView(self.view.start, tuple(extents), tuple(strides))


def _degrees(tensor: ParallelTensor, sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return the degrees of a tensor whose dims are split by factors of these sizes, copies and sums last."""
    factors = [refined(*dim) for dim in zip(tensor.dims, sizes, strict=True)]
    return [factor.degree for dim in factors for factor in dim or ()] + [tensor.copies, tensor.sums]


class ParallelKind(StrEnum):
    """The kinds of parallelization operators."""

    PARTITION = "Partition"
    COMBINE = "Combine"
    REPLICATE = "Replicate"
    REDUCE = "Reduce"
    PIPELINE = "Pipeline"
    BATCH = "Batch"


@dataclass(frozen=True, slots=True)
class ParallelOperator:
    """A parallelization operator.

    dim, factor, sizes: of Partition and Combine, the dim as a product of factors of these sizes, and which of them.
    """

    kind: ParallelKind
    degree: int
    dim: int | None = None
    factor: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The operator with its dim and degree."""
        if self.dim is None:
            return f"{self.kind}({self.degree})"
        if len(self.sizes) == 1:
            return f"{self.kind}({self.dim}, {self.degree})"
        return f"{self.kind}({self.dim}.{self.factor} of {' x '.join(map(str, self.sizes))}, {self.degree})"

    def apply(self, tensor: ParallelTensor) -> ParallelTensor:
        """Return the parallel tensor that the operator makes of one.

        Raises:
            StrategyError: its degrees do not allow it.
        """
        if self.kind is ParallelKind.REPLICATE:
            return replace(tensor, copies=tensor.copies * self.degree)
        if self.kind is ParallelKind.REDUCE:
            return replace(tensor, sums=self._divided(tensor.sums, tensor))
        if self.dim is None:
            return tensor
        factors = refined(tensor.dims[self.dim], self.sizes)
        if factors is None:
            raise self._unfit(tensor)
        changed = list(factors)
        size, degree = changed[self.factor].size, changed[self.factor].degree
        partition = self.kind is ParallelKind.PARTITION
        changed[self.factor] = ParallelDim(
            size, degree * self.degree if partition else self._divided(degree, tensor)
        )
        dims = list(tensor.dims)
        dims[self.dim] = tuple(changed)
        return replace(tensor, dims=tuple(dims))

    def _divided(self, degree: int, tensor: ParallelTensor) -> int:
        if degree % self.degree:
            raise self._unfit(tensor)
        return degree // self.degree

    def _unfit(self, tensor: ParallelTensor) -> StrategyError:
        return StrategyError(
            f"{self.text}: is applied to a tensor {tensor.text}, must divide its degree; correct the chain"
        )


def simplified(operators: Sequence[ParallelOperator]) -> tuple[ParallelOperator, ...]:
    """Return a chain of Partition, Combine, Replicate and Reduce of the same effect, in canonical form.

    Partitions and Combines of one factor of a dim cancel, operators of one kind multiply. First come a Reduce and
    Combines, then Partitions and a Replicate, in the order of dims. Factors of a dim read as another product stay
    behind those before them.
    """
    totals = {
        kind: prod(operator.degree for operator in operators if operator.kind is kind)
        for kind in (ParallelKind.REDUCE, ParallelKind.REPLICATE)
    }
    gathering: list[ParallelOperator] = []
    distributing: list[ParallelOperator] = []
    for dim in sorted({operator.dim for operator in operators if operator.dim is not None}):
        chain = _of_one_dim([operator for operator in operators if operator.dim == dim])
        partitions = [operator.kind is ParallelKind.PARTITION for operator in chain]
        leading = [*accumulate(partitions, max)].count(False)
        gathering += chain[:leading]
        distributing += chain[leading:]
    reduces, replicates = (
        [ParallelOperator(kind, total)] if total > 1 else [] for kind, total in totals.items()
    )
    return (*reduces, *gathering, *distributing, *replicates)


def _of_one_dim(operators: Sequence[ParallelOperator]) -> list[ParallelOperator]:
    """Return the simplified chain of Partitions and Combines of one dim."""
    result: list[ParallelOperator] = []
    start = 0
    while start < len(operators):
        stop, first = start, operators[start]
        while stop < len(operators) and operators[stop].sizes == first.sizes:
            stop += 1
        for kind in (ParallelKind.COMBINE, ParallelKind.PARTITION):
            for factor in range(len(first.sizes)):
                up, down = (
                    prod(
                        operator.degree
                        for operator in operators[start:stop]
                        if operator.factor == factor
                        and (operator.kind is ParallelKind.PARTITION) is partition
                    )
                    for partition in (True, False)
                )
                degree = (down if kind is ParallelKind.COMBINE else up) // gcd(up, down)
                if degree > 1:
                    result.append(ParallelOperator(kind, degree, first.dim, factor, first.sizes))
        start = stop
    return result
