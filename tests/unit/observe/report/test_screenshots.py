"""The page as a browser shows it: nothing is cut off on a phone, charts are drawn, and text is legible in both themes.

Screenshots lie in the test's folder. The tests are skipped where Chromium is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mimo.report.page import page
from mimo.report.run_reader import Run
from tests.support.browser import NAMES, Browser, find_chromium
from tests.support.marks import fast_only
from tests.support.report_runs import rewarded_run

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
