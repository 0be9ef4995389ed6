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


@dataclass
class Flip:
    """Invert one byte in the middle of a stored item."""

    item: MetadataIndex

    def __call__(self, folder: Path) -> None:
        place = read_index(folder).storage_data[self.item]
        with (folder / place.relative_path).open("r+b") as file:
            file.seek(place.offset + place.length // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0xFF]))


@dataclass
class Delete:
    """Take a tensor, or an object, out of the index."""

    key: str

    def __call__(self, folder: Path) -> None:
        metadata = read_index(folder)
        del metadata.state_dict_metadata[self.key]
        metadata.storage_data = {item: place for item, place in metadata.storage_data.items() if item.fqn != self.key}
        write_index(folder, metadata)


@dataclass
class Rename:
    """Give a tensor another name."""

    key: str
    name: str

    def __call__(self, folder: Path) -> None:
        metadata = read_index(folder)
        metadata.state_dict_metadata[self.name] = metadata.state_dict_metadata.pop(self.key)
        metadata.storage_data = {replace(item, fqn=self.name) if item.fqn == self.key else item: place
                                 for item, place in metadata.storage_data.items()}
        write_index(folder, metadata)


@dataclass
class Reshape:
    """Make a tensor one row longer in the index."""

    key: str

    def __call__(self, folder: Path) -> None:
        metadata = read_index(folder)
        stored = metadata.state_dict_metadata[self.key]
        stored.size = torch.Size([stored.size[0] + 1, *stored.size[1:]])
        write_index(folder, metadata)


@dataclass
class Recast:
    """Store a tensor in another dtype, everything consistent."""

    key: str
    dtype: torch.dtype = torch.float16

    def __call__(self, folder: Path) -> None:
        for item in items_of(folder):
            if item.fqn == self.key:
                Replace(item, lambda value: value.to(self.dtype))(folder)
        metadata = read_index(folder)
        stored = metadata.state_dict_metadata[self.key]
        stored.properties = replace(stored.properties, dtype=self.dtype)
        write_index(folder, metadata)


@dataclass
class DropPiece:
    """Take one piece of a tensor out of the index."""

    key: str
    number: int = 0

    def __call__(self, folder: Path) -> None:
        metadata = read_index(folder)
        chunk = metadata.state_dict_metadata[self.key].chunks.pop(self.number)
        del metadata.storage_data[MetadataIndex(self.key, chunk.offsets)]
        write_index(folder, metadata)


@dataclass
class MovePiece:
    """Say of one piece of a tensor that it is where the next one is."""

    key: str

    def __call__(self, folder: Path) -> None:
        metadata = read_index(folder)
        chunks = metadata.state_dict_metadata[self.key].chunks
        chunks[0] = replace(chunks[0], offsets=chunks[1].offsets)
        write_index(folder, metadata)


@dataclass
class LosePlace:
    """Forget where an item is stored."""

    item: MetadataIndex

    def __call__(self, folder: Path) -> None:
        metadata = read_index(folder)
        del metadata.storage_data[self.item]
        write_index(folder, metadata)


@dataclass
class AddTensor:
    """Put one more tensor into the index."""

    key: str

    def __call__(self, folder: Path) -> None:
        metadata = read_index(folder)
        like = next(iter(tensors_of(folder).values()))
        size = torch.Size([1])
        metadata.state_dict_metadata[self.key] = TensorStorageMetadata(
            like.properties, size, [ChunkStorageMetadata(torch.Size([0]), size)])
        write_index(folder, metadata)


@dataclass
class Replace:
    """Store another value for an item, with all that describes it."""

    item: MetadataIndex
    change: Callable[[Any], Any]

    def __call__(self, folder: Path) -> None:
        metadata = read_index(folder)
        place = metadata.storage_data[self.item]
        path = folder / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            value = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
        buffer = io.BytesIO()
        torch.save(self.change(value), buffer)
        data = buffer.getvalue()
        with path.open("ab") as file:
            offset = file.tell()
            file.write(data)
        metadata.storage_data[self.item] = replace(place, offset=offset, length=len(data))
        write_index(folder, metadata)
        if not (folder / CHECKSUMS).is_file():
            return
        checksums = json.loads((folder / CHECKSUMS).read_text())
        checksums[place.relative_path][str(offset)] = zlib.crc32(data)
        (folder / CHECKSUMS).write_text(json.dumps(checksums))


@dataclass
class Truncate:
    """Cut the end of a file off."""

    name: str
    num_bytes: int

    def __call__(self, folder: Path) -> None:
        path = folder / self.name
        os.truncate(path, path.stat().st_size - self.num_bytes)


@dataclass
class Remove:
    """Delete a file."""

    name: str

    def __call__(self, folder: Path) -> None:
        (folder / self.name).unlink()


@dataclass
class Write:
    """Put something else into a file."""

    name: str
    content: bytes

    def __call__(self, folder: Path) -> None:
        (folder / self.name).write_bytes(self.content)


@dataclass
class Bomb:
    """Makes a folder when it is unpickled."""

    path: str

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@dataclass
class Plant:
    """Put a bomb into a file of a checkpoint, or into a stored item.

    Attributes:
        where: INDEX, COMMON, or an item.
        path: the folder that it makes. (A bomb itself would go off on its way to another process.)
    """

    where: str | MetadataIndex
    path: str

    def __call__(self, folder: Path) -> None:
        bomb = Bomb(self.path)
        if self.where == INDEX:
            metadata = read_index(folder)
            metadata.planner_data = bomb
            write_index(folder, metadata)
        elif self.where == COMMON:
            common = torch.load(folder / COMMON, weights_only=True)
            buffer = io.BytesIO()
            torch.save({**common, "more": bomb}, buffer)
            write_with_checksum(folder / COMMON, buffer.getvalue())
        else:
            assert isinstance(self.where, MetadataIndex)
            Replace(self.where, lambda value: [bomb])(folder)


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
