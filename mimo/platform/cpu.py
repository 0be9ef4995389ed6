"""CPU with gloo. The real Megatron code runs, with its CUDA calls mapped to CPU ones.

The mapping replaces functions in the `torch` namespaces once per process. A `TorchFunctionMode` would see the same
calls, but it costs Python time on every torch operation and acts in one thread only. Replaced functions cost nothing
on operations that take no device, and also apply in data-loading and checkpoint-writing threads.

A stand-in is a function that takes the original attribute (None if this build of torch has none) and returns its
replacement. `install_mapped_calls` puts all replacements in place.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed
from torch.utils._device import _device_constructors

from mimo.platform.base import Platform

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

# Dotted name of an attribute -> its stand-in.
type _Calls = dict[str, Callable[[Any], Any]]


# Devices, streams, events, generators and memory figures: the parts of `torch.cuda` that Megatron touches.


class Stream:
    """A stream on which everything has already finished."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def synchronize(self, *_args: Any) -> None:
        """Do nothing: operations finish before they return."""

    wait_stream = wait_event = synchronize

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

    def synchronize(self, *_args: Any) -> None:
        """Do nothing: operations finish before they return."""

    wait = synchronize

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
    """Return the high-water mark of this process's resident set in bytes."""
    # getrusage will not do: a program starts with the mark of the process that started it, and cannot lower it.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB


def reset_peak_resident(*_args: Any, **_kwargs: Any) -> None:
    """Lower the mark to the current size, if the kernel allows it; otherwise it stays that of the whole process."""
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
    """Make a stand-in that ignores its arguments."""
    return lambda _original: lambda *_args, **_kwargs: value


def _use(replacement: Any) -> Callable[[Any], Any]:
    """Make a stand-in that does not need the original."""
    return lambda _original: replacement


def _get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


_RUNTIME_CALLS: _Calls = {
    # device
    "torch.cuda.is_available": _constant(False),
    "torch.cuda.device_count": _constant(1),
    "torch.cuda.current_device": _constant(CPU),  # a device, which functions that are not mapped accept too
    "torch.cuda.set_device": _constant(None),
    "torch.cuda.get_device_name": _constant("cpu"),
    "torch.cuda.get_device_capability": _constant((0, 0)),
    "torch.cuda.get_device_properties": _use(_device_properties),
    "torch.cuda.is_bf16_supported": _constant(True),
    "torch.cuda.init": _constant(None),
    "torch.cuda._lazy_init": _constant(None),
    "torch.cuda._lazy_call": _use(lambda callback, **_kwargs: callback()),
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


# Tensor creation and movement: a CUDA device argument becomes the CPU, and pinned memory becomes plain memory.


# Functions that take a `device` keyword.
_FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace ones ones_like rand "
    "rand_like randint randint_like randn randn_like randperm scalar_tensor tensor tril_indices triu_indices "
    "zeros zeros_like"
).split()
_NEW_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()


