"""Digests of the files that data flags name, for the record of a data set in a checkpoint (`stream_fields`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

# Everything that transformers reads of a tokenizer; a model's folder has other files too.
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
                   "chat_template*", "additional_chat_templates/*", "processor_config.json", "spiece.model",
                   "*.tiktoken")
# What `energon prepare` writes: shards with their sizes, splits, and how samples are read.
ENERGON_FILES = (".nv-meta/.info.*", ".nv-meta/split.*", ".nv-meta/dataset.*")


def content(files: Iterable[Path], root: Path) -> str:
    """A digest of some files, by their names below `root` and their bytes."""
    digest = hashlib.sha256()
    for path in sorted(files):
        name, data = str(path.relative_to(root)).encode(), path.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(data)) + data)
    return f"content {digest.hexdigest()[:16]}"


def content_of_folder(folder: str, patterns: Iterable[str]) -> str:
    """`content` of the files of a folder that fit a pattern; empty for no folder."""
    root = Path(folder)
    files = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    return content(files, root) if folder else ""


def content_of_data(path: str) -> str:
    """What the path of a data set for Energon names: a prepared folder, a blend in YAML, or a file of samples.

    A prepared folder may hold terabytes: its index stands for it, and the length of a file for the file.
    """
    place = Path(path)
    if place.is_dir():
        return content_of_folder(path, ENERGON_FILES)
    if place.suffix in (".yaml", ".yml"):
        return content([place], place.parent)
    return f"{place.stat().st_size} bytes"
