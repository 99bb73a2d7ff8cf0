"""A hub on this machine: an HTTP server with the endpoints that huggingface_hub calls to create, upload, list and download.

It stores what it receives and serves it again, large files over git LFS, the protocol of a client without hf_xet. Point a process
to it with `environment`. Requests it does not know end in 501 and are listed in `unknown`, so that a test fails.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"
USER = "me"
LARGE = (".safetensors", ".parquet", ".gguf")
"""Files that the hub stores in LFS, as .gitattributes of a new repository says."""


@dataclass
class Repository:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Messages of the commits."""

    @property
    def sha(self) -> str:
        parts = [part for name in sorted(self.files) for part in (name.encode(), self.files[name])]
        return hashlib.sha1(b"\0".join([*(commit.encode() for commit in self.commits), *parts])).hexdigest()


class LocalHub:
    """Repositories by (kind, id), such as ("models", "me/mine")."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.unknown: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))

    @property
    def url(self) -> str:
        return f"http://localhost:{self.server.server_address[1]}"

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Environment of a process that uses this hub, with its own cache and, if given, a token."""
        # hf_xet would send large files to a service of its own
        values = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return values | {"HF_HUB_OFFLINE": "0", "HF_TOKEN": token or ""}

    def put(self, kind: str, id: str, files: dict[str, bytes], *, private: bool = False) -> Repository:
        self.repositories[kind, id] = Repository(private, files, ["Add files"])
        return self.repositories[kind, id]

    def files(self, id: str, kind: str = "models") -> dict[str, bytes]:
        return self.repositories[kind, id].files


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    hub = LocalHub()
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    ROUTES = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/(models|datasets)/(.+)/preupload/(.+)", "preupload"),
        ("POST", r"/api/(models|datasets)/(.+)/commit/(.+)", "commit"),
        ("POST", r"/api/(models|datasets)/(.+)/paths-info/(.+)", "paths"),
        ("GET", r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", "tree"),
        ("GET", r"/api/(models|datasets)/([^/]+(?:/[^/]+)?)(?:/revision/(.+))?", "info"),
        ("POST", r"/(datasets/)?(.+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/lfs/([0-9a-f]{64})", "upload"),
        ("GET", r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
    )

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(iter(self._chunk, b""))
        method = "GET" if self.command == "HEAD" else self.command
        for verb, pattern, name in self.ROUTES:
            if verb == method and (found := re.fullmatch(pattern, path)):
                try:
                    getattr(self, name)(*found.groups())
                except _Refused as refused:
                    self._send({"error": str(refused)}, refused.status, {"X-Error-Code": refused.code})
                return
        self.hub.unknown.append(f"{self.command} {self.path}")
        self._send({"error": "unknown"}, 501)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        content = self.rfile.read(size)
        self.rfile.readline()
        return content

    def _send(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass

    @property
    def _known_user(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, kind: str, id: str, *, write: bool = False) -> Repository:
        if write and not self._known_user:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        repository = self.hub.repositories.get((kind, id))
        if repository is None or (repository.private and not self._known_user):
            raise _Refused(404 if self._known_user else 401, "RepoNotFound", "Repository not found")
        return repository

    # Endpoints

    def whoami(self) -> None:
        if not self._known_user:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        self._send({"type": "user", "id": "1", "name": USER, "orgs": []})

    def create(self) -> None:
        if not self._known_user:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        wanted = json.loads(self.body)
        owner, kind = wanted.get("organization") or USER, f"{wanted.get('type', 'model')}s"
        id = f"{owner}/{wanted['name']}"
        if owner != USER:
            raise _Refused(403, "", f"You don't have the rights to create a model under the namespace {owner}")
        url = {"url": f"{self.hub.url}/{id}", "name": id, "id": "1"}
        if (kind, id) in self.hub.repositories:
            return self._send(url | {"error": "You already created this model repo"}, 409)
        is_private = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.hub.repositories[kind, id] = Repository(is_private, {}, ["initial commit"])
        self._send(url)

    def validate(self) -> None:
        self._send({"errors": [], "warnings": []})

    def preupload(self, kind: str, id: str, revision: str) -> None:
        self._repository(kind, id, write=True)
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in paths}
        self._send({"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]})

    def batch(self, prefix: str | None, id: str) -> None:
        self._repository((prefix or "models").rstrip("/"), id, write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            href = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            objects.append(wanted if wanted["oid"] in self.hub.objects else wanted | {"actions": href})
        self._send({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _Refused(400, "", "The content is not that of its oid")
        self.hub.objects[oid] = self.body
        self._send(b"")

    def commit(self, kind: str, id: str, revision: str) -> None:
        repository = self._repository(kind, id, write=True)
        files = dict(repository.files)
        for line in self.body.splitlines():
            key, value = (json.loads(line)[name] for name in ("key", "value"))
            match key:
                case "header":
                    summary = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        repository.files = files
        repository.commits.append(summary)
        self._send({"commitUrl": f"{self.hub.url}/{id}/commit/{repository.sha}", "commitOid": repository.sha, "success": True})

    def info(self, kind: str, id: str, revision: str | None) -> None:
        repository = self._repository(kind, id)
        siblings = [{"rfilename": path} for path in sorted(repository.files)]
        about = {"id": id, "modelId": id, "sha": repository.sha, "private": repository.private, "siblings": siblings}
        self._send(
            about | {"tags": [], "downloads": 0, "gated": False, "disabled": False, "lastModified": "2026-01-01T00:00:00.000Z"}
        )

    def tree(self, kind: str, id: str, revision: str, folder: str | None) -> None:
        files = self._repository(kind, id).files
        start = f"{folder}/" if folder else ""
        inside = {path: content for path, content in files.items() if path.startswith(start)}
        if folder and not inside:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        self._send(_entries(inside))

    def paths(self, kind: str, id: str, revision: str) -> None:
        files = self._repository(kind, id).files
        wanted = json.loads(self.body)["paths"]
        self._send(_entries({path: content for path, content in files.items() if path in wanted}))

    def resolve(self, prefix: str | None, id: str, revision: str, path: str) -> None:
        repository = self._repository((prefix or "models").rstrip("/"), id)
        if path not in repository.files:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        content = repository.files[path]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": repository.sha,
            "Accept-Ranges": "bytes",
        }
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            return self._send(content, headers=headers)
        first, last = int(asked[1]), min(int(asked[2] or len(content) - 1), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self._send(content[first : last + 1], 206, headers)


def _entries(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Return the entries of a listing: each file, and each folder above it."""
    folders = {str(parent) for path in files for parent in Path(path).parents if str(parent) != "."}
    listed: list[dict[str, Any]] = [
        {"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)
    ]
    for path, content in files.items():
        entry = {"type": "file", "path": path, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
        if path.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 128}
        listed.append(entry)
    return listed
