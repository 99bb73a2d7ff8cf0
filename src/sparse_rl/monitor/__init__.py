"""Judge the metrics of a run: one table of limits for alerts, the report and the trainer."""
