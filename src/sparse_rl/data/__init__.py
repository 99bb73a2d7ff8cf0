"""Data: tasks, loaders and the embedded arithmetic task. Knows no model."""
