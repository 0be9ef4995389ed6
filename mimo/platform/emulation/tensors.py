"""Tensor creation and movement: a CUDA device argument becomes the CPU, pinned memory becomes plain memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")

# What takes a `device` keyword.
_FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace ones ones_like rand "
    "rand_like randint randint_like randn randn_like randperm scalar_tensor tensor tril_indices triu_indices "
    "zeros zeros_like"
).split()
_NEW_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()


def is_cuda_device(device: Any) -> bool:
    """Whether a `device` argument (device, string, index or None) means a CUDA device."""
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


def _ignores(_original: Any) -> Callable[..., None]:
    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    return nothing


CALLS: dict[str, Callable[[Any], Any]] = {
    **{f"torch.{name}": _creates_on_cpu for name in _FACTORIES},
    **{f"torch.Tensor.{name}": _creates_on_cpu for name in _NEW_METHODS},
    "torch.Tensor.to": _moves_to_cpu,
    "torch.Tensor.cuda": _returns_self,
    "torch.nn.Module.cuda": _returns_self,
    "torch.Tensor.type": _type_as_on_cuda,
    "torch.Tensor.pin_memory": _returns_self,
    "torch.Tensor.record_stream": _ignores,
}
