"""Build one self-contained HTML file with data, charts and styles. Its content security policy blocks the network."""

import base64
import functools
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import UserError
from .document import ReportSource
from .rollouts import RolloutChunk

SCRIPTS = ("uPlot.iife.min.js", "base.js", "charts.js", "curves.js", "tables.js", "inspector.js", "app.js")
STYLES = ("uPlot.min.css", "style.css")
FILE = "report.html"


def write(source: ReportSource, file: Path) -> dict[str, Any]:
    """Write the page to `file` atomically, also with concurrent writers. Return the page's document."""
    document, chunks = source.document()
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_bytes(html(document, chunks))
        os.replace(partial, file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(
            f"The report {file} cannot be written ({error.strerror or error}): pass another path with --out."
        ) from error
    return document


def html(document: dict[str, Any], chunks: Sequence[dict[int, RolloutChunk]] = ()) -> bytes:
    """Return the HTML page with embedded rollouts. Without `chunks`, the page requests rollouts from its server."""
    script = "\n".join(map(_asset, SCRIPTS))
    values = {
        "policy": policy(script, live=document["live"]),
        "title": escape(f"{document['title']} · sparse-rl"),
        "style": "\n".join(map(_asset, STYLES)),
        "uplot": uplot_version(),
        "data": script_json(document),
        "rollouts": "\n".join(_blocks(chunks)),
        "script": script,
    }
    parts = re.split(r"\{\{(\w+)\}\}", _asset("page.html"))  # alternates text and names; inserted values are not expanded
    filled = (values[part] if place % 2 else part for place, part in enumerate(parts))
    return "".join(filled).encode("utf-8", "replace")


def policy(script: str, *, live: bool) -> str:
    """Return the content security policy. It allows only `script`, identified by its hash, and loads nothing else.

    A live page may also connect to its own server.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = [
        "default-src 'none'",
        f"script-src 'sha256-{digest}'",
        "style-src 'unsafe-inline'",  # uPlot and our script set widths and colours of elements
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if live else []),
    ]
    return "; ".join(rules)


def _blocks(chunks: Sequence[dict[int, RolloutChunk]]) -> Iterable[str]:
    """Yield each chunk as a script element. Base64 text needs no HTML escaping."""
    for place, by_step in enumerate(chunks):
        for step, chunk in by_step.items():
            packed = base64.b64encode(chunk.data).decode()
            yield f'<script type="application/gzip" id="rollouts-{place}-{step}">{packed}</script>'


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element: ASCII only, and every `<` is escaped."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def uplot_version() -> str:
    found = re.search(r"\(v([\d.]+)\)", _asset("uPlot.iife.min.js")[:200])
    return found[1] if found else ""


@functools.cache
def _asset(name: str) -> str:
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")
