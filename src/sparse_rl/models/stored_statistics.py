"""Read the statistics stored next to a model's weights. sparse_rl.json names their file and its SHA-256."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..kv.statistics import FILE as STATISTICS
from ..kv.statistics import Statistics, load
from .stored_kv import FILE, stored_file

ENTRY = "statistics"
"""Key of sparse_rl.json. Models of earlier versions do not have it; their statistics are used unchecked."""


def described(file: Path) -> dict[str, str]:
    """Return the entry of a file of statistics."""
    with file.open("rb") as opened:
        return {"file": file.name, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def stored_statistics(path: str) -> Statistics:
    """Return the statistics stored with a model in a folder or on the hub; empty if there are none. Raise UserError if
    sparse_rl.json names different statistics."""
    settings = stored_file(path, FILE)
    file = stored_file(path, STATISTICS) if settings or Path(path).is_dir() else None
    named = _named(settings) if settings else None
    if named is not None and (file is None or described(file) != named):
        what = f"{file} does not match the SHA-256" if file else f"{Path(path) / STATISTICS} is missing, but named"
        raise UserError(
            f"{what} in {FILE}: copy the whole model folder again, or remove the file and the entry {ENTRY} of {FILE} to gather "
            "the statistics again."
        )
    return load(file.parent) if file else {}


def _named(settings: Path) -> Any:
    """Return the entry of sparse_rl.json, or None if it has none."""
    try:
        return json.loads(settings.read_text()).get(ENTRY)
    except (OSError, ValueError, AttributeError):
        return None  # `stored_kv` reports the damage
