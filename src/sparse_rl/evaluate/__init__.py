"""Evaluate a model on benchmarks, with a dense cache and with bounded caches."""
