"""Packs the boxes of a plan into messages, takes them out again, and verifies them with checksums.

A message has the boxes that a trainer rank sends to a worker for a chunk, in the order of the plan. Each box is
row-major, in the dtype of the wire, at a multiple of `ALIGNMENT` bytes. Layouts are computed once: a sync of a model of
experts copies tens of thousands of boxes, and Python's time for each box limits its speed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from mimo.boxes import View, contiguous_strides
from mimo.compat import copy_together
from mimo.refit import plan as planning
from mimo.refit.plan import Op
from mimo.refit.tensor_slices import DTYPE_BYTES, Address, TensorMeta

# Alignment of a box in a message, in bytes. It suits every dtype and is wide enough for vectorised copies.
ALIGNMENT = 16


@dataclass(frozen=True)
class MessageLayout:
    """Layout of a message.

    Attributes:
        num_bytes: size of the message.
        runs: successive boxes of one dtype: the dtype, the first byte, the byte behind the last box, and the numbers of
            elements of each box and of the gap behind it, with a flag for boxes.
    """

    num_bytes: int
    runs: tuple[tuple[torch.dtype, int, int, tuple[int, ...], tuple[bool, ...]], ...]

    def boxes(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Return flat views of a message, uint8, as the boxes that it carries. All views of a run are one call."""
        found: list[torch.Tensor] = []
        for dtype, first, stop, counts, is_box in self.runs:
            parts = message[first:stop].view(dtype).split_with_sizes(counts)
            found += parts if all(is_box) else itertools.compress(parts, is_box)
        return found


