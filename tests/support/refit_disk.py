"""Trainers that write their weights for engines elsewhere; inside worker processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mimo.rollout.process import EngineHandle
from tests.support import hf_families, holdings, refit


def write_versions(rank: int, flags: tuple[str, ...], world_size: int, folder: str, root: str, dtype: str,
                   out: str) -> list[str]:
    """Write three versions, the weights twice as large and elsewhere each time; export the last one, too.

    Returns:
        The versions' folders.
    """
    vllm_was_imported = "vllm" in sys.modules
    from mimo.refit.transport.disk import DiskWriter
    from mimo.weights.export import ExportOptions
    from tests.support.export_live import export_model

    assert vllm_was_imported or "vllm" not in sys.modules, "a trainer may lack vLLM"
    found = []
    with holdings.loaded_model(flags, world_size, folder) as (built, grids, provider, config):
        writer = DiskWriter(built, grids, provider, config, root, dtype, keep=2, max_shard_bytes=20_000)
        for number in range(3):
            if number:
                holdings.reallocate(built, 2)
            found.append(str(writer.write(f"step {number}")))
        export_model(built, grids, provider, config, out, ExportOptions(dtype=dtype))
    return found


def broken_writes(rank: int, flags: tuple[str, ...], world_size: int, folder: str, root: str) -> list[tuple[str, str]]:
    """A disk that is full after two tensors, one that cannot be written at all, one of which the manifest cannot be
    written; kind and words of each error. Then a version is written after all."""
    from mimo.refit.transport import disk
    from mimo.watchdog.process_exit import ReportedElsewhereError
    from mimo.weights.safetensors_io import ShardWriter

    found, written = [], []
    real = ShardWriter.write

    def write(self: Any, name: str, tensor: torch.Tensor, first_row: int = 0) -> bool:
        if len(written) == 2:
            raise OSError("no space left")
        written.append(name)
        return real(self, name, tensor, first_row)

    def fail(*args: Any) -> None:
        raise OSError("read-only")

    with holdings.loaded_model(flags, world_size, folder) as (built, grids, provider, config):
        for owner, name, broken in ((ShardWriter, "write", write), (ShardWriter, "_begin", fail),
                                    (disk, "write_manifest", fail)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, broken)
                try:
                    disk.DiskWriter(built, grids, provider, config, root, "float32").write("bad")
                except (ValueError, ReportedElsewhereError) as error:
                    found.append((type(error).__name__, str(error)))
            dist.barrier(group=grids.host)
            found.append(("left", ", ".join(path.name for path in Path(root).glob("*/*"))))
        disk.DiskWriter(built, grids, provider, config, root, "float32").write("good")
    return found


def sync(rank: int, name: str, folder: str, layout: tuple[str, ...], world_size: int, handle: EngineHandle, root: str,
         prompts: dict[str, list[int]], steps: int) -> list[dict[str, Any]]:
    """Sync like `refit.sync`, but through a folder."""
    from mimo.refit.transport.disk import DiskWriter
    from mimo.registry import model_provider

    refit.register()
    flags = hf_families.flags_of(name, folder, layout)
    found = []
    with hf_families.trainer_of(flags, world_size) as parts:
        hf_families.load(parts, model=folder)
        writer = DiskWriter(parts.built, parts.grids, model_provider(parts.config.model.model_provider),
                            parts.config.model_family, root, "float32", max_shard_bytes=30_000)
        for step in range(steps):
            with torch.no_grad():
                refit.change(parts, step)
            writer.write(f"step {step}")
            ours = refit.logprobs_of(parts, hf_families._batches(rank, flags, world_size), hf_families.VOCAB_SIZE)
            theirs = None
            if rank == 0:
                assert handle.load_from_disk(root, f"step {step}", 30.0) == f"step {step}"
                answers = handle.prompt_logprobs([{"prompt_token_ids": tokens} for tokens in prompts.values()])
                theirs = dict(zip(prompts, answers, strict=True))
            dist.barrier(group=parts.grids.host)
            found.append({"ours": ours, "theirs": theirs})
    return found
