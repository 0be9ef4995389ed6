"""Process groups and collectives: NCCL groups become gloo groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed


def _creates_gloo_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") is not None and "nccl" in str(kwargs["backend"]):
            kwargs["backend"] = "gloo"
        kwargs.pop("pg_options", None)  # NCCL's options
        kwargs.pop("device_id", None)
        return original(*args, **kwargs)

    return create


def _takes_split_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    # Megatron's token dispatcher turns split sizes into lists only when they lie on a CUDA device.
    def listed(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def all_to_all_single(output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = None,
                          input_split_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(output, input, listed(output_split_sizes), listed(input_split_sizes), *args, **kwargs)

    return all_to_all_single


def _without_device_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return original(*args, **kwargs)

    return barrier


CALLS: dict[str, Callable[[Any], Any]] = {
    "torch.distributed.new_group": _creates_gloo_group,
    "torch.distributed.distributed_c10d.new_group": _creates_gloo_group,
    "torch.distributed.new_subgroups_by_enumeration": _creates_gloo_group,
    "torch.distributed.all_to_all_single": _takes_split_tensors,
    "torch.distributed.barrier": _without_device_ids,
}
