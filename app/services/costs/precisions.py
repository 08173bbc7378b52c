"""Devices that compute in a precision, and the environments whose measurements are in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.db.store import Store
from graph.errors import UsageError
from graph.topology import Topology

if TYPE_CHECKING:
    from profiler.devices import PhysicalDevice

# Facts of a CUDA environment, which the others lack; see `profiler.environment`.
_TF32_FACTS = ("matmul_tf32", "cudnn_tf32")
# NVIDIA Ampere, the first generation whose matrix units have TF32.
_FIRST_WITH_TF32 = (8, 0)


def in_precision(devices: Sequence[PhysicalDevice], precision: str) -> tuple[PhysicalDevice, ...]:
    """Return this machine's devices, set to compute in a precision.

    Raises:
        UsageError: one of them does not.
    """
    if precision != "tf32":
        return tuple(devices)
    for device in devices:
        if device.processor != "cuda":
            raise _no_tf32(f"device {device.label}", "is no GPU")
        import torch

        if torch.cuda.get_device_capability(device.index) < _FIRST_WITH_TF32:
            raise _no_tf32(f"device {device.label}", f"is {device.kind.name}, which has no TF32")
    return tuple(replace(device, tf32=True) for device in devices)


def check_topology(topology: Topology, precision: str) -> None:
    """Check that the devices of a topology support a precision; all but tf32 run everywhere, if slowly.

    Raises:
        UsageError: one of them has not.
    """
    if precision != "tf32":
        return
    for kind in topology.kinds:
        if precision not in dict(kind.peak_flops):
            raise _no_tf32(f"device kind {kind.name} of {topology.name}", "has no peak_flops of tf32")


def _no_tf32(where: str, why: str) -> UsageError:
    return UsageError(
        f"--precision tf32: {where} {why}, must be of GPUs with TF32 (NVIDIA Ampere and later); choose float32"
    )


def is_measured_in(facts: Mapping[str, Any], precision: str) -> bool:
    """Return whether measurements in an environment are in a precision: tf32 is a setting that no call shows."""
    return all(bool(facts.get(name)) == (precision == "tf32") for name in _TF32_FACTS)


def environments_of(store: Store, precision: str) -> tuple[int, ...]:
    """Return the ids of the stored environments whose measurements are in a precision."""
    return tuple(
        environment.id for environment in store.environments() if is_measured_in(environment.facts, precision)
    )
