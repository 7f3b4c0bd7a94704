"""A stand-in of the Hugging Face Hub's file API, small enough to read: for trying and for tests without the network.

It serves the folders it is given to the real `huggingface_hub` and `datasets` libraries (HF_ENDPOINT=http://…), at one
commit each, with checksums and byte ranges, and can be told to misbehave: refuse, cut connections, be away.

    with Hub({"datasets/me/tales": folder, "models/me/tok": other}) as hub:
        os.environ["HF_ENDPOINT"] = hub.url
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_KINDS = ("datasets", "models")
_LARGE = 1 << 10  # bytes from which a file is kept as the Hub keeps large ones, with its SHA-256


class Hub:
    """Repositories by name (`datasets/OWNER/NAME`), each a folder."""

    def __init__(self, repositories: Mapping[str, Path], *, port: int = 0) -> None:
        self.repositories = dict(repositories)
        self.refuse = 0  # so many of the next requests are answered with 503
        self.cut = 0  # so many of the next files are cut off in the middle
        self.away = False  # every request is answered with 503
        self.asked: list[str] = []  # method and path of every request
        self.sent_bytes = 0  # of files
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, name: str) -> str:
        """A hash of the repository's files, so that a changed folder is another commit."""
        parts = [f"{path} {hashlib.sha256(content).hexdigest()}" for path, content in self._files(name)]
        return hashlib.sha1("\n".join(parts).encode()).hexdigest()

    def entries(self, name: str) -> list[dict[str, Any]]:
        """Every file as `tree` and `paths-info` tell of it."""
        return [_entry(path, content) for path, content in self._files(name)]

    def take(self, what: str) -> bool:
        """Whether this request is one of those to spoil."""
        left = getattr(self, what)
        if left > 0:
            setattr(self, what, left - 1)
        return bool(left > 0)

    def _files(self, name: str) -> Iterator[tuple[str, bytes]]:
        folder = self.repositories[name]
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield path.relative_to(folder).as_posix(), path.read_bytes()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git}
    if len(content) >= _LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_POST(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            """Silent: requests are in hub.asked."""

        def _answer(self, *, body: bool) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            sent = self.rfile.read(length).decode() if length else ""
            with lock:
                hub.asked.append(f"{self.command} {self.path}")
                refused = hub.away or hub.take("refuse")
            if refused:
                self._send(503, b'{"error": "away"}', body=body)
                return
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            if parts[:1] == ["api"]:
                self._api(parts[1:], sent, body=body)
            else:
                self._file(parts if parts[0] in _KINDS else ["models", *parts], body=body)

        def _api(self, parts: list[str], sent: str, *, body: bool) -> None:
            name, rest = "/".join(parts[:3]), parts[3:]
            if name not in hub.repositories:
                self._send(404, b"{}", body=body, headers={"X-Error-Code": "RepoNotFound"})
                return
            commit = hub.commit(name)
            if rest[1:2] and rest[0] in ("revision", "tree", "paths-info") and rest[1] not in ("main", commit):
                self._send(404, b"{}", body=body, headers={"X-Error-Code": "RevisionNotFound"})
                return
            entries = hub.entries(name)
            answer: Any = None
            if not rest or rest[0] == "revision":
                answer = _info(parts[1:3], commit, entries)
            elif rest[0] == "tree":
                deep = parse_qs(urlsplit(self.path).query).get("recursive", [""])[0].lower() in ("true", "1")
                answer = _tree(entries, "/".join(rest[2:]), commit, deep=deep)
            elif rest[0] == "paths-info":
                asked = json.loads(sent)["paths"] if sent.startswith("{") else parse_qs(sent).get("paths", [])
                answer = [
                    entry if entry is not None else {"type": "directory", "path": path, "oid": commit}
                    for path in asked
                    for entry in [next((one for one in entries if one["path"] == path), None)]
                    if entry is not None or any(one["path"].startswith(f"{path}/") for one in entries)
                ]
            if answer is None:
                self._send(404, b'{"error": "not there"}', body=body, headers={"X-Error-Code": "EntryNotFound"})
            else:
                self._send(200, json.dumps(answer).encode(), body=body, kind="application/json")

        def _file(self, parts: list[str], *, body: bool) -> None:
            """KIND/OWNER/NAME/resolve/REVISION/PATH"""
            name, path = "/".join(parts[:3]), "/".join(parts[5:])
            entry = None
            if name in hub.repositories and parts[3:4] == ["resolve"]:
                entry = next((one for one in hub.entries(name) if one["path"] == path), None)
            if entry is None:
                code = "EntryNotFound" if name in hub.repositories else "RepoNotFound"
                self._send(404, b"", body=body, headers={"X-Error-Code": code})
                return
            content = (hub.repositories[name] / path).read_bytes()
            etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit(name), "Accept-Ranges": "bytes"}
            status, wanted = 200, self.headers.get("Range", "")
            if wanted.startswith("bytes="):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last or len(content) - 1), len(content) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
                status, content = 206, content[start : end + 1]
            cut = body and len(content) > 1 and hub.take("cut")
            self._send(status, content, body=body, headers=headers, cut=cut)

        def _send(
            self,
            status: int,
            content: bytes,
            *,
            body: bool,
            headers: Mapping[str, str] | None = None,
            kind: str = "application/octet-stream",
            cut: bool = False,
        ) -> None:
            self.send_response(status)
            for key, value in {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if not body:
                return
            self.wfile.write(content[: len(content) // 2] if cut else content)
            hub.sent_bytes += len(content) // 2 if cut else len(content)
            if cut:
                self.close_connection = True

    return Handler


def _tree(entries: list[dict[str, Any]], under: str, commit: str, *, deep: bool) -> list[dict[str, Any]] | None:
    """What lies in a folder; None where there is no such folder."""
    before = f"{under}/" if under else ""
    inside = [entry for entry in entries if entry["path"].startswith(before)]
    if under and not inside:
        return None
    folders = dict.fromkeys(
        before + parts[depth]
        for entry in inside
        for parts in [_folders(entry["path"].removeprefix(before))]
        for depth in range(len(parts) if deep else min(1, len(parts)))
    )
    files = [entry for entry in inside if deep or "/" not in entry["path"].removeprefix(before)]
    return [*({"type": "directory", "path": path, "size": 0, "oid": commit} for path in folders), *files]


def _folders(path: str) -> list[str]:
    """`a/b/c` → a, a/b"""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def _info(name: list[str], commit: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    siblings = []
    for entry in entries:
        one = {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]}
        if "lfs" in entry:
            lfs = entry["lfs"]
            one["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
        siblings.append(one)
    return {
        "id": "/".join(name), "_id": commit[:24], "sha": commit, "private": False, "gated": False, "disabled": False,
        "tags": [], "downloads": 0, "likes": 0, "lastModified": "2026-01-01T00:00:00.000Z", "siblings": siblings,
    }  # fmt: skip
