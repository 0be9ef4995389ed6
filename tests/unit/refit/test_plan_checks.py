"""Checks of a refit's plan: each problem is named, and what is right passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from mimo.boxes import Box
from mimo.refit.plan import Op, check_holders, check_plan, check_recv_spec, receive_plan, send_plan
from mimo.refit.tensor_slices import Address, Holder, Holders, RecvSpec, TensorMeta, TensorSlice

PAIR = [TensorMeta("a", "float32", (4, 6)), TensorMeta("b", "float32", (4,))]
WHOLE_B = Holder(Box((0,), (4,)), (0,))


def halves(split: int, other: int) -> list[Holder]:
    return [Holder(Box((0, 0), (4, split)), (0,)), Holder(Box((0, other), (4, 6)), (1,))]


BAD_HOLDERS: dict[str, tuple[Sequence[TensorMeta], Holders, str]] = {
    "gap": (PAIR, {"a": halves(2, 3), "b": [WHOLE_B]}, r"a \[4, 6\]: 4 of 24 elements are missing"),
    "overlap": (PAIR, {"a": halves(4, 3), "b": [WHOLE_B]}, r"a .*: \[0:4, 0:4\] and \[0:4, 3:6\] overlap"),
    "outside": (PAIR, {"a": halves(3, 3), "b": [Holder(Box((0,), (5,)), (0,))]}, r"b \[4\]: \[0:5\] lies outside"),
    "axes": (PAIR, {"a": halves(3, 3), "b": [Holder(Box((0, 0), (2, 2)), (0,))]}, r"b .* lies outside"),
    "missing": (PAIR, {"a": halves(3, 3)}, "missing: no rank holds b"),
    "left over": (PAIR[:1], {"a": halves(3, 3), "b": [WHOLE_B]}, "left over: b is held"),
    "no ranks": (PAIR, {"a": halves(3, 3), "b": [Holder(WHOLE_B.box, ())]}, r"b \[0:4\]: ranks \[\]"),
    "ranks": (PAIR, {"a": halves(3, 3), "b": [Holder(WHOLE_B.box, (1, 0))]}, r"ranks \[1, 0\] are not ascending"),
    "twice": ([*PAIR, PAIR[1]], {"a": halves(3, 3), "b": [WHOLE_B]}, "twice: b is in the chunk plan 2 times"),
    "dtype": ([PAIR[0], TensorMeta("b", "int4", (4,))], {"a": halves(3, 3), "b": [WHOLE_B]}, "dtype: b is int4"),
}


@pytest.mark.parametrize("case", BAD_HOLDERS)
def test_holders_that_are_not_the_model_are_refused(case: str) -> None:
    check_holders(PAIR, {"a": halves(3, 3), "b": [WHOLE_B]})
    entries, holders, message = BAD_HOLDERS[case]
    with pytest.raises(ValueError, match=message):
        check_holders(entries, holders)


def part(name: str, box: Box, tensor: str = "live", offset: int = 0, strides: tuple[int, ...] = (6, 1)) -> TensorSlice:
    return TensorSlice(name, box, Address(tensor, offset, strides))


ROWS, VECTOR = Box((1, 0), (3, 6)), Box((0,), (4,))
GOOD = RecvSpec((part("a", ROWS), part("b", VECTOR, offset=12, strides=(1,))), ())
BAD_SPECS: dict[str, tuple[RecvSpec, str]] = {
    "unknown": (RecvSpec((part("c", ROWS),), ()), r"unknown: c \(direct\)"),
    "unknown to the loader": (RecvSpec((), ("c",)), r"unknown: c \(loader\)"),
    "order": (RecvSpec(GOOD.direct[::-1], ()), r"order: a \(direct\) comes after b"),
    "order of the loader": (RecvSpec((), ("b", "a")), r"order: a \(loader\) comes after b"),
    "twice": (RecvSpec((), ("a", "a")), "routes: a goes through the loader 2 times"),
    "both": (RecvSpec((part("a", ROWS),), ("a",)), "routes: a is both direct and for the loader"),
    "box": (RecvSpec((part("a", Box((1, 0), (5, 6))),), ()), r"shape: a \[1:5, 0:6\] is not a part of \[4, 6\]"),
    "axes": (RecvSpec((part("b", ROWS),), ()), r"shape: b \[1:3, 0:6\] is not a part of \[4\]"),
    "empty": (RecvSpec((part("a", Box((1, 0), (1, 6))),), ()), "shape: a"),
    "strides": (RecvSpec((part("a", ROWS, strides=(1,)),), ()), r"target: a .* with strides \[1\]"),
    "dtype": (RecvSpec((part("a", ROWS, "half"),), ()), "dtype: a .* comes as float32, half is bfloat16"),
    "beyond": (RecvSpec((part("a", ROWS, offset=9),), ()), "target: a .* ends at element 21 of live, which has 20"),
    "no tensor": (RecvSpec((part("a", ROWS, "other"),), ()), "target: a .* goes to other, which is not there"),
    "overlap": (RecvSpec((GOOD.direct[0], part("b", VECTOR, offset=11, strides=(1,))), ()),
                r"target: a \[1:3, 0:6\] and b \[0:4\] are both written to live"),
    "overlap of columns": (RecvSpec((part("a", Box((0, 0), (4, 3)), strides=(5, 1)), part("b", VECTOR, offset=2,
                                                                                          strides=(5,))), ()),
                           "a .* and b .* are both written to live"),
    "onto itself": (RecvSpec((part("b", VECTOR, strides=(0,)),), ()), "b .* and b .* are both written to live"),
}


@pytest.mark.parametrize("case", BAD_SPECS)
def test_wants_that_do_not_fit_are_refused(case: str) -> None:
    tensors = {"live": ("float32", 20), "half": ("bfloat16", 20)}
    check_recv_spec(PAIR, GOOD, tensors)
    # Columns beside each other.
    check_recv_spec(PAIR, RecvSpec((part("a", Box((0, 0), (4, 3)), strides=(5, 1)),
                                    part("b", VECTOR, offset=3, strides=(5,))), ()), tensors)
    spec, message = BAD_SPECS[case]
    with pytest.raises(ValueError, match=message):
        check_recv_spec(PAIR, spec, tensors)


BAD_PLANS: dict[str, tuple[Callable[[list[Op]], list[Op]], str]] = {
    "lost": (lambda operations: operations[1:], r"a \[1:3, 0:6\] of live: 6 of 12 elements are missing"),
    "again": (lambda operations: [*operations, operations[0]], r"a .* of live: .* overlap"),
    "not wanted": (lambda operations: [*operations, replace(operations[0], box=Box((3, 0), (4, 3)))],
                   r"a \[3:4, 0:3\] from trainer rank 0: not wanted"),
    "another place": (lambda operations: [replace(operations[0], target=Address("live", 3, (6, 1))), *operations[1:]],
                      r"a \[1:3, 0:3\] from trainer rank 0: not wanted at element 3 of live"),
    "another sender": (lambda operations: [replace(operations[0], sender=1), *operations[1:]],
                       r"a \[1:3, 0:3\] from trainer rank 1: that rank does not hold it"),
    "another entry": (lambda operations: [replace(operations[0], entry=1), *operations[1:]],
                      r"a \[1:3, 0:3\] from trainer rank 0: entry 1 is b"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_plan_that_brings_something_else_is_refused(case: str) -> None:
    holders = {"a": halves(3, 3), "b": [WHOLE_B]}
    operations = receive_plan(PAIR, holders, GOOD, 0)
    check_plan(PAIR, holders, GOOD, operations)
    change, message = BAD_PLANS[case]
    with pytest.raises(ValueError, match=message):
        check_plan(PAIR, holders, GOOD, change(operations))


def test_tensors_that_no_rank_holds_are_named_by_the_plans() -> None:
    holders = {"a": halves(3, 3)}
    with pytest.raises(ValueError, match="worker 7 wants tensors that the trainer does not have: b; c"):
        receive_plan(PAIR, holders, RecvSpec(GOOD.direct, ("c",)), 7)
    mine = [part("a", Box((0, 0), (4, 3)))]
    with pytest.raises(ValueError, match="trainer rank 0 holds tensors that are not in the chunk plan: a"):
        send_plan(PAIR[1:], holders, mine, {}, 0)
    with pytest.raises(ValueError, match=r"rank 1 does not hold .*: a \[0:4, 3:6\] should be there and is not; "
                                         r"a \[0:4, 0:3\] is there and should not be"):
        send_plan(PAIR, holders, mine, {}, 1)


def test_a_long_list_of_problems_is_cut() -> None:
    entries = [TensorMeta(f"layers.{number}", "float32", (1,)) for number in range(150)]
    with pytest.raises(ValueError, match=r"\(150 problems\)(?s:.*)layers\.99\n  and 50 more$"):
        check_holders(entries, {})
