"""Local calls that the profiler's tests measure."""

from graph.calls import LocalCall
from graph.operators import Slot, TensorSpec


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
