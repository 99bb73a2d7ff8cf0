"""The bounded KV cache, its eviction policies and the trace of evictions. Knows no model."""
