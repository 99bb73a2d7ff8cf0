"""The training run: training loop, rollout groups, checkpoints, metrics and loggers. Imports any part below `commands`."""
