"""Traces a loader: records which tensors every in-place operation would read and write, without performing any.

The storage of a view shows which tensor it belongs to. The storages of the checkpoint's tensors and of the model's are
known from the start. The result of a copy (`clone`, `contiguous`, `to`) counts as the tensor that it copies. The result
of any other operation counts as computed from the checkpoint tensors that the operation read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from mimo.boxes import View, box_of_view
from mimo.compat import storage_key
from mimo.refit.compat import TO_COPY, TracingMode, changed_arguments, returns_something
from mimo.refit.messages import view_of
from mimo.refit.tensor_slices import Address, TensorSlice

ATEN = torch.ops.aten
COPIES = (ATEN.clone.default, TO_COPY)
FILLS = (ATEN.fill_.Scalar, ATEN.zero_.default)
# Operations whose results always share the storage of their tensor, so that there is nothing to note about them if the
# storage is known. Most operations of a loader are of this kind.
VIEWS = frozenset({
    ATEN.alias.default, ATEN.as_strided.default, ATEN.detach.default, ATEN.expand.default, ATEN.narrow.default,
    ATEN.permute.default, ATEN.select.int, ATEN.slice.Tensor, ATEN.split.Tensor, ATEN.squeeze.dim, ATEN.t.default,
    ATEN.transpose.int, ATEN.unbind.int, ATEN.unsqueeze.default, ATEN.view.default,
})


@dataclass(frozen=True)
class Target:
    """A tensor of the model."""

    path: str
    whole: View
    dtype: torch.dtype


@dataclass(frozen=True)
class Write:
    """Write of an operation into a tensor of the model.

    Attributes:
        names: checkpoint tensors whose values were read; none for a constant.
        path: path of the tensor that was written.
        region: the part that was written, counted from the tensor's first element; None if it is not known.
        copied: the box that was copied, if the operation did nothing else.
        value: the constant that was written, if it is known.
    """

    names: frozenset[str]
    path: str
    region: View | None
    copied: TensorSlice | None = None
    value: float | None = None


@dataclass(frozen=True)
class _Source:
    """A whole tensor: one of the checkpoint, or a copy of a view of another source."""

    whole: View
    dtype: torch.dtype
    name: str
    parent: int | None = None
    view: View | None = None


class Tracer(TracingMode):
    """Dispatch mode in which a loader runs without effect on the model.

    Args:
        targets: path and tensor of everything that the loader may write.

    Attributes:
        writes: what the loader would have written, in the order of the operations.
    """

    def __init__(self, targets: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self._kept: dict[int, torch.UntypedStorage] = {}  # A freed address could be given to another storage.
        self._targets: dict[int, list[Target]] = {}
        self._sources: dict[int, _Source] = {}
        self._computed: dict[int, frozenset[str]] = {}
        self._made: set[int] = set()  # storages of the checkpoint's tensors, and of those that the loader has made
        self._pending: Any = ()  # arguments of the operation that is under way
        for path, tensor in targets:
            self._targets.setdefault(self._keep(tensor), []).append(Target(path, view_of(tensor), tensor.dtype))

    @property
    def failed(self) -> frozenset[str]:
        """Checkpoint tensors that the last operation read, if it raised."""
        return self._names(_tensors(self._pending))

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Register a tensor as the checkpoint's tensor of this name."""
        key = self._keep(tensor)
        self._computed.pop(key, None)
        self._made.add(key)
        self._sources[key] = _Source(view_of(tensor), tensor.dtype, name)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the writes of these names before they are tried again."""
        gone = frozenset(names)
        self.writes = [write for write in self.writes if not write.names & gone]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._pending = args, kwargs
        if func is ATEN.copy_.default and storage_key(args[0]) in self._targets:  # nearly all that a loader does
            self._note(func, args[0], args, list(args[:2]))
            self._pending = ()
            return args[0]
        if func in VIEWS and storage_key(args[0]) in self._kept:
            result = func(*args, **kwargs)
            self._pending = ()
            return result
        written = [tensor for number, name in changed_arguments(func)
                   for tensor in _tensors(args[number] if number < len(args) else kwargs.get(name))]
        tensors = _tensors(self._pending)
        if written:
            result = self._write(func, args, kwargs, tensors, written)
        elif func in COPIES and storage_key(args[0]) in self._sources:
            result = self._copy(func, args[0], kwargs)
        else:
            result = func(*args, **kwargs)
            # New tensors among its results come from the tensors that it read. Views share the storage of their base.
            for tensor in _tensors(result):
                key = storage_key(tensor)
                if key not in self._sources and key not in self._targets and key not in self._computed:
                    self._computed[self._keep(tensor)] = self._names(tensors)
                    # `lift_fresh` returns a tensor that the loader has just made from numbers.
                    if func is ATEN.lift_fresh.default or all(storage_key(each) != key for each in tensors):
                        self._made.add(key)
        self._pending = ()
        return result

    def _keep(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        self._kept[key] = storage
        return key

    def _names(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """Return the checkpoint tensors from which the values of tensors come."""
        names: set[str] = set()
        for tensor in tensors:
            key = storage_key(tensor)
            if key in self._sources:
                names.add(self._sources[key].name)
            elif key in self._targets:
                paths = {target.path for target in self._targets[key]}
                names.update(*(write.names for write in self.writes if write.path in paths))
            else:
                names |= self._computed.get(key, frozenset())
        return frozenset(names)

    def _copy(self, func: Callable[..., torch.Tensor], tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if tensor.is_meta:  # It stays on the meta device, whatever device the loader asks for.
            kwargs = {name: tensor.device if name == "device" else value for name, value in kwargs.items()
                      if name not in ("pin_memory", "non_blocking")}
        result = func(tensor, **kwargs)
        self._made.add(self._keep(result))
        parent = self._sources[storage_key(tensor)]
        is_dense = view_of(result).end - result.storage_offset() == result.numel()
        if tensor.dtype != parent.dtype or not is_dense:
            self._computed[storage_key(result)] = frozenset([parent.name])
        else:
            self._sources[storage_key(result)] = _Source(
                view_of(result), result.dtype, parent.name, storage_key(tensor), view_of(tensor))
        return result

    def _write(self, func: Any, args: Any, kwargs: Any, read: list[torch.Tensor], written: list[torch.Tensor]) -> Any:
        for tensor in written:
            key = storage_key(tensor)
            if key in self._targets:
                self._note(func, tensor, args, read)
                continue
            self._computed[self._keep(tensor)] = self._names(read)
            self._sources.pop(key, None)
        # Others were there before the trace, such as a work space that a loader keeps.
        if all(storage_key(tensor) in self._made and not tensor.is_meta for tensor in written):
            return func(*args, **kwargs)
        return written[0] if returns_something(func) else None

    def _note(self, func: Any, tensor: torch.Tensor, args: Any, read: list[torch.Tensor]) -> None:
        if tensor.numel() == 0:
            return
        view, known = view_of(tensor), self._targets[storage_key(tensor)]
        target = known[0] if len(known) == 1 else next(
            (one for one in known if one.whole.offset <= view.offset < one.whole.end), known[0])
        # The written part in the model's tensor. Under another dtype its elements are not those of the tensor.
        region = None if tensor.dtype != target.dtype else View(
            view.offset - target.whole.offset, view.sizes, view.strides)
        if func in FILLS and region is not None:
            value = 0.0 if func is ATEN.zero_.default else float(args[1])
            self.writes.append(Write(frozenset(), target.path, region, value=value))
            return
        part = None
        if func is ATEN.copy_.default:
            source = args[1] if args[1].shape == tensor.shape else args[1].expand(tensor.shape)
            part = None if region is None else self._slice(source, target, region)
            read = [source]
        names = frozenset([part.name]) if part else self._names(read)
        self.writes.append(Write(names, target.path, region, part))

    def _slice(self, source: torch.Tensor, target: Target, region: View) -> TensorSlice | None:
        """Return the box that a copy copies; None if it does anything else."""
        origin = self._sources.get(storage_key(source))
        view, dtypes = view_of(source), []
        if origin is None or origin.dtype != source.dtype:
            return None
        while True:
            found = box_of_view(origin.whole, view, View(0, region.sizes, region.strides))
            if found is None:
                return None
            dtypes.append(origin.dtype)
            box, placed = found
            region = View(region.offset + placed.offset, placed.sizes, placed.strides)
            if origin.parent is None or origin.view is None:
                break
            offset = origin.view.offset + sum(map(int.__mul__, box.starts, origin.view.strides))
            view = View(offset, box.sizes, origin.view.strides)
            if origin.parent not in self._sources:
                return None
            origin = self._sources[origin.parent]
        if not _exact(tuple(dtypes), dtypes[-1], target.dtype):
            return None
        return TensorSlice(origin.name, box, Address(target.path, region.offset, region.strides))


@lru_cache(maxsize=4096)
def _exact(dtypes: tuple[torch.dtype, ...], first: torch.dtype, last: torch.dtype) -> bool:
    """Whether casts through `dtypes` keep every value that the first or the last dtype can hold."""
    return all(dtype in (torch.promote_types(dtype, first), torch.promote_types(dtype, last)) for dtype in dtypes)


def _tensors(value: Any) -> list[torch.Tensor]:
    """List the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            # Most parts are neither, so a call for each would take half of the time of a trace.
            if isinstance(part, (torch.Tensor, list, tuple, dict)):
                found += _tensors(part)
    return found