def message_layout(operations: Sequence[Op], dtypes: Sequence[str]) -> MessageLayout:
    """Lay out the message that carries the boxes of operations.

    `dtypes` has the dtype on the wire of every entry of the chunk plan.
    """
    runs, end = [], 0
    for dtype, same_dtype in itertools.groupby(operations, lambda operation: dtypes[operation.entry]):
        start, counts, is_box = end, [], []
        for operation in same_dtype:
            numel = operation.box.numel
            num_bytes = numel * DTYPE_BYTES[dtype]
            gap = (aligned(num_bytes) - num_bytes) // DTYPE_BYTES[dtype]
            counts += [numel, gap] if gap else [numel]
            is_box += [True, False] if gap else [True]
            end += aligned(num_bytes)
        runs.append((torch_dtype(dtype), start, end, tuple(counts), tuple(is_box)))
    return MessageLayout(end, tuple(runs))


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def pack(layout: MessageLayout, sources: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Make a message, uint8, with the values of the sources.

    Args:
        layout: layout of the message.
        sources: views with the values of each box, which are converted to the dtype of the wire.
        device: device of the message.
    """
    message = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    copy_all(layout.boxes(message), sources)
    return message


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, in row-major order of both. Flat ones of equal dtypes go in few launches."""
    alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if (target.dim() == source.dim() == 1 and target.is_contiguous() and source.is_contiguous()
                and target.is_cuda == source.is_cuda):
            into, out = alike.setdefault((target.dtype, source.dtype), ([], []))
            into.append(target)
            out.append(source)
        elif target.dim() == 1:
            target.view(source.shape).copy_(source)
        else:
            target.copy_(source.view(target.shape))
    for into, out in alike.values():
        copy_together(into, out)


class Views:
    """Views of boxes of tensors, in the order of a message. Contiguous boxes become flat views."""

    def __init__(self, addresses: Sequence[Address], sizes: Sequence[tuple[int, ...]]) -> None:
        self._boxes = [(address.tensor, *_flattened(size, address.strides), address.offset)
                       for address, size in zip(addresses, sizes, strict=True)]
        self._tensors = tuple(dict.fromkeys(address.tensor for address in addresses))
        self._owners: tuple[torch.Tensor, ...] = ()
        self._views: list[torch.Tensor] = []

    def of(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return views of the boxes in these tensors, given by name. `check_inside` must have accepted the boxes.

        Views are kept for the next call, because making tens of thousands of them takes the host as long as sending
        the weights of a model of experts takes between two GPUs. They are made again if a tensor has other memory.
        """
        now = [tensors[name] for name in self._tensors]
        if len(self._owners) != len(now) or not all(map(_share_memory, self._owners, now)):
            self._owners = tuple(tensor.detach() for tensor in now)
            own = {name: (tensor.as_strided, tensor.storage_offset())
                   for name, tensor in zip(self._tensors, self._owners, strict=True)}
            self._views = [own[name][0](size, strides, own[name][1] + offset)
                           for name, size, strides, offset in self._boxes]
        return self._views


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of equal shape and strides are the same elements. Never true without memory of their own."""
    return one.data_ptr() == other.data_ptr() != 0 and one.dtype == other.dtype


@lru_cache(maxsize=1024)  # layers and experts are alike
def _flattened(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides of a view, which becomes flat if it is contiguous."""
    rows = [each for each in zip(sizes, strides, contiguous_strides(sizes), strict=True) if each[0] != 1]
    return ((math.prod(sizes),), (1,)) if all(stride == expected for _, stride, expected in rows) else (sizes, strides)


@dataclass(frozen=True)
class Part:
    """Message between a trainer rank and a worker for a chunk.

    Attributes:
        peer: number of the worker, or the trainer rank, at the other end.
        operations: operations of the message.
        layout: layout of the message.
        direct: numbers of the operations whose boxes lie in live tensors of this process: all of a trainer rank's, and
            those of a worker that do not go through its loader.
        views: these boxes.
        direct_bytes: their size on the wire.
        text: text that enters the running digest.
    """

    peer: int
    operations: Sequence[Op]
    layout: MessageLayout
    direct: frozenset[int]
    views: Views
    direct_bytes: int
    text: bytes


def parts_of_chunks(entries: Sequence[TensorMeta], chunk_bytes: int, by_peer: Mapping[int, Sequence[Op]],
                    address: Callable[[Op], Address | None]) -> list[list[Part]]:
    """Return, for each chunk, the messages to or from the peers that have a part in it.

    Args:
        entries: entries of the chunk plan.
        chunk_bytes: largest size of the whole tensors in a chunk.
        by_peer: operations between this process and each peer, in plan order.
        address: returns the address of an operation's box in a live tensor of this process; None without one.
    """
    dtypes = [entry.dtype for entry in entries]
    found: list[list[Part]] = []
    for chunk in planning.chunks(entries, chunk_bytes):
        found.append([])
        for peer, planned in by_peer.items():
            operations = planning.within(planned, chunk)
            if not operations:
                continue
            addresses = {number: where for number, where in enumerate(map(address, operations)) if where is not None}
            direct = [operations[number] for number in addresses]
            found[-1].append(Part(
                peer, operations, message_layout(operations, dtypes), frozenset(addresses),
                Views(list(addresses.values()), [operation.box.sizes for operation in direct]),
                planning.bytes_moved(direct, entries), planning.encoded(entries, operations)))
    return found


def check_inside(tensor: torch.Tensor, address: Address, sizes: Sequence[int]) -> None:
    """Raise RuntimeError if a box is not inside a tensor."""
    end = View(address.offset, tuple(sizes), address.strides).end
    if address.offset < 0 or end > tensor.numel() or not tensor.is_contiguous():
        raise RuntimeError(f"{address.tensor} {list(tensor.shape)} with strides {list(tensor.stride())} has no box of "
                           f"{list(sizes)} at element {address.offset} with strides {list(address.strides)}")


def view_of(tensor: torch.Tensor) -> View:
    """Return a tensor's layout in its storage."""
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`, as entries have it."""
    return str(dtype).removeprefix("torch.")


# Checksums of every box: as it is sent, as it arrives, and as it is read back from the live tensor.
#
# A checksum is computed on the device of the box by a few reductions, and only the sums leave the device. The bytes of
# a box, row-major and padded with zeros to whole words of four bytes, are signed 32-bit words. `x[0], x[1], ...` are
# these words times `MIXER` modulo 2**32, with their upper bits added to the lower ones by exclusive or. The checksum is
# `sum((i + 1 + ROW) * x[i]) mod 2**64`, as a signed number. It changes if a word changes, or if two different words are
# exchanged. Words are mixed because few changes by the last bit, as small steps of an optimizer leave them, would
# otherwise cancel: +1, -1, -1 and +1 at equal distances.


# Words of a row. A box is summed by rows and by columns, so that no weights of its size are needed.
ROW = 4096
WORD_BYTES = 4
# Odd, so that different words stay different; Knuth's multiplicative hash, 2**32 over the golden ratio.
MIXER, MIXED_BITS = 0x9E3779B1 - 2**32, 15
# Bytes of boxes that are summed together.
TOGETHER_BYTES = 64 << 20
# A change of about half of the elements may by chance leave smaller tensors as they were.
MIN_ELEMENTS = 64

Sums = dict[str, list[int]]
"""Number of a chunk -> checksum of each box of one message, in order."""


def checksums(boxes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the checksum of each box's bytes, `[n]` int64, on their device.

    Boxes of one size are summed together, up to `TOGETHER_BYTES` of them: a delta refit has tens of thousands of blocks
    of the same size, and a dozen launches for each would take longer than to send them.

    Args:
        boxes: one or more tensors of one device, of any dtype, shape and strides.
    """
    found = torch.empty(len(boxes), dtype=torch.int64, device=boxes[0].device)
    alike: dict[tuple[torch.dtype, int], list[int]] = {}
    for place, box in enumerate(boxes):
        alike.setdefault((box.dtype, box.numel()), []).append(place)
    for (dtype, numel), places in alike.items():
        for some in itertools.batched(places, max(1, TOGETHER_BYTES // max(1, numel * dtype.itemsize))):
            # There are as few operations for each box as possible: the host needs longer for them than the GPU.
            rows = [boxes[place] if boxes[place].dim() == 1 else boxes[place].reshape(-1) for place in some]
            if dtype.itemsize == 1:
                rows = [row.view(torch.uint8) for row in rows]  # not every operation knows 8-bit floats
            alone = (len(rows) == 1 and rows[0].stride(0) == 1
                     and rows[0].storage_offset() * dtype.itemsize % WORD_BYTES == 0)
            data = rows[0][None] if alone else torch.stack(rows)
            found[list(some)] = _checksums_of_rows(data.detach().view(torch.uint8))
    return found


def _checksums_of_rows(data: torch.Tensor) -> torch.Tensor:
    """Return the checksum of each row of bytes, `[n]` int64, of `[n, bytes]`."""
    if data.shape[1] % WORD_BYTES:
        data = torch.nn.functional.pad(data, (0, -data.shape[1] % WORD_BYTES))
    words = data.view(torch.int32) * MIXER
    words ^= words >> MIXED_BITS
    whole = words.shape[1] // ROW * ROW
    rows, rest = words[:, :whole].unflatten(1, (-1, ROW)), words[:, whole:]
    # The word in row r and column c has the weight (r * ROW + c) + 1 + ROW = (r + 1) * ROW + (c + 1).
    return (ROW * _weighted(rows.sum(2, dtype=torch.int64)) + _weighted(rows.sum(1, dtype=torch.int64))
            + (whole // ROW + 1) * ROW * rest.sum(1, dtype=torch.int64) + _weighted(rest))


@dataclass(frozen=True)
class _Message:
    """Checksums of a message as it arrived and as it was written."""

    sender: int
    chunk: int
    operations: Sequence[Op]
    arrived: torch.Tensor
    written: torch.Tensor


@dataclass
class Verification:
    """Checksums of a sync on the receiving side."""

    messages: list[_Message] = field(default_factory=list)

    def note(self, sender: int, chunk: int, operations: Sequence[Op], boxes: Sequence[torch.Tensor],
             targets: Sequence[torch.Tensor]) -> None:
        """Compute the checksums of a message that has come in and was written.

        `boxes` are views of the message as it arrived, `targets` views of the tensors to which it was written.
        """
        self.messages.append(_Message(sender, chunk, operations, checksums(boxes), checksums(targets)))

    def unchanged(self, earlier: Verification) -> list[str]:
        """Return names of tensors all of whose boxes have the bytes of an earlier sync. Tiny tensors are left out.

        Args:
            earlier: checksums of a sync after which about half of the elements of every tensor were changed.
        """
        before, now = earlier._by_name(), self._by_name()
        return [name for name, (sums, numel) in now.items()
                if numel >= MIN_ELEMENTS and name in before and before[name][0] == sums]

    def _by_name(self) -> dict[str, tuple[list[int], int]]:
        """Return the checksums of what was written and the number of elements, by tensor."""
        found: dict[str, tuple[list[int], int]] = {}
        for message in self.messages:
            for operation, written in zip(message.operations, message.written.tolist(), strict=True):
                sums, numel = found.get(operation.name, ([], 0))
                found[operation.name] = [*sums, written], numel + operation.box.numel
        return found

    def fault(self, sent: Mapping[int, Sums]) -> str:
        """Describe the first box whose checksums differ; empty if there is none.

        `sent` are the checksums that each rank of the trainer announced.
        """
        for message in self.messages:
            announced = sent[message.sender].get(str(message.chunk), [])
            where = f"chunk {message.chunk} from trainer rank {message.sender}"
            if len(announced) != len(message.operations):
                return f"{where}: {len(announced)} checksums of {len(message.operations)} boxes"
            for operation, expected, arrived, written in zip(message.operations, announced, message.arrived.tolist(),
                                                             message.written.tolist(), strict=True):
                box = f"{where}: {operation.name} {operation.box}"
                if arrived != expected:
                    return f"{box} arrived with checksum {arrived}; it was sent with {expected}"
                if written != arrived:
                    return f"{box} arrived with checksum {arrived}; read back from {operation.target.tensor}, where " \
                           f"it was written to, it has {written}"
        return ""


def _weighted(values: torch.Tensor) -> torch.Tensor:
    """Return `sum((i + 1) * values[:, i])` mod 2**64 of each row."""
    return (values.to(torch.int64) * torch.arange(1, values.shape[1] + 1, device=values.device)).sum(1)
