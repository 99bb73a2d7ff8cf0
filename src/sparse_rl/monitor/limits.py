"""The limits that alerts, the report and the trainer judge a run by: one table, `AlertsConfig`."""

from ..config import AlertsConfig

DEFAULTS = AlertsConfig()


def limit(alerts: AlertsConfig | None, name: str) -> float:
    """Return the limit of a run, or the default where the run has none or turned the alert off."""
    value = getattr(alerts or DEFAULTS, name)
    return float(getattr(DEFAULTS, name) if value == "none" else value)
