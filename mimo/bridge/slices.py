"""Which rank of a sending replica sends which rows to which rank of a receiving one.

The tensor-parallel ranks of a replica hold equal copies of what it sends, and all need what it receives. So the links
of all pairs of ranks can be used. Both sides compute the same messages from counts that both know.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """Rows of a piece that one rank sends to another.

    Attributes:
        sender, receiver: position of the rank in its replica.
        start, stop: first row of the piece, and the row after the last.
    """

    sender: int
    receiver: int
    start: int
    stop: int


def slice_rows(rows: int, parts: int) -> int:
    """Return the rows of each part of a piece that is cut into equal parts. The last parts may have fewer, or none."""
    return -(-rows // parts)


def sends_whole_pieces(num_senders: int, num_receivers: int, replica_size: int, *, one_host: bool) -> bool:
    """Choose between whole pieces, one to each receiver, and slices that the receiving replica gathers.

    Inside a host, a GPU's link has the same speed whomever it talks to, so the busiest GPU decides. Let each receiver
    need n bytes, T be the ranks of a receiving replica, and r >= 1 the receivers for each sender. With whole pieces the
    busiest sender sends r n. With slices it sends r n / T, and then the all-gather moves n (T - 1) / T to each
    receiver, so together n (1 + (r - 1) / T). That is less, unless r = 1: then both take equally long, and whole pieces
    need no all-gather. (For T = 1 nothing is gathered, and slices come from all senders at once.)

    Between hosts, the links between the replicas are the slow ones. Slices move each byte over them once, whole pieces
    T times.

    Args:
        num_senders: ranks of all sending replicas.
        num_receivers: ranks of all receiving replicas.
        replica_size: T.
        one_host: whether they all are on one host.
    """
    return one_host and replica_size > 1 and num_receivers <= num_senders


def piece_messages(rows: int, senders: int, receivers: int, number: int, *, whole: bool) -> list[Message]:
    """List the messages that move a piece from one replica to another. No message is empty.

    In slices every row moves once: each sender sends an equal part of the rows, and each receiver gets an equal part.

    Args:
        rows: rows of the piece.
        senders: ranks of the sending replica.
        receivers: ranks of the receiving replica.
        number: index of the piece among those that the sending replica sends at once. Whole pieces with different
            indices come from different senders, as far as there are enough.
        whole: see `sends_whole_pieces`.
    """
    if not rows:
        return []
    if whole:
        return [Message((number * receivers + receiver) % senders, receiver, 0, rows) for receiver in range(receivers)]
    sent, received = slice_rows(rows, senders), slice_rows(rows, receivers)
    messages = []
    for sender in range(senders):
        for receiver in range(receivers):
            start = max(sender * sent, receiver * received)
            stop = min((sender + 1) * sent, (receiver + 1) * received, rows)
            if start < stop:
                messages.append(Message(sender, receiver, start, stop))
    return messages
