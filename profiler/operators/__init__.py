"""Execute one local call with torch, for measurements and for runs.

A local call runs the same kernel as the module where it can; custom operators exist for the further needs of parts:
explicit padding, global counts, global positions of dropout, statistics that span devices.
"""

from __future__ import annotations

from profiler.operators.compiling import ExecutionContext, compile_call
from profiler.operators.inputs import random_inputs

__all__ = ["ExecutionContext", "compile_call", "random_inputs"]
