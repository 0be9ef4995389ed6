"""What a run reads and decodes, counted over processes and their workers."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from megatron.energon.epathlib import EPath

from data.energon.task_encoder import EncodedSample, Row, VlmTaskEncoder


class Events:
    """What processes did, as lines that each of them appends to one file: workers that are killed have told all."""

    def __init__(self) -> None:
        self._file = -1

    def record(self, path: Path) -> None:
        """Write to `path` from now on, here and in processes that are forked from here."""
        if self._file >= 0:
            os.close(self._file)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, kind: str, value: object) -> None:
        """Append a line."""
        if self._file >= 0:
            os.write(self._file, f"{kind} {value}\n".encode())


def watch(events: Events) -> None:
    """Note every shard that Energon opens, every read of one, and every sample whose images are decoded."""
    open_file, encode = EPath.open, VlmTaskEncoder.postencode_sample

    @functools.wraps(open_file)
    def noted_open(self: Any, mode: Any = "r", *arguments: Any, **options: Any) -> Any:
        file = open_file(self, mode, *arguments, **options)
        kind = {".tar": "shard", ".idx": "index"}.get(Path(str(self)).suffix)
        if kind is not None and mode == "rb":
            events.note(f"open-{kind}", self)
            read = file.read

            def noted_read(size: int = -1) -> bytes:
                data: bytes = read(size)
                events.note(f"read-{kind}", len(data))
                return data

            file.read = noted_read
        return file

    @functools.wraps(encode)
    def noted_encode(self: VlmTaskEncoder, sample: EncodedSample) -> Row:
        row: Row = encode(self, sample)
        events.note("decode", f"{len(sample.images)} {row.__key__}")
        return row

    EPath.open = noted_open  # type: ignore[method-assign]
    VlmTaskEncoder.postencode_sample = noted_encode
