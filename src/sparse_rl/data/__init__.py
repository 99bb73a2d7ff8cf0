"""Data: tasks, loaders and the embedded arithmetic task. Imports no model code."""
