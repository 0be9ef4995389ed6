"""Folders of weights: what is read, what is refused, and how everything that does not fit is told at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mimo.weights.match import check_tensor, match_source, report
from mimo.weights.rules import Direct, Fused, NamingScheme, PaddedRows, Rule, WeightMap, split_rules
from mimo.weights.safetensors_io import Catalog, HfSource, SourceTensor

QKV = Fused(2, (2, 1, 1))
LANGUAGE = WeightMap(
    (Rule("embedding", ("model.embed",), PaddedRows(5, 8)),
     Rule("qkv", ("model.q", "model.k", "model.v"), QKV),
     Rule("bias", ("model.bias",), keep_fp32=True),
     *split_rules(["mixer.z", "mixer.dt"], "model.in_proj", (4, 2))),
    (NamingScheme("alone"), NamingScheme("in llava", ((r"^model\.", "language.model."),))),
    ((r"\binv_freq$", "computed"),))
VISION = WeightMap(
    (Rule("class_token", ("tower.class",), Direct((3,), (1, 1, 3))), Rule("projector", ("projector.w",))),
    (NamingScheme("llava"), NamingScheme("tower", ((r"^tower\.", ""),), optional=(r"^projector\.",))),
    ((r"^tower\.last$", "unused"),))
SHAPES = {"embedding": (8, 3), "qkv": (8, 3), "bias": (3,), "mixer.z": (4, 3), "mixer.dt": (2, 3),
          "class_token": (1, 1, 3), "projector": (4, 3)}
SOURCE = {"model.embed": (5, 3), "model.q": (4, 3), "model.k": (2, 3), "model.v": (2, 3), "model.bias": (3,),
          "model.in_proj": (6, 3)}
WHOLE = {f"language.{name}": shape for name, shape in SOURCE.items()} | {"tower.class": (3,), "projector.w": (4, 3)}


def catalog(shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype | None] | None = None) -> Catalog:
    dtypes = dtypes or {}
    return Catalog("folder", {name: SourceTensor(shape, dtypes.get(name, torch.bfloat16), "X", "f.safetensors")
                              for name, shape in shapes.items()}, {})


def problems_of(source: Catalog, wanted: dict[str, WeightMap], others: dict[str, WeightMap] | None = None,
                dtype: torch.dtype = torch.bfloat16, with_model: bool = True) -> list[str]:
    matches, problems = match_source(source, wanted, others or {})
    for match in matches.values():
        for name, rule in match.rules.items():
            problems += check_tensor(match, rule, source, SHAPES[name] if with_model else None,
                                     torch.float32 if rule.keep_fp32 else dtype)
    return problems


def test_a_source_that_fits_has_no_problems() -> None:
    assert problems_of(catalog(SOURCE), {"language": LANGUAGE}) == []
    assert problems_of(catalog(WHOLE), {"language": LANGUAGE, "vision": VISION}) == []
    assert problems_of(catalog(WHOLE), {"vision": VISION}, {"language": LANGUAGE}) == []
    assert problems_of(catalog(WHOLE | {"tower.last": (9,), "language.model.rot.inv_freq": (9,)}),
                       {"language": LANGUAGE}, {"vision": VISION}) == []


@pytest.mark.parametrize("name", WHOLE)
def test_every_deleted_renamed_reshaped_or_quantized_tensor_is_named(name: str) -> None:
    wanted = {"language": LANGUAGE, "vision": VISION}

    def found(shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype | None] | None = None) -> list[str]:
        return problems_of(catalog(shapes, dtypes), wanted)

    left = {other: shape for other, shape in WHOLE.items() if other != name}
    (missing,) = found(left)
    assert missing.startswith(f"missing: {name} (for ")
    assert sorted(line.split(" ")[:2] for line in found({**left, f"{name}s": WHOLE[name]})) == [
        ["missing:", name], ["not", "used:"]]
    shape = WHOLE[name]
    for other in ((shape[0] + 1, *shape[1:]), (*shape[:-1], shape[-1] + 1), (*shape, 1), shape[::-1], shape[1:]):
        if other != shape:
            assert any(line.startswith("shape: ") and name in line for line in found(WHOLE | {name: other})), other
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.int64, None):
        (line,) = found(WHOLE, {name: dtype})
        assert line.startswith(f"dtype: {name} is X (f.safetensors)")
    assert found(WHOLE, {name: torch.float64}) == []


def test_the_odd_one_of_several_source_tensors_is_named_alone() -> None:
    (line,) = problems_of(catalog(SOURCE | {"model.k": (3, 3)}), {"language": LANGUAGE})
    assert line == "shape: model.k is [3, 3] (f.safetensors); language qkv [8, 3] takes [2, 3]"


@pytest.mark.parametrize(("name", "shape", "problem"), [
    ("mixer.dt", (3, 3), "do not make language mixer.dt [3, 3]: shape [3, 3] does not have 2 rows"),
    ("bias", (3,), "dtype: language bias must be float32 in the model, which has it in bfloat16")])
def test_a_model_of_other_rows_or_precision_than_its_map_is_noticed(name, shape, problem):
    match = match_source(catalog(SOURCE), {"language": LANGUAGE}, {})[0]["language"]
    (line,) = check_tensor(match, match.rules[name], catalog(SOURCE), shape, torch.bfloat16)
    assert line.endswith(problem)


def test_a_tensor_that_several_rules_share_is_told_of_once() -> None:
    for with_model in (True, False):
        lines = problems_of(catalog(SOURCE | {"model.in_proj": (7, 3)}), {"language": LANGUAGE}, with_model=with_model)
        assert all("model.in_proj" in line and "[7, 3]" in line for line in lines)
        assert len(set(lines)) == (1 if with_model else 2)
    assert lines[0].endswith("do not make language mixer.z: shape [7, 3] does not have 6 rows")
    wide = problems_of(catalog(SOURCE | {"model.in_proj": (6, 4)}), {"language": LANGUAGE})
    assert set(wide) == {"shape: model.in_proj is [6, 4] (f.safetensors); language takes [6, 3]"}


def test_without_a_model_the_rules_own_word_is_left() -> None:
    assert problems_of(catalog(SOURCE), {"language": LANGUAGE}, with_model=False) == []
    (line,) = problems_of(catalog(SOURCE | {"model.k": (3, 3)}), {"language": LANGUAGE}, with_model=False)
    assert line.startswith("shape: model.q [4, 3], model.k [3, 3], model.v [2, 3] do not make language qkv:")


def test_a_tower_may_come_without_its_projector_but_not_with_half_of_it() -> None:
    matches, problems = match_source(catalog({"class": (3,)}), {"vision": VISION}, {})
    assert problems == [] and matches["vision"].scheme.name == "tower" and matches["vision"].absent == ["projector"]
    matches, problems = match_source(catalog({"tower.class": (3,)}), {"vision": VISION}, {})
    assert problems == ["missing: projector.w (for vision projector)"]


def test_everything_is_told_in_one_error() -> None:
    with pytest.raises(ValueError) as error:
        report("--load-hf x does not fit the model", ["shape: b", "missing: a", "missing: a"])
    assert str(error.value) == "--load-hf x does not fit the model (2 problems):\n  missing: a\n  shape: b"
    report("nothing", [])


# Folders


def folder_of(path: Path, **files: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors")
    located = {tensor: f"{name}.safetensors" for name, tensors in files.items() for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": located}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "hf", one={"a": torch.ones(4, 2)}, two={"b": torch.zeros(3)},
                     three={"c": torch.ones(1)})


def test_few_files_are_open_at_once(folder: Path) -> None:
    source = HfSource(folder)
    assert [source.read(name).sum().item() for name in "abcab"] == [8, 0, 1, 8, 0]
    assert source._handle.cache_info().currsize == 2
    source.close()
    assert source.read("a", slice(1, 3)).shape == (2, 2)


def test_files_without_an_index_are_all_read(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert set(HfSource(folder).tensors) == {"a", "b", "c"}
    save_file({"b": torch.ones(1)}, folder / "four.safetensors")
    with pytest.raises(ValueError, match=r"b is in four.safetensors and in two.safetensors"):
        HfSource(folder)


def test_damaged_folders_are_refused_by_file(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such folder"):
        HfSource("meta-llama/Llama-2-7b")
    data = (folder / "two.safetensors").read_bytes()
    for bad in (data[:-1], data[:5], b"", b"\xff" * 64):
        (folder / "two.safetensors").write_bytes(bad)
        with pytest.raises(ValueError, match=r"two.safetensors is truncated or is not safetensors"):
            HfSource(folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names files that are not there: two.safetensors"):
        HfSource(folder)
    save_file({"other": torch.ones(1)}, folder / "two.safetensors")
    with pytest.raises(ValueError, match=r"says that b is in two.safetensors, which does not hold it"):
        HfSource(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="is not an index of safetensors"):
        HfSource(folder)
    (tmp_path / "pickled").mkdir()
    with pytest.raises(ValueError, match="has no weights"):
        HfSource(tmp_path / "pickled")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="has weights as pytorch_model.bin; only safetensors is loaded"):
        HfSource(tmp_path / "pickled")


def test_a_rank_that_sees_other_files_says_so(folder: Path) -> None:
    known = HfSource(folder).catalog
    assert HfSource(folder, known).missing_files() == []
    (folder / "one.safetensors").unlink()
    (folder / "two.safetensors").write_bytes(b"1234")
    assert [line.rsplit("/", 1)[-1] for line in HfSource(folder, known).missing_files()] == [
        "one.safetensors is not there", f"two.safetensors has 4 bytes, not {known.file_bytes['two.safetensors']}"]
