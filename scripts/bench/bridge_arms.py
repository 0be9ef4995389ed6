"""What scripts/bench/bridge.py compares: raw P2P beside the bridges, what each is given, and what it does with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist

from mimo.grid.spec import Layout, lane_shares, lane_sources

ENCODER = "vision"
FORWARD, BACKWARD = 0, 1
# Primes near 256: whole numbers below them are exact in bfloat16, and rows, columns and lanes do not repeat together.
MODULI = (251, 241)
# Tensors of different values that microbatches take in turn.
NUM_DISTINCT = 2
# How a tensor's values reach Python; on a CPU nothing else tells that a GPU would have to be waited for.
HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")
DEVICE_WAITS = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))


class Operations(Protocol):
    """A bridge, as the wheel's schedule drives it."""

    def send_forward(self, tensor_to_send: torch.Tensor) -> None: ...
    def recv_forward(self) -> torch.Tensor: ...
    def send_backward(self, grad_tensor: torch.Tensor) -> None: ...
    def recv_backward(self) -> torch.Tensor: ...
    def send_forward_recv_backward(self, tensor_to_send: torch.Tensor) -> torch.Tensor: ...
    def send_backward_recv_forward(self, grad_tensor: torch.Tensor) -> torch.Tensor: ...


class Payload:
    """What moves in a microbatch: the rows of each lane's samples, and their values.

    Args:
        layout: one encoder, and the language model.
        lane_bytes: of a lane's microbatch, one way, as near as whole rows of samples get.
        hidden_size: columns.
        dtype: of the values.
        uneven: samples have half as many rows more and less in turn.
    """

    def __init__(self, layout: Layout, lane_bytes: float, hidden_size: int, dtype: torch.dtype, *,
                 uneven: bool = False) -> None:
        self.layout, self.hidden_size, self.dtype = layout, hidden_size, dtype
        (self.encoder,) = layout.encoders
        self.micro_batch_size = max(self.encoder.dp // layout.num_lanes, 1)
        sample_bytes = lane_bytes / self.micro_batch_size
        rows = max(round(sample_bytes / (hidden_size * dtype.itemsize)), 2)
        numbers = range(layout.num_lanes * self.micro_batch_size)
        sizes = [rows + (rows // 2 if number % 2 == 0 else -(rows // 2)) * uneven for number in numbers]
        self.sample_rows = [sizes[lane * self.micro_batch_size :][: self.micro_batch_size]
                            for lane in range(layout.num_lanes)]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden_size * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all lanes, every row once, both ways."""
        return 2 * self.row_bytes * sum(sum(lane) for lane in self.sample_rows)

    def pieces(self, rank: int) -> list[tuple[int, int, int, int]]:
        """Of each piece of this rank's tensors: lane, encoder replica, first row of the lane, row after the last."""
        shares = []
        if rank in self.encoder.ranks:
            dp = self.encoder.coordinates(rank)["dp"]
            shares = [(dp, share) for share in lane_shares(self.encoder.dp, self.layout.num_lanes,
                                                           self.micro_batch_size, dp)]
        elif rank in self.layout.language.ranks:
            lane = self.layout.language.coordinates(rank)["dp"]
            shares = list(lane_sources(self.encoder.dp, self.layout.num_lanes, self.micro_batch_size, lane))
        return [(share.lane, dp, sum(self.sample_rows[share.lane][: share.start]),
                 sum(self.sample_rows[share.lane][: share.stop])) for dp, share in shares]

    def rows(self, rank: int) -> list[int]:
        """Rows of each piece."""
        return [stop - start for _, _, start, stop in self.pieces(rank)]

    def values(self, rank: int, direction: int, microbatch: int, device: torch.device) -> torch.Tensor:
        """`[rows, hidden]` of this rank in a microbatch: what it sends or has to receive."""
        columns = 5 * torch.arange(self.hidden_size, dtype=torch.int32, device=device)
        parts = []
        for lane, _, start, stop in self.pieces(rank):
            rows = 3 * torch.arange(start, stop, dtype=torch.int32, device=device)
            offset = 7 * lane + 11 * (microbatch % NUM_DISTINCT) + 101 * direction
            parts.append(((rows[:, None] + columns + offset) % MODULI[direction]).to(self.dtype))
        return torch.cat(parts)


class RawP2P:
    """Batched P2P of the least bytes: each rank gets the rows that it needs from one rank that has them, and no more.

    Receives go into buffers made once. Tensor-parallel ranks of the receiving side share out those of the sending one.

    Args:
        payload: what moves.
        rank: this one.
        device: of the tensors.
        group: of all ranks.
    """

    def __init__(self, payload: Payload, rank: int, device: torch.device, group: dist.ProcessGroup) -> None:
        encoder, language = payload.encoder, payload.layout.language
        here, there = (encoder, language) if rank in encoder.ranks else (language, encoder)
        place = here.coordinates(rank)["tp"]
        self._group = group
        # Of each piece, the ranks of the other side that it is sent to, and the one that it comes from.
        self._targets: list[list[int]] = []
        self._sources: list[int] = []
        for lane, dp, _, _ in payload.pieces(rank):
            replica = lane if here is encoder else dp
            self._targets.append([there.rank_at(tp=tp, dp=replica) for tp in range(there.tp) if tp % here.tp == place])
            self._sources.append(there.rank_at(tp=place % there.tp, dp=replica))
        self._rows = payload.rows(rank)
        self._received = torch.empty(sum(self._rows), payload.hidden_size, dtype=payload.dtype, device=device)

    def _exchange(self, sent: torch.Tensor | None, receives: bool) -> torch.Tensor:
        operations = []
        if sent is not None:
            operations += [dist.P2POp(dist.isend, piece, target, self._group)
                           for piece, targets in zip(sent.split(self._rows), self._targets, strict=True)
                           for target in targets]
        if receives:
            operations += [dist.P2POp(dist.irecv, piece, source, self._group)
                           for piece, source in zip(self._received.split(self._rows), self._sources, strict=True)]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return self._received

    def send_forward(self, tensor_to_send: torch.Tensor) -> None:
        self._exchange(tensor_to_send, False)

    def recv_forward(self) -> torch.Tensor:
        return self._exchange(None, True)

    send_backward, recv_backward = send_forward, recv_forward

    def send_forward_recv_backward(self, tensor_to_send: torch.Tensor) -> torch.Tensor:
        return self._exchange(tensor_to_send, True)

    send_backward_recv_forward = send_forward_recv_backward


def run_microbatches(operations: Operations, sent: Sequence[torch.Tensor], num_microbatches: int, *, encodes: bool,
                     take: Callable[[int, torch.Tensor], None] = lambda microbatch, tensor: None) -> None:
    """One step's transfers in the order of 1F1B over two stages.

    Args:
        operations: the bridge.
        sent: what this rank sends, `NUM_DISTINCT` tensors in turn.
        num_microbatches: of the step.
        encodes: whether this rank is of the encoder.
        take: called with each tensor that is received and its microbatch.
    """
    last = num_microbatches - 1
    if encodes:
        operations.send_forward(sent[0])
        for microbatch in range(last):
            take(microbatch, operations.send_forward_recv_backward(sent[(microbatch + 1) % NUM_DISTINCT]))
        take(last, operations.recv_backward())
        return
    take(0, operations.recv_forward())
    for microbatch in range(last):
        take(microbatch + 1, operations.send_backward_recv_forward(sent[microbatch % NUM_DISTINCT]))
    operations.send_backward(sent[last % NUM_DISTINCT])


def checker(where: str, expected: Sequence[torch.Tensor]) -> Callable[[int, torch.Tensor], None]:
    """What `run_microbatches` may call: raises ValueError for a tensor that is not the expected one of its turn."""
    def take(microbatch: int, tensor: torch.Tensor) -> None:
        if not torch.equal(tensor.detach(), expected[microbatch % len(expected)]):
            raise ValueError(f"{where}, microbatch {microbatch}: what arrived is not what was sent")

    return take


@dataclass
class Counts:
    """What one rank did.

    Attributes:
        messages: P2P messages sent, those that carry shapes included.
        p2p_bytes: of them.
        broadcasts: started from this rank.
        broadcast_bytes: what the other ranks of their groups got, summed.
        host_syncs: times that the host waited for the device, or would have on a GPU.
    """

    messages: int = 0
    p2p_bytes: int = 0
    broadcasts: int = 0
    broadcast_bytes: int = 0
    host_syncs: int = 0

    def sent(self, tensor: torch.Tensor) -> None:
        self.messages += 1
        self.p2p_bytes += tensor.nbytes

    def to_list(self) -> list[float]:
        return [float(value) for value in asdict(self).values()]


@contextmanager
def counted(device_type: str) -> Iterator[Counts]:
    """Count what the block does. On `cuda` torch says where an operation waits; elsewhere reads of values count."""
    counts = Counts()
    batch_p2p, send, broadcast = dist.batch_isend_irecv, dist.send, dist.broadcast

    def count_batch(operations: list[dist.P2POp]) -> Any:
        for operation in operations:
            if operation.op is dist.isend:
                counts.sent(operation.tensor)
        return batch_p2p(operations)

    def count_send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.sent(tensor)
        return send(tensor, *args, **kwargs)

    def count_broadcast(tensor: torch.Tensor, src: int, group: dist.ProcessGroup) -> Any:
        if src == dist.get_rank():
            counts.broadcasts += 1
            counts.broadcast_bytes += tensor.nbytes * (group.size() - 1)
        return broadcast(tensor, src=src, group=group)

    with ExitStack() as stack:
        for name, count in (("batch_isend_irecv", count_batch), ("send", count_send), ("broadcast", count_broadcast)):
            stack.enter_context(patch.object(dist, name, count))
        waits = DEVICE_WAITS if device_type == "cuda" else (*DEVICE_WAITS, *((torch.Tensor, name) for name in
                                                                             HOST_READS))
        for owner, name in waits:
            stack.enter_context(patch.object(owner, name, _counting(counts, getattr(owner, name))))
        caught = stack.enter_context(_sync_warnings(device_type))
        yield counts
    counts.host_syncs += sum("called a synchronizing" in str(warning.message) for warning in caught)


def _counting(counts: Counts, call: Callable[..., Any]) -> Callable[..., Any]:
    def count(*args: Any, **kwargs: Any) -> Any:
        counts.host_syncs += 1
        return call(*args, **kwargs)

    return count


@contextmanager
def _sync_warnings(device_type: str) -> Iterator[list[warnings.WarningMessage]]:
    """torch's warnings of operations that wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device_type != "cuda":
            yield caught
            return
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode(mode)
