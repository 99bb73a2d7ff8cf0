"""Bounded KV caches in other training and generation loops. No other part of sparse-rl imports this package."""
