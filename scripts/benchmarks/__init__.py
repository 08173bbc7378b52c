"""Benchmarks: one module each, with `run(*, quick: bool) -> Result`; `scripts/bench NAME` runs one."""
