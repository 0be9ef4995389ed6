"""Memory that two processes of one machine share: GPU memory through CUDA IPC, or host memory.

Neither kind has a name in a file system, so it is freed when the processes that use it end, however they end. Memory of
a GPU comes from the CUDA driver instead of torch's allocator. Freed memory is then available to every process at once,
and a process that dies with a mapping leaves no reference count behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any, Protocol

import torch

from mimo.refit.rendezvous import RefitError

HOST_NAME = "mimo-refit"  # appears in /proc/<pid>/maps
OPEN_LAZILY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class Staging(Protocol):
    """Shared memory in one of its processes.

    Attributes:
        handle: name by which other processes open it.
        memory: the whole memory, uint8.
    """

    handle: str
    memory: torch.Tensor

    def release(self) -> None:
        """Free or unmap the memory. No view of `memory` may be used afterwards."""
        ...


def make_staging(num_bytes: int, device: torch.device) -> Staging:
    """Allocate memory of a device that other processes can open.

    Raises:
        RefitError: there is not enough memory.
    """
    return _OwnCuda(num_bytes, device) if device.type == "cuda" else _OwnHost(num_bytes)


def open_staging(handle: str, num_bytes: int, device: torch.device) -> Staging:
    """Open memory of the same device that another process of this machine has allocated.

    Raises:
        RefitError: the memory does not exist, or this process may not open it.
    """
    return _OpenedCuda(handle, num_bytes, device) if device.type == "cuda" else _OpenedHost(handle, num_bytes)


def device_identity(device: torch.device) -> str:
    """Return a name that is the same in two processes if, and only if, their devices can share memory."""
    if device.type == "cuda":
        return f"GPU {torch.cuda.get_device_properties(device).uuid}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    # Processes of the same machine can open each other's memory if they are in the same PID namespace.
    return f"host {boot} {os.readlink('/proc/self/ns/pid')}"


class _OwnHost:
    """Anonymous memory of this process. Others open it through this process's file descriptor."""

    def __init__(self, num_bytes: int) -> None:
        self._descriptor = os.memfd_create(HOST_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, num_bytes)
        self.memory = _mapped(self._descriptor, num_bytes)
        self.handle = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def release(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)  # The mapping ends with its last tensor.
        os.close(self._descriptor)


class _OpenedHost:
    """Memory of another process."""

    def __init__(self, handle: str, num_bytes: int) -> None:
        try:
            descriptor = os.open(handle, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RefitError(f"shared memory {handle} cannot be opened: {error}") from error
        try:
            self.memory = _mapped(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self.handle = handle

    def release(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)


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


class _OwnCuda:
    """Memory of this process's GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device, address, handle = device, ctypes.c_uint64(), _Handle()
        _enter(device)
        try:
            _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        except RefitError:
            torch.cuda.empty_cache()  # torch's allocator may hold unused memory.
            _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._address = address
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self.handle = bytes(handle).hex()
        self.memory = torch.as_tensor(_Region(address.value, num_bytes), device=device)

    def release(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        _enter(self._device)
        _call("cuMemFree_v2", self._address)


class _OpenedCuda:
    """Memory of another process on the same GPU."""

    def __init__(self, handle: str, num_bytes: int, device: torch.device) -> None:
        self._device, address, self.handle = device, ctypes.c_uint64(), handle
        _enter(device)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(bytes.fromhex(handle)),
              ctypes.c_uint(OPEN_LAZILY))
        self._address = address
        self.memory = torch.as_tensor(_Region(address.value, num_bytes), device=device)

    def release(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        _enter(self._device)
        _call("cuIpcCloseMemHandle", self._address)


def _enter(device: torch.device) -> None:
    """Make torch's CUDA context current in this thread, and wait for queued work, which may use the memory."""
    torch.cuda.synchronize(device)


def _call(name: str, *arguments: Any) -> None:
    """Call the CUDA driver. Raises RefitError."""
    driver = ctypes.CDLL("libcuda.so.1")
    result = getattr(driver, name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(text))
        raise RefitError(f"{name} failed: {(text.value or b'error').decode()} ({result})")
