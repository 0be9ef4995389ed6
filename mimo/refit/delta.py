"""Delta refits: only what has changed since the last refit travels.

What goes straight into live parameters travels block by block: every box is cut to at most `RefitOptions.block_bytes`.
What goes through vLLM's loader travels in groups of whole tensors, because vLLM reloads whole modules: if one tensor
of a module has changed, all of them travel.

Every rank of the trainer keeps the checksum of each of its blocks as it was last sent, 8 bytes for each. For a delta
refit it computes them again, announces to each worker which of its blocks have changed, and sends those alone. Both
read the same announcement and select the same operations from the same plan. In the end each worker proves that its
live parameters have the trainer's weights: it reads the checksum of every block of them back, sent or not. Tensors
that went through vLLM's loader have no blocks to read; refits that send everything and are verified prove those.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from mimo.boxes import Box
from mimo.refit.messages import Views
from mimo.refit.plan import Op
from mimo.refit.tensor_slices import DTYPE_BYTES, TensorMeta


def cut(operations: Iterable[Op], entries: Sequence[TensorMeta], loader: frozenset[str],
        block_bytes: int) -> list[Op]:
    """Cut the boxes of a plan into blocks of rows. Tensors for the loader stay whole, as do single rows.

    Args:
        operations: the plan, of either end.
        entries: entries of the chunk plan.
        loader: names that go through the worker's loader.
        block_bytes: largest size of a block.
    """
    found: list[Op] = []
    for operation in operations:
        box = operation.box
        row_bytes = box.numel // max(1, box.sizes[0] if box.sizes else 1) * DTYPE_BYTES[entries[operation.entry].dtype]
        rows = max(1, block_bytes // max(1, row_bytes))
        if operation.name in loader or not box.sizes or box.sizes[0] <= rows:
            found.append(operation)
            continue
        for first in range(box.starts[0], box.stops[0], rows):
            block = Box((first, *box.starts[1:]), (min(first + rows, box.stops[0]), *box.stops[1:]))
            source = operation.source and operation.source.inside(box, block)
            found.append(dataclasses.replace(operation, box=block, target=operation.target.inside(box, block),
                                             source=source))
    return found


def live_blocks(operations: Sequence[Op], loader: frozenset[str]) -> tuple[list[int], Views]:
    """Return the numbers of the operations that write into live parameters, and views of their targets."""
    numbers = [number for number, each in enumerate(operations) if each.name not in loader]
    return numbers, Views([operations[number].target for number in numbers],
                          [operations[number].box.sizes for number in numbers])


@dataclass(frozen=True)
class Announcement:
    """Announcement of one trainer rank to one worker before a delta refit.

    Attributes:
        changed: for each operation between the two, whether its box has changed.
        sums: checksum of each of these boxes.
    """

    changed: list[bool]
    sums: list[int]

    def packed(self) -> bytes:
        """Return the checksums, 8 bytes each, and then the flags, one bit each."""
        flags = np.packbits(np.array(self.changed, bool), bitorder="little")
        return struct.pack(f"<{len(self.sums)}q", *self.sums) + flags.tobytes()

    @classmethod
    def unpacked(cls, data: bytes, count: int) -> Self:
        """Read what `packed` made of an announcement of `count` operations."""
        sums = list(struct.unpack_from(f"<{count}q", data))
        flags = np.unpackbits(np.frombuffer(data, np.uint8, offset=8 * count), count=count, bitorder="little")
        return cls(flags.astype(bool).tolist(), sums)


def key(rank: int, worker: int) -> str:
    """Return the key under which a trainer rank's announcement to a worker lies in the store."""
    return f"delta/{rank}/{worker}"


def announce(by_worker: dict[int, list[Op]], loaders: dict[int, frozenset[str]], sums: dict[int, list[int]],
             before: dict[int, list[int]]) -> tuple[frozenset[int], dict[int, Announcement]]:
    """Compare the checksums of a rank's blocks with those of the last refit.

    Args:
        by_worker: the rank's operations to each worker.
        loaders: names that go through each worker's loader.
        sums: checksums of the operations' boxes.
        before: checksums as they were last sent.

    Returns:
        The entries for loaders of which some box has changed, which all ranks and workers need to know, and the
        announcement to each worker.
    """
    changed = {worker: [now != then for now, then in zip(own, before[worker], strict=True)]
               for worker, own in sums.items()}
    loader = frozenset(operation.entry for worker, operations in by_worker.items()
                       for operation, is_changed in zip(operations, changed[worker], strict=True)
                       if is_changed and operation.name in loaders[worker])
    return loader, {worker: Announcement(changed[worker], own) for worker, own in sums.items()}


def changed_entries(changed: Iterable[Iterable[int]], groups: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the entries that a worker's loader has to get.

    Args:
        changed: entries for loaders that have changed, of all trainer ranks.
        groups: entries that the worker's loader has to get together.
    """
    entries = frozenset(itertools.chain.from_iterable(changed))
    return frozenset(entry for group in groups if not entries.isdisjoint(group) for entry in group)


def select(operations: Sequence[Op], changed: Sequence[bool], loader: frozenset[str],
           entries: frozenset[int]) -> list[Op]:
    """Select the operations of a rank and a worker that a delta refit carries out.

    Args:
        operations: all operations between the two.
        changed: whether the box of each has changed.
        loader: names that go through the worker's loader.
        entries: entries that the loader has to get.
    """
    return [operation for operation, is_changed in zip(operations, changed, strict=True)
            if (operation.entry in entries if operation.name in loader else is_changed)]
