"""Watches a loader write: every in-place operation is noted, by the tensors it reads and writes, and none is done.

A storage tells which tensor a view belongs to. The storages of the checkpoint's tensors and of the model's are known
from the start; the results of copies (`clone`, `contiguous`, `to`) stay the tensor they copy, the results of anything
else are computed from the names they read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mimo.refit.tensor_slices import Address, Box, TensorSlice

# Which box of a tensor a strided view is: how an engine's loader is understood from the views it copies.
#
# A loader slices, narrows, transposes and reshapes a checkpoint's tensor before it copies it into a parameter. What
# is left of that when the copy happens are two views, each an offset, sizes and strides in its storage. `box_of`
# turns the source view back into a box of the whole tensor and says where the elements of that box go. No torch here.


@dataclass(frozen=True, slots=True)
class View:
    """A strided view, in elements.

    Attributes:
        offset: of its first element.
        sizes: elements on each axis.
        strides: of its axes.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def box_of(tensor: View, source: View, target: View) -> tuple[Box, View] | None:
    """The box of a tensor that a view of it is, and where the box's elements lie in the target.

    Args:
        tensor: the whole tensor, dense: its axes in any order of memory, without gaps.
        source: a view of it, in the same storage.
        target: a view of the source's sizes of any other storage: element `i` of the source is copied to element `i`.

    Returns:
        The box and a view of the target whose axes are the tensor's; None if the source is no box (strides over rows,
        repeats elements, begins inside one row and ends in the next) or if the target is not strided along its axes.
    """
    assert source.sizes == target.sizes, f"a copy of {source.sizes} to {target.sizes}"
    starts = _position(tensor, source.offset - tensor.offset)
    sizes, strides = [1] * len(starts), [0] * len(starts)
    axes = {stride: axis for axis, (size, stride) in enumerate(zip(tensor.sizes, tensor.strides, strict=True))
            if size > 1}
    for size, step, target_step in _runs(source, target):
        while size > 1:
            axis = axes.pop(step, None)
            if axis is None:
                return None
            room = tensor.sizes[axis]
            strides[axis] = target_step
            if size <= room - starts[axis]:
                sizes[axis], size = size, 1
            elif starts[axis] == 0 and size % room == 0:
                sizes[axis] = room
                size, step, target_step = size // room, step * room, target_step * room
            else:
                return None
    box = Box(tuple(starts), tuple(map(int.__add__, starts, sizes)))
    return box, View(target.offset, tuple(sizes), tuple(strides))


def subtract(pieces: Sequence[Box], box: Box) -> tuple[list[Box], int]:
    """Return the rest of disjoint pieces of a tensor without a box, and the number of elements taken away."""
    left, removed = [], 0
    for piece in pieces:
        common = piece.intersection(box)
        if common is None:
            left.append(piece)
            continue
        removed += common.numel
        starts, stops = list(piece.starts), list(piece.stops)
        for axis in range(len(starts)):
            if starts[axis] < common.starts[axis]:
                left.append(Box(tuple(starts), (*stops[:axis], common.starts[axis], *stops[axis + 1:])))
            if common.stops[axis] < stops[axis]:
                left.append(Box((*starts[:axis], common.stops[axis], *starts[axis + 1:]), tuple(stops)))
            starts[axis], stops[axis] = common.starts[axis], common.stops[axis]
    return left, removed


def _position(tensor: View, offset: int) -> list[int]:
    """Indices of the element at an offset."""
    starts = [0] * len(tensor.sizes)
    for axis in sorted(range(len(starts)), key=lambda axis: (-tensor.strides[axis], tensor.sizes[axis])):
        if tensor.sizes[axis] > 1:
            starts[axis], offset = divmod(offset, tensor.strides[axis])
    return starts


def _runs(source: View, target: View) -> list[tuple[int, int, int]]:
    """Sizes and both strides of the axes, those merged that both views walk through in one step."""
    runs: list[tuple[int, int, int]] = []
    axes = sorted(zip(source.sizes, source.strides, target.strides, strict=True), key=lambda axis: -axis[1])
    for size, step, target_step in axes:
        if size == 1:
            continue
        if runs and runs[-1][1:] == (size * step, size * target_step):
            size *= runs.pop()[0]
        runs.append((size, step, target_step))
    return runs


