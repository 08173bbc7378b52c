"""Local calls that the profiler's tests measure, and devices with something wrong."""

import os
import resource
import threading

import psutil

from graph.calls import LocalCall
from graph.operators import Slot, TensorSpec
from profiler.devices import PhysicalDevice


def matrix_product(
    rows: int, inner: int, columns: int, gradients: tuple[bool, bool] = (True, True)
) -> LocalCall:
    """Return the product of a (rows, inner) and an (inner, columns) matrix."""
    return LocalCall(
        target="aten.mm.default",
        arguments=(("self", Slot(0)), ("mat2", Slot(1))),
        inputs=(TensorSpec((rows, inner), "float32"), TensorSpec((inner, columns), "float32")),
        outputs=(TensorSpec((rows, columns), "float32"),),
        gradients=gradients,
    )


def long_matrix_product(seed: int = 0) -> LocalCall:
    """Return a product that takes many seconds; different seeds, different keys."""
    return matrix_product(8000 + seed, 8000, 8000)


def impossible_matrix_product() -> LocalCall:
    """Return a product whose inner sizes differ."""
    return LocalCall(
        target="aten.mm.default",
        arguments=(("self", Slot(0)), ("mat2", Slot(1))),
        inputs=(TensorSpec((2, 3), "float32"), TensorSpec((4, 5), "float32")),
        outputs=(TensorSpec((2, 5), "float32"),),
        gradients=(True, True),
    )


def rectifier(elements: int) -> LocalCall:
    """Return max(x, 0) of a vector."""
    spec = TensorSpec((elements,), "float32")
    return LocalCall("aten.relu.default", (("self", Slot(0)),), (spec,), (spec,), (True,))


def incomplete_gamma(elements: int) -> LocalCall:
    """Return the incomplete gamma function, whose derivative by its first input PyTorch does not know."""
    spec = TensorSpec((elements,), "float32")
    return LocalCall(
        target="aten.igamma.default",
        arguments=(("self", Slot(0)), ("other", Slot(1))),
        inputs=(spec, spec),
        outputs=(spec,),
        gradients=(True, False),
    )


class OccupiedDevice(PhysicalDevice):
    """A device on whose core somebody more important computes: it is slow at everything."""

    __slots__ = ()

    def occupy(self) -> None:
        """Become the device's process, and give it company."""
        PhysicalDevice.occupy(self)
        threading.Thread(target=_compute_on, daemon=True).start()
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # of this thread alone


class CrampedDevice(PhysicalDevice):
    """A device whose process gets little more memory than it has."""

    __slots__ = ()

    def occupy(self) -> None:
        """Become the device's process, and limit its memory."""
        PhysicalDevice.occupy(self)
        most = psutil.Process().memory_info().vms + 2**26
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _compute_on() -> None:
    import torch

    matrix = torch.rand(256, 256)
    while True:
        torch.mm(matrix, matrix)  # without Python's lock


def as_device(kind: type[PhysicalDevice], device: PhysicalDevice) -> PhysicalDevice:
    """Return a device as one of another class."""
    return kind(device.processor, device.index, device.kind, device.core)
