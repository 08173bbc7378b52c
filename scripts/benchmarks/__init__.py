"""Benchmarks: one module each, with `run(*, quick: bool) -> BenchmarkResult`; `scripts/bench NAME` runs one."""
