"""The mock data set, with flags for a disk that is full or slow; importing it changes nothing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from mimo.checkpoint import paths
from mimo.protocols import Lane, TokenSpec
from mimo.registry import dataset_provider

mock_data = dataset_provider("mock")


@dataclass(frozen=True)
class Config(mock_data.Config):
    """Data set: mock data on a bad disk."""

    full_file: str = ""
    """File of a checkpoint for which the disk has no space: the kernel refuses its bytes."""
    full_at: int = 0
    """Iteration whose save meets the full disk; 0 for none."""
    fsync_s: float = 0.0
    """Seconds that the disk takes to confirm a file."""


begin, fsync = paths.begin, os.fsync


class DataOnABadDisk(type(mock_data)):
    Config: ClassVar[type] = Config

    def stream_fields(self, config: Any) -> dict[str, Any]:
        """Return the fields of the mock data: the disk decides no sample, and may be another one after a restart."""
        return {field.name: getattr(config, field.name) for field in fields(mock_data.Config)}

    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> Any:
        def begin_on_full_disk(root: Path, iteration: int) -> Path:
            folder = begin(root, iteration)
            if iteration == config.full_at:
                (folder / config.full_file).symlink_to("/dev/full")
            return folder

        def confirm_slowly(descriptor: int) -> None:
            time.sleep(config.fsync_s)
            fsync(descriptor)

        paths.begin, os.fsync = begin_on_full_disk, confirm_slowly
        return super().stream(config, tokens, lane)


provider = DataOnABadDisk()
