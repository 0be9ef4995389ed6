"""Hugging Face folders into trainers and checkpoints and back, to the bit, on several layouts; what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support import weights
from tests.support.spawn import WorkerPool
from tests.support.weights import Sources

pytestmark = pytest.mark.slow

# name -> (ranks, flags)
LAYOUTS = {"tp2": (4, "--encoder-tp 2 --llm-tp 2 --sequence-parallel"), "pp2": (4, "--encoder-pp 2 --llm-pp 2"),
           "dp2": (3, "--llm-dp 2"), "cp2": (3, "--llm-cp 2"),
           "colocated": (2, "--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --sequence-parallel")}
MOE_LAYOUTS = {"ep2": (3, "--llm-dp 2 --llm-ep 2"),
               "expert-tp2": (3, "--llm-tp 2 --sequence-parallel --llm-expt-tp 2"),
               "expert-data-parallel": (3, "--llm-tp 2 --sequence-parallel")}
TEXT_LAYOUTS = {"one": (1, ""), "pp2": (2, "--llm-pp 2"), "ep2": (2, "--llm-dp 2 --llm-ep 2"),
                "cp2-ep2": (2, "--llm-cp 2 --llm-ep 2"),
                "tp2-ep2": (4, "--llm-tp 2 --llm-dp 2 --sequence-parallel --llm-ep 4")}
TEXT_MODELS = ("deepseek", "hybrid")
CASES = [*(("dense-tied", name) for name in LAYOUTS), ("vlm", "tp2"), ("vlm", "colocated"), ("vlm", "cp2"),
         *(("moe", name) for name in ("tp2", "cp2", *MOE_LAYOUTS)),
         *((model, name) for model in TEXT_MODELS for name in TEXT_LAYOUTS)]
VISION, LANGUAGE = "vision", "language"


@pytest.fixture(scope="module")
def sources(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(pool, tmp_path_factory.mktemp("sources"))


def layout_of(model: str, layout: str) -> tuple[int, list[str]]:
    world_size, flags = (TEXT_LAYOUTS if model in TEXT_MODELS else {**LAYOUTS, **MOE_LAYOUTS})[layout]
    return world_size, flags.split()


def assert_same(found: Path, expected: Path) -> None:
    tensors = weights.read_folder(found)
    wanted = weights.read_folder(expected)
    assert tensors.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(tensors[name], tensor)] == []


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_loaded_and_exported_to_the_bit(pool, sources, tmp_path, model, layout):
    world_size, flags = layout_of(model, layout)
    folder = sources.folder(model)
    for wrong, compared, elements in pool.run(weights.load_and_export, (*sources.flags[model], *flags), world_size,
                                              str(folder), str(tmp_path / "out"), world_size=world_size):
        assert wrong == [] and compared == elements
    assert_same(tmp_path / "out", folder)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        {*index["weight_map"].values(), "model.safetensors.index.json"})


@pytest.mark.parametrize("model", ["dense-tied", "moe", "deepseek", "hybrid", "vlm"])
def test_imported_checkpoint_is_what_a_live_model_expects(pool, sources, tmp_path, model):
    release = str(sources.release(model))
    folder = sources.folder(model)
    assert (Path(release).parent / "latest_checkpointed_iteration.txt").read_text() == "release"
    one = weights.alone(sources.flags[model])
    layouts = [layout_of(model, name) for name in (("pp2", "cp2-ep2") if model in TEXT_MODELS else ("tp2", "cp2"))]
    for world_size, flags in ((1, one), *((ranks, (*sources.flags[model], *split)) for ranks, split in layouts)):
        for odd, wrong, compared, elements in pool.run(weights.load_release, flags, world_size, release, str(folder),
                                                       world_size=world_size):
            assert odd == [] and wrong == [] and compared == elements
    pool.run(weights.export_release, sources.flags[model], release, str(tmp_path / "out"), "", world_size=1)
    assert_same(tmp_path / "out", folder)


def start_from(rank: int, flags: tuple[str, ...], folder: str) -> tuple[bool, list[str]]:
    """Load a checkpoint as a run does that starts; whether its iteration is 0, and what the log says."""
    from tests.support.resuming import started

    with started(rank, (*flags, "--load", folder), 1) as (_, _, _, progress, lines):
        return progress.iteration == 0, lines


def test_imported_weights_are_known_by_their_content(pool: WorkerPool, sources: Sources, tmp_path: Path) -> None:
    shutil.copytree(sources.release("vlm"), tmp_path / "renamed")
    ((is_new, lines),) = pool.run(start_from, weights.alone(sources.flags["vlm"]), str(tmp_path / "renamed"),
                                  world_size=1)
    assert is_new and lines[0] == f"loaded {tmp_path / 'renamed'} (weights only)"


@pytest.mark.parametrize(("model", "layout"), [
    ("dense-tied", "tp2"), ("dense-tied", "cp2"), ("moe", "ep2"), ("deepseek", "pp2"), ("hybrid", "tp2-ep2"),
    ("hybrid", "cp2-ep2")])
def test_a_split_models_checkpoint_is_exported(pool, sources, tmp_path, model, layout):
    world_size, flags = layout_of(model, layout)
    pool.run(weights.save_live, (*sources.flags[model], *flags), world_size, str(sources.folder(model)),
             str(tmp_path / "live"), world_size=world_size)
    pool.run(weights.export_release, sources.flags[model], str(tmp_path / "live"), str(tmp_path / "out"), "",
             world_size=1)
    assert_same(tmp_path / "out", sources.folder(model))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"


def test_lower_precision_in_and_out(pool: WorkerPool, sources: Sources, tmp_path: Path) -> None:
    flags = sources.flags["moe"]
    pool.run(weights.write_source, flags, str(tmp_path / "half"), torch.bfloat16, world_size=1)
    for wrong, compared, elements in pool.run(weights.load_and_export, (*flags, "--llm-dp", "2"), 3,
                                              str(tmp_path / "half"), str(tmp_path / "out"), world_size=3):
        assert wrong == [] and compared == elements  # the model is in float32
    for _, wrong, changed, _ in pool.run(weights.load_modules, (*flags, "--llm-dp", "2", "--bf16"), 3, {
            "model": str(tmp_path / "half")}, dict.fromkeys((VISION, LANGUAGE), str(tmp_path / "half")), world_size=3):
        assert wrong == [] and changed
    pool.run(weights.import_folder, flags, str(tmp_path / "half"), str(tmp_path / "save"), torch.bfloat16, world_size=1)
    pool.run(weights.export_release, flags, str(tmp_path / "save/release"), str(tmp_path / "again"), "", world_size=1)
    assert_same(tmp_path / "again", tmp_path / "half")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"


# Modules from folders of their own


def test_modules_come_from_folders_of_their_own(pool: WorkerPool, sources: Sources, tmp_path: Path) -> None:
    flags, whole = sources.flags["dense-tied"], sources.folder("dense-tied")
    tensors = weights.read_folder(whole)
    tower = {name.removeprefix("vision_tower.vision_model."): tensor for name, tensor in tensors.items()
             if name.startswith("vision_tower.")}
    assert 20 < len(tower) < len(tensors)
    weights.write_folder(tmp_path / "tower", tower)
    world_size, layout = layout_of("dense-tied", "dp2")
    # A tower alone: the projector and the language model keep what they had.
    results = pool.run(weights.load_modules, (*flags, *layout), world_size, {VISION: str(tmp_path / "tower")}, {},
                       world_size=world_size)
    absent, _, changed, reads = results[0]
    assert sorted(absent[VISION]) == [f"input_projections.0.linear_fc{n}.{kind}" for n in (1, 2)
                                      for kind in ("bias", "weight")]
    assert changed and not any("input_projections" in name for name in changed)
    assert reads == len(tower) and [entry[2:] for entry in results[1:]] == [([], 0), ([], 0)]
    # The language model of a whole folder, whose tower is not asked for; one of its two replicas reads.
    results = pool.run(weights.load_modules, (*flags, *layout), world_size, {LANGUAGE: str(whole)},
                       {LANGUAGE: str(whole)}, world_size=world_size)
    assert [(absent, wrong) for absent, wrong, _, _ in results] == [({}, [])] * 3
    assert results[0][2] == [] and results[1][2] == results[2][2] != []
    assert [reads for *_, reads in results] == [0, len(tensors) - sum(not name.startswith("language_model")
                                                                      for name in tensors), 0]


# What does not fit


@pytest.mark.parametrize("model", ["dense-tied", "deepseek", "hybrid"])
def test_any_one_spoiled_tensor_is_named_by_a_load(pool: WorkerPool, sources: Sources, model: str) -> None:
    (found,) = pool.run(weights.spoiled_loads, sources.flags[model], str(sources.folder(model)), world_size=1)
    assert len(found) > 6 * 60
    assert [change for change, lines in found.items()
            if not any(change.split()[1] in line for line in lines[1:]) or len(lines) > 3] == []
    assert all("--load-hf" in lines[0] for lines in found.values())


@pytest.mark.parametrize("model", ["dense-tied", "deepseek", "hybrid"])
def test_any_one_spoiled_tensor_is_named_by_an_import(pool: WorkerPool, sources: Sources, model: str) -> None:
    (found,) = pool.run(weights.spoiled_imports, sources.flags[model], str(sources.folder(model)), world_size=1)
    assert [change for change, lines in found.items()
            if not any(change.split()[1] in line for line in lines[1:])] == []


def test_a_problem_of_one_rank_stops_all_before_anything_is_written(pool: WorkerPool, sources: Sources) -> None:
    by_rank = pool.run(weights.load_with_a_lost_file, (*sources.flags["dense-tied"], "--llm-pp", "2"), 3,
                       str(sources.folder("dense-tied")), 2, world_size=3)
    assert [lines[1:] for lines, _ in by_rank] == [["  on rank 2: gone.safetensors is not there"], [], []]
    assert all(lines and unchanged for lines, unchanged in by_rank)


# Checkpoints and bases of export


def export_refusal(pool: WorkerPool, flags: tuple[str, ...], release: Path, out: Path, base: str = "") -> str:
    """Return the error of an export that is refused."""
    (lines,) = pool.run(weights.export_errors, flags, str(release), str(out), base, world_size=1)
    assert lines, "the export went through"
    return "\n".join(lines)


def test_a_damaged_checkpoint_is_refused_by_name(pool: WorkerPool, sources: Sources, tmp_path: Path) -> None:
    release = tmp_path / "release"
    flags = sources.flags["dense-tied"]

    def refusal() -> str:
        return export_refusal(pool, flags, release, tmp_path / "out")

    shutil.copytree(sources.release("dense-tied"), release)
    (shard,) = release.glob("*.distcp")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    assert f"{shard.name} is truncated: {len(data) - 1} of {len(data)} bytes" in refusal()
    shard.write_bytes(data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64:])
    assert "checksum" in refusal() and not list((tmp_path / "out").glob("*"))
    shard.unlink()
    assert f"{shard.name} is missing" in refusal()


def test_a_checkpoint_of_another_model_is_refused_by_name(pool: WorkerPool, sources: Sources, tmp_path: Path) -> None:
    release, out = sources.release("dense-tied"), tmp_path / "out"
    said = export_refusal(pool, (*sources.flags["dense-tied"], "--num-layers", "3"), release, out)
    assert "shape: language.decoder.layers.mlp.linear_fc2.weight has [2] on its leading axes, the model [3]" in said
    said = export_refusal(pool, sources.flags["moe"], release, out)
    assert "missing: language.decoder.layers.mlp.router.weight" in said
    assert "not used: language.decoder.layers.mlp.linear_fc2.weight" in said


def test_a_base_gives_names_files_and_unused_tensors(pool: WorkerPool, sources: Sources, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tensors = weights.read_folder(sources.folder("dense-tied"))
    # As transformers 5 spells it, with a tensor that training has no use for.
    tensors = {name.replace("vision_tower.vision_model.", "vision_tower."): tensor for name, tensor in tensors.items()}
    tensors["vision_tower.post_layernorm.weight"] = torch.randn(7)
    weights.write_folder(base, tensors)
    (base / "sub").mkdir()
    for name in ("tokenizer.json", "tokenizer.model", "sub/chat.jinja"):
        (base / name).write_text(name)
    flags, release = sources.flags["dense-tied"], str(sources.release("dense-tied"))
    provider, family = weights.family(flags)
    values = provider.hf_config(family) | {"a": 1, "torch_dtype": "float16"}
    values["text_config"]["dtype"] = "x"
    (base / "config.json").write_text(json.dumps(values))
    for left_out in ("pytorch_model.bin", ".hidden", "tf_model.h5"):
        (base / left_out).write_text("")
    pool.run(weights.export_release, flags, release, str(tmp_path / "out"), str(base), world_size=1)
    assert_same(tmp_path / "out", base)
    others = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {name for name in others if "safetensors" not in name} == {
        "config.json", "tokenizer.json", "tokenizer.model", "sub/chat.jinja"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == values | {
        "torch_dtype": "float32", "text_config": values["text_config"] | {"dtype": "float32"}}
    name = next(name for name in tensors if "q_proj.weight" in name)
    tensors[f"{name}2"] = tensors.pop(name)
    shutil.rmtree(base)
    weights.write_folder(base, tensors)
    said = export_refusal(pool, flags, Path(release), tmp_path / "again", str(base))
    assert f"missing: {name} [" in said and f"not used: {name}2 [" in said


def test_memory_is_bounded_by_the_largest_group(pool: WorkerPool, sources: Sources, tmp_path: Path) -> None:
    flags = (*sources.flags["dense-tied"], "--num-layers", "24")
    pool.run(weights.write_source, flags, str(tmp_path / "deep"), world_size=1)
    tensors = weights.read_folder(tmp_path / "deep")
    total = sum(tensor.nbytes for tensor in tensors.values())
    largest = max(128 * 32 * 4, *(tensor.nbytes for tensor in tensors.values()))  # the padded embedding counts too
    assert largest < total / 20
    (found,) = pool.run(weights.peaks, flags, str(tmp_path / "deep"), str(tmp_path), world_size=1)
    assert largest <= min(found.values()) and max(found.values()) <= 4 * largest, (found, total)
