"""Does the hub answer? Asked once and briefly: the libraries themselves would try for most of a minute."""

from collections.abc import Callable

from .errors import first_line

PROBE_S = 10.0
"""How long it may take."""


def why_unreachable(ask: Callable[..., object], id: str) -> str | None:
    """Why the hub cannot be reached; None if it answers, whatever it says. `ask` is `HfApi().model_info` or `dataset_info`."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        ask(id, timeout=PROBE_S)
    except HfHubHTTPError:
        return None
    except Exception as error:  # of the HTTP library, which is not ours to name
        return first_line(error)
    return None
