"""Proof, before any byte moves, that a worker's tensors are written whole: each element once, none left as it was."""

from __future__ import annotations

import math

import torch

from mimo.refit.record import Layout, Recording, target_box
from mimo.refit.slots import Box
from mimo.refit.strided import subtract
from mimo.refit.tracing import Write


def check_coverage(model: torch.nn.Module, recording: Recording) -> None:
    """Raises unless a recording fills every parameter, and every buffer that a checkpoint may hold, exactly once.

    A tensor that is shared counts once. Padding that the model declares may stay unwritten.

    Raises:
        ValueError: names that the loader refuses; elements written twice or never, with their number, by tensor.
    """
    faults = [f"{name} is refused: {reason}" for name, reason in recording.refused.items()]
    writes = _writes(recording)
    for path, layout in recording.layouts.items():
        needed = layout.parameter or _is_loadable_buffer(model, path, layout)
        faults += _faults(path, layout, writes.get(path, []), needed, recording.layouts)
    if faults:
        raise ValueError("the engine's weights are not all written once: " + "; ".join(faults))


def _writes(recording: Recording) -> dict[str, list[tuple[Write, bool]]]:
    """What is written to each tensor, and whether it is a box that has to be the only one there."""
    writes: dict[str, list[tuple[Write, bool]]] = {}
    for write in recording.copies:
        writes.setdefault(write.path, []).append((write, True))
    others = [write for group in recording.computed.values() for write in group] + list(recording.constants)
    for write in others:
        writes.setdefault(write.path, []).append((write, False))
    return writes


def _faults(path: str, layout: Layout, writes: list[tuple[Write, bool]], needed: bool,
            layouts: dict[str, Layout]) -> list[str]:
    left, twice = [Box.whole(layout.view.sizes)], 0
    names: set[str] = set()
    for write, alone in writes:
        box = target_box(write, layouts)
        if box is None:
            return []  # a part that only the loader knows; it is written by the loader
        left, removed = subtract(left, box)
        if alone and removed < box.numel:
            twice += box.numel - removed
            names |= write.names
    faults = [f"{path}: {twice} elements are written twice, again by {', '.join(sorted(names))}"] if twice else []
    total = math.prod(layout.view.sizes)
    missing = sum(box.numel for box in left) - (total - layout.loaded)
    if missing > 0 and (needed or missing < total):
        faults.append(f"{path}: {missing} of {total} elements are never written")
    return faults


def _is_loadable_buffer(model: torch.nn.Module, path: str, layout: Layout) -> bool:
    """Whether a checkpoint may hold a buffer: it is part of the state dict, floating and not private to its module."""
    parent, _, name = path.rpartition(".")
    module = model.get_submodule(parent)
    persistent = name not in module._non_persistent_buffers_set and not name.startswith("_")
    return persistent and getattr(torch, layout.dtype).is_floating_point
