"""Which spelling of a module's names an engine's loader wants: the one of which every name writes something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from mimo.refit.record import record
from mimo.refit.slots import Entry

NAMED = 3  # names in an error message
Candidates = Mapping[str, Mapping[str, Sequence[Entry]]]
"""Module -> name of a style -> its entries."""


@dataclass(frozen=True)
class Probe:
    """What a worker's loader makes of one spelling of a module's names.

    Attributes:
        refused: names that it raises on, the first few, with the error.
        silent: names that write nothing on this worker.
    """

    refused: dict[str, str]
    silent: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As plain lists."""
        return {"refused": self.refused, "silent": list(self.silent)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The other way."""
        return cls(dict(value["refused"]), tuple(value["silent"]))


Probes = Mapping[str, Mapping[str, Probe]]
"""Module -> name of a style -> what it came to."""


def probe_styles(model: torch.nn.Module, candidates: Candidates) -> dict[str, dict[str, Probe]]:
    """Tries every spelling of every module on a live model, without any effect on it."""
    probes: dict[str, dict[str, Probe]] = {}
    for module, styles in candidates.items():
        for style, entries in styles.items():
            recording = record(model, entries, max_refused=NAMED)
            probes.setdefault(module, {})[style] = Probe(recording.refused, recording.untaken)
    return probes


def choose_style(probes: Sequence[Probes]) -> dict[str, str]:
    """Each module's spelling, from what all workers found.

    Args:
        probes: of every worker. A name may write nothing on one (a layer of another pipeline stage, an expert of
            another rank), but not on all.

    Returns:
        For each module the first style that no worker refuses and of which every name writes something.

    Raises:
        ValueError: a module has no such style; for each style what was refused or silently ignored.
    """
    chosen = {}
    for module, styles in probes[0].items():
        faults = {style: _fault([worker[module][style] for worker in probes]) for style in styles}
        fitting = [style for style, fault in faults.items() if not fault]
        if not fitting:
            told = "; ".join(f"as {style}, {fault}" for style, fault in faults.items())
            raise ValueError(f"the engine's loader takes the names of module {module} in no spelling: {told}")
        chosen[module] = fitting[0]
    return chosen


def _fault(workers: Sequence[Probe]) -> str:
    for worker in workers:
        for name, reason in worker.refused.items():
            return f"{name} is refused ({reason})"
    ignored = [name for name in workers[0].silent if all(name in set(worker.silent) for worker in workers)]
    more = f" and {len(ignored) - NAMED} more" if len(ignored) > NAMED else ""
    return f"{', '.join(ignored[:NAMED])}{more} are ignored without a word" if ignored else ""
