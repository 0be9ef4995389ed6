"""Sends weights to an engine on the trainer's own GPUs, through shared memory.

NCCL cannot do this, because it allows only one rank of a group on each GPU. Every worker has a proxy: the trainer rank
on its GPU. Messages travel to the proxy among the trainer's ranks, in a group of their own. The proxy copies the
messages of a chunk next to each other into memory that the worker has mapped. On CPUs this is host memory, and any rank
of the worker's machine can be its proxy.

The shared memory exists only during a sync. It holds two chunks, so that the next one is filled while the worker reads.
For each chunk the proxy sets the flag `ready` and the worker the flag `taken`. Both synchronise the device before,
because neither waits for the other's streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from mimo.refit.messages import aligned
from mimo.refit.rendezvous import RefitError
from mimo.refit.transport.p2p import REASON_S, Wait, Wire

# Number of chunks that the shared memory holds.
SLOTS = 2
HOST_NAME = "mimo-refit"  # name of shared host memory in /proc/<pid>/maps
OPEN_LAZILY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


@dataclass(frozen=True)
class Incoming:
    """Messages to a worker, and their places in its shared memory. Both ends compute the same places.

    Attributes:
        chunks: for each chunk, trainer rank -> size of its message in bytes.
    """

    chunks: list[dict[int, int]]

    @property
    def num_bytes(self) -> int:
        return self._start(SLOTS)

    def place(self, number: int, sender: int) -> slice:
        """Return the place of a trainer rank's message of a chunk."""
        chunk = self.chunks[number]
        first = self._start(number % SLOTS) + sum(aligned(chunk[each]) for each in chunk if each < sender)
        return slice(first, first + chunk[sender])

    def _start(self, slot: int) -> int:
        """Return the beginning of a slot. Each slot is as long as the longest of its chunks."""
        return sum(max((sum(map(aligned, chunk.values())) for chunk in self.chunks[each::SLOTS]), default=0)
                   for each in range(slot))

    def as_json(self) -> list[list[list[int]]]:
        return [sorted([sender, size] for sender, size in chunk.items()) for chunk in self.chunks]

    @classmethod
    def from_json(cls, plain: Sequence[Sequence[Sequence[int]]]) -> Incoming:
        return cls([{sender: size for sender, size in chunk} for chunk in plain])


class Flags:
    """Flags of a sync through which the two ends signal each other, in a store.

    By `ready` a proxy says that a chunk is complete; the value is the handle of the memory. By `taken` a worker says
    that it has copied a chunk, and by `released` that it has unmapped the memory.
    """

    def __init__(self, store: Store) -> None:
        self._store, self.sync = store, 1

    @contextmanager
    def _key(self, kind: str, worker: int, number: int) -> Iterator[str]:
        try:
            yield f"{self.sync}/{kind}/{worker}/{number}"
        except RuntimeError as error:
            raise RefitError(f"the refit store, which the trainer's first rank serves, is gone: {error}") from error

    def set(self, kind: str, worker: int, number: int = 0, value: str = "set") -> None:
        with self._key(kind, worker, number) as key:
            self._store.set(key, value)

    def has(self, kind: str, worker: int, number: int = 0) -> bool:
        with self._key(kind, worker, number) as key:
            return self._store.check([key])

    def take(self, kind: str, worker: int, number: int = 0) -> str:
        """Wait for a flag, delete it and return its value."""
        with self._key(kind, worker, number) as key:
            value = self._store.get(key).decode()
            self._store.delete_key(key)
            return value

    def drop(self, kind: str, worker: int, number: int = 0) -> None:
        with self._key(kind, worker, number) as key:
            self._store.delete_key(key)


