"""Gathers whole Hugging Face tensors of a running trainer on its first rank, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from mimo.boxes import Box
from mimo.model.build import BuiltModel
from mimo.refit.messages import torch_dtype
from mimo.refit.tensor_slices import TensorMeta, TensorSlice
from mimo.refit.trainer_shards import LiveTensors, TrainerShards


class WholeTensors:
    """Whole tensors of a model whose ranks hold parts of them. Each iteration gathers their present values.

    Each holder sends its boxes of a tensor to the first rank of the world in one message, in the dtype of the wire.
    Iterating is collective over the world. Ranks other than the first get tensors on the meta device.

    Args:
        built: this rank's model.
        shards: places of the model's weights.
        device: device of the model, where whole tensors are put together.

    Attributes:
        entries: entries of the tensors, in the order of iteration.
    """

    def __init__(self, built: BuiltModel, shards: TrainerShards, device: torch.device) -> None:
        self._built = built
        self._live = LiveTensors(built)
        self._device = device
        self._holders = shards.holders
        self.entries = shards.entries
        self._mine: dict[str, dict[Box, TensorSlice]] = {}
        for part in shards.slices:
            self._mine.setdefault(part.name, {})[part.box] = part

    def __iter__(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield every whole tensor. Only one is in memory at a time. Collective."""
        self._built.finish_gathers("a refit")
        for number, entry in enumerate(self.entries):
            # The boxes that each rank sends, the same choice on every rank. Replicas take turns, but what the first
            # rank has by itself is not sent.
            boxes: dict[int, list[Box]] = {}
            for held in self._holders[entry.name]:
                rank = 0 if 0 in held.ranks else held.ranks[number % len(held.ranks)]
                boxes.setdefault(rank, []).append(held.box)
            yield entry, self._gathered(entry, boxes)

    @torch.no_grad()
    def _gathered(self, entry: TensorMeta, boxes: dict[int, list[Box]]) -> torch.Tensor:
        """Return the whole tensor on the first rank, and a meta tensor on the others."""
        rank, dtype = dist.get_rank(), torch_dtype(entry.dtype)
        if rank != 0:
            if rank in boxes:
                parts = [self._held(entry, box).to(dtype).flatten() for box in boxes[rank]]
                dist.send(_bytes(parts[0] if len(parts) == 1 else torch.cat(parts)), dst=0)
            return torch.empty(entry.shape, dtype=dtype, device="meta")
        whole = torch.empty(entry.shape, dtype=dtype, device=self._device)
        for sender, sent in sorted(boxes.items()):
            places = [whole[box.slices] for box in sent]
            if sender == 0:
                for place, box in zip(places, sent, strict=True):
                    place.copy_(self._held(entry, box))
            elif len(places) == 1 and places[0].is_contiguous():
                dist.recv(_bytes(places[0]), src=sender)
            else:
                packed = whole.new_empty(sum(box.numel for box in sent))
                dist.recv(_bytes(packed), src=sender)
                for place, part in zip(places, packed.split([box.numel for box in sent]), strict=True):
                    place.copy_(part.view(place.shape))
        return whole

    def _held(self, entry: TensorMeta, box: Box) -> torch.Tensor:
        return self._live.view(self._mine[entry.name][box].address, box.sizes)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)
