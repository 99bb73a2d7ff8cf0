"""The bounded KV cache, its eviction policies and the trace of evictions. Imports no model code."""