class WorkerEnd:
    """Transport of a worker."""

    def __init__(self, store: Store, rank: int, proxy: str, incoming: Incoming, device: torch.device,
                 timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._flags, self._rank, self._proxy = Flags(store), rank, proxy
        self._incoming, self._device = incoming, device
        self._next = 0
        self._staging: Staging | None = None

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
                 ) -> list[tuple[str, Any]]:
        assert not sends, "a worker sends nothing"
        number, self._next = self._next, self._next + 1
        return [(f"chunk {number} from {self._proxy}", (number, list(receives)))]

    def follow(self, works: Sequence[tuple[str, Any]], check: Callable[[], None]) -> list[tuple[str, Any]]:
        """Wait, because the proxy sets flags in a store and not events of a stream."""
        self.wait(works, check)
        return []

    def wait(self, works: Sequence[tuple[str, Any]], check: Callable[[], None], grace_s: float = 0.0) -> None:
        wait = Wait(check, self.timeout_s + grace_s)
        for what, (number, receives) in works:
            assert {sender: into.numel() for sender, into in receives} == self._incoming.chunks[number]
            if not receives:
                continue
            wait.until(what, partial(self._flags.has, "ready", self._rank, number))
            handle = self._flags.take("ready", self._rank, number)
            if self._staging is None:
                self._staging = open_staging(handle, self._incoming.num_bytes, self._device)
            for sender, into in receives:
                into.copy_(self._staging.memory[self._incoming.place(number, sender)])
            if self._device.type == "cuda":
                # The proxy may overwrite the messages as soon as the flag is set.
                torch.cuda.current_stream(self._device).synchronize()
            self._flags.set("taken", self._rank, number)

    def release(self, check: Callable[[], None], grace_s: float = 0.0) -> None:
        assert self._next == len(self._incoming.chunks), "a chunk was not waited for"
        self._leave()
        self._flags.sync, self._next = self._flags.sync + 1, 0

    def close(self) -> None:
        """See `Wire`. This may be called in the middle of a sync."""
        with contextlib.suppress(RuntimeError):
            self._leave()

    def _leave(self) -> None:
        """Unmap the memory, then tell the proxy."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.release()
            _empty_cache(self._device)
            self._flags.set("released", self._rank)


@dataclass(eq=False)
class _Chunk:
    """Messages of a chunk that this rank sends, or receives as a proxy.

    Attributes:
        number: number of the chunk in its sync.
        sends: messages that this rank sends, by worker.
        works: work handles of transfers among ranks, once they have begun.
        event: CUDA event after which this rank's messages to its own workers are in the shared memory.
    """

    number: int
    sends: list[tuple[int, torch.Tensor]]
    works: list[tuple[str, Any]] = field(default_factory=list)
    event: Any = None


class TrainerEnd:
    """Transport of a trainer rank.

    Args:
        store: store for flags.
        rank: rank of this process.
        by_worker: rank of each worker -> rank of its proxy.
        incoming: messages to the workers whose proxy this rank is.
        among: connects the trainer's ranks; None if there is only one.
        device: device of messages and shared memory.
        timeout_s: time limit of one wait.
        names: name of each rank, for errors.
    """

    def __init__(self, store: Store, rank: int, by_worker: Mapping[int, int], incoming: Mapping[int, Incoming],
                 among: Wire | None, device: torch.device, timeout_s: float, names: Sequence[str]) -> None:
        self.timeout_s = timeout_s
        self._flags, self._rank, self._names = Flags(store), rank, names
        self._by_worker, self._incoming, self._among = by_worker, incoming, among
        self._device = device
        self._next = 0
        self._staging: dict[int, Staging] = {}
        self._opened: set[int] = set()  # workers that have seen a flag and may have mapped their memory
        self._pending: deque[_Chunk] = deque()

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
                 ) -> list[tuple[str, Any]]:
        """See `Wire`. A chunk for which there is no room yet begins during the wait for an earlier one."""
        assert not receives, "a trainer rank receives nothing"
        chunk = _Chunk(self._next, list(sends))
        self._next += 1
        self._pending.append(chunk)
        self._begin()
        return [(f"chunk {chunk.number}", chunk)]

    def follow(self, works: Sequence[tuple[str, Any]], check: Callable[[], None]) -> list[tuple[str, Any]]:
        raise AssertionError("a trainer rank receives nothing")

    def wait(self, works: Sequence[tuple[str, Any]], check: Callable[[], None], grace_s: float = 0.0) -> None:
        wait = Wait(check, self.timeout_s + grace_s)
        for _, chunk in works:
            while chunk in self._pending:
                number = self._pending[0].number
                wait.until(f"room for chunk {number}", lambda: not self._late(),
                           lambda: f"{self._listed(self._late())} taken an earlier one out")
                self._begin()
            if self._among is not None:
                # Longer than the other rank waits for its worker, so that the error names the worker.
                self._among.wait(chunk.works, check, 1.5 * grace_s)
            if chunk.event is not None:
                chunk.event.synchronize()
            for worker in self._receivers(chunk.number):
                self._opened.add(worker)
                self._flags.set("ready", worker, chunk.number, self._staging[worker].handle)

    def release(self, check: Callable[[], None], grace_s: float = 0.0) -> None:
        """See `Wire`. This waits until this rank's workers have unmapped the memory."""
        assert not self._pending, "a chunk was not waited for"
        wait = Wait(check, self.timeout_s + grace_s)
        wait.until("the end of the sync", lambda: not self._mapped(),
                   lambda: f"{self._listed(self._mapped())} released the shared memory")
        for worker in self._incoming:
            for number in range(max(0, self._next - SLOTS), self._next):
                self._flags.drop("taken", worker, number)
            self._flags.drop("released", worker)
        self._free()
        self._flags.sync, self._next = self._flags.sync + 1, 0
        _empty_cache(self._device)

    def close(self) -> None:
        """See `Wire`. In the middle of a sync, workers get a moment to unmap the memory."""
        if self._among is not None:
            self._among.close()
        self._pending.clear()
        with contextlib.suppress(RuntimeError):
            if self._staging:
                Wait(lambda: None, REASON_S).until("the end", lambda: not self._mapped())
        with contextlib.suppress(RuntimeError):
            self._free()

    def _begin(self) -> None:
        """Start the transfers of chunks for which there is room. Every rank starts them in the same order."""
        while self._pending and not self._late():
            chunk = self._pending.popleft()
            before = chunk.number - SLOTS
            for worker in self._receivers(before):
                self._flags.drop("taken", worker, before)
            own = [(worker, message) for worker, message in chunk.sends if self._by_worker[worker] == self._rank]
            for worker, message in own:
                self._room(worker, chunk.number, self._rank).copy_(message)
            if own and self._device.type == "cuda":
                chunk.event = torch.cuda.Event()
                chunk.event.record()
            if self._among is not None:
                # Both sides order the messages between the same two ranks by the worker that gets them.
                chunk.works = self._among.exchange(
                    [(self._by_worker[worker], message) for worker, message in sorted(chunk.sends, key=itemgetter(0))
                     if self._by_worker[worker] != self._rank],
                    [(sender, self._room(worker, chunk.number, sender)) for worker in self._receivers(chunk.number)
                     for sender in sorted(self._incoming[worker].chunks[chunk.number]) if sender != self._rank])

    def _room(self, worker: int, number: int, sender: int) -> torch.Tensor:
        """Return the shared memory for a message to one of this rank's workers."""
        incoming = self._incoming[worker]
        if worker not in self._staging:
            self._staging[worker] = make_staging(incoming.num_bytes, self._device)
        return self._staging[worker].memory[incoming.place(number, sender)]

    def _receivers(self, number: int) -> list[int]:
        """Return this rank's workers that get messages in a chunk."""
        return sorted(worker for worker, incoming in self._incoming.items() if number >= 0 and incoming.chunks[number])

    def _late(self) -> list[int]:
        """Return the workers that have not yet copied the chunk whose memory the next one needs."""
        before = self._pending[0].number - SLOTS
        return [worker for worker in self._receivers(before) if not self._flags.has("taken", worker, before)]

    def _mapped(self) -> list[int]:
        return [worker for worker in sorted(self._opened) if not self._flags.has("released", worker)]

    def _listed(self, workers: Sequence[int]) -> str:
        return ", ".join(self._names[worker] for worker in workers)

    def _free(self) -> None:
        staging, self._staging = self._staging, {}
        self._opened.clear()
        for each in staging.values():
            each.release()


