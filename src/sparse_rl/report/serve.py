"""Serve the report of a live run on the loopback interface. The server serves only the page and its rollouts."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..errors import UserError, first_line
from . import page
from .document import ReportSource
from .runs import find

HOST = "127.0.0.1"
WATCHED = ("config.toml", "metrics.jsonl", "xi.jsonl", "budget.jsonl", "rollouts")


class Watcher:
    """Holds the document of the report, and rebuilds it when a file of a run has changed."""

    def __init__(self, source: ReportSource):
        self.source = source
        self._lock = threading.Lock()
        self._stamp = ""
        self._document: dict[str, Any] = {}
        self._chunks: list = []

    def refresh(self) -> dict[str, Any]:
        with self._lock:
            stamp = self._now()
            if stamp != self._stamp:
                self._document, self._chunks = self.source.document(live=True)
                self._document["stamp"] = self._stamp = stamp
            return self._document

    def chunk(self, run: int, step: int) -> bytes | None:
        self.refresh()
        with self._lock:
            found = self._chunks[run].get(step) if run < len(self._chunks) else None
        return found.data if found else None

    def _now(self) -> str:
        paths, _ = find(self.source.paths)
        seen = [(str(path / name), *_when(path / name)) for path in paths for name in WATCHED]
        return f"{hash(tuple(seen)) & 0xFFFFFFFFFFFF:x}"


def _when(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def make_server(source: ReportSource, port: int) -> ThreadingHTTPServer:
    watcher = Watcher(source)
    watcher.refresh()  # raise an error now if a folder is not a run
    try:
        server = ThreadingHTTPServer((HOST, port), type("Handler", (Handler,), {"watcher": watcher}))
    except (OSError, OverflowError) as error:
        raise UserError(f"Port {port} cannot be used ({first_line(error)}): choose another with --port.") from error
    server.daemon_threads = True
    return server


def serve(source: ReportSource, port: int) -> None:
    with make_server(source, port) as server:
        print(
            f"Serving the report at http://{HOST}:{server.server_port}/ (this machine only). Press Ctrl-C to stop.", flush=True
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


class Handler(BaseHTTPRequestHandler):
    watcher: Watcher
    server_version = "sparse-rl"

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if host not in (HOST, "localhost"):  # prevents DNS rebinding
            self._answer(403, "text/plain", b"This page answers to 127.0.0.1 and localhost only.")
            return
        try:
            self._route()
        except (BrokenPipeError, ConnectionResetError):
            pass
        except Exception as error:  # e.g. the run was deleted; the page keeps polling
            self._answer(503, "text/plain", first_line(error).encode("utf-8", "replace"))

    def _route(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/":
            self._answer(200, "text/html; charset=utf-8", page.html(self.watcher.refresh()))
        elif url.path == "/data.json":
            document = self.watcher.refresh()
            if parse_qs(url.query).get("since") == [document["stamp"]]:
                self._answer(204, "application/json", b"")
            else:
                self._answer(200, "application/json", json.dumps(document, allow_nan=False).encode())
        elif match := re.fullmatch(r"/rollouts/(\d{1,6})/(\d{1,9})", url.path):
            data = self.watcher.chunk(int(match[1]), int(match[2]))
            self._answer(200 if data else 404, "application/octet-stream", data or b"")
        else:
            self._answer(404, "text/plain", b"There is only one page here: /")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Disable request logging."""
