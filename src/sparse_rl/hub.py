"""Check once, with a short timeout, whether the hub answers. The hub libraries retry for most of a minute."""

from collections.abc import Callable

from .errors import first_line

PROBE_S = 10.0
"""Timeout of the check in seconds."""


def why_unreachable(ask: Callable[..., object], id: str) -> str | None:
    """Return why the hub cannot be reached, or None if it sends any response. `ask` is `HfApi().model_info` or
    `dataset_info`."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        ask(id, timeout=PROBE_S)
    except HfHubHTTPError:
        return None
    except Exception as error:  # the HTTP library's exception type is an implementation detail
        return first_line(error)
    return None
