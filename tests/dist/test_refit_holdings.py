"""What ranks hold of a model, against what its export writes, on several layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support import refit, weights
from tests.support.spawn import WorkerPool

QWEN = ("--vocab-size", "90", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4",
        "--num-query-groups", "2", "--ffn-hidden-size", "48", "--qk-layernorm", "--max-position-embeddings", "64")


class Sources:
    """Random folders of the models, made when they are first asked for."""

    def __init__(self, pool: WorkerPool, root: Path) -> None:
        self.pool, self.root = pool, root
        (root / "deepseek-config").mkdir()
        (root / "deepseek-config" / "config.json").write_text(json.dumps(weights.DEEPSEEK))
        self.flags = {**weights.MODELS, "deepseek": ("--model-provider", "deepseek_v3", "--hf-config",
                                                     str(root / "deepseek-config"))}

    def folder(self, model: str) -> Path:
        folder = self.root / model
        if not folder.exists():
            self.pool.run(weights.write_source, self.flags[model], str(folder), world_size=1)
        return folder


@pytest.fixture(scope="module")
def sources(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(pool, tmp_path_factory.mktemp("sources"))


CASES = {
    "dense-tied-tp2-pp2": ("dense-tied", 3, "--llm-pp 2"),
    "vlm-tp2": ("vlm", 4, "--encoder-tp 2 --llm-tp 2 --sequence-parallel"),
    "moe-ep2": ("moe", 3, "--llm-dp 2 --llm-ep 2"),
    "deepseek-pp2": ("deepseek", 2, "--llm-pp 2"),
    "hybrid-tp2-ep2": ("hybrid", 4, "--llm-tp 2 --llm-dp 2 --sequence-parallel --llm-ep 4"),
}


@pytest.mark.parametrize("case", CASES)
def test_boxes_of_all_ranks_are_what_an_export_writes(pool: WorkerPool, sources: Sources, tmp_path: Path,
                                                      case: str) -> None:
    model, world_size, layout = CASES[case]
    found = pool.run(refit.held_and_exported, (*sources.flags[model], *layout.split()), world_size,
                     str(sources.folder(model)), str(tmp_path), world_size=world_size)
    for when in ("before", "after"):
        exported = weights.read_folder(tmp_path / when)
        entries = found[0]["entries"]
        assert {entry.name: entry.shape for entry in entries} == {
            name: tuple(tensor.shape) for name, tensor in exported.items()}
        whole = {entry.name: torch.full(entry.shape, torch.nan) for entry in entries}
        for rank in found:
            for name, place, values in rank[when]:
                assert torch.equal(values, exported[name][place]), name
                whole[name][place] = values
        assert [name for name, tensor in whole.items() if not torch.equal(tensor, exported[name])] == []
