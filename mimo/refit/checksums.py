"""Checksums of what a refit moves: of every box as it is sent, as it arrives, and as it stands in the live tensor.

A checksum is made where the box lies, by a few reductions, and only the sums leave the device. The bytes of a box,
row-major and filled up with zeros to whole words of four bytes, are signed 32-bit words `x[0], x[1], ...`; the checksum
is `sum((i + 1 + ROW) * x[i]) mod 2**64`, as a signed number. One changed word changes it, as do two that change places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mimo.refit.plan import Op, described_box

# Words of a row: a box is summed by rows and by columns, so that no tensor of its size is made.
ROW = 4096
WORD_BYTES = 4
# Smaller tensors may by chance not be changed by a change of half of their elements.
MIN_ELEMENTS = 64

Sums = dict[str, list[int]]
"""Number of a chunk -> checksum of each box of one message, in order."""


def checksum(box: torch.Tensor) -> torch.Tensor:
    """Checksum of a tensor's bytes, `[]` int64, on its device.

    Args:
        box: of any dtype, shape and strides.
    """
    data = box.detach().reshape(-1).contiguous().view(torch.uint8)
    if data.numel() % WORD_BYTES or data.storage_offset() % WORD_BYTES:
        data = torch.nn.functional.pad(data, (0, -data.numel() % WORD_BYTES))
    words = data.view(torch.int32)
    whole = words.numel() // ROW * ROW
    rows, rest = words[:whole].view(-1, ROW), words[whole:]
    # The word in row r and column c has the weight (r * ROW + c) + 1 + ROW = (r + 1) * ROW + (c + 1).
    return (ROW * _weighted(rows.sum(1, dtype=torch.int64)) + _weighted(rows.sum(0, dtype=torch.int64))
            + (rows.shape[0] + 1) * ROW * rest.sum(dtype=torch.int64) + _weighted(rest))


def checksums(boxes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Checksum of each, `[n]` int64, on their device."""
    return torch.stack([checksum(box) for box in boxes])


@dataclass(frozen=True)
class _Message:
    """What came of a message."""

    sender: int
    chunk: int
    operations: Sequence[Op]
    arrived: torch.Tensor
    written: torch.Tensor


@dataclass
class Verification:
    """Checksums of one sync on the side that receives."""

    messages: list[_Message] = field(default_factory=list)

    def note(self, sender: int, chunk: int, operations: Sequence[Op], boxes: Sequence[torch.Tensor],
             targets: Sequence[torch.Tensor]) -> None:
        """A message has come in and was written.

        Args:
            sender: rank of the trainer.
            chunk: number of the chunk.
            operations: what the message carries.
            boxes: each as it came.
            targets: each as it was read back from where it was written to.
        """
        self.messages.append(_Message(sender, chunk, operations, checksums(boxes), checksums(targets)))

    def unchanged(self, earlier: Verification) -> list[str]:
        """Names of tensors whose boxes all have the bytes of an earlier sync; tiny ones are left out.

        Args:
            earlier: of a sync after which every tensor was changed in about half of its elements.
        """
        before, now = earlier._by_name(), self._by_name()
        return [name for name, (sums, numel) in now.items()
                if numel >= MIN_ELEMENTS and name in before and before[name][0] == sums]

    def _by_name(self) -> dict[str, tuple[list[int], int]]:
        """Checksums of what was written and number of elements, by tensor."""
        found: dict[str, tuple[list[int], int]] = {}
        for message in self.messages:
            for operation, stands in zip(message.operations, message.written.tolist(), strict=True):
                sums, numel = found.get(operation.name, ([], 0))
                found[operation.name] = [*sums, stands], numel + operation.box.numel
        return found

    def fault(self, sent: Mapping[int, Sums]) -> str:
        """The first box whose checksums differ, in words; empty where none does.

        Args:
            sent: of each rank of the trainer, what it says that it has sent.
        """
        for message in self.messages:
            theirs = sent[message.sender].get(str(message.chunk), [])
            where = f"chunk {message.chunk} from trainer rank {message.sender}"
            if len(theirs) != len(message.operations):
                return f"{where}: {len(theirs)} checksums of {len(message.operations)} boxes"
            for operation, gave, came, stands in zip(message.operations, theirs, message.arrived.tolist(),
                                                     message.written.tolist(), strict=True):
                box = f"{where}: {operation.name} {described_box(operation.box)}"
                if came != gave:
                    return f"{box} arrived with checksum {came}; it was sent with {gave}"
                if stands != came:
                    return f"{box} arrived with checksum {came}; read back from {operation.target.tensor}, where it " \
                           f"was written to, it has {stands}"
        return ""


def _weighted(values: torch.Tensor) -> torch.Tensor:
    """`sum((i + 1) * values[i])` mod 2**64."""
    return (values.to(torch.int64) * torch.arange(1, values.numel() + 1, device=values.device)).sum()
