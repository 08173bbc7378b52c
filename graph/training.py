"""Training: batch size, precision, optimizer and batch norm; stored with every simulation and execution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graph.canonical import digest
from graph.errors import TrainingError

OPTIMIZERS = ("sgd", "momentum", "adam")
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
# The dtype of a network's floating-point tensors. tf32 is how matrix units of a GPU multiply float32 tensors.
TENSOR_DTYPES = {"float32": "float32", "tf32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
BATCH_NORMS = ("synchronized", "local")

# Tensors of optimizer state a weight, beside the weight and its gradient.
OPTIMIZER_STATE = {"sgd": 0, "momentum": 1, "adam": 2}


@dataclass(frozen=True)
class Training:
    """Batch size (samples a step over all devices), precision, optimizer, batch-norm mode.

    Raises:
        TrainingError: a field is not one of the known values, or precision and optimizer do not go together.
    """

    batch_size: int
    precision: str = "float32"
    optimizer: str = "sgd"
    batch_norm: str = "synchronized"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise TrainingError(f"batch size: is {self.batch_size}, must be at least 1; set --batch-size")
        for name, value, choices in (
            ("precision", self.precision, PRECISIONS),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("batch norm", self.batch_norm, BATCH_NORMS),
        ):
            if value not in choices:
                raise TrainingError(
                    f"{name}: is {value}, must be one of {', '.join(choices)}; choose one of them"
                )
        if self.precision == "float16" and self.optimizer == "adam":
            # Moments have the weights' dtype: of gradients below 1.7e-4 the square is 0 in float16, and so is epsilon.
            raise TrainingError(
                "optimizer: is adam with precision float16, whose range does not hold squares of gradients, must be "
                "sgd or momentum; choose one of them, or precision bfloat16"
            )

    @property
    def dtype(self) -> str:
        """The dtype of floating-point tensors: weights, gradients, optimizer state, activations."""
        return TENSOR_DTYPES[self.precision]

    def to_json(self) -> dict[str, Any]:
        """Return the training as a JSON document."""
        return {
            "batch_size": self.batch_size,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "batch_norm": self.batch_norm,
        }

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical document."""
        return digest(self.to_json())


def training_from_json(document: dict[str, Any]) -> Training:
    """Return the training that `to_json` wrote."""
    return Training(
        batch_size=int(document["batch_size"]),
        precision=str(document["precision"]),
        optimizer=str(document["optimizer"]),
        batch_norm=str(document["batch_norm"]),
    )
