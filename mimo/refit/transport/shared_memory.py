"""Memory that two processes of one machine share: GPU memory through CUDA IPC, or host memory.

Neither kind has a name in a file system, so it is freed when the processes that use it end, however they end. Memory of
a GPU comes from the CUDA driver instead of torch's allocator. Freed memory is then available to every process at once,
and a process that dies with a mapping leaves no reference count behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mimo.refit.rendezvous import RefitError

HOST_NAME = "mimo-refit"  # appears in /proc/<pid>/maps
OPEN_LAZILY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class Staging:
    """Shared memory in one of its processes; see `make_staging` and `open_staging`.

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
