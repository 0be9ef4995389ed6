"""Row maps of conversions against the conversions, pieces cut into boxes, and the chunk plan. In one process."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mimo.boxes import Box
from mimo.refit.plan import holder_problems
from mimo.refit.tensor_slices import Address, Holder, TensorMeta
from mimo.refit.trainer_shards import by_layer, piece_slices, plan_entries
from mimo.weights.match import ModelPiece
from mimo.weights.rules import Conversion, Direct, Fused, NamingScheme, PaddedRows, Rows, Rule, WeightMap, split_rules
from providers.common.weights import HeadMajor
from tests.support import equality, weights

SIZES = st.integers(1, 4)
ROOT = Path(__file__).resolve().parents[3]
OWN = NamingScheme("own names")
MODELS = {**weights.MODELS,
          "mixtral": ("--model-provider", "causal_lm", *equality.MOE),
          "deepseek": ("--model-provider", "deepseek_v3")}


def whole_shape(rule: Rule) -> tuple[int, ...]:
    """Return a shape that a rule's Megatron tensor may have."""
    convert = rule.convert
    if isinstance(convert, Fused):
        rows = convert.groups * sum(convert.rows)
    elif isinstance(convert, HeadMajor):
        rows = 3 * convert.heads * convert.channels
    elif isinstance(convert, PaddedRows):
        rows = convert.padded_rows
    else:
        assert isinstance(convert, Direct), f"{rule.megatron}: sizes of {convert} are not known here"
        if convert.megatron_shape is not None:
            return convert.megatron_shape
        rows = rule.rows.count if rule.rows else 5
    return (rows, 2) if rule.megatron.endswith("weight") else (rows,)


