"""Benchmarks of the kernel beside its peers: rows, inputs, timing, records."""
