"""Conversions between Hugging Face and Megatron tensors, spellings, and the keys of checkpoints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mimo.weights.match import fitted
from mimo.weights.rules import (
    Conversion,
    Direct,
    Fused,
    NamingScheme,
    PaddedRows,
    Rows,
    Rule,
    StoredTensor,
    WeightMap,
    global_name,
    is_expert,
    split_rules,
    stored_tensors,
)

SIZES = st.integers(1, 5)


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    size = int(torch.Size(shape).numel())
    return torch.arange(start, start + size, dtype=torch.float32).view(shape)


def test_fused_interleaves_by_group() -> None:
    query, key, value = numbered(4, 1), numbered(2, 1, start=10), numbered(2, 1, start=20)
    fused = Fused(2, (2, 1, 1)).to_megatron([query, key, value])
    assert fused.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@given(groups=SIZES, rows=st.lists(SIZES, min_size=1, max_size=3), columns=st.integers(0, 3))
def test_fused_gives_its_parts_back(groups: int, rows: list[int], columns: int) -> None:
    rest = (columns,) if columns else ()  # weights and biases
    parts = [numbered(groups * size, *rest, start=100 * number) for number, size in enumerate(rows)]
    convert = Fused(groups, tuple(rows))
    whole = convert.to_megatron(parts)
    assert sorted(whole.flatten().tolist()) == sorted(value for part in parts for value in part.flatten().tolist())
    for part, found in zip(parts, convert.to_hf(whole), strict=True):
        assert torch.equal(part, found)


@given(rows=SIZES, padding=st.integers(0, 4))
def test_padding_rows_are_zero_and_never_come_back(rows: int, padding: int) -> None:
    convert = PaddedRows(rows, rows + padding)
    part = numbered(rows, 3, start=1)
    whole = convert.to_megatron([part])
    assert whole.shape == (rows + padding, 3) and not whole[rows:].any()
    assert torch.equal(convert.to_hf(whole + 7)[0], part + 7)


def test_a_vocabulary_rule_takes_the_models_rows() -> None:
    rule = Rule("a", ("a",), PaddedRows(5, 8))
    assert fitted(rule, (12, 3)).convert == PaddedRows(5, 12)
    assert fitted(rule, (4, 3)) is rule  # fewer rows than tokens stay an error
    assert fitted(Rule("a", ("a",)), (12, 3)).convert == Direct()


REFUSED: dict[str, tuple[Conversion, list[tuple[int, ...]], tuple[int, ...]]] = {
    "direct": (Direct((4,), (1, 1, 4)), [(5,)], (1, 1, 5)),
    "rows": (Fused(2, (2, 1)), [(4, 3), (3, 3)], (7, 3)),
    "count": (Fused(2, (2, 1)), [(4, 3)], (5, 3)),
    "vocabulary": (PaddedRows(4, 8), [(5, 2)], (7, 2)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_shapes_are_refused(case: str) -> None:
    convert, shapes, whole = REFUSED[case]
    with pytest.raises(ValueError, match="parts for|does not have|is not"):
        convert.to_megatron([torch.empty(shape, device="meta") for shape in shapes])
    with pytest.raises(ValueError, match="does not have|is not"):
        convert.to_hf(torch.empty(whole, device="meta"))


def test_rules_share_a_tensor_by_rows() -> None:
    rules = split_rules(["z", "x", "dt"], "in_proj", (2, 3, 1))
    assert [rule.megatron for rule in rules] == ["z", "x", "dt"] and {rule.hf for rule in rules} == {("in_proj",)}
    assert [rule.row_slice for rule in rules] == [slice(0, 2), slice(2, 5), slice(5, 6)]
    assert rules[1].part_shapes([(6, 4)]) == [(3, 4)] and rules[1].part_shapes([(6,)]) == [(3,)]
    assert rules[1].tensor_shape((3, 1, 4)) == (6, 1, 4)
    for call in (lambda: rules[1].part_shapes([(7, 4)]), lambda: rules[1].part_shapes([()])):
        with pytest.raises(ValueError, match="does not have 6 rows"):
            call()
    with pytest.raises(ValueError, match="does not have 3 rows"):
        rules[1].tensor_shape((6, 4))
    alone = Rule("qkv", ("q", "k"))
    assert alone.row_slice is None and alone.part_shapes([(7, 4), (2, 4)]) == [(7, 4), (2, 4)]
    assert alone.tensor_shape((9, 4)) == (9, 4)


@pytest.mark.parametrize("rows", [
    [Rows(0, 2, 5), Rows(3, 2, 5)], [Rows(0, 3, 5), Rows(2, 3, 5)], [Rows(0, 2, 5), Rows(2, 2, 5)], [Rows(1, 4, 5)],
    [Rows(0, 2, 5), Rows(2, 3, 6)], [Rows(0, 5, 5), Rows(0, 5, 5)],
], ids=["gap", "overlap", "last-missing", "first-missing", "of-another-size", "twice"])
def test_rules_that_share_a_tensor_make_all_of_it_once(rows: list[Rows]) -> None:
    with pytest.raises(AssertionError, match="in_proj"):
        WeightMap(tuple(Rule(str(number), ("in_proj",), rows=part) for number, part in enumerate(rows)))


def test_the_style_that_knows_most_names_is_best() -> None:
    plain = NamingScheme("plain")
    prefixed = NamingScheme("prefixed", ((r"^model\.", "language.model."), (r"^model", "never")))
    weight_map = WeightMap((Rule("a", ("model.a", "lm_head")), Rule("b", ("model.b",))), (plain, prefixed))
    assert weight_map.best_scheme(["model.a", "language.model.b", "language.model.a"]) is prefixed
    assert weight_map.best_scheme(["model.a", "language.model.b", "lm_head"]) is plain
    assert weight_map.best_scheme([]) is plain
    assert prefixed.apply("model.a") == "language.model.a" and prefixed.apply("lm_head") == "lm_head"


def test_a_style_may_lack_a_rule_only_whole() -> None:
    scheme = NamingScheme("tower", optional=(r"^projector\.",))
    assert scheme.may_lack(Rule("a", ("projector.a", "projector.b")))
    assert not scheme.may_lack(Rule("a", ("projector.a", "tower.b")))


LAYER = "decoder.layers.{}.mlp."


def test_equal_layers_and_experts_are_stacked() -> None:
    names = [LAYER.format(layer) + f"experts.{expert}.linear_fc1.weight" for layer in range(3) for expert in range(2)]
    names += [LAYER.format(layer) + "router.weight" for layer in range(3)] + ["embedding.word_embeddings.weight"]
    stored = stored_tensors(names)
    assert stored[names[3]] == StoredTensor("decoder.layers.mlp.experts.experts.linear_fc1.weight", (1, 1), (3, 2))
    assert stored[LAYER.format(2) + "router.weight"] == StoredTensor("decoder.layers.mlp.router.weight", (2,), (3,))
    assert stored[names[-1]] == StoredTensor(names[-1], (), ())


def test_different_layers_are_not_stacked_but_their_experts_are() -> None:
    names = [LAYER.format(0) + "linear_fc1.weight",
             *(LAYER.format(1) + f"experts.{expert}.linear_fc1.weight" for expert in range(2))]
    stored = stored_tensors(names)
    assert stored[names[0]] == StoredTensor(names[0], (), ())
    assert stored[names[2]] == StoredTensor("decoder.layers.1.mlp.experts.experts.linear_fc1.weight", (1,), (2,))


def test_layers_of_a_hybrid_stack_are_not_stacked_but_their_experts_are() -> None:
    names = [LAYER.format(layer) + f"experts.{expert}.linear_fc1.weight" for layer in range(3) for expert in range(2)]
    stored = WeightMap(tuple(Rule(name, (name,)) for name in names), stacked_layers=False).stored()
    assert stored[names[3]] == StoredTensor("decoder.layers.1.mlp.experts.experts.linear_fc1.weight", (1,), (2,))
    assert WeightMap(tuple(Rule(name, (name,)) for name in names)).stored() == stored_tensors(names)


def test_blocks_are_judged_one_by_one() -> None:
    names = [f"encoders.vit.decoder.layers.{layer}.a" for layer in range(2)]
    names += ["decoder.layers.0.a", "decoder.layers.1.b"]
    stored = stored_tensors(names)
    assert stored[names[1]] == StoredTensor("encoders.vit.decoder.layers.a", (1,), (2,))
    assert stored[names[2]].axes == ()


def test_names_and_keys_are_each_others_inverse() -> None:
    names = [LAYER.format(layer) + f"experts.{expert}.x.weight" for layer in range(2) for expert in range(3)]
    names += [LAYER.format(layer) + "shared_experts.x.weight" for layer in range(2)] + ["output_layer.weight"]
    for name, place in stored_tensors(names).items():
        assert global_name(place.key, place.index) == name
    assert is_expert(names[0]) and not is_expert(LAYER.format(0) + "shared_experts.x.weight")
