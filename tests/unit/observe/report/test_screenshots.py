"""The page as a browser shows it: nothing is cut off on a phone, charts are drawn, and text is legible in both themes.

Screenshots lie in the test's folder. The tests are skipped where Chromium is not installed. It is driven
through its DevTools protocol on two pipes, so that no other package is needed:
https://chromedevtools.github.io/devtools-protocol lists the methods. Messages are JSON, with a zero byte at the end.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mimo.report.page import page
from mimo.report.run_reader import Run
from tests.support.marks import fast_only
from tests.support.report_runs import rewarded_run

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


VIEWS = {"light": (1280, False), "dark": (1280, True), "phone": (390, False), "dark phone": (390, True)}
# Least contrast of text in WCAG 2, level AA.
LEAST_CONTRAST = 4.5

# Draws all charts at once, and opens what is folded.
DRAW = "document.querySelectorAll('details').forEach(each => each.open = true); dispatchEvent(new Event('beforeprint'))"

# Elements that reach beyond the window, except in parts that scroll on their own.
BEYOND = """[...document.querySelectorAll('main *')].filter(each => !each.parentElement.closest('.scroll, .chart')
  && each.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(each => each.outerHTML)"""

# Charts without any line or bar.
EMPTY = """[...document.querySelectorAll('.chart')].filter(each => each.offsetParent && !each.querySelector(
  '.scatterlayer path, .barlayer path')).map(each => each.ariaLabel)"""

# Texts of charts that reach beyond their chart.
CUT = """[...document.querySelectorAll('.chart')].flatMap(chart => { const box = chart.getBoundingClientRect();
  return [...chart.querySelectorAll('.xtick text, .ytick text, .legendtext, .xtitle')].filter(each => {
    const own = each.getBoundingClientRect(); return own.left < box.left - 1 || own.right > box.right + 1;
  }).map(each => chart.ariaLabel + ': ' + each.textContent); })"""

# The least contrast of any text with the background behind it, and that text.
CONTRAST = """(() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => numbers(colour).slice(0, 3).map(value => value / 255).map(
    value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4).reduce(
    (sum, value, index) => sum + [0.2126, 0.7152, 0.0722][index] * value, 0);
  const backdrop = each => { for (let at = each; at; at = at.parentElement) {
    const found = getComputedStyle(at).backgroundColor, parts = numbers(found);
    if (parts.length < 4 || parts[3] === 1) return found; } return 'rgb(255, 255, 255)'; };
  let least = [99, ''];
  for (const each of document.querySelectorAll('main *')) {
    const inChart = each.closest('.chart');
    if (inChart ? !each.matches('.xtick text, .ytick text, .legendtext, .xtitle')
        : ![...each.childNodes].some(node => node.nodeType === 3 && node.data.trim()) || each.tagName === 'SCRIPT')
      continue;
    const style = getComputedStyle(each), pair = [light(inChart ? style.fill : style.color), light(backdrop(each))];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < least[0]) least = [ratio, each.textContent.slice(0, 80)];
  }
  return least; })()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    found = Browser(program)
    yield found
    found.close()


@pytest.mark.parametrize("case", fast_only(["rewarded phone"], [f"{kind} {view}" for kind in ("supervised", "rewarded")
                                                               for view in VIEWS]))
def test_every_view_is_whole_and_legible(browser: Browser, usual: Run, tmp_path: Path, case: str) -> None:
    kind, _, view = case.partition(" ")
    width, dark = VIEWS[view]
    file = tmp_path / "report.html"
    file.write_text(page([usual if kind == "supervised" else rewarded_run(tmp_path / "run")]), encoding="utf-8")
    browser.open(file, width=width, dark=dark)
    browser.evaluate(DRAW)
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.evaluate(BEYOND) == []
    assert browser.evaluate(EMPTY) == []
    assert browser.evaluate(CUT) == []
    ratio, text = browser.evaluate(CONTRAST)
    assert ratio >= LEAST_CONTRAST, text
    assert browser.evaluate("[...document.images].every(each => each.naturalWidth && each.width)")
    browser.screenshot(tmp_path / f"{case.replace(' ', '-')}.png")
