"""Benchmarks that ship with the package: each against a named peer in the same process."""