def is_cuda_device(device: Any) -> bool:
    """Return whether a `device` argument (device, string, index or None) means a CUDA device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _creates_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and is_cuda_device(kwargs["device"]):
            kwargs["device"] = CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return create


def _moves_to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and is_cuda_device(args[0]):
            args = (CPU, *args[1:])
        elif "device" in kwargs and is_cuda_device(kwargs["device"]):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def _type_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    # Megatron's optimizers sort parameters by type names such as torch.cuda.FloatTensor.
    @functools.wraps(original)
    def type_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return type_of


def _returns_self(_original: Any) -> Callable[..., Any]:
    def same(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        return self

    return same


_TENSOR_CALLS: _Calls = {
    **{f"torch.{name}": _creates_on_cpu for name in _FACTORIES},
    **{f"torch.Tensor.{name}": _creates_on_cpu for name in _NEW_METHODS},
    "torch.Tensor.to": _moves_to_cpu,
    "torch.Tensor.cuda": _returns_self,
    "torch.nn.Module.cuda": _returns_self,
    "torch.Tensor.type": _type_as_on_cuda,
    "torch.Tensor.pin_memory": _returns_self,
    "torch.Tensor.record_stream": _constant(None),
}


# Process groups and collectives: NCCL groups become gloo groups.


def _makes_gloo_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if "nccl" in str(arguments.get("backend")):
            arguments["backend"] = "gloo"
        for nccl_option in ("pg_options", "device_id"):
            arguments.pop(nccl_option, None)
        return original(**arguments)

    return create


def _takes_split_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    # Megatron's token dispatcher turns split sizes into lists only when they lie on a CUDA device.
    def listed(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(output, input, listed(output_split_sizes), listed(input_split_sizes), *args, **kwargs)

    return all_to_all_single


def _rows_padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    padded = tensor.new_zeros((rows, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    return padded


def _gathers_uneven_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    # Experts with tensor parallelism send tensors of different sizes. NCCL takes them, but gloo wants equal ones.
    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        rows = max((part.shape[0] for part in tensor_list if part.ndim), default=0)
        if async_op or all(part.ndim == 0 or part.shape[0] == rows for part in tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        padded = _rows_padded(tensor, rows)
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        original(gathered, padded, group=group)
        for part, whole in zip(tensor_list, gathered, strict=True):
            part.copy_(whole[: len(part)])
        return None

    return all_gather


def _scatters_uneven_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter(output: torch.Tensor, input_list: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        rows = max((part.shape[0] for part in input_list if part.ndim), default=0)
        if kwargs.get("async_op") or all(part.ndim == 0 or part.shape[0] == rows for part in input_list):
            return original(output, input_list, *args, **kwargs)
        reduced = output.new_empty((rows, *output.shape[1:]))
        original(reduced, [_rows_padded(part, rows) for part in input_list], *args, **kwargs)
        output.copy_(reduced[: len(output)])
        return None

    return reduce_scatter


_COLLECTIVE_CALLS: _Calls = {
    "torch.distributed.init_process_group": _makes_gloo_groups,
    "torch.distributed.new_group": _makes_gloo_groups,
    "torch.distributed.distributed_c10d.new_group": _makes_gloo_groups,  # new_subgroups_* call this one
    "torch.distributed.new_subgroups_by_enumeration": _makes_gloo_groups,
    "torch.distributed.all_to_all_single": _takes_split_tensors,
    "torch.distributed.all_gather": _gathers_uneven_rows,
    "torch.distributed.reduce_scatter": _scatters_uneven_rows,
}


# torch.compile and its switches become the identity if TORCHDYNAMO_DISABLE=1 asks for eager execution anyway. torch
# honours the variable too, but imports the whole compiler first, which costs each process over a second. Optimizers do
# so when they are made and when they take a step.


def _identity_if_disabled(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def transform(function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
            return original(function, *args, **kwargs)
        return function if function is not None else lambda decorated: decorated

    return transform


def _plain_if_disabled(original: Callable[..., Any]) -> Callable[..., Any]:
    # torch._disable_dynamo keeps what it decorates in __wrapped__.
    return original.__wrapped__ if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else original  # type: ignore[attr-defined]


def _steps_without_breaks(original: Callable[..., Any]) -> Callable[..., Any]:
    # The same as torch's decorator, without the two graph breaks, which only matter to a compiler.
    step = _plain_if_disabled(original)
    if step is original:
        return original

    @functools.wraps(step)
    def with_grad_mode(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return with_grad_mode


_COMPILATION_CALLS: _Calls = {
    "torch.compile": _identity_if_disabled,
    "torch.compiler.disable": _identity_if_disabled,
    **{f"torch.optim.Optimizer.{name}": _plain_if_disabled
       for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad")},
    **{f"torch.optim.{name}.step": _steps_without_breaks for name in ("Adam", "SGD")},
}


MAPPED_CALLS: _Calls = {**_RUNTIME_CALLS, **_TENSOR_CALLS, **_COLLECTIVE_CALLS, **_COMPILATION_CALLS}


def resolve(name: str) -> tuple[Any, str]:
    """Return the owner object and the attribute name of a dotted name such as `torch.cuda.nvtx.range_push`."""
    first, *rest, attribute = name.split(".")
    owner: Any = importlib.import_module(first)
    for part in rest:
        owner = getattr(owner, part)
    return owner, attribute


class _CpuRngNotice(logging.Filter):
    """Drops Megatron's notice that the CPU generator moved inside a CUDA RNG context, since they are one generator."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def install_mapped_calls() -> int:
    """Replace every mapped call in this process and return how many there are. Call it only once."""
    # `with torch.device(...)` finds tensor constructors by identity, in a set built at first use. Build it before
    # they are replaced, since the replacements call the originals.
    _device_constructors()
    replacements = []
    for name, build in MAPPED_CALLS.items():
        owner, attribute = resolve(name)
        original = getattr(owner, attribute) if hasattr(owner, attribute) else None
        replacements.append((owner, attribute, build(original)))
    for owner, attribute, replacement in replacements:
        setattr(owner, attribute, replacement)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_CpuRngNotice())
    return len(replacements)


class CpuPlatform(Platform):
    """Platform of ranks that share the CPU cores of a host."""

    def __init__(self) -> None:
        self.name = "cpu"
        self.device = torch.device("cpu")
        self.backend = "gloo"

    def install(self) -> None:
        """Map CUDA calls to CPU. Raises RuntimeError if Megatron was imported before."""
        if "megatron.core" in sys.modules:
            raise RuntimeError(
                "CPU emulation must be installed before megatron.core is imported: call "
                "mimo.platform.get_platform first"
            )
        # Megatron's local GELU and SwiGLU fusions go through torch.compile, which would start a C++ compiler per run.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Some virtual machines report AMX and then fault on it in the first bf16 matrix product.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        count = install_mapped_calls()
        logger.info("CPU emulation is on: %d CUDA calls are mapped to CPU, NCCL groups to gloo", count)

    def set_device(self, local_rank: int) -> None:
        """Do nothing, because the processes share the cores."""

    def synchronize(self) -> None:
        """Do nothing, because CPU operations finish before they return."""

    def peak_memory_bytes(self) -> int:
        return peak_resident_bytes()

    def reset_peak_memory(self) -> None:
        reset_peak_resident()

    def drain_allocation_retries(self) -> int:
        return 0

    def device_memory(self) -> tuple[int, int]:
        """Free and total bytes of the host's memory."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def has_transformer_engine(self) -> bool:
        return False  # its kernels are CUDA only

    def has_mamba_kernels(self) -> bool:
        return False