def numbered(*shape: int) -> torch.Tensor:
    """Return a tensor whose elements are all different."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


def fault(convert: Conversion, shape: tuple[int, ...]) -> str:
    """Describe how the row map of a conversion differs from what it does; empty if they agree."""
    whole = numbered(*shape)
    parts = convert.to_hf(whole)
    segments = convert.segments(shape[0])
    if segments is None:
        alike = len(parts) == 1 and torch.equal(parts[0].flatten(), whole.flatten())
        return "" if alike else "no row map, and not one part with the same numbers"
    rebuilt = [torch.full_like(part, -1) for part in parts]
    row = 0
    for segment in segments:
        if segment.first < row or segment.count < 1 or segment.first + segment.count > shape[0]:
            return f"{segment} is not after row {row} of {shape[0]}"
        row = segment.first + segment.count
        place = rebuilt[segment.part][segment.part_first:segment.part_first + segment.count]
        place.copy_(whole[segment.first:row].reshape(place.shape))
    return "; ".join(f"part {number} differs" for number, (part, found) in enumerate(zip(parts, rebuilt, strict=True))
                     if not torch.equal(part, found))


@st.composite
def conversions(draw: st.DrawFn) -> tuple[Conversion, tuple[int, ...]]:
    """Draw a conversion and the shape of a Megatron tensor for it."""
    rest = draw(st.sampled_from([(), (2,), (2, 3)]))
    kind = draw(st.sampled_from(["direct", "reshaped", "flattened", "fused", "padded", "heads"]))
    size = draw(SIZES)
    if kind == "direct":
        return Direct(), (size, *rest)
    if kind == "reshaped":
        return Direct((size, 6), (size, 2, 3)), (size, 2, 3)
    if kind == "flattened":
        return Direct((6 * size,), (1, 1, 6 * size)), (1, 1, 6 * size)
    if kind == "fused":
        rows = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
        return Fused(size, rows), (size * sum(rows), *rest)
    if kind == "padded":
        rows_padded = size + draw(st.integers(0, 3))
        return PaddedRows(size, rows_padded), (rows_padded, *rest)
    channels = draw(SIZES)
    return HeadMajor(size, channels), (3 * size * channels, *rest)


@settings(deadline=None)
@given(case=conversions())
def test_row_maps_say_what_conversions_do(case: tuple[Conversion, tuple[int, ...]]) -> None:
    assert fault(*case) == ""


@pytest.fixture(params=MODELS)
def maps(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, WeightMap]:
    """Weight maps of a provider."""
    flags = MODELS[request.param]
    if request.param == "deepseek":
        (tmp_path / "config.json").write_text(json.dumps(weights.DEEPSEEK))
        flags = (*flags, "--hf-config", str(tmp_path))
    provider, config = weights.family(flags)
    return {module: provider.weight_map(config, module) for module in (*provider.encoders(config), "language")}


def test_row_maps_of_every_provider(maps: dict[str, WeightMap]) -> None:
    for weight_map in maps.values():
        assert {rule.megatron: fault(rule.convert, whole_shape(rule)) for rule in weight_map.rules
                if fault(rule.convert, whole_shape(rule))} == {}


# Pieces


def cuts(size: int, parts: int) -> list[slice]:
    """Return an axis in parts of any sizes, empty ones left out."""
    stops = [size * (number + 1) // parts for number in range(parts)]
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False) if stop > start]


def pieces_of(whole: torch.Tensor, parts: tuple[int, ...]) -> Iterator[ModelPiece]:
    """Yield a tensor cut along its axes, each piece a view of a larger buffer."""
    for place in itertools.product(*map(cuts, whole.shape, parts)):
        part = whole[place]
        memory = torch.full((part.numel() + 7,), -1)
        tensor = memory[5:5 + part.numel()].view(part.shape)
        tensor.copy_(part)
        box = Box.at([cut.start for cut in place], part.shape)
        yield ModelPiece("a", tuple(whole.shape), box, tensor)


def read(piece: ModelPiece, box: Box, address: Address) -> torch.Tensor:
    return torch.as_strided(piece.tensor, box.sizes, address.strides, piece.tensor.storage_offset() + address.offset)


@settings(deadline=None)
@given(case=conversions(), parts=st.tuples(SIZES, SIZES, SIZES))
def test_boxes_of_any_pieces_are_the_parts(case: tuple[Conversion, tuple[int, ...]], parts: tuple[int, ...]) -> None:
    convert, shape = case
    if isinstance(convert, Direct) and convert.hf_shape is not None:
        parts = (parts[0] if convert.hf_shape[0] == shape[0] else 1, 1, 1)  # the other axes are one on the other side
    whole = numbered(*shape)
    expected = convert.to_hf(whole)
    names = tuple(map(str, range(len(expected))))
    found = [torch.full_like(whole_part, -1) for whole_part in expected]
    boxes: dict[str, list[Box]] = {}
    for piece in pieces_of(whole, parts):
        for part in piece_slices(Rule("a", names, convert), OWN, piece, Address("x", 0, piece.tensor.stride())):
            found[int(part.name)][part.box.slices] = read(piece, part.box,
                                                                                            part.address)
            boxes.setdefault(part.name, []).append(part.box)
    assert all(map(torch.equal, found, expected))
    entries = [TensorMeta(name, "float32", tuple(part.shape)) for name, part in zip(names, expected, strict=True)]
    assert holder_problems(entries, {name: [Holder(box, (0,)) for box in held] for name, held in boxes.items()}) == []


def test_rules_that_share_a_tensor_cut_their_rows_of_it() -> None:
    found = torch.full((7, 2), -1)
    for rule in split_rules(["z", "x", "dt"], "in_proj", (2, 4, 1)):
        assert rule.rows is not None
        whole = numbered(rule.rows.count, 2) + 100 * rule.rows.first
        for piece in pieces_of(whole, (2, 1)):
            for part in piece_slices(rule, OWN, piece, Address("x", 0, piece.tensor.stride())):
                found[part.box.slices] = read(piece, part.box, part.address)
    assert found[:, 0].tolist() == [0, 2, 200, 202, 204, 206, 600]


def test_a_scalar_is_a_box() -> None:
    (piece,) = pieces_of(torch.tensor(3), ())
    (part,) = piece_slices(Rule("a", ("a",)), OWN, piece, Address("x", 2, ()))
    assert part.box == Box((), ()) and part.address == Address("x", 2, ())
    assert holder_problems([TensorMeta("a", "float32", ())], {"a": [Holder(part.box, (0,))]}) == []


@pytest.mark.parametrize(("convert", "shape", "parts"), [
    (Direct((6,), (1, 1, 6)), (1, 1, 6), (1, 1, 2)), (Direct((4, 6), (4, 2, 3)), (4, 2, 3), (1, 2, 1))])
def test_a_piece_that_is_no_box_is_refused(convert: Conversion, shape: tuple[int, ...], parts: tuple[int, ...]) -> None:
    piece = next(pieces_of(numbered(*shape), parts))
    with pytest.raises(ValueError, match=r"must hold whole; this one holds \[0:"):
        list(piece_slices(Rule("a", ("a",), convert), OWN, piece, Address("x", 0, piece.tensor.stride())))


# The chunk plan


class OnlyMeta(TorchDispatchMode):
    """Fails where an operation makes a tensor that takes memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (list, tuple)) else [result]:
            assert not isinstance(made, torch.Tensor) or made.device.type == "meta", f"{func} takes memory"
        return result


