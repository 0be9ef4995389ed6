"""The bridge's benchmark without processes: cases, what moves, who sends what to whom, what is counted."""

from __future__ import annotations

import argparse

import pytest
import torch

from scripts.bench.bridge import CASES, cases_of, parse_arguments, parse_case, unsupported
from scripts.bench.bridge_rank import (
    FORWARD,
    Payload,
    checker,
    layout_of,
)

CPU = torch.device("cpu")
HIDDEN = 8


def payload_of(name: str, *, uneven: bool = False) -> Payload:
    return Payload(layout_of(vars(parse_case(name))), 12 * HIDDEN * 4, HIDDEN, torch.float32, uneven=uneven)


def test_cases_have_names():
    case = parse_case("2tp4->1")
    assert (case.encoder_dp, case.encoder_tp, case.language_dp, case.language_tp, case.ranks) == (2, 4, 1, 1, 9)
    for wrong in ("1", "1->", "0->1", "1tp0->1", "1->1tp", "2->3"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_case(wrong)


def test_cases_that_do_not_fit_are_left_out_or_refused():
    two, three = parse_arguments(["--device", "cuda"]), parse_arguments(["--device", "cpu", "--world-size", "3"])
    assert [case.name for case in cases_of(two, 2)] == ["1->1"]
    assert [case.name for case in cases_of(three, 0)] == ["1->1", "1->2", "2->1", "1->1tp2", "1tp2->1"]
    with pytest.raises(ValueError, match="finds 0 GPUs"):
        cases_of(two, 0)
    with pytest.raises(ValueError, match="2->2' needs 4 ranks, --world-size allows 3"):
        cases_of(parse_arguments(["--device", "cpu", "--world-size", "3", "--case", "2->2"]), 0)
    with pytest.raises(ValueError, match="--world-size 4: torch finds 2 GPUs"):
        cases_of(parse_arguments(["--device", "cuda", "--world-size", "4"]), 2)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("name", [*CASES, "4->2", "2->4"])
def test_both_sides_know_the_same_rows(name, uneven):
    payload = payload_of(name, uneven=uneven)
    encoder, language = payload.encoder, payload.layout.language
    sent = {lane: torch.cat([payload.values(encoder.rank_at(dp=dp), FORWARD, 1, CPU).split(
        payload.rows(encoder.rank_at(dp=dp)))[index] for dp in range(encoder.dp)
        for index, piece in enumerate(payload.pieces(encoder.rank_at(dp=dp))) if piece[0] == lane])
        for lane in range(language.dp)}
    for lane, tensor in sent.items():
        assert torch.equal(payload.values(language.rank_at(dp=lane), FORWARD, 1, CPU), tensor)
    total = sum(len(tensor) for tensor in sent.values())
    assert payload.num_bytes == 2 * total * HIDDEN * 4 and total == 12 * language.dp or uneven
    if uneven and max(encoder.dp, language.dp) > 1:
        assert len({rows for rank in range(encoder.size) for rows in payload.rows(rank)}) > 1


def test_a_wrong_value_is_an_error():
    expected = [torch.zeros(4), torch.ones(4)]
    take = checker("arm ours, rank 1", expected)
    take(0, torch.zeros(4))
    take(3, torch.ones(4, requires_grad=True))
    for wrong in (torch.zeros(4), torch.ones(3), torch.tensor([1.0, 1.0, 1.0, 1.5])):
        with pytest.raises(ValueError, match="arm ours, rank 1, microbatch 1"):
            take(1, wrong)


def test_the_wheel_is_left_out_where_it_would_be_wrong():
    assert unsupported(parse_case("2->1"), uneven=True)
    assert not unsupported(parse_case("2->1"), uneven=False) and not unsupported(parse_case("1->2"), uneven=True)
