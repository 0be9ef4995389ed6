"""Devices, streams, events, generators, memory figures: the parts of `torch.cuda` that Megatron touches."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")


class Stream:
    """A stream on which everything has already finished."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: operations finish before they return."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: operations finish before they return."""

    def synchronize(self) -> None:
        """Do nothing: operations finish before they return."""

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record the present time in `event` or a new one."""
        event = event or Event()
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as CUDA reports them where streams have none."""
        return 0, 0


class Event:
    """A point in time of the host clock."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._time_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._time_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: operations finish before they return."""

    def synchronize(self) -> None:
        """Do nothing: operations finish before they return."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`. Raises RuntimeError where one was not recorded."""
        if self._time_s is None or end._time_s is None:
            raise RuntimeError("both events must be recorded before elapsed_time")
        return (end._time_s - self._time_s) * 1e3


class _Generators:
    """The default generator under every device index."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter((torch.default_generator,))


_STREAM = Stream()


def _no_context(*_args: Any, **_kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def peak_resident_bytes(*_args: Any, **_kwargs: Any) -> int:
    """High-water mark of this process's resident set in bytes."""
    # Not getrusage's: a program starts with the mark of the process that started it, and cannot lower it.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB


def reset_peak_resident(*_args: Any, **_kwargs: Any) -> None:
    """Lower the mark to the present size where the kernel allows it; elsewhere it stays that of the whole process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident_bytes(*_args: Any, **_kwargs: Any) -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _memory_stats(*_args: Any, **_kwargs: Any) -> dict[str, int]:
    current, peak = _resident_bytes(), peak_resident_bytes()
    stats = {
        f"{kind}_bytes.all.{when}": size
        for kind in ("allocated", "active", "reserved")
        for when, size in (("current", current), ("peak", peak))
    }
    return {**stats, "allocation.all.current": 0, "num_alloc_retries": 0, "num_ooms": 0}


def _device_properties(*_args: Any, **_kwargs: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name="cpu",
        major=0,
        minor=0,
        multi_processor_count=os.cpu_count(),
        total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )


def _constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Stand-in that ignores its arguments."""
    return lambda _original: lambda *_args, **_kwargs: value


def _use(replacement: Any) -> Callable[[Any], Any]:
    """Stand-in that does not need the original."""
    return lambda _original: replacement


def _get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _run_now(callback: Callable[[], Any], **_kwargs: Any) -> None:
    callback()


CALLS: dict[str, Callable[[Any], Any]] = {
    # device
    "torch.cuda.is_available": _constant(False),
    "torch.cuda.device_count": _constant(1),
    "torch.cuda.current_device": _constant(CPU),  # a device, so that functions which are not mapped take it too
    "torch.cuda.set_device": _constant(None),
    "torch.cuda.get_device_name": _constant("cpu"),
    "torch.cuda.get_device_capability": _constant((0, 0)),
    "torch.cuda.get_device_properties": _use(_device_properties),
    "torch.cuda.is_bf16_supported": _constant(True),
    "torch.cuda.init": _constant(None),
    "torch.cuda._lazy_init": _constant(None),
    "torch.cuda._lazy_call": _use(_run_now),
    "torch.cuda.device": _use(_no_context),
    "torch.cuda.synchronize": _constant(None),
    # streams and events
    "torch.cuda.Stream": _use(Stream),
    "torch.cuda.ExternalStream": _use(Stream),
    "torch.cuda.Event": _use(Event),
    "torch.cuda.current_stream": _constant(_STREAM),
    "torch.cuda.default_stream": _constant(_STREAM),
    "torch.cuda.set_stream": _constant(None),
    "torch.cuda.stream": _use(_no_context),
    "torch.cuda.is_current_stream_capturing": _constant(False),
    # generators
    "torch.cuda.default_generators": _use(_Generators()),
    "torch.cuda.get_rng_state": _use(_get_rng_state),
    "torch.cuda.set_rng_state": _use(_set_rng_state),
    "torch.cuda.random.get_rng_state": _use(_get_rng_state),
    "torch.cuda.random.set_rng_state": _use(_set_rng_state),
    "torch.cuda.manual_seed": _use(_manual_seed),
    "torch.cuda.manual_seed_all": _use(_manual_seed),
    # memory
    "torch.cuda.empty_cache": _constant(None),
    "torch.cuda.memory_allocated": _use(_resident_bytes),
    "torch.cuda.memory_reserved": _use(_resident_bytes),
    "torch.cuda.max_memory_allocated": _use(peak_resident_bytes),
    "torch.cuda.max_memory_reserved": _use(peak_resident_bytes),
    "torch.cuda.memory_stats": _use(_memory_stats),
    "torch.cuda.reset_peak_memory_stats": _use(reset_peak_resident),
    # profiling ranges
    "torch.cuda.nvtx.range_push": _constant(0),
    "torch.cuda.nvtx.range_pop": _constant(0),
    "torch.cuda.nvtx.range": _use(_no_context),
    "torch.cuda.nvtx.mark": _constant(None),
    "torch.cuda.profiler.start": _constant(None),
    "torch.cuda.profiler.stop": _constant(None),
}
