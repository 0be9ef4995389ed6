"""Data sets that note every row that they hand out.

`tests.support.noted_energon:provider` is `energon`, and `tests.support.noted_energon:conversations` is `conversations`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.conversation_files.provider import ConversationsProvider
from data.energon.provider import EnergonProvider
from mimo.protocols import DataRequest, LaneReader, Sample

# Names a folder; each process that reads lanes appends to a file of its own.
FOLDER = "NOTED_ENERGON"


class NotedReader:
    """A reader whose rows are noted as `[lane, position, key]`, positions counted over a run and what continues it."""

    def __init__(self, inner: LaneReader, path: Path) -> None:
        self.inner, self.path, self.positions = inner, path, {}

    def load_state_dict(self, states: Mapping[int, dict[str, Any]]) -> None:
        for lane, state in states.items():
            self.positions[lane] = sum(worker["count"] for worker in state["workers"])
        self.inner.load_state_dict(states)

    def read(self, lane: int) -> Sample:
        sample = self.inner.read(lane)
        position = self.positions.get(lane, 0)
        self.positions[lane] = position + 1
        with self.path.open("a") as file:
            file.write(json.dumps([lane, position, sample.key]) + "\n")
        return sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Noting(EnergonProvider):
    """Notes the rows of the readers of the provider that it is mixed into."""

    def reader(self, config: Any, request: DataRequest, lanes: Sequence[int]) -> Any:
        reader = super().reader(config, request, lanes)
        folder = os.environ.get(FOLDER)
        if not folder or request.split != "train":
            return reader
        return NotedReader(reader, Path(folder) / f"{os.getpid()}.jsonl")


def noted_rows(folder: Path) -> dict[tuple[int, int], set[str]]:
    """Return the keys that were handed out at each (lane, position), by any process; a sound run has one for each."""
    rows: dict[tuple[int, int], set[str]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            lane, position, key = json.loads(line)
            rows.setdefault((lane, position), set()).add(key)
    return rows


class NotedEnergon(Noting):
    """The `energon` data set."""


class NotedConversations(Noting, ConversationsProvider):
    """The `conversations` data set."""


provider = NotedEnergon()
conversations = NotedConversations()
