"""Traces what each checkpoint tensor becomes in a vLLM worker, by running the worker's own loader. Imports vLLM.

The model's `load_weights` runs once on meta tensors, on a model whose tensors have the shapes that they had when they
were loaded. A dispatch mode records every copy and performs none (`mimo.refit.dispatch_trace`). So vLLM itself shows
which box of which tensor this worker wants, and where it puts it. This covers fused projections, stacks of experts,
every kind of parallelism and padding of the vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, capture_layer_to_meta, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from mimo.boxes import Box, View, box_of_view, subtract
from mimo.refit import compat
from mimo.refit.dispatch_trace import VIEWS, Tracer, Write
from mimo.refit.messages import dtype_name, torch_dtype, view_of
from mimo.refit.tensor_slices import TensorMeta, TensorSlice

# Errors that loaders raise about a name, a shape or a value. Each is reported with the name.
LOADER_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
MESSAGE_CHARACTERS = 200  # For an unknown name, vLLM's message lists all parameters.


@dataclass(frozen=True)
class Layout:
    """A tensor of the model as it is when weights are loaded into it.

    Attributes:
        view: sizes, strides and offset in its storage.
        dtype: name of the dtype, such as `bfloat16`.
        loaded: number of elements that a loader has to write: all but the padding that the model declares.
        parameter: whether it is a parameter; otherwise it is a buffer.
    """

    view: View
    dtype: str
    loaded: int
    parameter: bool


@dataclass(frozen=True)
class Recording:
    """Trace of one worker's loader. Each name is in one of `slices`, `computed`, `untaken` and `refused`.

    Attributes:
        slices: boxes of each name that is copied unchanged, in the order of the entries.
        copies: the writes behind these slices.
        computed: for each name that the loader computes with, the writes that depend on it. Such names have to go
            through the loader.
        untaken: names that write nothing on this worker. They belong to another pipeline stage or another rank's
            experts, or the loader ignores them because it does not know them. Only all workers together show which.
        refused: error for each name that the loader cannot load.
        constants: writes that read no checkpoint tensor, such as padding rows.
        layouts: layout of every tensor that a loader may write, by path. Shared tensors have one path.
    """

    slices: dict[str, tuple[TensorSlice, ...]]
    copies: tuple[Write, ...]
    computed: dict[str, tuple[Write, ...]]
    untaken: tuple[str, ...]
    refused: dict[str, str]
    constants: tuple[Write, ...]
    layouts: dict[str, Layout]


def record(model: torch.nn.Module, entries: Sequence[TensorMeta], max_refused: int | None = None) -> Recording:
    """Run a model's loader without any effect on the model.

    If the loader raises an error on a name, that name is tried alone, on a meta tensor and then on zeros, because a
    loader may read values. If zeros work, the name has to go through the loader; if they do not, it is refused. The
    other names are loaded as usual.

    Args:
        model: a live vLLM model, or one that is only built.
        entries: whole tensors of the checkpoint. Names are unique.
        max_refused: number of refused names at which to give up; other names may then be missing from the result.
    """
    assert len({entry.name for entry in entries}) == len(entries), "names of entries are not unique"
    with loading_time(model), torch.no_grad():
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        run = _Run(model, Tracer((*model.named_parameters(remove_duplicate=False),
                                  *model.named_buffers(remove_duplicate=False))))
        pending = [list(entries)]
        while pending and (max_refused is None or len(run.refused) < max_refused):
            pending += run.batch(pending.pop())
        layouts = {path: Layout(view_of(tensor), dtype_name(tensor.dtype),
                                vars(tensor).get("weight_loader_numel", tensor.numel()),
                                isinstance(tensor, torch.nn.Parameter))
                   for path, tensor in tensors.items()}
    return _recording(entries, run, layouts)


class _Run:
    def __init__(self, model: Any, tracer: Tracer) -> None:
        self.model = model
        self.tracer = tracer
        self.refused: dict[str, str] = {}
        self.inexact: set[str] = set()

    def batch(self, entries: list[TensorMeta]) -> list[list[TensorMeta]]:
        """Load names together. Return groups of names that have to be loaded again."""
        if len(entries) < 2:
            for entry in entries:
                self.alone(entry)
            return []
        # Views are seen only if that is needed to blame a name. Otherwise they would take a quarter of the time.
        with compat.untraced(VIEWS):
            error, last = self.load(entries)
        if error is None:
            return []
        names = {entry.name for entry in entries}
        self.tracer.forget(names)
        error, last = self.load(entries)
        blamed = (self.tracer.failed & names) or {last}
        innocent = all([self.alone(entry) for entry in entries if entry.name in blamed])
        # Writes before the error are kept. If the blamed names load alone, some combination of names is at fault, so
        # the rest is tried in halves.
        done = blamed.union(*(write.names for write in self.tracer.writes))
        rest = [entry for entry in entries if entry.name not in done]
        middle = len(rest) // 2 if innocent else 0
        return [part for part in (rest[:middle], rest[middle:]) if part]

    def alone(self, entry: TensorMeta) -> bool:
        """Load one name. Return whether the loader can do so without reading its values."""
        self.tracer.forget([entry.name])
        error, _ = self.load([entry])
        if error is None:
            return True
        self.tracer.forget([entry.name])
        error, _ = self.load([entry], device="cpu")
        if error is None:
            self.inexact.add(entry.name)
        else:
            self.tracer.forget([entry.name])
            self.refused[entry.name] = f"{type(error).__name__}: {str(error)[:MESSAGE_CHARACTERS]}"
        return False

    def load(self, entries: Sequence[TensorMeta], device: str = "meta") -> tuple[Exception | None, str | None]:
        """Run the loader. Return the error that it raised and the last name that it had asked for."""
        taken: list[str] = []
        # Made before the trace, in which each of them would be one more operation.
        kind = torch.empty if device == "meta" else torch.zeros
        tensors = [kind(entry.shape, dtype=torch_dtype(entry.dtype), device=device) for entry in entries]

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for entry, tensor in zip(entries, tensors, strict=True):
                self.tracer.watch(entry.name, tensor)
                taken.append(entry.name)
                yield entry.name, tensor

        with self.tracer:
            try:
                self.model.load_weights(weights())
            except LOADER_ERRORS as error:
                return error, taken[-1] if taken else entries[0].name
        return None, None


def _recording(entries: Sequence[TensorMeta], run: _Run, layouts: dict[str, Layout]) -> Recording:
    writes: dict[str, list[Write]] = {entry.name: [] for entry in entries}
    constants: list[Write] = []
    computed = set(run.inexact)
    for write in run.tracer.writes:
        for name in write.names:
            writes[name].append(write)
        if write.copied is None:
            computed |= write.names
        if not write.names:
            constants.append(write)
            computed |= _overwritten(write, run.tracer.writes, layouts)
    taken = [entry.name for entry in entries if writes[entry.name]]
    copies = tuple({write.copied: write for name in taken if name not in computed for write in writes[name]}.values())
    slices: dict[str, list[TensorSlice]] = {}
    for write in copies:
        assert write.copied is not None
        slices.setdefault(write.copied.name, []).append(write.copied)
    return Recording(
        slices={name: tuple(group) for name, group in slices.items()}, copies=copies,
        computed={name: tuple(writes[name]) for name in taken if name in computed},
        untaken=tuple(entry.name for entry in entries if not writes[entry.name] and entry.name not in run.refused),
        refused=run.refused, constants=tuple(constants), layouts=layouts)


def _overwritten(constant: Write, writes: Sequence[Write], layouts: dict[str, Layout]) -> set[str]:
    """Return the names of earlier writes that a constant overwrites. These tensors have to go through the loader."""
    earlier = itertools.takewhile(lambda write: write is not constant, writes)
    box = target_box(constant, layouts)
    names: set[str] = set()
    for write in earlier:
        if write.path == constant.path:
            other = target_box(write, layouts)
            # A write without a box may be anywhere in the tensor.
            if box is None or other is None or box.intersection(other) is not None:
                names |= write.names
    return names


def target_box(write: Write, layouts: dict[str, Layout]) -> Box | None:
    """Return the box that a write fills in its target tensor; None if the written part is not a box."""
    view = layouts[write.path].view
    if write.region is None:
        return None
    found = box_of_view(View(0, view.sizes, view.strides), write.region, write.region)
    return found[0] if found else None


@contextmanager
def loading_time(model: torch.nn.Module) -> Iterator[None]:
    """Context in which a model's modules have the tensors, on the meta device, and loaders from when it was loaded.

    Processing after loading repacks, frees or replaces parameters. vLLM keeps their original form for its own
    reloading. If it has kept nothing, because the model is only built, the present tensors are used. Tensors that vLLM
    never moves to the meta device stay live. On exit, everything in the modules is as before.
    """
    saved = [(module, dict(vars(module))) for module in model.modules()]
    kept = any(module in layerwise.LAYERWISE_INFO for module, _ in saved)
    shared: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
    try:
        for module, _ in saved:
            info = layerwise.LAYERWISE_INFO.get(module)
            # A module without an entry was added after loading, and has nothing to load.
            metas: Any = info.restore_metadata if info else ({}, {}) if kept else capture_layer_to_meta(module)
            lives = compat.module_tables(module)[:2]
            compat.copy_module_tables(module)
            for place, live, meta in zip(compat.module_tables(module)[:2], lives, metas, strict=True):
                for name in [name for name in place if name not in SKIP_TENSORS]:
                    del place[name]
                for name, tensor in meta.items():
                    vars(module).pop(name, None)
                    place[name] = _restored(module, tensor, live.get(name), shared)
        vars(model)["_do_torchao_reload"] = False  # Otherwise load_weights quantizes the weights.
        yield
    finally:
        for module, attributes in saved:  # with the original tables, which have not changed
            vars(module).clear()
            vars(module).update(attributes)


def _restored(module: torch.nn.Module, meta: torch.Tensor, live: torch.Tensor | None,
              shared: dict[tuple[int, tuple[int, ...]], torch.Tensor]) -> torch.Tensor:
    """Copy a kept meta tensor, once for all modules that share the live one."""
    key = (id(live), tuple(meta.shape))
    if live is not None and key in shared:
        return shared[key]
    tensor = restore_layer_refs(to_meta_tensor(meta), module)
    loader, original = compat.weight_loaders(tensor)
    if original is not loader:
        tensor.weight_loader = original  # type: ignore[attr-defined]
    if live is not None:
        shared[key] = tensor
    return tensor


# Checks, before any byte moves, that every element of a worker's tensors is written exactly once.


def check_coverage(model: torch.nn.Module, recording: Recording) -> None:
    """Check that a recording fills every parameter, and every buffer that a checkpoint may hold, exactly once.

    A tensor that is shared counts once. Padding that the model declares may stay unwritten.

    Raises:
        ValueError: names that the loader refuses; elements written twice or never, with their number, by tensor.
    """
    faults = [f"{name} is refused: {reason}" for name, reason in recording.refused.items()]
    # The writes to each tensor, each with whether it has to be the only one to its box. Only copies have to: a loader
    # may compute with what it has written, and may fill a tensor before it writes a part of it.
    writes: dict[str, list[tuple[Write, bool]]] = {}
    for write in recording.copies:
        writes.setdefault(write.path, []).append((write, True))
    for write in itertools.chain(*recording.computed.values(), recording.constants):
        writes.setdefault(write.path, []).append((write, False))
    for path, layout in recording.layouts.items():
        own = writes.get(path, [])
        boxes = [(box, alone) for write, alone in own if (box := target_box(write, recording.layouts)) is not None]
        if len(boxes) < len(own):
            continue  # Only the loader knows where the other writes go, and the loader does them.
        left, repeated = _coverage(layout.view.sizes, tuple(boxes))
        twice = sum(repeated)
        if twice:
            names = set().union(*(write.names for (write, _), count in zip(own, repeated, strict=True) if count))
            faults.append(f"{path}: {twice} elements are written twice, again by {', '.join(sorted(names))}")
        # A checkpoint may hold a buffer if it is part of the state dict, floating and not private to its module. It
        # need not, but if it holds a part, it has to hold all.
        parent, _, name = path.rpartition(".")
        needed = layout.parameter or (
            not name.startswith("_") and torch_dtype(layout.dtype).is_floating_point
            and name not in compat.module_tables(model.get_submodule(parent))[2])
        total = math.prod(layout.view.sizes)
        missing = left - (total - layout.loaded)
        if missing > 0 and (needed or missing < total):
            faults.append(f"{path}: {missing} of {total} elements are never written")
    if faults:
        raise ValueError("not all of the engine's weights are written exactly once: " + "; ".join(faults))


@lru_cache(maxsize=256)  # layers are alike
def _coverage(sizes: tuple[int, ...], writes: tuple[tuple[Box, bool], ...]) -> tuple[int, list[int]]:
    """Return how many elements of a tensor no write fills, and how many each write fills that earlier ones have filled.

    Args:
        sizes: sizes of the tensor.
        writes: box of each write, and whether it has to be the only one; otherwise 0 is returned for it.
    """
    left, repeated = [Box.whole(sizes)], []
    for box, alone in writes:
        left, removed = subtract(left, box)
        repeated.append(box.numel - removed if alone else 0)
    return sum(box.numel for box in left), repeated
