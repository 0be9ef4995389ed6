"""The last part of a save, on rank 0: the index, checksums and common state are written, then the folder is named."""

from __future__ import annotations

import io
import json
import pickle
import threading
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from mimo.checkpoint import paths
from mimo.checkpoint.reader import CHECKSUMS, COMMON, INDEX

CONFIG_FILE = "run_config.toml"
# Seconds that the publishing thread leaves to the one that has started it.
START_S = 0.001


@dataclass
class Content:
    """What rank 0 writes of a checkpoint besides its own tensors.

    Attributes:
        metadata: the index, without places in files.
        written: what each rank has written, `Write.written` of each.
        common: what is the same on every rank.
    """

    metadata: Metadata
    written: list[bytes]
    common: dict[str, Any]


class Publication:
    """Publishes one checkpoint in a thread of its own: training does not wait for the disk.

    Args:
        root: folder of the run's checkpoints.
        iteration: of the checkpoint.
        content: what is still to be written.
        keep_last: complete checkpoints to keep; None keeps all.
    """

    def __init__(self, root: Path, iteration: int, content: Content, keep_last: int | None) -> None:
        self._root, self._iteration, self._content, self._keep_last = root, iteration, content, keep_last
        self._error: str | None = "the publisher has not run to its end"
        self._thread = threading.Thread(target=self._run, name="checkpoint publisher", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread is still at it."""
        return self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait for the thread. Returns what went wrong, or None."""
        self._thread.join()
        return self._error

    def _run(self) -> None:
        # Whoever has started this thread goes on first. It would wait a whole switch interval of the interpreter.
        time.sleep(START_S)
        try:
            _write_content(paths.unfinished_dir(self._root, self._iteration), self._content)
            paths.publish(self._root, self._iteration, self._keep_last)
            self._error = None
        except OSError as error:
            self._error = f"{type(error).__name__}: {error}"


def _write_content(folder: Path, content: Content) -> None:
    metadata = content.metadata
    checksums: dict[str, dict[int, int]] = {}
    metadata.storage_data = {}
    for of_rank in content.written:
        for fqn, offsets, name, offset, length, checksum in json.loads(of_rank):
            index = MetadataIndex(fqn, None if offsets is None else torch.Size(offsets))
            metadata.storage_data[index] = _StorageInfo(name, offset, length)
            checksums.setdefault(name, {})[offset] = checksum
    metadata.storage_meta, metadata.version = StorageMeta(), CURRENT_DCP_VERSION
    common = io.BytesIO()
    torch.save(content.common, common)
    for name, data in ((INDEX, pickle.dumps(metadata)), (COMMON, common.getvalue())):
        paths.write_file(folder / name, data)
        checksums[name] = {0: zlib.crc32(data)}
    paths.write_file(folder / CHECKSUMS, json.dumps(checksums).encode())
    paths.write_file(folder / CONFIG_FILE, content.common["config"].encode())
    config = CheckpointingConfig("torch_dist", 1)
    paths.write_file(folder / paths.METADATA, json.dumps(asdict(config)).encode())
