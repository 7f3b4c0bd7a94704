"""Stand-ins that only tests and benchmarks use."""
