"""Bounded KV caches for other training and generation loops. No other part of sparse-rl imports this package."""
