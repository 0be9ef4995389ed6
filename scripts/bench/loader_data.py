"""Data of scripts/bench/loader.py: shards of drawn images, and a record of what ranks and their workers read."""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath
from PIL import Image

from data.digits import NAMES
from data.energon.shards import prepare_shards, write_shard
from data.energon.task_encoder import EncodedSample, Row, VlmTaskEncoder
from data.prompts import IMAGE_MARKER
from scripts.prepare_digits import write_tokenizer


def draw(index: int, size: int) -> tuple[str, bytes]:
    """Draw an image with the smooth areas and grain of a photograph. Returns extension and content of the file."""
    rng = np.random.default_rng(index)
    smooth = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
    grain = rng.integers(-8, 9, (size, size, 1))
    image = Image.fromarray(np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8))
    kind = ("JPEG", "jpg") if index % 2 else ("PNG", "png")
    buffer = io.BytesIO()
    image.save(buffer, format=kind[0], compress_level=1)  # JPEG ignores this option
    return kind[1], buffer.getvalue()


def write_shards(folder: Path, *, samples: int, shards: int, image_size: int, rank: int, world_size: int) -> None:
    """Write this process's part of the shards. Each image has a word of text."""
    def members(indices: Any) -> Iterator[tuple[str, bytes]]:
        for index in indices:
            extension, content = draw(int(index), image_size)
            yield f"{index:06d}.{extension}", content
            messages = [{"role": "user", "content": f"{IMAGE_MARKER} {NAMES[index % 10]}"},
                        {"role": "assistant", "content": str(index % 10)}]
            yield f"{index:06d}.json", json.dumps({"messages": messages}).encode()

    (folder / "shards").mkdir(exist_ok=True)
    split = np.array_split(np.arange(samples), shards)
    for number in range(rank, shards, world_size):
        write_shard(folder / "shards" / f"train-{number:05d}.tar", members(split[number]))


def prepare_images(folder: Path) -> None:
    """Prepare the shards as `energon prepare` does, and write a tokenizer."""
    shards = folder / "shards"
    names = sorted(path.name for path in shards.glob("*.tar"))
    prepare_shards(shards, names, ["train"])
    write_tokenizer(folder / "tokenizer")


class Events:
    """A log to which all processes append lines at once, so that killed workers have written everything, too."""

    def __init__(self) -> None:
        self._file = -1

    def record(self, path: Path) -> None:
        """Write to `path` from now on, here and in processes forked from here."""
        if self._file >= 0:
            os.close(self._file)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, kind: str, value: object) -> None:
        if self._file >= 0:
            os.write(self._file, f"{kind} {value}\n".encode())


def watch(events: Events) -> None:
    """Log every shard that Energon opens, every read from one, and every sample whose images it decodes."""
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
