"""Weights for engines elsewhere: what a trainer's ranks write together, and a live engine that loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mimo.refit.rendezvous import RefitError
from mimo.refit.transport.disk import is_complete, read_manifest, subfolders, wait_for_weights
from mimo.rollout.process import EngineProcess
from tests.dist.test_refit import MAX_ERROR
from tests.support import equality, refit, refit_disk, weights
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

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
    by_rank = pool.run(refit_disk.write_versions, (*flags, *layout.split()), world_size, str(source), str(root), dtype,
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
    first, second = pool.run(refit_disk.broken_writes, (*TEXT, "--llm-tp", "2", "--sequence-parallel"), 2, str(source),
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
        by_rank = pool.run(refit_disk.sync, name, str(folder), ("--llm-tp", "2", "--sequence-parallel"), 2,
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
