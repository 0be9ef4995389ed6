"""The tables that the two ends of a refit exchange, as JSON of a size that does not grow with equal layers.

Layers that are alike differ in one number of their names. A table is therefore patterns, the rows of a layer with `*`
for its number, and blocks, which pattern each layer follows. Whoever needs only some names reads only their layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from mimo.refit.slots import Box, Holder, Holders, Wants, slot_as_json, slot_from_json

# The first number of a name: of its layer.
LAYER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.)")
MARK = "*"


def wants_table(wants: Wants) -> dict[str, Any]:
    """What a worker wants, to send."""
    return {"direct": folded([slot_as_json(slot) for slot in wants.direct]),
            "loader": folded([[name] for name in wants.loader])}


def wants_from_table(table: dict[str, Any], names: Collection[str] | None = None) -> Wants:
    """What a worker wants, as received; of these names alone where they are given."""
    return Wants(tuple(map(slot_from_json, unfolded(table["direct"], names))),
                 tuple(row[0] for row in unfolded(table["loader"], names)))


def wanted_names(table: dict[str, Any]) -> set[str]:
    """Every name in a table of wants."""
    return {row[0] for route in ("direct", "loader") for row in unfolded(table[route])}


def holders_table(holders: Holders) -> dict[str, Any]:
    """What the trainer's ranks hold, to send."""
    return folded([[name, [[list(held.box.starts), list(held.box.stops), list(held.ranks)] for held in boxes]]
                   for name, boxes in sorted(holders.items(), key=lambda item: _layer(item[0]) or "")])


def holders_from_table(table: dict[str, Any]) -> Holders:
    """What the trainer's ranks hold, as received."""
    return {name: [Holder(Box(tuple(starts), tuple(stops)), tuple(ranks)) for starts, stops, ranks in boxes]
            for name, boxes in unfolded(table)}


def folded(rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """Rows, each of which begins with a name, as patterns and blocks.

    Raises:
        ValueError: a name has the mark of a layer's number in it.
    """
    patterns: dict[str, int] = {}
    blocks: list[list[Any]] = []
    block: list[list[Any]] = []
    layer = None

    def close() -> None:
        if block:
            blocks.append([patterns.setdefault(json.dumps(block), len(patterns)), layer])
            block.clear()

    for row in rows:
        here = _layer(row[0])
        if here != layer:
            close()
            layer = here
        block.append([_masked(item, layer) for item in row])
    close()
    return {"patterns": [json.loads(pattern) for pattern in patterns], "blocks": blocks}


def unfolded(table: dict[str, Any], names: Collection[str] | None = None) -> Iterator[list[Any]]:
    """The rows; of these names alone where they are given."""
    layers = None if names is None else {_layer(name) for name in names}
    for number, layer in table["blocks"]:
        if layers is not None and layer not in layers:
            continue
        for row in table["patterns"][number]:
            if layer is None:
                found = row
            else:
                found = [item.replace(MARK, layer) if isinstance(item, str) else item for item in row]
            if names is None or found[0] in names:
                yield found


def _layer(name: str) -> str | None:
    found = LAYER.search(name)
    return found.group(1) if found else None


def _masked(item: Any, layer: str | None) -> Any:
    """A name with the mark in place of its layer's number, where that is the one of its row."""
    if not isinstance(item, str):
        return item
    if MARK in item:
        raise ValueError(f"{item}: a name with {MARK!r}")
    found = LAYER.search(item)
    if layer is None or found is None or found.group(1) != layer:
        return item
    return f"{item[:found.start()]}{MARK}{item[found.end():]}"
