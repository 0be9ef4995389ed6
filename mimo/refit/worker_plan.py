"""What one worker takes in, and how: its model's loader is asked, and everything that does not fit is an error here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mimo.refit.coverage import check_coverage
from mimo.refit.record import Recording, record
from mimo.refit.routes import routes
from mimo.refit.slots import Entry, Wants
from mimo.refit.styles import Probe, choose_style, probe_styles


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


def worker_wants(model: torch.nn.Module, entries: Sequence[Entry], spellings: Sequence[Mapping[str, Any]], route: str,
                 share: Callable[[Any], list[Any]]) -> Taken:
    """Ask a model's loader what it does with the trainer's tensors.

    Args:
        model: the live one; nothing of it changes.
        entries: every tensor of the chunk plan.
        spellings: see `mimo.refit.trainer.module_spellings`.
        route: see `RefitOptions`.
        share: gives every worker's plain value for this worker's: spelling is chosen by all together.

    Raises:
        ValueError: no spelling fits, tensors of the model are filled by nothing, or one would lose its precision.
    """
    probes = probe_spellings(model, entries, spellings)
    return wants_as(model, entries, spellings, route, share(probes) if probes else [])


def probe_spellings(model: torch.nn.Module, entries: Sequence[Entry],
                    spellings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What this worker's loader makes of each spelling, as plain data; nothing where there is no choice.

    Which choices there are is the same on all workers.
    """
    open_choices = {module: styles for module, styles in _candidates(entries, spellings).items() if len(styles) > 1}
    return {module: {style: probe.as_json() for style, probe in styles.items()}
            for module, styles in probe_styles(model, open_choices).items()}


def wants_as(model: torch.nn.Module, entries: Sequence[Entry], spellings: Sequence[Mapping[str, Any]], route: str,
             probes: Sequence[Mapping[str, Any]]) -> Taken:
    """`worker_wants`, given what `probe_spellings` said on every worker. Raises ValueError as that."""
    spelled = _spelled(_candidates(entries, spellings), probes)
    own = {name: entry.name for entry, name in zip(entries, spelled, strict=True)}
    renamed = [dataclasses.replace(entry, name=name) for entry, name in zip(entries, spelled, strict=True)]
    recording = record(model, renamed)
    check_coverage(model, recording)
    wants = routes(model, recording, renamed)
    if route == "loader":
        taken = recording.slots.keys() | recording.computed.keys()
        wants = Wants((), tuple(name for name in spelled if name in taken))
    return Taken(
        Wants(tuple(dataclasses.replace(slot, name=own[slot.name]) for slot in wants.direct),
              tuple(own[name] for name in wants.loader)),
        dict(zip(own.values(), own, strict=True)), _layers(model, recording, wants.loader))


def _candidates(entries: Sequence[Entry],
                spellings: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Entry]]]:
    """Module -> style -> its entries, renamed; styles that differ only for other tensors are one."""
    candidates = {}
    for part in spellings:
        own = entries[part["first"]:part["first"] + part["count"]]
        distinct = {tuple(names): style for style, names in reversed(part["styles"].items())}
        candidates[part["module"]] = {
            style: [dataclasses.replace(entry, name=name) for entry, name in zip(own, names, strict=True)]
            for names, style in reversed(distinct.items())}
    return candidates


def _spelled(candidates: Mapping[str, Mapping[str, Sequence[Entry]]],
             probes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The loader's name of every entry."""
    chosen = {module: next(iter(styles)) for module, styles in candidates.items()}
    if any(probes):
        chosen |= choose_style([
            {module: {style: Probe.from_json(probe) for style, probe in styles.items()}
             for module, styles in worker.items()} for worker in probes])
    return [entry.name for module, styles in candidates.items() for entry in styles[chosen[module]]]


def _layers(model: torch.nn.Module, recording: Recording, loader: Iterable[str]) -> tuple[str, ...]:
    """Paths of the modules that loader names are loaded into."""
    wanted = set(loader)
    paths = {slot.address.tensor for name, slots in recording.slots.items() if name in wanted for slot in slots}
    paths |= {write.path for name, writes in recording.computed.items() if name in wanted for write in writes}
    owners = {path.rpartition(".")[0] for path in paths}
    return tuple(path for path, _ in model.named_modules() if path in owners)
