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


def _rows_padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    padded = tensor.new_zeros((rows, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    return padded


def _gathers_uneven_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    # NCCL takes tensors of different sizes, as experts with tensor parallelism send them; gloo wants equal ones.
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


CALLS: dict[str, Callable[[Any], Any]] = {
    "torch.distributed.init_process_group": _makes_gloo_groups,
    "torch.distributed.new_group": _makes_gloo_groups,
    "torch.distributed.distributed_c10d.new_group": _makes_gloo_groups,  # new_subgroups_* call this one
    "torch.distributed.new_subgroups_by_enumeration": _makes_gloo_groups,
    "torch.distributed.all_to_all_single": _takes_split_tensors,
    "torch.distributed.all_gather": _gathers_uneven_rows,
    "torch.distributed.reduce_scatter": _scatters_uneven_rows,
}
