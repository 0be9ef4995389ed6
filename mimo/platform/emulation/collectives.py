"""Process groups and collectives: NCCL groups become gloo groups."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed


def _makes_gloo_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if "nccl" in str(arguments.get("backend")):
            arguments["backend"] = "gloo"
        for of_nccl in ("pg_options", "device_id"):
            arguments.pop(of_nccl, None)
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


CALLS: dict[str, Callable[[Any], Any]] = {
    "torch.distributed.init_process_group": _makes_gloo_groups,
    "torch.distributed.new_group": _makes_gloo_groups,
    "torch.distributed.distributed_c10d.new_group": _makes_gloo_groups,  # new_subgroups_* call this one
    "torch.distributed.new_subgroups_by_enumeration": _makes_gloo_groups,
    "torch.distributed.all_to_all_single": _takes_split_tensors,
}
