"""Headless Chromium, driven through its DevTools protocol on two pipes, so that no other package is needed.

https://chromedevtools.github.io/devtools-protocol lists the methods. Messages are JSON, with a zero byte at the end.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "google-chrome", "chrome-headless-shell")
# Seconds until a browser that hangs is killed, which ends the pipe that the test reads.
LIMIT_S = 120


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


class Browser:
    """A browser with one page."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # Chromium reads commands from file 3 and answers on file 4.
        self._pid = os.posix_spawn(
            "/usr/bin/env", ["env", "timeout", "-s", "KILL", str(LIMIT_S), program, "--headless", "--no-sandbox",
                             "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
                             f"--user-data-dir={self._profile.name}"],
            os.environ, setpgroup=0,
            file_actions=[(os.POSIX_SPAWN_DUP2, commands, 3), (os.POSIX_SPAWN_DUP2, answers, 4),
                          (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                          (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)])
        os.close(commands)
        os.close(answers)
        self._answers, self._number, self._session = os.fdopen(self._read, "rb"), 0, ""
        self._pending = b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _message(self) -> bytes:
        while b"\0" not in self._pending:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._pending += data
        found, _, self._pending = self._pending.partition(b"\0")
        return found

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page. A promise is waited for."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        """Open a file in a window of this width, on a light or a dark system, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                  mobile=width < 500)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme",
                                                           "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.evaluate("new Promise(done => document.readyState === 'complete' ? done() "
                      ": addEventListener('load', () => done()))")

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser and all its processes."""
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._answers.close()
        os.close(self._write)
        self._profile.cleanup()
