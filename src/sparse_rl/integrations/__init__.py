"""Bounded KV caches for other training and generation loops, and conversion of their settings. Only the commands import this package."""
