"""Writes the files of a checkpoint from host memory, with checksums of everything that is written."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import weakref
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from mimo.checkpoint import compat, paths
from mimo.checkpoint.reader import CHECKSUMS, COMMON, INDEX
from mimo.comm import broadcast_object, gather_at, raise_known_errors
from mimo.grid.groups import Grids


@dataclass
class PlannedFile:
    """A file of this rank.

    Attributes:
        name: name of the file inside the checkpoint.
        objects: objects at its beginning. Their unique keys are in `index.fqn`.
        tensors: tensors after them, in order, as they are in the running model and its optimizers.
    """

    name: str
    objects: list[WriteItem]
    tensors: list[tuple[WriteItem, torch.Tensor]]


@dataclass
class Plan:
    """Plan of this rank's writes. It is made once with Megatron Core and then used by every save of the run.

    Attributes:
        files: this rank's files.
        metadata: the index of all ranks' tensors and objects, without their places in files; only on rank 0.
    """

    files: list[PlannedFile]
    metadata: Metadata | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of all files, in order."""
        return [tensor for file in self.files for _, tensor in file.tensors]


def make_plan(sharded: dict[str, Any], grids: Grids, files_per_rank: int) -> Plan:
    """Plan a save. Collective over the world.

    The files of a rank, at most `files_per_rank`, have about the same size.

    Raises:
        ValueError: the ranks' slices of a tensor overlap or leave something out; raised on rank 0.
        ReportedElsewhereError: the same, on the other ranks.
    """
    tensors = [entry for entry in nested_values(sharded) if isinstance(entry, ShardedTensor)]
    # Megatron Core would plan copies of other tensors, and later saves would write these copies unchanged.
    strided = [entry.key for entry in tensors if not entry.data.is_contiguous()]
    assert not strided, f"not contiguous: {', '.join(strided)}"
    # Only rank 0 gathers the slices and checks that they make up whole tensors: there are as many as ranks times
    # tensors.
    slices = gather_at(grids, [entry.without_data() for entry in nested_values(sharded)], 0)
    error = None
    if slices is not None:
        try:
            validate_sharding_integrity(slices)
        except CheckpointingException as problem:
            error = f"the checkpoint would not be whole: {problem}"
    raise_known_errors(grids, [broadcast_object(grids, error)])
    # Only main replicas are kept. `spread_replicas` has chosen one for each piece, so the planner has none to remove.
    by_key, _, _ = compat.by_stored_key(sharded, True)
    state = torch_strategy.mcore_to_pyt_state_dict(by_key, False)
    planner = torch_strategy.MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, is_coordinator=grids.rank == 0)
    local = planner.create_local_plan()
    plans = gather_at(grids, local, 0)
    metadata = None if plans is None else planner.create_global_plan(plans)[1]
    files: list[PlannedFile] = []
    for items in compat.split_into_files(files_per_rank, local.items):
        if items:
            values = [(item, planner.resolve_data(item)) for item in items if item.type != WriteItemType.BYTE_IO]
            objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
            files.append(PlannedFile(f"__{grids.rank}_{len(files)}.distcp", objects, values))
    plan = Plan(files, metadata)
    assert {tensor.data_ptr() for tensor in plan.tensors} <= {entry.data.data_ptr() for entry in tensors}
    return plan


def serialized_objects(sharded: dict[str, Any]) -> dict[str, bytes]:
    """Serialize the objects that this rank writes as Megatron Core does, by unique key."""
    found = {}
    for entry in nested_values(sharded):
        if isinstance(entry, ShardedObject) and is_main_replica(entry.replica_id):
            buffer = io.BytesIO()
            torch.save([entry.data], buffer)
            found[entry.unique_key] = buffer.getvalue()
    return found


# Copies in a buffer begin at multiples of this many bytes.
_ALIGNMENT = 64


class HostBuffer:
    """Host memory into which a plan's tensors are copied before writing. Kept between saves; page-locked on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unlock: weakref.finalize[Any, HostBuffer] | None = None
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []

    def lay_out(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return a copy's place for each of `tensors`, as a tensor whose storage has no other bytes."""
        sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        self._sources, self._targets = list(tensors), []
        self._reserve(sum(sizes))
        begin = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            part = self._memory[begin: begin + tensor.numel() * tensor.element_size()]
            self._targets.append(with_own_storage(part).view(tensor.dtype).view(tensor.shape))
            begin += size
        return self._targets

    def fill(self) -> None:
        """Copy the present values of the tensors."""
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source, non_blocking=self._on_cuda)
        if self._on_cuda:
            torch.cuda.synchronize()

    def _reserve(self, num_bytes: int) -> None:
        """Grow to at least `num_bytes`. Every page is touched, so that the first copy is as fast as later ones."""
        if num_bytes <= self._memory.numel():
            return
        if self._unlock is not None:
            self._unlock()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8)
        if self._on_cuda:
            # torch's own allocator of page-locked memory would round up to the next power of two.
            runtime, address = torch.cuda.cudart(), self._memory.data_ptr()
            code = int(runtime.cudaHostRegister(address, num_bytes, 0))
            if code:
                raise RuntimeError(f"--async-save: {num_bytes} bytes of host memory cannot be page-locked (CUDA error "
                                   f"{code}); leave it out, or raise the limit of locked memory (ulimit -l)")
            self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)


