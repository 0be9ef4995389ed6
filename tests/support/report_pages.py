"""Checks of pages with charts: sound HTML that needs nothing else, and the figures that are shown."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

from mimo.report.html import POLICY, plotly_script
from mimo.report.run_reader import IMAGE_URL

VOID = {"meta", "img"}


class Sound(HTMLParser):
    """Checks that tags close in order and that nothing points out of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if tag == "img" and name == "src":
                assert value is not None and IMAGE_URL.fullmatch(value), value
                continue
            assert name not in ("src", "href", "xlink:href", "action", "onload"), (tag, name, value)
            assert value is None or "://" not in value, (tag, name, value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def contents(html: str) -> str:
    """Return a page without Plotly's script, which it has once, and with the policy that keeps it off the network."""
    script = plotly_script()
    assert html.count(script) == 1
    assert POLICY.startswith("default-src 'none';") and "http" not in POLICY
    assert html.index(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">') < html.index("<style>")
    return html.replace(script, "")


def headings(html: str) -> list[str]:
    """Return the titles of the sections of a page that is sound."""
    html = contents(html)
    parser = Sound()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert "http" not in re.sub(r"</?html", "", html).lower().replace("http-equiv", "")
    assert not re.search(r"@import|url\(", html)
    assert not re.search(r"(?<![\w-])nan(?![\w-])", html, re.IGNORECASE)
    assert html.isascii()
    return parser.headings


def figures(html: str) -> dict[str, dict[str, Any]]:
    """Return the figures of a page, data and layout, by their titles."""
    found = re.findall(r'<h3>([^<]*)</h3><div class="chart"[^>]*></div><script type="application/json">(.*?)</script>',
                       html, re.DOTALL)
    assert len(found) == html.count('<div class="chart"')
    return {unescape(title): json.loads(text) for title, text in found}
