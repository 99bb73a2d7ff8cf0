"""Our caches inside other people's loops. Nothing else of sparse-rl uses this room."""