def _empty_cache(device: torch.device) -> None:
    """Release cached memory, because trainer and engine share a GPU and the next sync is far off."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Staging:
    """Memory that processes of one machine share, in one of them: GPU memory through CUDA IPC, or host memory.

    `make_staging` and `open_staging` make it. Neither kind has a name in a file system, so it is freed when the
    processes that use it end, however they end. Memory of a GPU comes from the CUDA driver instead of torch's
    allocator. Freed memory is then available to every process at once, and a process that dies with a mapping leaves
    no reference count behind.

    Attributes:
        handle: name by which other processes open it.
        memory: the whole memory, uint8.
    """

    def __init__(self, handle: str, memory: torch.Tensor, free: Callable[[], None]) -> None:
        self.handle, self.memory, self._free = handle, memory, free

    def release(self) -> None:
        """Free or unmap the memory. No view of `memory` may be used afterwards."""
        self.memory = torch.empty(0, dtype=torch.uint8)  # A mapping of host memory ends with its last tensor.
        self._free()


def make_staging(num_bytes: int, device: torch.device) -> Staging:
    """Allocate memory of a device that other processes can open.

    Raises:
        RefitError: there is not enough memory.
    """
    if device.type == "cuda":
        address, driver_handle = ctypes.c_uint64(), _Handle()
        _enter(device)
        try:
            _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        except RefitError:
            torch.cuda.empty_cache()  # torch's allocator may hold unused memory.
            _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        _call("cuIpcGetMemHandle", ctypes.byref(driver_handle), address)
        return Staging(bytes(driver_handle).hex(), torch.as_tensor(_Region(address.value, num_bytes), device=device),
                       partial(_give_up, "cuMemFree_v2", address, device))
    # Anonymous memory of this process. Others open it through this process's file descriptor.
    descriptor = os.memfd_create(HOST_NAME, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    handle = f"/proc/{os.getpid()}/fd/{descriptor}"
    return Staging(handle, _mapped(descriptor, num_bytes), partial(os.close, descriptor))


def open_staging(handle: str, num_bytes: int, device: torch.device) -> Staging:
    """Open memory of the same device that another process of this machine has allocated.

    Raises:
        RefitError: the memory does not exist, or this process may not open it.
    """
    if device.type == "cuda":
        address = ctypes.c_uint64()
        _enter(device)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(bytes.fromhex(handle)),
              ctypes.c_uint(OPEN_LAZILY))
        return Staging(handle, torch.as_tensor(_Region(address.value, num_bytes), device=device),
                       partial(_give_up, "cuIpcCloseMemHandle", address, device))
    try:
        descriptor = os.open(handle, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RefitError(f"shared memory {handle} cannot be opened: {error}") from error
    try:
        return Staging(handle, _mapped(descriptor, num_bytes), lambda: None)
    finally:
        os.close(descriptor)


def device_identity(device: torch.device) -> str:
    """Return a name that is the same in two processes if, and only if, their devices can share memory."""
    if device.type == "cuda":
        return f"GPU {torch.cuda.get_device_properties(device).uuid}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    # Processes of the same machine can open each other's memory if they are in the same PID namespace.
    return f"host {boot} {os.readlink('/proc/self/ns/pid')}"


def _mapped(descriptor: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


class _Handle(ctypes.Structure):
    """The driver's `CUipcMemHandle`."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Region:
    """Device memory at an address, in the form that `torch.as_tensor` accepts."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False),
                                         "version": 3}


def _enter(device: torch.device) -> None:
    """Make torch's CUDA context current in this thread, and wait for queued work, which may use the memory."""
    torch.cuda.synchronize(device)


def _give_up(name: str, address: ctypes.c_uint64, device: torch.device) -> None:
    """Free or unmap memory of a GPU with this function of the CUDA driver."""
    _enter(device)
    _call(name, address)


def _call(name: str, *arguments: Any) -> None:
    """Call the CUDA driver. Raises RefitError."""
    driver = ctypes.CDLL("libcuda.so.1")
    result = getattr(driver, name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(text))
        raise RefitError(f"{name} failed: {(text.value or b'error').decode()} ({result})")
