"""Limits used by alerts, the report and the trainer. They are defined in one table, `AlertsConfig`."""

from ..config import AlertsConfig

DEFAULTS = AlertsConfig().resolved(corrected=True)


def limit(alerts: AlertsConfig | None, name: str) -> float:
    """Return the run's limit, or the default if the run has none or disabled the alert."""
    value = getattr(alerts or DEFAULTS, name)
    return float(getattr(DEFAULTS, name) if value == "none" else value)
