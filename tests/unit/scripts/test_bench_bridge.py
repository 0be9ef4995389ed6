"""The bridge's benchmark without processes: cases, what moves, who sends what to whom, what is counted."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.bench import bridge_rank
from scripts.bench.bridge import CASES, cases_of, markdown, parse_arguments, parse_case, unsupported, with_ratios
from scripts.bench.bridge_rank import (
    BACKWARD,
    FORWARD,
    Payload,
    RawP2P,
    checker,
    counted,
    layout_of,
    run_microbatches,
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


def test_values_tell_microbatches_lanes_and_directions_apart():
    payload = payload_of("1->2")
    tensors = [payload.values(rank, direction, microbatch, CPU)
               for rank in (1, 2) for direction in (FORWARD, BACKWARD) for microbatch in (0, 1)]
    assert all(not torch.equal(one, two) for index, one in enumerate(tensors) for two in tensors[:index])
    exact = Payload(payload.layout, 1 << 16, 64, torch.bfloat16).values(1, FORWARD, 0, CPU)
    assert torch.equal(exact, exact.float().round().bfloat16()) and exact.max() == 250


@pytest.mark.parametrize("name", [*CASES, "2tp2->4", "1tp4->1tp2"])
def test_raw_messages_meet_and_are_the_fewest(monkeypatch, name):
    payload = payload_of(name)
    world = payload.layout.world_size
    messages: Counter[tuple[str, int, int, int]] = Counter()
    # Operations hold plain tuples, for P2POp wants a group of processes.
    monkeypatch.setattr(dist, "P2POp", lambda operation, tensor, peer, group: (operation, len(tensor), peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: batches.append(operations) or [])
    for rank in range(world):
        batches: list[Any] = []
        values = payload.values(rank, FORWARD if rank in payload.encoder.ranks else BACKWARD, 0, CPU)
        RawP2P(payload, rank, CPU, None).send_forward_recv_backward(values)
        for operation, rows, peer in batches[0]:
            ends = (rank, peer) if operation is dist.isend else (peer, rank)
            messages[operation.__name__, *ends, rows] += 1
        received = sum(rows for operation, rows, _ in batches[0] if operation is dist.irecv)
        assert received == sum(payload.rows(rank)), "each rank gets its rows once"
    assert {key[1:]: count for key, count in messages.items() if key[0] == "isend"} == {
        key[1:]: count for key, count in messages.items() if key[0] == "irecv"}
    assert set(messages.values()) == {1}


class Recorded:
    """A bridge that notes what it is asked for and receives numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append((name, *args))
            return len(self.calls)

        return call


@pytest.mark.parametrize("count", [1, 2, 3])
def test_both_sides_take_the_same_steps(count):
    encoder, language, taken = Recorded(), Recorded(), []
    run_microbatches(encoder, ["x0", "x1"], count, encodes=True, take=lambda *found: taken.append(found))
    run_microbatches(language, ["g0", "g1"], count, encodes=False, take=lambda *found: taken.append(found))
    names = [[call[0] for call in bridge.calls] for bridge in (encoder, language)]
    assert names[0] == ["send_forward", *["send_forward_recv_backward"] * (count - 1), "recv_backward"]
    assert names[1] == ["recv_forward", *["send_backward_recv_forward"] * (count - 1), "send_backward"]
    assert [call[1] for call in encoder.calls[:-1]] == ["x0", "x1", "x0"][:count]
    assert [call[1] for call in language.calls[1:]] == ["g0", "g1", "g0"][:count]
    assert [microbatch for microbatch, _ in taken] == [*range(count)] * 2


def test_a_wrong_value_is_an_error():
    expected = [torch.zeros(4), torch.ones(4)]
    take = checker("arm ours, rank 1", expected)
    take(0, torch.zeros(4))
    take(3, torch.ones(4, requires_grad=True))
    for wrong in (torch.zeros(4), torch.ones(3), torch.tensor([1.0, 1.0, 1.0, 1.5])):
        with pytest.raises(ValueError, match="arm ours, rank 1, microbatch 1"):
            take(1, wrong)


def test_what_is_counted(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for name in ("batch_isend_irecv", "send", "broadcast", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: [])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    group = argparse.Namespace(size=lambda: 3, rank=lambda: 0)
    operation = argparse.Namespace
    tensor = torch.ones(4)
    with counted("cpu") as counts:
        dist.batch_isend_irecv([operation(op=dist.isend, tensor=tensor), operation(op=dist.irecv, tensor=tensor)])
        dist.send(tensor, dst=1)
        dist.broadcast(tensor, src=0, group=group)
        dist.broadcast(tensor, src=1, group=group)
        dist.all_gather_into_tensor(torch.ones(12), tensor, group=group)
        assert f"{tensor.sum()}" and tensor.tolist() and bool(tensor[0] > 0)
        torch.cuda.synchronize()
    assert (counts.messages, counts.p2p_bytes, counts.collectives, counts.collective_bytes) == (2, 32, 2, 128)
    assert counts.host_syncs == 4
    assert torch.ones(1).item() == 1.0 and counts.host_syncs == 4, "everything is as before"
    assert bridge_rank.dist.send(tensor) == []


def test_the_wheel_is_left_out_where_it_would_be_wrong():
    assert unsupported(parse_case("2->1"), uneven=True)
    assert not unsupported(parse_case("2->1"), uneven=False) and not unsupported(parse_case("1->2"), uneven=True)


def test_ratios_and_the_table():
    arm = {"messages": 2.0, "p2p_bytes": 2e6, "collectives": 0.0, "collective_bytes": 0.0, "host_syncs": 0.0}
    size = with_ratios({"size_mb": 1.0, "bytes": 2_000_000,
                        "arms": {"ours": arm | {"seconds": 0.002}, "raw": arm | {"seconds": 0.001}}})
    assert size["raw_over_ours"] == 0.5 and "upstream_over_ours" not in size
    assert size["arms"]["raw"]["gb_per_s"] == pytest.approx(2.0)
    lines = markdown([{"case": "1->1", "ranks": 2, "sizes": [size]}, {"case": "2->2", "error": "ended"}]).splitlines()
    assert lines[2] == "| 1->1 | 2 | 1 | ours | 2.000 | 1.00 | 0.50 |  | 2 | 2.0 | 0 | 0.0 | 0 |" and len(lines) == 4
