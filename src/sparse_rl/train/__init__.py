"""The training run: the loop, its groups, checkpoints, metrics and loggers. Knows every other part; only the cli knows it."""
