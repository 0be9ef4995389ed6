"""Microbatches on the device, each copied while the one before it is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial

import torch

from mimo.batch import Microbatch, map_tensors


def on_device(microbatches: Sequence[Microbatch], device: torch.device) -> Iterator[Microbatch]:
    """The microbatches on `device`, in order.

    On a GPU the copy of the next one runs on a stream of its own from page-locked memory, so it waits for no kernel and
    no kernel for it. At most two microbatches are on the device at a time.
    """
    if device.type != "cuda":
        for batch in microbatches:
            yield batch.to(device)
        return
    side = _copy_stream(device)
    ahead = _copy(microbatches[0], device, side) if microbatches else None
    for following in (*microbatches[1:], None):
        assert ahead is not None, "every microbatch but the last has a next one"
        batch, copied = ahead
        ahead = None if following is None else _copy(following, device, side)
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copied)
        # The memory comes from the side stream's pool: it may go back there only after the kernels that read it.
        map_tensors(batch, partial(_used_by, stream))
        yield batch


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: the allocator keeps the free memory of every stream apart."""
    return torch.cuda.Stream(device)


def _copy(batch: Microbatch, device: torch.device, stream: torch.cuda.Stream) -> tuple[Microbatch, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        moved = batch.to(device)
        copied = torch.cuda.Event()
        copied.record(stream)
    return moved, copied


def _used_by(stream: torch.cuda.Stream, tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor
