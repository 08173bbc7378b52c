"""Execute one local call with torch. What is measured is what runs.

A local call runs the very kernel that the module would where it can; operators of ours exist for what parts need
beyond that: explicit padding, global counts, global positions of dropout, statistics that span devices.
"""

from __future__ import annotations

from profiler.operators.compiling import Compiled, ExecutionContext, compile_call, execute
from profiler.operators.inputs import random_inputs, torch_dtype

__all__ = ["Compiled", "ExecutionContext", "compile_call", "execute", "random_inputs", "torch_dtype"]
