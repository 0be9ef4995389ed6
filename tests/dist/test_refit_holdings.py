"""The parts of a model that ranks hold, and whole tensors gathered from them, compared with the model's export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import equality, holdings, weights
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool
from tests.support.weights import Sources

# Model -> name of a layout -> processes, flags.
TEXT = {"tp2": (2, "--llm-tp 2 --sequence-parallel"), "pp2": (2, "--llm-pp 2"), "ep2": (2, "--llm-dp 2 --llm-ep 2"),
        "tp2-ep2": (4, "--llm-tp 2 --sequence-parallel --llm-dp 2 --llm-ep 2")}
DISJOINT = {"encoder-dp1-llm-dp2": (3, "--llm-dp 2"), "encoder-pp2-llm-pp2": (4, "--encoder-pp 2 --llm-pp 2"),
            "tp2": (4, "--encoder-tp 2 --llm-tp 2 --sequence-parallel"),
            "colocated": (2, "--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --sequence-parallel")}
EXPERTS = {"ep2": (3, "--llm-dp 2 --llm-ep 2"), "expert-tp2": (3, "--llm-tp 2 --sequence-parallel --llm-expt-tp 2")}
DENSE = {"tp2": TEXT["tp2"], "tp4": (4, "--llm-tp 4 --sequence-parallel"), "pp2": TEXT["pp2"]}
LAYOUTS = {"text": DENSE, "text-moe": TEXT, "deepseek": TEXT, "hybrid": TEXT, "dense-tied": DISJOINT, "moe": EXPERTS,
           "vlm": {name: DISJOINT[name] for name in ("encoder-dp1-llm-dp2", "tp2", "colocated")}}
CASES = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]
FAST = (("text-moe", "tp2-ep2"), ("dense-tied", "encoder-pp2-llm-pp2"), ("vlm", "tp2"), ("hybrid", "tp2-ep2"))
QWEN3 = """--model-provider causal_lm --vocab-size 90 --num-layers 2 --hidden-size 32 --num-attention-heads 4
--num-query-groups 2 --kv-channels 8 --ffn-hidden-size 48 --max-position-embeddings 64 --qk-layernorm""".split()


@pytest.fixture(scope="module")
def sources(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    text = {"text": (*QWEN3,), "text-moe": (*QWEN3, *equality.MOE)}
    return Sources(pool, tmp_path_factory.mktemp("sources"), text)


@pytest.mark.parametrize(("model", "layout"), fast_only(FAST, CASES))
def test_boxes_of_all_ranks_are_what_an_export_writes(pool, sources, tmp_path, model, layout):
    world_size, flags = LAYOUTS[model][layout]
    by_rank = pool.run(holdings.held_and_exported, (*sources.flags[model], *flags.split()), world_size,
                       str(sources.folder(model)), str(tmp_path), world_size=world_size)
    entries, holders = by_rank[0].entries, by_rank[0].holders
    assert all(held.entries == entries and held.holders == holders for held in by_rank)
    boxes = {(name, box, rank) for rank, held in enumerate(by_rank) for name, box, _ in held.values["before"]}
    assert boxes == {(name, part.box, rank) for name, parts in holders.items() for part in parts for rank in part.ranks}
    written = {}
    for when in ("before", "after"):
        exported = written[when] = weights.read_folder(tmp_path / when)
        assert {entry.name: entry.shape for entry in entries} == {
            name: tuple(tensor.shape) for name, tensor in exported.items()}
        whole = {name: torch.full_like(tensor, torch.nan) for name, tensor in exported.items()}
        for name, box, values in (box for held in by_rank for box in held.values[when]):
            place = box.slices
            assert torch.equal(values, exported[name][place]), name  # of every replica
            whole[name][place] = values
        assert [name for name, tensor in whole.items() if not torch.equal(tensor, exported[name])] == []
    assert all(torch.equal(3 * tensor, written["after"][name]) for name, tensor in written["before"].items())


@pytest.mark.parametrize(("model", "layout"), [
    ("deepseek", "tp2-ep2"), pytest.param("vlm", "tp2", marks=pytest.mark.slow)])
def test_whole_tensors_are_gathered_as_they_are_now(pool, sources, model, layout):
    folder = sources.folder(model)
    source = weights.read_folder(folder)
    world_size, flags = LAYOUTS[model][layout]
    # Numbers that bfloat16 does not tell apart.
    (num_experts,) = {len(tensor) for name, tensor in source.items() if name.endswith("e_score_correction_bias")}
    biases = 40 + 7e-4 * torch.randn(num_experts, generator=torch.Generator().manual_seed(1))
    by_rank = pool.run(holdings.gathered, (*sources.flags[model], *flags.split(), "--bf16"), world_size, str(folder),
                       "bfloat16", biases, world_size=world_size)
    assert len(by_rank[0]) == len(source)
    kept = 0
    for entry, tensor in by_rank[0]:
        if entry.keep_fp32:
            assert torch.equal(tensor, biases) and len(tensor.unique()) == num_experts
            kept += 1
        else:
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, 2 * source[entry.name].bfloat16()), entry
    assert kept
    for others in by_rank[1:]:
        for (entry, tensor), (expected, whole) in zip(others, by_rank[0], strict=True):
            assert entry == expected and (tensor.dtype, tensor.shape) == (whole.dtype, whole.shape)
            assert tensor.device.type == "meta"


def test_parameters_that_a_step_left_to_be_gathered_are_gathered_first(pool: WorkerPool, tmp_path: Path) -> None:
    flags = "--llm-dp 2 --overlap-grad-reduce --overlap-param-gather".split()
    by_rank = pool.run(holdings.gathered_after_a_step, tuple(flags), 3, str(tmp_path), world_size=3)
    assert any(was_open for _, was_open in by_rank)
    exported = weights.read_folder(tmp_path)
    assert by_rank[0][0].keys() == exported.keys()
    assert [name for name, tensor in exported.items() if not torch.equal(tensor, by_rank[0][0][name])] == []


def test_a_map_that_does_not_fit_is_refused_by_name(pool: WorkerPool, sources: Sources) -> None:
    (found,) = pool.run(holdings.refused_holdings, sources.flags["moe"], str(sources.folder("moe")), world_size=1)
    name, parameter = "language decoder.final_layernorm.weight", "language/decoder.final_layernorm.weight"
    assert found.pop("nothing") == []
    assert {change: [line.strip() for line in lines[1:]] for change, lines in found.items()} == {
        "unmapped": [f"no rule: {name} [32] of the model is in no rule of its weight map"],
        "missing": ["no parameter: language decoder.another of the weight map is not in the model"],
        "shape": [f"shape: {name} [32]: shape [32] is not [3]"],
        "copy": [f"a copy: {name} [32] is a view of no parameter or buffer of the model",
                 f"not saved: 32 elements of {parameter} are in no sharded state dict"],
        "lost": [f"no parameter: {name} of the weight map is not in the model",
                 f"not saved: 32 elements of {parameter} are in no sharded state dict"]}


def test_a_weight_that_is_not_as_it_was_is_refused_by_name(pool: WorkerPool, sources: Sources) -> None:
    (found,) = pool.run(holdings.refused_reads, sources.flags["moe"], world_size=1)
    path = "language/decoder.final_layernorm.weight"
    assert found == {
        "unknown": f"{path}s is not a tensor of this rank's model",
        "module": "vision/decoder.final_layernorm.weight is not a tensor of this rank's model",
        "grown": f"{path} has shape and strides ((64,), (1,)); at set-up it had ((32,), (1,))",
        "strided": f"{path} has shape and strides ((32,), (2,)); at set-up it had ((32,), (1,))",
        "offloaded": f"{path} has no memory: its weights are offloaded",
        "removed": f"{path} was a tensor of this rank's model at set-up and is none now"}
