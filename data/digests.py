"""Digests of the files that data flags name, for the record of a data set in a checkpoint (`stream_fields`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.energon.epathlib import EPath

# Everything that transformers reads for a tokenizer. The folder of a model has other files too.
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
                   "chat_template*", "additional_chat_templates/*", "processor_config.json", "spiece.model",
                   "*.tiktoken")
# Files that `energon prepare` writes: shards with their sizes, splits, and how samples are read.
ENERGON_FILES = (".nv-meta/.info.*", ".nv-meta/split.*", ".nv-meta/dataset.*")
ENERGON_SUFFIXES = ("json", "yaml", "yml")


def content[P: (Path, EPath)](files: Iterable[P], root: P) -> str:
    """Compute a digest of files from their names below `root` and their bytes."""
    digest = hashlib.sha256()
    for path in sorted(files):
        name, data = str(path.relative_to(root)).encode(), path.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(data)) + data)
    return f"content {digest.hexdigest()[:16]}"


def content_of_folder(folder: str, patterns: Iterable[str]) -> str:
    """Compute `content` of the files of a folder that match a pattern; empty without a folder."""
    root = Path(folder)
    files = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    return content(files, root) if folder else ""


def content_of_data(path: str) -> str:
    """Compute the digest of a data set for Energon: a prepared folder, a blend in YAML, or a file of samples.

    A prepared folder may hold terabytes, so only its index is read. A file of samples counts only by its length. The
    path may be one that Energon opens on remote storage (`msc://`).
    """
    # Energon takes seconds to import, and data sets without it use this module too.
    from megatron.energon.epathlib import EPath

    root = EPath(path)
    if root.is_dir():
        files = (root / pattern.replace("*", suffix) for pattern in ENERGON_FILES for suffix in ENERGON_SUFFIXES)
        return content([file for file in files if file.is_file()], root)
    if path.endswith((".yaml", ".yml")):
        return content([root], root.parent)
    return f"{root.size()} bytes"
