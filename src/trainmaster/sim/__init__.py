"""Simulators that ship: they stand in for hardware and clouds in tests, in benchmarks and for a first try."""
