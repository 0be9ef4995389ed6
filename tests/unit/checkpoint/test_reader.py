"""Files of a checkpoint are read as data, whatever they hold."""

from __future__ import annotations

import io
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.support.spawn import WorkerPool


def index() -> Metadata:
    """Return an index as saving writes it."""
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)]
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([4, 3]), chunks)
    storage = {MetadataIndex("weight", chunk.offsets): _StorageInfo("__0_0.distcp", 100 * number, 100)
               for number, chunk in enumerate(chunks)}
    storage[MetadataIndex("state")] = _StorageInfo("__0_1.distcp", 0, 50)
    return Metadata({"weight": tensor, "state": BytesStorageMetadata()}, storage_data=storage,
                    storage_meta=StorageMeta())


def read(rank: int, name: str, files: list[bytes], folder: Path) -> list[Any]:
    """Read each of `files` as the index or as the common state; what it is, or the error's text."""
    from mimo.checkpoint import reader

    function, file = (reader.read_index, ".metadata") if name == "index" else (reader.read_common, "common.pt")
    found: list[Any] = []
    for content in files:
        (folder / file).write_bytes(content)
        try:
            found.append(function(folder))
        except ValueError as error:
            found.append(str(error))
    return found


def test_the_index_is_read(pool: WorkerPool, tmp_path: Path) -> None:
    for protocol in (2, 4, 5):
        assert pool.run(read, "index", [pickle.dumps(index(), protocol)], tmp_path) == [[index()]]


def call(module: str, name: str, argument: str) -> bytes:
    """Return a pickle that calls a function; dots in a name walk into attributes."""
    words = [value.encode() for value in (module, name, argument)]
    packed = [b"\x8c" + bytes([len(word)]) + word for word in words]
    return b"\x80\x04" + packed[0] + packed[1] + b"\x93" + packed[2] + b"\x85R."


CALLS = [("os", "mkdir"), ("posix", "mkdir"), ("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr"),
         ("builtins", "__import__"), ("pathlib", "os.mkdir"), ("pathlib", "Path.mkdir"), ("torch", "load"),
         ("torch", "os.mkdir"), ("torch.serialization", "os.mkdir"), ("torch.serialization", "load"),
         ("torch.distributed.checkpoint.filesystem", "os.mkdir"), ("torch.hub", "load"), ("shutil", "rmtree"),
         ("torch.distributed.checkpoint.filesystem", "FileSystemReader"), ("functools", "partial"),
         ("megatron.core.dist_checkpointing.mapping", "logging.FileHandler"), ("subprocess", "Popen"),
         ("torch.distributed.checkpoint.metadata", "Metadata.__init__")]


def test_an_index_that_calls_functions_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    target = tmp_path / "made"
    messages = pool.run(read, "index", [call(*names, str(target)) for names in CALLS], tmp_path)[0]
    for (module, name), message in zip(CALLS, messages, strict=True):
        assert f"it refers to {module}.{name}, which is not data" in message, message
    assert not target.exists()
    pickle.loads(call("os", "mkdir", str(target)))
    assert target.is_dir(), "these pickles do run"


def test_a_file_that_is_not_an_index_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    files = [b"", b"text", pickle.dumps({"a": 1}), pickle.dumps(Metadata({})), pickle.dumps(index())[:-20]]
    for message in pool.run(read, "index", files, tmp_path)[0]:
        assert isinstance(message, str) and str(tmp_path / ".metadata") in message


def common_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"iteration": 7, "config": "x = 1", "nested": {"list": [1.5, None, "a"]}}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["index", "common"])
def test_any_damaged_byte_gives_a_clear_error(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    """Never another exception, and with a checksum nothing but an error."""
    content = pickle.dumps(index()) if name == "index" else common_file()
    places = range(len(content)) if name == "index" else range(0, len(content), 3)
    # Other bits turn an instruction into one that asks for gigabytes.
    files = [content[:place] + bytes([content[place] ^ 2]) + content[place + 1:] for place in places]
    files += [content[:place] for place in places if place % 3 == 0]
    refused = [message for message in pool.run(read, name, files, tmp_path)[0] if isinstance(message, str)]
    assert len(files) / 4 < len(refused) < len(files), "some damage only a checksum tells"
    assert all(str(tmp_path) in message for message in refused)
    file = ".metadata" if name == "index" else "common.pt"
    (tmp_path / "checksums.json").write_text(json.dumps({file: {"0": zlib.crc32(content)}}))
    (whole,) = pool.run(read, name, [content], tmp_path)[0]
    assert not isinstance(whole, str)
    for message in pool.run(read, name, files, tmp_path)[0]:
        assert message == f"{tmp_path / file} is damaged: its bytes are not those that were saved (checksum)"


def check_cover(rank: int) -> None:
    from mimo.checkpoint.reader import is_covered

    def stored(*pieces: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorStorageMetadata:
        return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((4, 2)), [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in pieces])

    top, bottom = ((0, 0), (1, 2)), ((1, 0), (3, 2))
    assert is_covered(stored(top, bottom))
    for pieces in ([], [top], [top, top, bottom], [top, ((1, 0), (4, 2))], [((0,), (8,))], [((0, 0), (4,))]):
        assert not is_covered(stored(*pieces)), pieces


def test_cover(pool: WorkerPool) -> None:
    pool.run(check_cover)
