"""Private parts of PyTorch 2.13 and vLLM 0.32 that refits rely on; the rest of the package uses public names only.

Each entry says what it uses and why the public interface will not do. Look through it when one of the two is upgraded:
tests/unit/test_compat.py names what is gone.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

# `torch.utils._python_dispatch.TorchDispatchMode`: the only way to see what a loader does with tensors.
from torch.utils._python_dispatch import TorchDispatchMode


class TracingMode(TorchDispatchMode):
    """A dispatch mode whose handler PyTorch calls without telling its compiler to leave it alone.

    `TorchDispatchMode._should_skip_dynamo`: by default every operation sets and restores a state of the compiler, which
    takes about as long as a view. Nothing compiles while a loader is traced.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def untraced(operations: Iterable[Any]) -> Iterator[None]:
    """Context in which no dispatch mode sees these operations, except for `detach` behind `Tensor.data`.

    `Library._destroy`: registering kernels for the modes' dispatch key is public, but the registration only ends when
    the library is collected.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for operation in operations:
            library.impl(operation, torch.library.fallthrough_kernel, "Python")
        yield
    finally:
        library._destroy()


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


def copy_module_tables(module: torch.nn.Module) -> None:
    """Give a module copies of its tables, so that the originals stay as they are. See `module_tables`."""
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        vars(module)[name] = vars(module)[name].copy()


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


def unwrapped(worker: Any) -> Any:
    """Return a worker of vLLM without its wrapper. `WorkerWrapperBase.worker`: a call of a function gets either."""
    return vars(worker).get("worker") or worker


def forget_weight_update(worker: Any) -> None:
    """Have a worker of vLLM consider the weight update that it is in as over.

    `Worker._weight_update_active`: vLLM refuses a new update where a trainer began one and never ended it.
    """
    unwrapped(worker)._weight_update_active = False


# An attention layer's scale of keys, of values and of queries: tensors on the device and (not for queries) in host
# memory, and numbers.
CACHE_SCALES = (("_k_scale", "_k_scale_cpu", "_k_scale_float"), ("_v_scale", "_v_scale_cpu", "_v_scale_float"),
                ("_q_scale", "_q_scale_float"))


def set_cache_scales(layer: Any, scales: Sequence[float]) -> None:
    """Set the scales of an attention layer of vLLM with an FP8 cache, in place, because CUDA graphs read these tensors.

    `Attention._k_scale` and the others of `CACHE_SCALES`: vLLM sets them only from a checkpoint, and only if the
    checkpoint's quantisation has a scheme for the cache. Backends differ in which of them they read.

    Args:
        layer: the attention layer.
        scales: of keys, values and queries, in this order.
    """
    for (*tensors, number), scale in zip(CACHE_SCALES, scales, strict=True):
        for name in tensors:
            getattr(layer, name).fill_(scale)
        setattr(layer, number, scale)


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


def allocate_stage_inputs(worker: Any) -> None:
    """Have a worker of a later pipeline stage allocate the tensors in which it receives activations, on the CPU.

    `GPUModelRunner.intermediate_tensors`: vLLM allocates them when it warms up, which its CPU worker leaves out if the
    size of the KV cache is given (`CPUWorker._should_warm_up_model`). The first step then fails on an assertion.
    """
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.platforms import current_platform

    runner = unwrapped(worker).model_runner
    if current_platform.is_cpu() and not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device)


# Environment variable with the number of workers on each node of an engine of several nodes, for their processes.
NODE_WORKERS = "MIMO_ENGINE_NODE_WORKERS"


def count_workers_as_cpu_devices() -> None:
    """Have vLLM count a CPU as a device for each worker of this node, in an engine of several nodes.

    `CpuPlatform.device_count` is 1. `MessageQueue.create_from_process_group_single_reader` divides ranks by it to find
    out which are on its own node, and would look for all workers but the first elsewhere.
    """
    from vllm.platforms import current_platform

    if NODE_WORKERS in os.environ and current_platform.is_cpu():
        count = int(os.environ[NODE_WORKERS])
        type(current_platform).device_count = classmethod(lambda cls: count)  # type: ignore[attr-defined]


def worker_processes(executor: Any) -> list[Any]:
    """Return the processes of an executor's workers on this node. `MultiprocExecutor.workers`: vLLM names only those
    that it has seen end, and only in its log.
    """
    return [worker.proc for worker in vars(executor).get("workers") or ()]


def start_node_workers(arguments: dict[str, Any]) -> Any:
    """Start the workers of one node of an engine of several nodes, whose first node has the scheduler.

    `MultiprocExecutor` and `create_engine_config(headless=True)`, as `vllm serve --headless` uses them: `vllm.LLM`
    starts first nodes only.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = EngineArgs(**arguments).create_engine_config(usage_context=UsageContext.LLM_CLASS, headless=True)
    return MultiprocExecutor(config, monitor_workers=False)


def complete_cpu_communicator() -> None:
    """Give vLLM's communicator for CPUs the two collectives that data-parallel ranks need in order to share experts.

    `CpuCommunicator.all_gatherv` and `reduce_scatterv` raise NotImplementedError in vLLM 0.32, although its all-to-all
    for CPUs calls both.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(self, each, dim, sizes) for each in input_]
        assert dim == 0, dim
        if sizes is None:
            return self.all_gather(input_, dim=0)
        # Gloo gathers only equal sizes.
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[:len(input_)] = input_
        gathered = self.all_gather(padded, dim=0).view(len(sizes), *padded.shape)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

    def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
        assert dim == 0 and sizes is not None, (dim, sizes)
        summed = input_.clone()
        torch.distributed.all_reduce(summed, group=self.device_group)
        first = sum(sizes[:self.rank_in_group])
        return summed[first:first + sizes[self.rank_in_group]].contiguous()

    for function in (all_gatherv, reduce_scatterv):
        if function.__name__ not in vars(CpuCommunicator):  # A later version may have its own.
            setattr(CpuCommunicator, function.__name__, function)
