"""The trainer's weights on a disk that engines elsewhere can read: safetensors and a manifest for each version."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mimo.checkpoint.paths import replace_file
from mimo.comm import broadcast_object, raise_on_any_rank
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel
from mimo.protocols import ModelProvider
from mimo.refit.messages import torch_dtype
from mimo.refit.rendezvous import RefitError
from mimo.refit.tensor_slices import TensorMeta, meta_as_json, meta_from_json
from mimo.refit.trainer_shards import ModelWeights, WholeTensors
from mimo.weights.safetensors_io import MAX_SHARD_BYTES, ShardWriter, TensorInfo, plan_shards, write_index

# A folder of weights for engines elsewhere: one subfolder for each policy version, complete once it has a manifest.
#
# The manifest is the chunk plan of `mimo.refit.trainer_shards` as a file. It is written last and in one step, so that a
# folder with a manifest is complete. It lists the contents of the other files, so that an engine can refuse them before
# it touches its weights.


MANIFEST = "refit_manifest.json"
FORMAT = 1
KEEP = 2  # complete versions that a writer keeps unless it is told otherwise
POLL_S = 0.05
_NUMBERED = re.compile(r"weights_(\d{7,})")


@dataclass(frozen=True)
class Manifest:
    """Contents of one subfolder.

    Attributes:
        version: policy version of the weights.
        entries: every tensor, in the order of the chunk plan.
        schemes: see `mimo.refit.trainer_shards.module_schemes`.
        file_bytes: size of each file of weights.
    """

    version: str
    entries: tuple[TensorMeta, ...]
    schemes: Sequence[Mapping[str, Any]]
    file_bytes: Mapping[str, int]

    def sequence(self) -> str:
        """Return a checksum of names, dtypes and shapes in their order, and of their other naming schemes."""
        return _digest([[meta_as_json(entry) for entry in self.entries], list(self.schemes)])

    def as_json(self) -> dict[str, Any]:
        """Return plain lists with a checksum of everything."""
        content = {"format": FORMAT, "version": self.version, "files": dict(self.file_bytes),
                   "entries": [meta_as_json(entry) for entry in self.entries], "spellings": list(self.schemes)}
        return content | {"checksum": _digest(content)}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read the result of `as_json`. Raises ValueError if it is something else, or if its checksum differs."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"it is not a manifest of format {FORMAT}")
        content = {key: part for key, part in value.items() if key != "checksum"}
        if _digest(content) != value.get("checksum"):
            raise ValueError("its checksum does not match its contents")
        return cls(value["version"], tuple(map(meta_from_json, value["entries"])), value["spellings"], value["files"])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest in one step, which makes a subfolder complete. Raises OSError."""
    replace_file(folder / MANIFEST, json.dumps(manifest.as_json()).encode())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a subfolder. Raises RefitError if there is none, or if it is damaged."""
    path = folder / MANIFEST
    try:
        return Manifest.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RefitError(f"{path} cannot be read; the weights are incomplete or deleted: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise RefitError(f"{path} is damaged: {error}") from error


def subfolders(root: Path) -> list[Path]:
    """List the subfolders of all versions, complete or not, in the order in which they were started."""
    if not root.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in root.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def is_complete(folder: Path) -> bool:
    """Whether a subfolder has its manifest."""
    return (folder / MANIFEST).is_file()


def next_subfolder(root: Path) -> Path:
    """Return the subfolder for the next weights."""
    begun = subfolders(root)
    number = int(begun[-1].name.rpartition("_")[2]) + 1 if begun else 1
    return root / f"weights_{number:07d}"


def prune(root: Path, keep: int) -> None:
    """Keep the last `keep` complete versions, and delete all others that were started before the last of them."""
    begun = subfolders(root)
    kept = [path for path in begun if is_complete(path)][-keep:]
    for path in begun[:begun.index(kept[-1])] if kept else ():
        if path not in kept:
            (path / MANIFEST).unlink(missing_ok=True)  # A folder with a manifest must be complete.
            shutil.rmtree(path)


def wait_for_weights(root: Path, version: str | None, timeout_s: float) -> Path:
    """Wait for a complete subfolder and return the newest.

    A version of None stands for any. The folder need not exist yet.

    Raises:
        RefitError: there is none in time, with what is there instead; or the manifest of the newest is damaged.
    """
    deadline = time.monotonic() + timeout_s
    versions: dict[Path, str | None] = {}
    while True:
        for folder in reversed(subfolders(root)):
            if folder not in versions and is_complete(folder):
                try:
                    versions[folder] = read_manifest(folder).version
                except RefitError:
                    if is_complete(folder):
                        raise
                    versions[folder] = None  # The trainer has deleted it in the meantime.
            if folder in versions and versions[folder] is not None and version in (None, versions[folder]):
                return folder
        if time.monotonic() > deadline:
            raise RefitError(f"no complete weights{f' of version {version!r}' if version is not None else ''} in "
                             f"{root} within {timeout_s:g} s: {_described(root)}")
        time.sleep(POLL_S)


def _described(root: Path) -> str:
    if not root.is_dir():
        return "there is no such folder"
    begun = subfolders(root)
    if not begun:
        return "no trainer has written there"
    lines = [f"{path.name} has version {read_manifest(path).version!r}" if is_complete(path)
             else f"{path.name} has no {MANIFEST} yet; it is being written or was abandoned" for path in begun[-3:]]
    return ", ".join(lines)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class DiskWriter:
    """Writes versions of a running trainer's weights. The constructor and `write` are collective over the world.

    The first rank gathers one whole tensor at a time and writes it. Names follow each module's first naming scheme. The
    engine finds out which scheme its loader accepts.

    Args:
        built: this rank's model.
        grids: process groups.
        provider: the model family.
        family_config: its configuration.
        folder: folder of all versions. Only the first rank uses it.
        dtype: dtype of weights: `bfloat16`, `float16` or `float32`. Tensors that must stay float32 keep it.
        keep: number of complete versions to keep. Use at least 2 if an engine may read one while the next is written.
        max_shard_bytes: largest size of a file's data.

    Raises:
        ValueError: on the first rank: the weight map and the model do not fit each other, or `keep` is below 1.
        ReportedElsewhereError: the same, on the other ranks.
    """

    def __init__(self, built: BuiltModel, grids: Grids, provider: ModelProvider, family_config: Any,
                 folder: str | Path, dtype: str, keep: int = KEEP, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        if keep < 1:
            raise ValueError(f"cannot keep {keep} of the versions written to {folder}: keep at least 1")
        held = ModelWeights(built, grids, provider, family_config, dtype).locate()
        self._grids, self._root, self._keep = grids, Path(folder), keep
        self._entries, self._schemes = tuple(held.entries), held.schemes
        self._shards = plan_shards([TensorInfo(entry.name, torch_dtype(entry.dtype), entry.shape)
                                    for entry in held.entries], max_shard_bytes)
        self._whole = WholeTensors(held, next(built.model.parameters()).device)

    def write(self, version: str) -> Path:
        """Write the present weights. Collective.

        Args:
            version: policy version that an engine with these weights returns with its answers.

        Returns:
            The folder of this version.

        Raises:
            ValueError: on the first rank: the disk cannot be written. Incomplete files are removed.
            ReportedElsewhereError: the same, on the other ranks.
        """
        target, writer, error = None, None, None
        if self._grids.rank == 0:
            try:
                target = next_subfolder(self._root)
                writer = ShardWriter(target, self._shards)
            except OSError as problem:
                error = f"refit weights of version {version!r} cannot be written to {self._root}: {problem}"
        raise_on_any_rank(self._grids, error)
        try:
            error = self._write(writer, version)
        finally:
            if writer is not None:
                writer.discard()
        raise_on_any_rank(self._grids, error)
        return Path(broadcast_object(self._grids, str(target)))

    def _write(self, writer: ShardWriter | None, version: str) -> str | None:
        """Write this rank's files. Return an error, or None.

        After an error the remaining tensors are still received, because other ranks are sending them.
        """
        error = None
        for entry, tensor in self._whole:
            try:
                if writer is not None and error is None:
                    writer.write(entry.name, tensor)
            except OSError as problem:
                error = str(problem)
        if writer is None:
            return None
        try:
            if error is None:
                writer.finish()
                writer.publish()
                write_index(writer.folder, self._shards)
                file_bytes = {shard.file: (writer.folder / shard.file).stat().st_size for shard in self._shards}
                write_manifest(writer.folder, Manifest(version, self._entries, self._schemes, file_bytes))
                prune(self._root, self._keep)
        except OSError as problem:
            error = str(problem)
        if error is not None:
            shutil.rmtree(writer.folder, ignore_errors=True)
            error = f"refit weights of version {version!r} cannot be written to {writer.folder}: {error}"
        return error
