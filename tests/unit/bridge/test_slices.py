"""Messages between replicas: every receiver gets every row, and no sender does the work of others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.bridge.disjoint import Message, piece_messages, sends_whole_pieces, slice_rows
from mimo.bridge.handshake import order_by_owner

RANKS = st.integers(1, 9)


@given(rows=st.integers(0, 100), senders=RANKS, receivers=RANKS, number=st.integers(0, 3))
def test_slices_move_every_row_once(rows: int, senders: int, receivers: int, number: int) -> None:
    messages = piece_messages(rows, senders, receivers, number, whole=False)
    assert sorted(row for each in messages for row in range(each.start, each.stop)) == list(range(rows))
    for side, ranks in (("sender", senders), ("receiver", receivers)):
        parts = [[row for each in messages if vars(each)[side] == rank for row in range(each.start, each.stop)]
                 for rank in range(ranks)]
        assert [row for part in parts for row in part] == list(range(rows)), "parts follow each other"
        height = slice_rows(rows, ranks)
        assert [len(part) for part in parts] == [min(height, max(rows - rank * height, 0)) for rank in range(ranks)]
    assert len({(each.sender, each.receiver) for each in messages}) == len(messages) <= senders + receivers - 1
    assert all(each.start < each.stop for each in messages)


@given(st.lists(st.binary(max_size=9).map(lambda owners: bytes(each % 3 for each in owners)), max_size=4))
def test_rows_of_each_context_parallel_rank_lie_together_lane_by_lane(lanes: list[bytes]) -> None:
    counts, order = order_by_owner(lanes, 3)
    assert sorted(order.tolist()) == list(range(sum(map(len, lanes))))
    assert counts == [lane.count(rank) for lane in lanes for rank in range(3)]
    owners, first = b"".join(lanes), 0
    for number, count in enumerate(counts):
        rows = order[first:first + count].tolist()
        assert rows == sorted(rows) and all(owners[row] == number % 3 for row in rows)
        first += count


def test_ranks_of_equal_replicas_meet_in_pairs() -> None:
    assert piece_messages(9, 2, 2, 0, whole=False) == [Message(0, 0, 0, 5), Message(1, 1, 5, 9)]
    assert piece_messages(8, 2, 4, 0, whole=False) == [
        Message(0, 0, 0, 2), Message(0, 1, 2, 4), Message(1, 2, 4, 6), Message(1, 3, 6, 8)]


@pytest.mark.parametrize(("senders", "receivers", "pieces"), [(4, 2, 2), (2, 2, 1), (8, 2, 4), (4, 1, 4), (2, 4, 1)])
def test_whole_pieces_come_from_as_many_senders_as_there_are(senders: int, receivers: int, pieces: int) -> None:
    messages = [each for number in range(pieces) for each in piece_messages(7, senders, receivers, number, whole=True)]
    assert {(each.start, each.stop) for each in messages} == {(0, 7)}
    assert [each.receiver for each in messages] == list(range(receivers)) * pieces
    loads = [sum(each.sender == sender for each in messages) for sender in range(senders)]
    assert max(loads) - min(loads) <= (receivers * pieces % senders > 0)


@pytest.mark.parametrize(("senders", "receivers", "replica_size", "one_host", "whole"), [
    (2, 2, 2, True, True),  # a sender for each receiver
    (4, 2, 2, True, True),
    (1, 2, 2, True, False),  # one sender would send everything twice
    (2, 4, 2, True, False),  # likewise, with two lanes
    (2, 2, 2, False, False),  # the slow links would carry everything twice
    (2, 1, 1, True, False),  # nothing to gather: each sender sends a half
])
def test_the_layout_decides_slices(senders, receivers, replica_size, one_host, whole):
    assert sends_whole_pieces(senders, receivers, replica_size, one_host=one_host) == whole
