"""Weights for engines elsewhere: what a trainer's ranks write together, and a live engine that loads it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mimo.refit.rendezvous import RefitError
from mimo.refit.transport.disk import is_complete, read_manifest, subfolders, wait_for_weights
from mimo.rollout.process import EngineHandle, EngineProcess
from tests.dist.test_refit import MAX_ERROR
from tests.support import equality, hf_families, holdings, refit, weights
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool


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


TEXT = (*"""--model-provider causal_lm --vocab-size 90 --num-layers 2 --hidden-size 32 --num-attention-heads 4
--num-query-groups 2 --kv-channels 8 --ffn-hidden-size 48 --max-position-embeddings 64 --qk-layernorm""".split(),
        *equality.MOE)
CASES = {"text-tp2-ep2-bfloat16": (TEXT, 4, "--llm-tp 2 --sequence-parallel --llm-dp 2 --llm-ep 2", "bfloat16"),
         "vlm-disjoint-float32": (weights.MODELS["vlm"], 3, "--llm-dp 2", "float32")}


@pytest.mark.parametrize("case", fast_only(["text-tp2-ep2-bfloat16"], CASES))
def test_versions_are_what_an_export_writes(pool: WorkerPool, tmp_path: Path, case: str) -> None:
    flags, world_size, layout, dtype = CASES[case]
    source, root, out = tmp_path / "source", tmp_path / "weights", tmp_path / "out"
    pool.run(weights.write_source, flags, str(source), world_size=1)
    by_rank = pool.run(write_versions, (*flags, *layout.split()), world_size, str(source), str(root), dtype,
                       str(out), world_size=world_size)
    assert all(folders == by_rank[0] for folders in by_rank)
    assert [str(path) for path in subfolders(root)] == by_rank[0][1:], "the first version is deleted"
    exported = weights.read_folder(out)
    for step, folder in enumerate(subfolders(root), start=1):
        manifest = read_manifest(folder)
        assert manifest.version == f"step {step}" and len(manifest.file_bytes) > 1
        written = weights.read_folder(folder)
        assert {entry.name: (f"torch.{entry.dtype}", entry.shape) for entry in manifest.entries} == {
            name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in written.items()}
        assert written.keys() == exported.keys()
        factor = 2 ** (2 - step)
        assert [name for name, tensor in written.items() if not torch.equal(factor * tensor, exported[name])] == []
    assert any(tensor.dtype == vars(torch)[dtype] for tensor in exported.values())
    assert wait_for_weights(root, None, 0) == subfolders(root)[-1]


def test_a_write_that_fails_is_one_error_and_leaves_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "weights"
    pool.run(weights.write_source, TEXT, str(source), world_size=1)
    first, second = pool.run(broken_writes, (*TEXT, "--llm-tp", "2", "--sequence-parallel"), 2, str(source),
                             str(root), world_size=2)
    for ours, theirs, told in zip(first[::2], second[::2], ("no space left", "read-only", "read-only"), strict=True):
        assert ours[0] == "ValueError" and told in ours[1] and "'bad' cannot be written" in ours[1]
        assert theirs[0] == "ReportedElsewhereError"
    assert [left for kind, left in first if kind == "left"] == ["", "", ""]
    assert [read_manifest(folder).version for folder in subfolders(root) if is_complete(folder)] == ["good"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_loads_what_a_trainer_has_written(pool: WorkerPool, tmp_path: Path) -> None:
    name, folder, root = "refit-qwen3-moe", tmp_path / "model", tmp_path / "weights"
    pool.run(refit.save, name, str(folder), world_size=1)
    prompts = pool.run(refit.prompts_of, name, str(folder), world_size=1)[0]
    process = EngineProcess(refit.engine_options(folder))
    try:
        with pytest.raises(RefitError, match="no complete weights in"):
            process.handle.load_from_disk(str(root), None, 0.1)
        by_rank = pool.run(sync, name, str(folder), ("--llm-tp", "2", "--sequence-parallel"), 2,
                           process.handle, str(root), prompts, 3, world_size=2, timeout_s=300)
        # What is damaged is refused, and the last good weights answer.
        newest = wait_for_weights(root, None, 0)
        file = next(iter(read_manifest(newest).file_bytes))
        (newest / file).write_bytes((newest / file).read_bytes()[:-8])
        with pytest.raises(RefitError, match="its manifest says"):
            process.handle.load_from_disk(str(root), None, 5.0)
        again = process.handle.prompt_logprobs([{"prompt_token_ids": tokens} for tokens in prompts.values()])
    finally:
        process.close()
    for step in range(3):
        ours = {key: each for rank in by_rank for key, each in rank[step]["ours"].items()}
        theirs = by_rank[0][step]["theirs"]
        assert ours.keys() == theirs.keys() == prompts.keys()
        for key, mine in ours.items():
            assert float((mine - torch.tensor(theirs[key])).abs().max()) <= MAX_ERROR, (step, key)
            if step:
                assert float((mine - torch.tensor(by_rank[0][step - 1]["theirs"][key])).abs().max()) > 1e-2
    assert dict(zip(prompts, again, strict=True)) == by_rank[0][2]["theirs"]
