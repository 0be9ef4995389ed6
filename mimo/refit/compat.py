"""Private parts of PyTorch 2.13 and vLLM 0.32 that refits rely on; the rest of the package uses public names only.

Each entry says what it uses and why the public interface will not do. Look through it when one of the two is upgraded:
tests/unit/test_compat.py names what is gone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

# `torch.utils._python_dispatch.TorchDispatchMode`: the only way to see what a loader does with tensors.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# `aten._to_copy`: the operation behind `Tensor.to`, as a dispatch mode sees it.
TO_COPY = torch.ops.aten._to_copy.default


@functools.cache
def changed_arguments(operation: Any) -> tuple[tuple[int, str], ...]:
    """Return number and name of the arguments that an operation of torch changes.

    `OpOverload._schema`: no public attribute says what an operation writes to.
    """
    return tuple((number, argument.name) for number, argument in enumerate(operation._schema.arguments)
                 if argument.alias_info is not None and argument.alias_info.is_write)


def returns_something(operation: Any) -> bool:
    """Whether an operation of torch has a result. `OpOverload._schema`, as above."""
    return bool(operation._schema.returns)


def module_tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Return a module's own tables of parameters, buffers and names of buffers that are not saved, to change in place.

    `Module._parameters`, `_buffers`, `_non_persistent_buffers_set`: setting a parameter through the public interface
    would wrap it and move its name to the end.
    """
    return module._parameters, module._buffers, module._non_persistent_buffers_set


def nccl_options(timeout: timedelta) -> Any:
    """Return options of an NCCL group with a time limit. `ProcessGroupNCCL.Options._timeout` has no public setter."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


@contextmanager
def one_nccl_group(group: Any, works: list[Any]) -> Iterator[None]:
    """Have NCCL start what the block sends and receives in one group, and add its work to `works`.

    `ProcessGroup._start_coalescing` and `_end_coalescing`: the public `batch_isend_irecv` needs a group that is known
    to torch.distributed, and a refit's is not.
    """
    group._start_coalescing()
    yield
    works.append(group._end_coalescing())


# vLLM. The imports are inside: a trainer need not have it.


def is_engine_registered(backend: str) -> bool:
    """Whether vLLM knows a weight-transfer backend.

    `WeightTransferEngineFactory._registry`: registering twice fails, and nothing public lists what is registered.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    return backend in WeightTransferEngineFactory._registry


def weight_loaders(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Return the loader that vLLM's reloading has put on a tensor, and the model's own beneath it.

    `layerwise._get_weight_loader` and `_get_original_loader`: the wrapped loader is in a closure.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    return layerwise._get_weight_loader(tensor), layerwise._get_original_loader(tensor)


def place_kernel_tensors(layer: torch.nn.Module, info: Any) -> None:
    """Give a layer the tensors back that its kernels know. `layerwise._place_kernel_tensors`: vLLM has no public way to
    give up a reload that it has begun.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise._place_kernel_tensors(layer, info)


def forget_weight_update(worker: Any) -> None:
    """Have a worker of vLLM consider the weight update that it is in as over.

    `Worker._weight_update_active`: vLLM refuses a new update where a trainer began one and never ended it.
    """
    own = vars(worker).get("worker") or worker  # vLLM wraps it
    own._weight_update_active = False


def use_trainer_scales() -> None:
    """Have vLLM quantise blocks of weights with powers of two as scales, as Transformer Engine's blockwise products do.

    `vllm.utils.deep_gemm.per_block_cast_to_fp8`: weights that are quantised as they are loaded always get other scales,
    the largest value over 448. The function itself can do both.
    """
    from vllm.utils import deep_gemm as imported

    deep_gemm: Any = imported
    if deep_gemm.per_block_cast_to_fp8 is not _cast_with_powers_of_two:
        _VLLM["cast"] = deep_gemm.per_block_cast_to_fp8
        deep_gemm.per_block_cast_to_fp8 = _cast_with_powers_of_two
    importer: Any = sys.modules.get("vllm.model_executor.layers.quantization.online.fp8")
    if importer is not None:
        importer.per_block_cast_to_fp8 = _cast_with_powers_of_two


_VLLM: dict[str, Any] = {}


def _cast_with_powers_of_two(x: torch.Tensor, block_size: list[int], use_ue8m0: bool = True) -> Any:
    return _VLLM["cast"](x, block_size=block_size, use_ue8m0=True)
