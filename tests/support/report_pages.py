"""Whether a page of a run is sound HTML that needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser

# Without an end, and those of SVG that close themselves.
VOID, CLOSED = {"meta"}, {"line", "rect", "circle", "path"}


class Sound(HTMLParser):
    """Checks that tags close in order and that nothing points out of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            assert name not in ("src", "href", "xlink:href", "action", "onload"), (tag, name, value)
            assert value is None or "://" not in value, (tag, name, value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in CLOSED, tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def headings(html: str) -> list[str]:
    """Section titles of a page that is sound."""
    parser = Sound()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert "http" not in re.sub(r"</?html", "", html).lower().replace("http-equiv", "")
    assert not re.search(r"@import|url\((?!#)", html)
    assert not re.search(r"(?<![\w-])nan(?![\w-])", re.sub(r"<script>.*?</script>", "", html, flags=re.S))
    assert html.isascii()
    return parser.headings