class SummedStream:
    """File that keeps the offset, length and CRC-32 of each item that is written to it.

    Attributes:
        error: the first error of the file. C++ code that writes to this stream raises another error instead.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None
        self._begin = self._place = self._checksum = 0

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._checksum = zlib.crc32(data, self._checksum)
        size = memoryview(data).nbytes
        self._place += size
        return size

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is complete."""

    def end_item(self, item: WriteItem, name: str) -> list[Any]:
        """Describe what was written since the last call as plain data.

        Returns:
            Key and offsets of the item, name of the file, offset, length and checksum.
        """
        offsets = None if item.index.offset is None else list(item.index.offset)
        described = [item.index.fqn, offsets, name, self._begin, self._place - self._begin, self._checksum]
        self._begin, self._checksum = self._place, 0
        return described


def save_item(tensor: torch.Tensor, stream: SummedStream) -> None:
    """Write a tensor with `torch.save`. Raises the OSError of the file, which C++ code replaces by another error."""
    try:
        torch.save(tensor, cast(BinaryIO, stream))
    except RuntimeError:
        if stream.error is None:
            raise
    if stream.error is not None:
        raise stream.error


def write_files(folder: Path, plan: Plan, objects: dict[str, bytes], copies: list[torch.Tensor] | None) -> bytes:
    """Write all files of this rank in parallel.

    `copies` are written in place of the plan's tensors, if there are any.

    Returns:
        Every item with its place and checksum, as JSON.

    Raises:
        OSError: the disk is full or a file cannot be written.
    """
    tensors = iter(plan.tensors if copies is None else copies)
    own = [[next(tensors) for _ in file.tensors] for file in plan.files]
    with ThreadPoolExecutor(max(len(plan.files), 1)) as pool:
        found = list(pool.map(partial(write_planned_file, folder, objects), plan.files, own))
    return json.dumps(list(itertools.chain.from_iterable(found))).encode()


def write_planned_file(folder: Path, objects: dict[str, bytes], planned: PlannedFile,
                       tensors: list[torch.Tensor]) -> list[list[Any]]:
    """Write one file. Return a description of each item, as `write_shared_files` takes them."""
    items = []
    with (folder / planned.name).open("wb") as file:
        stream = SummedStream(file)
        for item in planned.objects:
            stream.write(objects[item.index.fqn])
            items.append(stream.end_item(item, planned.name))
        for (item, _), tensor in zip(planned.tensors, tensors, strict=True):
            save_item(with_own_storage(tensor.cpu()), stream)
            items.append(stream.end_item(item, planned.name))
        file.flush()
        os.fsync(file.fileno())
    return items


def write_shared_files(folder: Path, metadata: Metadata, written: Iterable[list[Any]], common: dict[str, Any]) -> None:
    """Write the files that all ranks share: the index, the common state, and checksums.

    `written` are the items of all ranks, from `SummedStream.end_item`.

    Raises:
        OSError: a file cannot be written.
    """
    checksums: dict[str, dict[int, int]] = {}
    metadata.storage_data = {}
    for fqn, offsets, name, offset, length, checksum in written:
        index = MetadataIndex(fqn, None if offsets is None else torch.Size(offsets))
        metadata.storage_data[index] = compat.StorageInfo(name, offset, length)
        checksums.setdefault(name, {})[offset] = checksum
    metadata.storage_meta, metadata.version = StorageMeta(), CURRENT_DCP_VERSION
    buffer = io.BytesIO()
    torch.save(common, buffer)
    for name, data in ((INDEX, pickle.dumps(metadata)), (COMMON, buffer.getvalue())):
        paths.write_file(folder / name, data)
        checksums[name] = {0: zlib.crc32(data)}
    paths.write_file(folder / CHECKSUMS, json.dumps(checksums).encode())
    # This file makes the folder a complete checkpoint (`paths.METADATA`), so it comes last.
    config = CheckpointingConfig("torch_dist", 1)
    paths.write_file(folder / paths.METADATA, json.dumps(asdict(config)).encode())


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor with the same memory, whose storage has no other bytes. torch.save writes whole storages.

    A detour over numpy would do as well, but then the memory could never be given back, as `Fp8Weights` does.
    """
    tensor = tensor.contiguous()
    begin = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[begin : begin + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
