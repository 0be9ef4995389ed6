"""A server of the files of a folder, which answers as S3 does for one bucket, and as a plain web server."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"


class Handler(BaseHTTPRequestHandler):
    """Answers from `server.folder`; notes keys that are read in `server.asked`; fails `server.failures` times first."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        """No line for each request."""

    def _answer(self, *, with_body: bool) -> None:
        url = urlsplit(self.path)
        key, options = unquote(url.path).lstrip("/").removeprefix(BUCKET).lstrip("/"), parse_qs(url.query)
        path = self.server.folder / key
        if with_body and self.server.failures:
            self.server.failures -= 1
            return self._send(503, b"")
        if "list-type" in options or "prefix" in options:
            return self._send(200, self._listing(options.get("prefix", [""])[0]), "application/xml")
        if not key or not path.is_file():
            return self._send(404, b"<Error><Code>NoSuchKey</Code></Error>" if with_body else b"")
        body = path.read_bytes()
        if with_body:
            self.server.asked.append(key)
        span = self.headers.get("Range", "").removeprefix("bytes=")
        first, _, last = span.partition("-")
        part = body[int(first) : int(last) + 1 if last else None] if first else body
        return self._send(206 if first else 200, part if with_body else b"", size=len(part),
                          ETag=f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"',
                          **{"Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT"})

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

    def _send(self, code: int, body: bytes, kind: str = "application/octet-stream", size: int | None = None,
              **headers: str) -> None:
        self.send_response(code)
        for name, value in ({"Content-Type": kind, "Content-Length": str(len(body) if size is None else size)}
                            | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def small_store(folder: Path) -> Iterator[tuple[str, ThreadingHTTPServer]]:
    """Serve a folder; gives the address, and the server with the keys that were read."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.asked, server.failures = folder, [], 0
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
