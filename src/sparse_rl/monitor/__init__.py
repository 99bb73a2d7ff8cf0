"""Evaluate the metrics of a run against one table of limits, used by alerts, the report and the trainer."""
