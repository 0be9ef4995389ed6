"""The trainer's weights on a disk that engines elsewhere can read: safetensors and a manifest for each version."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mimo.checkpoint.agree import from_first_rank, raise_together
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel
from mimo.protocols import ModelProvider
from mimo.refit.holdings import holdings
from mimo.refit.manifest import Manifest, next_subfolder, prune, write_manifest
from mimo.refit.trainer import module_spellings
from mimo.refit.whole import WholeTensors, entry_dtype
from mimo.weights.writer import MAX_SHARD_BYTES, ShardWriter, TensorInfo, plan_shards, write_index

KEEP = 2


class DiskWriter:
    """Writes a running trainer's weights, version after version. Construct it and `write` on all ranks together.

    The first rank gathers one whole tensor at a time and writes it. Names are those of each module's first spelling;
    the engine finds out which one its loader wants.

    Args:
        built: this rank's model.
        grids: process groups.
        provider: the model family.
        family_config: its configuration.
        folder: where versions are written; only the first rank sees it.
        dtype: of weights: `bfloat16`, `float16`, `float32`; what must stay float32 does.
        keep: complete versions that are kept. An engine reads one while the next is written: at least 2.
        max_shard_bytes: data of a file, at most.

    Raises:
        ValueError: on the first rank: the weight map and the model do not fit each other, or `keep` is below 1.
        ReportedElsewhereError: on the other ranks then.
    """

    def __init__(self, built: BuiltModel, grids: Grids, provider: ModelProvider, family_config: Any,
                 folder: str | Path, dtype: str, keep: int = KEEP, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        if keep < 1:
            raise ValueError(f"of the versions written to {folder}, {keep} are to be kept: it must be at least 1")
        held = holdings(built, grids, provider, family_config, dtype)
        maps = {module: provider.weight_map(family_config, module) for module in grids.layout.grids}
        self._grids, self._root, self._keep = grids, Path(folder), keep
        self._entries = tuple(held.entries)
        self._spellings = module_spellings(maps, [entry.name for entry in held.entries])
        (self._shards,) = plan_shards([[TensorInfo(entry.name, entry_dtype(entry), entry.shape)
                                        for entry in held.entries]], max_shard_bytes)
        self._whole = WholeTensors(built, held, next(built.model.parameters()).device)

    def write(self, version: str) -> Path:
        """Write the weights as they are now. Collective.

        Args:
            version: policy version that an engine returns with what it generates from them.

        Returns:
            The version's own folder.

        Raises:
            ValueError: on the first rank: the disk cannot be written; what was begun is removed again.
            ReportedElsewhereError: on the other ranks then.
        """
        target, writer, error = None, None, None
        if self._grids.rank == 0:
            try:
                target = next_subfolder(self._root)
                writer = ShardWriter(target, self._shards)
            except OSError as problem:
                error = f"refit weights of version {version!r} cannot be written to {self._root}: {problem}"
        raise_together(self._grids, error)
        try:
            error = self._write(writer, version)
        finally:
            if writer is not None:
                writer.discard()
        raise_together(self._grids, error)
        return Path(from_first_rank(self._grids, str(target)))

    def _write(self, writer: ShardWriter | None, version: str) -> str | None:
        """What went wrong on this rank. The rest of the tensors is still taken in: other ranks are sending it."""
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
                self._publish(writer, version)
        except OSError as problem:
            error = str(problem)
        if error is not None:
            shutil.rmtree(writer.folder, ignore_errors=True)
            error = f"refit weights of version {version!r} cannot be written to {writer.folder}: {error}"
        return error

    def _publish(self, writer: ShardWriter, version: str) -> None:
        writer.finish()
        writer.publish()
        write_index(writer.folder, self._shards)
        file_bytes = {shard.file: (writer.folder / shard.file).stat().st_size for shard in self._shards}
        write_manifest(writer.folder, Manifest(version, self._entries, self._spellings, file_bytes))
        prune(self._root, self._keep)


def write_weights(built: BuiltModel, grids: Grids, provider: ModelProvider, family_config: Any, folder: str | Path,
                  version: str, dtype: str, keep: int = KEEP) -> Path:
    """Write one version; see `DiskWriter`, which takes stock of the model only once for many. Collective."""
    return DiskWriter(built, grids, provider, family_config, folder, dtype, keep).write(version)
