"""Private parts of PyTorch 2.13 and Megatron Core 0.19.2 that several packages, or the watchdog, rely on.

What a single package needs of PyTorch, Megatron Core or vLLM is in that package's own `compat`. Each entry says what it
uses and why the public interface will not do. Look through these modules when one of the libraries is upgraded:
tests/unit/test_compat.py names what is gone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def storage_key(holder: torch.Tensor | torch.UntypedStorage) -> int:
    """Return a number that tells storages apart, given a storage or a tensor that uses it.

    `UntypedStorage._cdata`: the address of the data is 0 for all tensors on the meta device, and for all storages that
    were emptied. PyTorch could offer an identity of storages, as `id` is for objects.
    """
    storage = holder if isinstance(holder, torch.UntypedStorage) else holder.untyped_storage()
    return storage._cdata


def copy_together(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target in few launches.

    `torch._foreach_copy_`: there is no public copy of many tensors. With one launch a tensor, a refit or an update of a
    model of experts waits for the launches.
    """
    torch._foreach_copy_(targets, sources)


def process_group_names() -> dict[dist.ProcessGroup, str]:
    """Return torch's names of this rank's process groups, in the order in which the groups were created.

    `distributed_c10d._world.pg_names`: the flight recorder tells groups apart by these names. A group has the public
    `group_name`, but nothing public lists the groups that exist.
    """
    return dict(dist.distributed_c10d._world.pg_names)


def default_store() -> Any:
    """Return the store that `init_process_group` uses.

    `distributed_c10d._get_default_store`: PyTorch returns the store of `init_process_group` nowhere. A store of our own
    would need one more port on the first node.
    """
    return dist.distributed_c10d._get_default_store()


def flight_record(backend: str) -> bytes:
    """Return the pickled dump of torch's flight recorder.

    `torch._C._distributed_c10d._dump_nccl_trace` and `_dump_fr_trace`: PyTorch itself writes a dump only after its own
    time limit, when the watchdog has long ended the run.

    Args:
        backend: `nccl` or `gloo`.
    """
    c10d: Any = torch._C._distributed_c10d  # this module of torch has no stubs
    record = c10d._dump_nccl_trace if backend == "nccl" else c10d._dump_fr_trace
    # Without Python stacks, whose symbols may take many seconds. The watchdog's report has the stacks that matter.
    found: bytes = record(includeStackTraces=False)
    return found


def parameter_ranges(optimizer: Any, parameter: Any) -> tuple[Any, Any]:
    """Return which elements of a parameter this rank's optimizer owns: in the parameter, and in its bucket.

    `DistributedOptimizer._get_model_param_range_map`: the public state dict gathers whole parameters instead.
    """
    ranges = optimizer._get_model_param_range_map(parameter)
    return ranges["param"], ranges["gbuf_world_in_bucket"]