def plan(maps: dict[str, WeightMap], wire_dtype: str = "bfloat16") -> tuple[list[TensorMeta], list[str]]:
    """Without process groups: a collective would raise."""
    shapes = {module: {rule.megatron: (whole_shape(rule), torch.float32) for rule in weight_map.rules}
              for module, weight_map in maps.items()}
    with OnlyMeta():
        return plan_entries(maps, {module: one.schemes[0] for module, one in maps.items()}, shapes, wire_dtype)


def is_grouped(keys: Iterable[tuple[str, int]]) -> bool:
    """Return whether equal keys follow each other, with ascending numbers."""
    groups = [key for key, _ in itertools.groupby(keys)]
    return len(groups) == len(set(groups)) and all(
        first[1] < second[1] for first, second in itertools.pairwise(groups) if first[0] == second[0])


def test_entries_are_every_tensor_once_and_layer_by_layer(maps: dict[str, WeightMap]) -> None:
    found, problems = plan(maps)
    assert problems == []
    names = [entry.name for entry in found]
    spelled = [list(dict.fromkeys(weight_map.schemes[0].apply(name) for rule in weight_map.rules for name in rule.hf))
               for weight_map in maps.values()]
    assert sorted(names) == sorted(itertools.chain(*spelled))
    assert [names.index(module[0]) for module in spelled] == [0, *itertools.accumulate(map(len, spelled))][:-1]
    kept = {weight_map.schemes[0].apply(rule.hf[0]) for weight_map in maps.values() for rule in weight_map.rules
            if rule.keep_fp32}
    assert {entry.name for entry in found if entry.keep_fp32} == kept
    assert {entry.dtype for entry in found} == ({"bfloat16", "float32"} if kept else {"bfloat16"})
    assert all((entry.dtype == "float32") == entry.keep_fp32 for entry in found)
    numbers = [(name.split("."), next((at for at, part in enumerate(name.split(".")) if part.isdigit()), 0))
               for name in names]
    assert is_grouped((".".join(parts[:at]), int(parts[at])) for parts, at in numbers if at)
    experts = [(name.partition(".experts.")[0], int(name.partition(".experts.")[2].split(".")[0])) for name in names
               if ".experts." in name]
    assert is_grouped(experts)


def test_layers_are_put_together_and_the_rest_stays() -> None:
    names = ["embed", "mtp.1.a", "h.0.x.7.y", "mtp.0.b", "norm", "h.0.x.8.y", "mtp.1.c", "head"]
    found = [entry.name for entry in by_layer([TensorMeta(name, "float32", (1,)) for name in names])]
    assert found == ["embed", "mtp.0.b", "mtp.1.a", "mtp.1.c", "h.0.x.7.y", "h.0.x.8.y", "norm", "head"]


TWO = WeightMap((Rule("a", ("a",)), Rule("b", ("b",), keep_fp32=True)))
FLOATS = {"a": ((2,), torch.bfloat16), "b": ((2,), torch.float32)}