ATEN = torch.ops.aten
COPIES = (ATEN.clone.default, ATEN._to_copy.default)
FILLS = (ATEN.fill_.Scalar, ATEN.zero_.default)


@dataclass(frozen=True)
class Target:
    """A tensor of the model.

    Attributes:
        path: first name of it.
        whole: its layout in its storage.
        dtype: of its elements.
    """

    path: str
    whole: View
    dtype: torch.dtype


@dataclass(frozen=True)
class Write:
    """Write of an operation into a tensor of the model.

    Attributes:
        names: checkpoint tensors whose values it read, none for a constant.
        path: the tensor.
        region: where, counted from its first element; None for an unknown part.
        slot: the box it copied, if that is all it did.
        value: of a constant, where it is known.
    """

    names: frozenset[str]
    path: str
    region: View | None
    slot: TensorSlice | None = None
    value: float | None = None


@dataclass(frozen=True)
class _Source:
    """A whole tensor: a checkpoint's, or a copy of a view of another."""

    whole: View
    dtype: torch.dtype
    name: str
    parent: int | None = None
    view: View | None = None


class Tracer(TorchDispatchMode):
    """A mode under which a loader runs without effect on the model.

    Args:
        targets: path and tensor of everything that the loader may write.

    Attributes:
        writes: what it would have written, in the order of the operations.
    """

    def __init__(self, targets: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self._kept: dict[int, torch.UntypedStorage] = {}  # the address of a freed storage would be given out again
        self._targets: dict[int, list[Target]] = {}
        self._sources: dict[int, _Source] = {}
        self._computed: dict[int, frozenset[str]] = {}
        self._pending: list[torch.Tensor] = []
        for path, tensor in targets:
            self._targets.setdefault(self._keep(tensor), []).append(Target(path, view_of(tensor), tensor.dtype))

    @property
    def failed(self) -> frozenset[str]:
        """Checkpoint tensors that the last operation read, if it raised."""
        return self._names(self._pending)

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Makes a tensor known as the checkpoint's of that name."""
        key = self._keep(tensor)
        self._computed.pop(key, None)
        self._sources[key] = _Source(view_of(tensor), tensor.dtype, name)

    def forget(self, names: Iterable[str]) -> None:
        """Drops what was noted of names, before they are tried again."""
        gone = frozenset(names)
        self.writes = [write for write in self.writes if not write.names & gone]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = list(_written(func, args, kwargs))
        tensors = list(_tensors((args, kwargs)))
        self._pending = tensors
        if written:
            result = self._write(func, args, kwargs, tensors, written)
        elif func in COPIES and _key(args[0]) in self._sources:
            result = self._copy(func, args[0], kwargs)
        else:
            result = func(*args, **kwargs)
            self._follow(result, tensors)
        self._pending = []
        return result

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept[_key(tensor)] = tensor.untyped_storage()
        return _key(tensor)

    def _names(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """Checkpoint tensors that the values of tensors come from."""
        names: set[str] = set()
        for tensor in tensors:
            key = _key(tensor)
            if key in self._sources:
                names.add(self._sources[key].name)
            elif key in self._targets:
                paths = {target.path for target in self._targets[key]}
                names.update(*(write.names for write in self.writes if write.path in paths))
            else:
                names |= self._computed.get(key, frozenset())
        return frozenset(names)

    def _copy(self, func: Callable[..., torch.Tensor], tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if tensor.is_meta:  # stays so, whatever device the loader wants it on
            kwargs = {name: tensor.device if name == "device" else value for name, value in kwargs.items()
                      if name not in ("pin_memory", "non_blocking")}
        result = func(tensor, **kwargs)
        parent = self._sources[_key(tensor)]
        if tensor.dtype != parent.dtype or not _dense(result):
            self._computed[self._keep(result)] = frozenset([parent.name])
        else:
            self._sources[self._keep(result)] = _Source(
                view_of(result), result.dtype, parent.name, _key(tensor), view_of(tensor))
        return result

    def _follow(self, result: Any, read: list[torch.Tensor]) -> None:
        """Notes what the results of an operation come from; a view has the storage of what it shows."""
        for tensor in _tensors(result):
            key = _key(tensor)
            if key not in self._sources and key not in self._targets and key not in self._computed:
                self._computed[self._keep(tensor)] = self._names(read)

    def _write(self, func: Any, args: Any, kwargs: Any, read: list[torch.Tensor], written: list[torch.Tensor]) -> Any:
        for tensor in written:
            key = _key(tensor)
            if key in self._targets:
                self._note(func, tensor, args, read)
            elif key in self._sources or key in self._computed:
                self._computed[key] = self._names(read)
                self._sources.pop(key, None)
        if all(_key(tensor) in self._computed and not tensor.is_meta for tensor in written):
            return func(*args, **kwargs)  # the loader's own work space
        return written[0] if func._schema.returns else None

    def _note(self, func: Any, tensor: torch.Tensor, args: Any, read: list[torch.Tensor]) -> None:
        if tensor.numel() == 0:
            return
        target, region = self._region(tensor)
        if func in FILLS and region is not None:
            value = 0.0 if func is ATEN.zero_.default else float(args[1])
            self.writes.append(Write(frozenset(), target.path, region, value=value))
            return
        slot = None
        if func is ATEN.copy_.default:
            source = args[1].expand(tensor.shape)
            slot = None if region is None else self._slot(source, target, region)
            read = [source]
        names = frozenset([slot.name]) if slot else self._names(read)
        self.writes.append(Write(names, target.path, region, slot))

    def _region(self, tensor: torch.Tensor) -> tuple[Target, View | None]:
        """The model's tensor that a view belongs to, and where in it."""
        view, known = view_of(tensor), self._targets[_key(tensor)]
        target = next((one for one in known if one.whole.offset <= view.offset <= _last(one.whole)), known[0])
        if tensor.dtype != target.dtype:
            return target, None
        return target, View(view.offset - target.whole.offset, view.sizes, view.strides)

    def _slot(self, source: torch.Tensor, target: Target, region: View) -> TensorSlice | None:
        """The box that a copy copies; None if it does anything else."""
        origin = self._sources.get(_key(source))
        view, dtypes = view_of(source), []
        if origin is None or origin.dtype != source.dtype:
            return None
        while True:
            found = box_of(origin.whole, view, region)
            if found is None:
                return None
            dtypes.append(origin.dtype)
            box, region = found
            if origin.parent is None or origin.view is None:
                break
            offset = origin.view.offset + sum(map(int.__mul__, box.starts, origin.view.strides))
            view = View(offset, box.sizes, origin.view.strides)
            if origin.parent not in self._sources:
                return None
            origin = self._sources[origin.parent]
        if not _exact(dtypes, dtypes[-1], target.dtype):
            return None
        return TensorSlice(origin.name, box, Address(target.path, region.offset, region.strides))


def _key(tensor: torch.Tensor) -> int:
    """Return a key that tells storages apart."""
    return tensor.untyped_storage()._cdata


def view_of(tensor: torch.Tensor) -> View:
    """A tensor's layout in its storage."""
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def _exact(dtypes: Iterable[torch.dtype], first: torch.dtype, last: torch.dtype) -> bool:
    """Whether casts in between keep all that the first or the last dtype can hold."""
    return all(dtype in (torch.promote_types(dtype, first), torch.promote_types(dtype, last)) for dtype in dtypes)


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or _last(view_of(tensor)) - tensor.storage_offset() + 1 == tensor.numel()


def _last(view: View) -> int:
    """Offset of the last element."""
    return view.offset + sum((size - 1) * stride for size, stride in zip(view.sizes, view.strides, strict=True))


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Tensors that an operation changes."""
    for number, name in _changed(func):
        yield from _tensors(args[number] if number < len(args) else kwargs.get(name))


@functools.cache
def _changed(func: Any) -> tuple[tuple[int, str], ...]:
    """Number and name of the arguments that an operation changes, by its schema."""
    return tuple((number, argument.name) for number, argument in enumerate(func._schema.arguments)
                 if argument.alias_info is not None and argument.alias_info.is_write)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
