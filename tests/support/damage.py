"""Change files of a checkpoint for a moment: its index, single bytes, stored items, code hidden in a pickle."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

INDEX, COMMON, CHECKSUMS = ".metadata", "common.pt", "checksums.json"
Change = Callable[[Path], None]


def read_index(folder: Path) -> Metadata:
    """Return the index, as torch reads it."""
    found: Metadata = pickle.loads((folder / INDEX).read_bytes())
    return found


def write_index(folder: Path, metadata: Any) -> None:
    write_with_checksum(folder / INDEX, pickle.dumps(metadata))


def write_with_checksum(path: Path, data: bytes) -> None:
    """Replace a file as someone would who means it."""
    path.write_bytes(data)
    if not (path.parent / CHECKSUMS).is_file():
        return
    checksums = json.loads((path.parent / CHECKSUMS).read_text())
    checksums[path.name] = {"0": zlib.crc32(data)}
    (path.parent / CHECKSUMS).write_text(json.dumps(checksums))


def tensors_of(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of a checkpoint by key."""
    return {key: value for key, value in read_index(folder).state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)}


def items_of(folder: Path) -> list[MetadataIndex]:
    """List the stored items: pieces of tensors, and objects."""
    return list(read_index(folder).storage_data)


@contextlib.contextmanager
def changed(folder: Path, change: Change) -> Iterator[None]:
    """Inside, `change` is done to the checkpoint; its files are put back at the end."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    try:
        change(folder)
        yield
    finally:
        for path, content in before.items():
            if not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)


@contextlib.contextmanager
def edited_index(folder: Path) -> Iterator[Metadata]:
    """Give the index, and write it back as it is at the end."""
    metadata = read_index(folder)
    yield metadata
    write_index(folder, metadata)


# What follows changes the checkpoint `folder`. With `partial` for the other arguments, each is a `Change` that can be
# sent to another process.


def flip(item: MetadataIndex, folder: Path) -> None:
    """Invert one byte in the middle of a stored item."""
    place = read_index(folder).storage_data[item]
    with (folder / place.relative_path).open("r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def delete(key: str, folder: Path) -> None:
    """Take a tensor, or an object, out of the index."""
    with edited_index(folder) as metadata:
        del metadata.state_dict_metadata[key]
        metadata.storage_data = {item: place for item, place in metadata.storage_data.items() if item.fqn != key}


def rename(key: str, name: str, folder: Path) -> None:
    """Give a tensor another name."""
    with edited_index(folder) as metadata:
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(key)
        metadata.storage_data = {replace(item, fqn=name) if item.fqn == key else item: place
                                 for item, place in metadata.storage_data.items()}


def reshape(key: str, folder: Path) -> None:
    """Make a tensor one row longer in the index."""
    with edited_index(folder) as metadata:
        stored = metadata.state_dict_metadata[key]
        stored.size = torch.Size([stored.size[0] + 1, *stored.size[1:]])


def recast(key: str, folder: Path) -> None:
    """Store a tensor in half precision, everything consistent."""
    for item in items_of(folder):
        if item.fqn == key:
            store(item, torch.Tensor.half, folder)
    with edited_index(folder) as metadata:
        stored = metadata.state_dict_metadata[key]
        stored.properties = replace(stored.properties, dtype=torch.float16)


def drop_piece(key: str, folder: Path) -> None:
    """Take the first piece of a tensor out of the index."""
    with edited_index(folder) as metadata:
        chunk = metadata.state_dict_metadata[key].chunks.pop(0)
        del metadata.storage_data[MetadataIndex(key, chunk.offsets)]


def move_piece(key: str, folder: Path) -> None:
    """Say of the first piece of a tensor that it is where the next one is."""
    with edited_index(folder) as metadata:
        chunks = metadata.state_dict_metadata[key].chunks
        chunks[0] = replace(chunks[0], offsets=chunks[1].offsets)


def lose_place(item: MetadataIndex, folder: Path) -> None:
    """Forget where an item is stored."""
    with edited_index(folder) as metadata:
        del metadata.storage_data[item]


def add_tensor(key: str, folder: Path) -> None:
    """Put one more tensor into the index."""
    size = torch.Size([1])
    with edited_index(folder) as metadata:
        like = next(iter(tensors_of(folder).values()))
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            like.properties, size, [ChunkStorageMetadata(torch.Size([0]), size)])


def store(item: MetadataIndex, change: Callable[[Any], Any], folder: Path) -> None:
    """Store another value for an item, made of its own by `change`, with all that describes it."""
    with edited_index(folder) as metadata:
        place = metadata.storage_data[item]
        path = folder / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            value = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
        buffer = io.BytesIO()
        torch.save(change(value), buffer)
        data = buffer.getvalue()
        with path.open("ab") as file:
            offset = file.tell()
            file.write(data)
        metadata.storage_data[item] = replace(place, offset=offset, length=len(data))
    if (folder / CHECKSUMS).is_file():
        checksums = json.loads((folder / CHECKSUMS).read_text())
        checksums[place.relative_path][str(offset)] = zlib.crc32(data)
        (folder / CHECKSUMS).write_text(json.dumps(checksums))


def truncate(name: str, num_bytes: int, folder: Path) -> None:
    """Cut the end of a file off."""
    path = folder / name
    os.truncate(path, path.stat().st_size - num_bytes)


def remove(name: str, folder: Path) -> None:
    (folder / name).unlink()


def write(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)


@dataclass
class Bomb:
    """Makes a folder when it is unpickled."""

    path: str

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def plant(where: str | MetadataIndex, path: str, folder: Path) -> None:
    """Put a bomb that makes the folder `path` into a file of a checkpoint (INDEX, COMMON), or into a stored item.

    A bomb itself would go off on its way to another process.
    """
    bomb = Bomb(path)
    if where == INDEX:
        with edited_index(folder) as metadata:
            metadata.planner_data = bomb
    elif where == COMMON:
        common = torch.load(folder / COMMON, weights_only=True)
        buffer = io.BytesIO()
        torch.save({**common, "more": bomb}, buffer)
        write_with_checksum(folder / COMMON, buffer.getvalue())
    else:
        assert isinstance(where, MetadataIndex)
        store(where, lambda value: [bomb], folder)


def is_object(folder: Path, item: MetadataIndex) -> bool:
    """Return whether an item is an object, not a tensor."""
    return isinstance(read_index(folder).state_dict_metadata[item.fqn], BytesStorageMetadata)


def notes_after(rank: int, flags: tuple[str, ...], world_size: int, folder: Path, changes: list[Change]
                ) -> list[list[str]]:
    """Return the notes of loading after each change to the checkpoint in `folder`, on one process."""
    from mimo.checkpoint.load import load_checkpoint
    from mimo.training.setup import run_state
    from tests.support.resuming import SCHEDULE
    from tests.support.steps import trainer_of

    with trainer_of(rank, (*SCHEDULE, *flags), world_size) as (parts, loader):
        state, found = run_state(parts, loader), []
        for change in changes:
            with changed(folder, change):
                found.append(load_checkpoint(state, folder, parts.watchdog).notes)
    return found


def refusals(rank: int, flags: tuple[str, ...], world_size: int, folder: Path, changes: list[Change]
             ) -> list[str | None]:
    """Return the error of loading after each change to the checkpoint in `folder` on this rank, None if it loads.

    One trainer tries them all. "" where another rank has the word.
    """
    import torch.distributed as dist

    from mimo.checkpoint.load import load_checkpoint
    from mimo.training.setup import run_state
    from mimo.watchdog.process_exit import ReportedElsewhereError
    from tests.support.resuming import SCHEDULE
    from tests.support.steps import trainer_of

    found: list[str | None] = []
    with trainer_of(rank, (*SCHEDULE, *flags), world_size) as (parts, loader):
        state = run_state(parts, loader)
        for change in changes:
            with changed(folder, change) if rank == 0 else contextlib.nullcontext():
                dist.barrier()
                try:
                    load_checkpoint(state, folder, parts.watchdog)
                    found.append(None)
                except ValueError as error:
                    found.append(str(error))
                except ReportedElsewhereError:
                    found.append("")
                dist.barrier()
    return found