@pytest.mark.parametrize(("weight_map", "tensors", "problem"), [
    (TWO, {"a": FLOATS["a"]}, "no parameter: m b of the weight map"),
    (TWO, {**FLOATS, "c": ((3,), torch.float32)}, r"no rule: m c \[3\] of the model"),
    (TWO, {**FLOATS, "b": ((2,), torch.bfloat16)}, "dtype: m b must be float32 in the model, which has it in bfloat16"),
    (TWO, {**FLOATS, "a": ((2,), torch.int64)}, "dtype: a is int64, which does not travel"),
    (WeightMap((Rule("a", ("a",)), Rule("b", ("a",)))), FLOATS, "twice: a is made by 2 rules"),
    (WeightMap((Rule("a", ("a", "b"), Fused(1, (1, 2))), Rule("b", ("c",)))), FLOATS, r"shape: m a \[2\]: .* 3 rows"),
], ids=["missing", "unmapped", "precision", "integer", "twice", "shape"])
def test_misfits_of_map_and_model_are_named(weight_map: WeightMap, tensors: dict[str, Any], problem: str) -> None:
    _, problems = plan_entries({"m": weight_map}, {"m": OWN}, {"m": tensors}, "float32")
    assert len(problems) == 1
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(problems[0])


def test_entries_have_the_names_of_a_scheme() -> None:
    maps, other = {"m": WeightMap((Rule("a", ("a",)),))}, {"m": NamingScheme("other", ((r"^", "x."),))}
    (entry,), _ = plan_entries(maps, other, {"m": {"a": FLOATS["a"]}}, "float16")
    assert entry == TensorMeta("x.a", "float16", (2,))


@pytest.mark.parametrize("boxes", [
    [((0, 0), (2, 3))], [((0, 0), (4, 3)), ((0, 0), (1, 1))], [((0, 0), (3, 3)), ((2, 0), (3, 3))],
    [((0, 0), (4, 2)), ((1, 1), (3, 2)), ((0, 2), (2, 3)), ((2, 2), (2, 3))], [((0, 0), (5, 3))], [],
], ids=["gap", "contained", "gap-and-overlap", "crossing", "outside", "none"])
def test_boxes_that_are_not_the_tensor_once_are_named(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    whole = [Holder(Box((0, 0), (4, 2)), (0, 1)), Holder(Box((0, 2), (4, 3)), (2,))]
    entries = [TensorMeta("a", "float32", (4, 3)), TensorMeta("b", "float32", (4, 3))]
    assert holder_problems(entries, {"a": whole, "b": whole}) == []
    lines = holder_problems(entries, {"a": whole, "b": [Holder(Box(*box), (0,)) for box in boxes]})
    assert lines and all(line.startswith("b [4, 3]: ") for line in lines)


READS_SOURCE = """
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
from mimo.refit.tensor_slices import TensorMeta
from scripts.bench.vllm_source import MegatronSource

class Tensors:
    entries = [TensorMeta("a", "bfloat16", (2, 3)), TensorMeta("b", "float32", (4,), True)]
    dtypes = [torch.bfloat16, torch.float32]
    def __iter__(self):
        return iter([(entry, torch.ones(entry.shape, dtype=dtype)) for entry, dtype in zip(self.entries, self.dtypes)])

tensors = Tensors()
source = MegatronSource(tensors)
assert isinstance(source, WeightSource)
metadata = source.metadata()
assert metadata == [ParamMeta("a", torch.bfloat16, (2, 3)), ParamMeta("b", torch.float32, (4,))]
for sync in range(2):
    read = list(NCCLTrainerWeightTransferEngine._checked_iter(source, metadata))
    assert [(name, tensor.dtype) for name, tensor in read] == [("a", torch.bfloat16), ("b", torch.float32)]
tensors.dtypes = [torch.bfloat16] * 2
try:
    list(source)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_takes_the_source_and_a_wrong_tensor_is_named() -> None:
    # vLLM looks at the machine when it is imported: in a process of its own.
    done = subprocess.run([sys.executable, "-c", READS_SOURCE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "the tensor b torch.bfloat16 [4] differs from its metadata, ParamMeta(name='b'")


def test_rows_is_a_part_of_a_rule() -> None:
    rule = Rule("a", ("whole",), rows=Rows(2, 3, 5))
    (part,) = piece_slices(rule, OWN, next(pieces_of(numbered(3, 2), (1, 1))), Address("x", 0, (2, 1)))
    assert part.box == Box((2, 0), (5, 2))
