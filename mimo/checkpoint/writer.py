"""Writes what the wheel has planned: to host memory, then to disk, in a thread if asked, with checksums."""

from __future__ import annotations

import queue
import threading
import zlib
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async

_ALIGNMENT = 64


def use_local_results() -> None:
    """Have the wheel hand over write results inside this process.

    Its own queue is a manager process, for writers that are processes; here they are threads.
    """
    if not isinstance(filesystem_async._results_queue, queue.Queue):
        filesystem_async._results_queue = queue.Queue()


class HostBuffer:
    """Host memory that a checkpoint's tensors are copied into, kept between saves (page-locked on CUDA).

    Attributes:
        capacity_bytes: size of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def capacity_bytes(self) -> int:
        """Bytes allocated so far."""
        return self._memory.numel()

    def reserve(self, num_bytes: int) -> None:
        """Grow to at least `num_bytes`, touching every page so that the first copy is as fast as later ones."""
        if num_bytes > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def copy(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of `tensors` in this memory, each with a storage of exactly its own bytes."""
        sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        self.reserve(sum(sizes))
        place, copies = 0, []
        for tensor, size in zip(tensors, sizes, strict=True):
            num_bytes = tensor.numel() * tensor.element_size()
            # Through numpy a slice becomes a storage of its own: torch.save writes whole storages.
            part = torch.from_numpy(self._memory[place: place + num_bytes].numpy())
            copies.append(part.view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor, non_blocking=self._pinned)
            place += size
        torch.cuda.synchronize()
        return copies


class Write:
    """The disk part of one save on this rank.

    Args:
        request: the wheel's request: what to write, and its closing calls.
        folder: where the checkpoint is written.
        buffer: where tensors are copied before writing; None writes them from where they are (on CUDA: after a copy).

    Attributes:
        request: as given.
        num_bytes: bytes of tensors that this rank writes.
        checksums: CRC-32 of each item by file name and offset, once it is done.
    """

    def __init__(self, request: Any, folder: Path, buffer: HostBuffer | None) -> None:
        self.request, self._folder = request, folder
        arguments = list(request.async_fn_args)
        self.num_bytes = 0
        if request.async_fn is not None:
            buckets = arguments[1]
            tensors = [tensor for *_, (_, pairs) in buckets for _, tensor in pairs]
            self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            arguments[1] = request.preload_fn() if buffer is None else _with_tensors(buckets, buffer.copy(tensors))
        self._arguments = arguments
        self.checksums: dict[str, dict[int, int]] = {}
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write in a thread of this process; it ends with the process and needs no device."""
        self._thread = threading.Thread(target=self.run, name="checkpoint writer", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread still writes."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait for the thread. Returns what went wrong, or None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._error

    def run(self) -> None:
        """Write everything, then read it back once for the checksums."""
        if self.request.async_fn is None:
            return
        try:
            self.request.async_fn(*self._arguments)
            results = self._arguments[2].get_nowait()
            if isinstance(results, Exception):
                self._error = str(results)
                return
            self._sum(results)
            self._arguments[2].put(results)
        except (OSError, RuntimeError, AssertionError) as error:
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._arguments = []

    def _sum(self, results: dict[int, list[Any]]) -> None:
        for written in results.values():
            for place in (result.storage_data for result in written):
                with (self._folder / place.relative_path).open("rb") as file:
                    checksum = crc32_of(file, place.offset, place.length)
                self.checksums.setdefault(place.relative_path, {})[place.offset] = checksum


def crc32_of(file: Any, offset: int, length: int) -> int:
    """CRC-32 of part of an open file."""
    file.seek(offset)
    checksum = 0
    while length > 0:
        block = file.read(min(length, 1 << 22))
        if not block:
            break
        checksum = zlib.crc32(block, checksum)
        length -= len(block)
    return checksum


def _with_tensors(buckets: list[Any], tensors: list[torch.Tensor]) -> list[Any]:
    """The wheel's write buckets with other tensors in the same order."""
    rest = iter(tensors)
    return [
        (path, key, (objects, [(item, next(rest)) for item, _ in pairs])) for path, key, (objects, pairs) in buckets
    ]
