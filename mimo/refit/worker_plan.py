"""What one worker takes in, and how: its model's loader is asked, and everything that does not fit is an error here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mimo.refit.coverage import check_coverage
from mimo.refit.record import record
from mimo.refit.slots import Entry, Wants


@dataclass(frozen=True)
class Taken:
    """What a worker takes in.

    Attributes:
        wants: under the trainer's names.
        spelled: the trainer's name -> the loader's.
        loader_layers: paths of the modules whose parameters are loaded rather than written.
    """

    wants: Wants
    spelled: dict[str, str]
    loader_layers: tuple[str, ...]


def worker_wants(model: torch.nn.Module, entries: Sequence[Entry], spellings: Sequence[dict[str, Any]],
                 route: str) -> Taken:
    recording = record(model, entries)
    check_coverage(model, recording)
    paths = {write.path for write in recording.copies} | {w.path for g in recording.computed.values() for w in g}
    layers = tuple(dict.fromkeys(path.rpartition(".")[0] for path in sorted(paths)))
    taken = [e.name for e in entries if e.name in recording.slots or e.name in recording.computed]
    return Taken(Wants((), tuple(taken)), {n: n for n in taken}, layers)
