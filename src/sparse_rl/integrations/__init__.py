"""Bounded KV caches for other trainers, and conversion of their settings. Only the commands import this package."""
