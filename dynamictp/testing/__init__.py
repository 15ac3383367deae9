"""Fakes, harness and gate: product code for tests, benchmarks and the simulator."""
