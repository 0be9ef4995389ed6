"""Shards of drawn images for benchmarks, prepared for Megatron-Energon."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.digits import NAMES
from data.prompts import IMAGE_MARKER
from scripts.prepare_digits import write_tokenizer
from scripts.shards import prepare_shards, write_shard


def draw(index: int, size: int) -> tuple[str, bytes]:
    """An image with the smooth areas and the grain of a photograph, as PNG or JPEG: file extension and content."""
    rng = np.random.default_rng(index)
    smooth = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
    grain = rng.integers(-8, 9, (size, size, 1))
    image = Image.fromarray(np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8))
    kind = ("JPEG", "jpg") if index % 2 else ("PNG", "png")
    buffer = io.BytesIO()
    image.save(buffer, format=kind[0], compress_level=1)  # JPEG has no such option and passes over it
    return kind[1], buffer.getvalue()


def write_shards(folder: Path, *, samples: int, shards: int, image_size: int, rank: int, world_size: int) -> None:
    """Write one process's part of the shards: images with a word of text each."""
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
    """What `energon prepare` does with the shards, and a tokenizer."""
    shards = folder / "shards"
    names = sorted(path.name for path in shards.glob("*.tar"))
    prepare_shards(shards, names, ["train"])
    write_tokenizer(folder / "tokenizer")
