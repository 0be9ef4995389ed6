"""Servers of a few files for tests: the Hugging Face Hub, and an object store that is a plain web server, too."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

REPO = "org/small"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
BUCKET = "bucket"


class Handler(BaseHTTPRequestHandler):
    """Answers both kinds of requests by `answer`, and prints no line for them."""

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, *, with_body: bool) -> None:
        raise NotImplementedError

    def send(self, code: int, body: bytes, with_body: bool, **headers: str) -> None:
        """Send headers and, unless only they are wanted, the body."""
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def serving(handler: type[Handler], **state: object) -> Iterator[ThreadingHTTPServer]:
    """Run a server on a free port; `state` becomes its attributes."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    vars(server).update(state)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class HubHandler(Handler):
    """Answers from `server.files`; notes paths in `server.asked`, behind HEAD where only headers are wanted."""

    def answer(self, *, with_body: bool) -> None:
        path, files = self.path.partition("?")[0], self.server.files
        self.server.asked.append(path if with_body else f"HEAD {path}")
        headers = {"X_Repo_Commit": COMMIT}
        if path in (f"/api/models/{REPO}/revision/{name}" for name in ("main", COMMIT)):
            body = json.dumps({"id": REPO, "sha": COMMIT, "siblings": [
                {"rfilename": name, "size": len(data)} for name, data in files.items()]}).encode()
        elif path == f"/api/models/{REPO}/tree/{COMMIT}":
            body = json.dumps([{"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                               for name, data in files.items()]).encode()
        elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            body = files[path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")]
            headers["ETag"] = f'"{_oid(body)}"'
        else:
            body, headers = b"", {"X_Error_Code": "RepoNotFound"}
        self.send(200 if body else 404, body, with_body, **headers)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def small_hub(files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of one repository as the hub does; gives the address, and the paths that were asked for."""
    asked: list[str] = []
    with serving(HubHandler, files=files, asked=asked) as server:
        yield f"http://127.0.0.1:{server.server_port}", asked


class StoreHandler(Handler):
    """Answers from `server.folder`; notes keys that are read in `server.asked`; fails `server.failures` times first."""

    protocol_version = "HTTP/1.1"

    def answer(self, *, with_body: bool) -> None:
        url = urlsplit(self.path)
        key, options = unquote(url.path).lstrip("/").removeprefix(BUCKET).lstrip("/"), parse_qs(url.query)
        path = self.server.folder / key
        if with_body and self.server.failures:
            self.server.failures -= 1
            return self.send(503, b"", with_body)
        if "list-type" in options or "prefix" in options:
            return self.send(200, self._listing(options.get("prefix", [""])[0]), True, Content_Type="application/xml")
        if not key or not path.is_file():
            return self.send(404, b"<Error><Code>NoSuchKey</Code></Error>" if with_body else b"", with_body)
        body = path.read_bytes()
        if with_body:
            self.server.asked.append(key)
        span = self.headers.get("Range", "").removeprefix("bytes=")
        first, _, last = span.partition("-")
        part = body[int(first) : int(last) + 1 if last else None] if first else body
        return self.send(206 if first else 200, part, with_body, Content_Type="application/octet-stream",
                         ETag=f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"',
                         Last_Modified="Mon, 02 Nov 2026 10:00:00 GMT")

    def _listing(self, prefix: str) -> bytes:
        root = self.server.folder
        keys = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        rest = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        folders = sorted({name.partition("/")[0] for name in rest if "/" in name})
        files = "".join(f"<Contents><Key>{escape(prefix + name)}</Key><Size>{(root / (prefix + name)).stat().st_size}"
                        f'</Size><ETag>"x"</ETag><LastModified>2026-11-02T10:00:00.000Z</LastModified></Contents>'
                        for name in rest if "/" not in name)
        places = "".join(f"<CommonPrefixes><Prefix>{escape(prefix + name)}/</Prefix></CommonPrefixes>"
                         for name in folders)
        return (f"<ListBucketResult><Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><Delimiter>/</Delimiter>"
                f"<KeyCount>{len(rest)}</KeyCount><IsTruncated>false</IsTruncated>{files}{places}"
                "</ListBucketResult>").encode()


@contextmanager
def small_store(folder: Path) -> Iterator[tuple[str, ThreadingHTTPServer]]:
    """Serve a folder as S3 does for one bucket, and as a web server; gives the address and the server."""
    with serving(StoreHandler, folder=folder, asked=[], failures=0) as server:
        yield f"http://127.0.0.1:{server.server_port}", server
