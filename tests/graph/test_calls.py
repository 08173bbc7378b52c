"""The cost key of a local call is the canonical text of its document, and calls are found by it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from graph.calls import LocalCall, call_from_json
from graph.canonical import canonical_json, digest
from graph.operators import Slot, TensorSpec

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.builds(Slot, st.integers(0, 5))
)
SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.lists(st.integers(0, 10**6)).map(tuple),
        st.sampled_from(["float32", "bfloat16", "int64"]),
    )
).map(tuple)
ARGUMENTS = st.recursive(LEAVES, lambda items: st.lists(items).map(tuple))


@given(
    st.lists(st.tuples(st.sampled_from(["self", "dim", "bias"]), ARGUMENTS)).map(tuple),
    SPECS,
    SPECS,
    st.lists(st.booleans()).map(tuple),
)
def test_a_cost_key_is_the_canonical_text_of_its_document(
    arguments: tuple[tuple[str, object], ...],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    gradients: tuple[bool, ...],
) -> None:
    call = LocalCall("aten.some.default", arguments, inputs, outputs, gradients)
    assert call.key == canonical_json(call.document)
    assert call.digest == digest(call.document)
    assert hash(call) == hash(call_from_json(call.document))


def test_calls_that_differ_in_their_bindings_alone_are_two() -> None:
    call = LocalCall("soapstone.dropout", (), (), (), ())
    other = replace(call, bindings=(("operator", 1),))
    assert call.digest == other.digest
    assert len({call, other}) == 2


def test_a_call_of_another_process_is_found_among_its_equals() -> None:
    """Where texts have other hashes."""
    call = LocalCall("aten.some.default", (("dim", 1),), (), (TensorSpec((2, 3), "float32"),), ())
    hash(call)
    find = (
        "import pickle, sys\n"
        "from graph.calls import call_from_json\n"
        "call = pickle.load(sys.stdin.buffer)\n"
        "assert call in {call_from_json(call.document)}\n"
    )
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", find],
            input=pickle.dumps(call),
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
