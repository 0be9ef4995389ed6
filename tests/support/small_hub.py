"""A server that answers as the Hugging Face Hub does, for one repository of a few files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPO = "org/small"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Handler(BaseHTTPRequestHandler):
    """Answers from `server.files`; notes paths in `server.asked`, behind HEAD where only headers are wanted."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        """No line for each request."""

    def _answer(self, *, with_body: bool) -> None:
        path, files = self.path.partition("?")[0], self.server.files
        self.server.asked.append(path if with_body else f"HEAD {path}")
        headers = {"X-Repo-Commit": COMMIT}
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
            body, headers = b"", {"X-Error-Code": "RepoNotFound"}
        self.send_response(200 if body else 404)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def small_hub(files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve files; gives the address, and the paths that were asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked = files, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
