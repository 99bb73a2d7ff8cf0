"""Benchmarks that ship with the package. Each compares with a named peer in the same process."""
