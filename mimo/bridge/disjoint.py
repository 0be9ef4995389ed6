"""The bridge between an encoder grid and the language grid on different ranks.

`Bridge` has the six operations of Megatron Core's `BridgeCommunicator`, so Megatron Core's 1F1B schedule drives it, but
without that class's limits: shapes come from the step's plan instead of the device, all peers' payloads travel in one
batch of P2P operations over the links of all tensor-parallel ranks, row counts may be uneven in both directions
(fan-out and fan-in), a side without rows moves nothing, and nothing is summed for a log.

The tensor-parallel ranks of a replica hold equal copies of what it sends, and all need what it receives. So the links
of all pairs of ranks can be used: `sends_whole_pieces` and `piece_messages` say which rank sends which rows to which.
Both sides compute the same messages from counts that both know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

from mimo.bridge.handshake import Rows
from mimo.comm import gather
from mimo.grid.groups import Grids
from mimo.grid.spec import GridSpec, lane_shares, lane_sources
from mimo.observability.clock import DeviceTimer, host_of_clock
from mimo.observability.spans import Kind, Spans, Trace
from mimo.protocols import LANGUAGE
from mimo.watchdog.watchdog import Watchdog


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


@dataclass(frozen=True)
class Peer:
    """A replica of the other grid with which this rank's replica exchanges a piece.

    Attributes:
        ranks: its ranks at the bridge, in the order of their positions.
        number: index of the piece among all that the peer sends at once.
    """

    ranks: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class Sent:
    """Messages on their way. Nothing may write to their tensor until they have been received."""

    works: list[dist.Work]
    peers: tuple[int, ...]
    tensor: torch.Tensor


class Bridge(BridgeCommunicator):
    """Moves activations of one encoder to the language grid, and gradients back.

    A replica here is one of the encoder's last stage or of the language model's first stage, where each
    context-parallel rank is a replica of its own and gets the rows of its own tokens. The tensor-parallel ranks of a
    replica hold equal copies of what it sends, since the same collectives made them. Each rank sends a part, and the
    receiving replica completes its copies by an all-gather where needed (see `sends_whole_pieces`).

    An encoder that does not run ahead sends a microbatch and receives the gradient that is due in one batch of P2P
    operations, and waits for the batch. One that runs ahead sends microbatches long before the language model takes
    them. The language model sends a gradient before it takes those features. If features and gradients shared a batch,
    or a communicator, on which NCCL runs messages in order, the gradient would be held back behind the features, and
    both sides would wait for ever. So they then have a communicator each, with a stream of its own on CUDA, and each
    side waits only for what it receives.

    A message that exceeds NCCL's buffers is under way until it is received, and a host that loads a kernel may wait for
    all that is under way. If hosts on both sides do, an encoder that is two or more microbatches ahead and the language
    model could wait for each other. Kernels are loaded in the first step, in which it is at most one ahead.

    Args:
        grids: process groups.
        module: the encoder.
        micro_batch_size: samples of one lane in one microbatch.
        hidden_size: columns of a row.
        dtype: dtype of the payload, both ways.
        needs_grad: whether anything of the encoder trains; if not, no gradient is sent back.
        run_ahead: the most microbatches that the encoder encodes beyond those that 1F1B has in flight.
        watchdog: watches every wait.
        spans: records every transfer.

    Attributes:
        while_waiting: called in every transfer, on all ranks of a replica alike: what is sent is on its way, what is
            received not yet waited for.
        run_ahead: as given, whatever the first step has (`microbatches_ahead`); may be lowered between steps, on all
            ranks alike.
    """

    def __init__(
        self,
        grids: Grids,
        module: str,
        *,
        micro_batch_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        needs_grad: bool,
        run_ahead: int,
        device: torch.device,
        backend: str,
        watchdog: Watchdog,
        spans: Spans,
    ) -> None:
        # Megatron Core's constructor is replaced, not extended: it makes NCCL groups by name and refuses uneven fan-in.
        self.grids, self.module, self.device, self.watchdog, self.spans = grids, module, device, watchdog, spans
        self.trace = Trace(watchdog, spans)
        self.src_grid, self.dest_grid = grids.grids[module], grids.grids[LANGUAGE]
        self.src_module_name, self.dest_module_name = module, LANGUAGE
        self.comm_dtype, self.hidden_size, self.needs_grad = dtype, hidden_size, needs_grad
        self.current_rank = grids.rank
        layout = grids.layout
        encoder, language = layout.grids[module], layout.language
        cp = language.cp
        encoders = [_replica(encoder, dp, 0, -1) for dp in range(encoder.dp)]
        # Each context-parallel rank of a lane gets the rows of its own tokens.
        lanes = [[_replica(language, lane, part, 0) for part in range(cp)] for lane in range(language.dp)]
        members = sorted(rank for replica in (*encoders, *chain(*lanes)) for rank in replica)
        self.group = self.gradient_group = self._new_group(members, backend)
        if run_ahead:
            self.gradient_group = self._new_group(members, backend)
        hosts = gather(grids, host_of_clock())
        one_host = len({hosts[rank] for rank in members}) == 1

        def served(dp: int) -> list[int]:
            return [share.lane for share in lane_shares(encoder.dp, layout.num_lanes, micro_batch_size, dp)]

        def feeding(lane: int) -> list[int]:
            return [dp for dp, _ in lane_sources(encoder.dp, layout.num_lanes, micro_batch_size, lane)]

        self.replica_group: dist.ProcessGroup | None = None
        self.replica: tuple[int, ...] = ()
        self.peers: list[Peer] = []
        # A piece has the same number at both ends: its place among all that its sender sends at once (`Peer.number`).
        here, there = encoder, language
        self._sends_gradients = False
        if self.current_rank in encoder.ranks:
            dp = encoder.coordinates(self.current_rank)["dp"]
            self.replica, self.replica_group = encoders[dp], grids.collections[module].tp
            self.peers = [Peer(ranks, feeding(lane).index(dp)) for lane in served(dp) for ranks in lanes[lane]]
        elif self.current_rank in language.ranks:
            here, there, self._sends_gradients = language, encoder, True
            coordinates = language.coordinates(self.current_rank)
            lane, part = coordinates["dp"], coordinates["cp"]
            self.replica, self.replica_group = lanes[lane][part], grids.collections[LANGUAGE].tp
            self.peers = [Peer(encoders[dp], served(dp).index(lane) * cp + part) for dp in feeding(lane)]
        own_ranks, their_ranks = (grid.dp * grid.tp * grid.cp for grid in (here, there))
        self._sends_whole = sends_whole_pieces(own_ranks, their_ranks, there.tp, one_host=one_host)
        self._receives_whole = sends_whole_pieces(their_ranks, own_ranks, here.tp, one_host=one_host)
        self.while_waiting: Callable[[], None] | None = None
        self.run_ahead = run_ahead
        # Whether no step with backward passes is over.
        self._is_first_step = True
        self._sent: deque[Sent] = deque()
        self.timer = DeviceTimer()
        self._rows: Rows = []
        self._orders: Sequence[torch.Tensor] | None = None
        self._forward_index = self._backward_index = 0

    def _new_group(self, members: list[int], backend: str) -> dist.ProcessGroup:
        group = dist.new_group(members, backend=backend)
        if self.current_rank in members:
            # NCCL wants all ranks of a group in its first call; later calls are between pairs.
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return group

    @property
    def position(self) -> int:
        """Position of this rank in its replica."""
        return self.replica.index(self.current_rank)

    @property
    def microbatches_ahead(self) -> int:
        """The most microbatches that the encoder runs ahead in the coming schedule, or in the one under way."""
        return min(self.run_ahead, 1) if self._is_first_step else self.run_ahead

    def begin_step(self, rows: Rows, orders: Sequence[torch.Tensor] | None = None) -> None:
        """Give the row counts of every microbatch of the coming schedule, per peer in `self.peers` order.

        `orders` says which row of the encoder's output comes where, so that those of each peer lie together, int64
        `[rows]` for each microbatch; None: they do already, as on the language grid.
        """
        self._rows = rows
        # A copy from memory that is not page-locked would make the host wait for the device.
        self._orders = None if orders is None else [
            (order.pin_memory() if self.device.type == "cuda" else order).to(self.device, non_blocking=True)
            for order in orders]
        self._forward_index = self._backward_index = 0
        # It measures one schedule. Evaluations and policy updates come here too, but nobody asks for their times.
        self.timer = DeviceTimer()

    def _next_forward(self) -> list[int]:
        self._forward_index += 1
        return self._rows[self._forward_index - 1]

    def _next_backward(self) -> list[int]:
        self._backward_index += 1
        return self._rows[self._backward_index - 1]

    def _exchange(
        self, what: str, sends: tuple[torch.Tensor, list[int]] | None, receives: list[int] | None
    ) -> torch.Tensor | None:
        """Send the pieces of a tensor to all peers and return theirs, concatenated, in one batch of P2P operations."""
        microbatch = (self._backward_index if what.endswith("backward") else self._forward_index) - 1
        with self.spans.span(Kind.BRIDGE_WAIT, what, microbatch=microbatch):
            return self._transfer(what, sends, receives)

    def _transfer(
        self, what: str, sends: tuple[torch.Tensor, list[int]] | None, receives: list[int] | None
    ) -> torch.Tensor | None:
        sending: list[dist.P2POp] = []
        receiving: list[dist.P2POp] = []
        if sends is not None:
            # Held here until it has been waited for: it may be a copy.
            sends = (sends[0].detach().contiguous(), sends[1])
            sending = self._sending(*sends)
        received = None if receives is None else self._buffer(receives)
        if receives is not None and received is not None:
            receiving = self._receiving(received, receives)
        if sends is not None and self.run_ahead:
            self._send_ahead(what, sends[0], sending)
            sending = []
        works, peers = self._post(what, sending + receiving)
        if self.while_waiting is not None:
            self.while_waiting()
        with self.timer.measure():
            if works:
                with self.watchdog.waiting(f"bridge {what}", module=self.module, peers=peers):
                    for work in works:
                        work.wait()
            return None if receives is None or received is None else self._completed(what, received, receives)

    def _post(self, what: str, operations: list[dist.P2POp]) -> tuple[list[dist.Work], tuple[int, ...]]:
        """Start messages and return them with the ranks at their other ends."""
        if not operations:
            return [], ()
        peers = tuple(sorted({operation.peer for operation in operations}))
        with self.watchdog.waiting(f"bridge {what}", module=self.module, peers=peers):
            return dist.batch_isend_irecv(operations), peers

    def _send_ahead(self, what: str, tensor: torch.Tensor, operations: list[dist.P2POp]) -> None:
        """Start messages that are not waited for before too many of them are on their way.

        The encoder has at most `limit` microbatches in flight. So it has the gradient of the microbatch whose message
        is waited for here, and the language model has that microbatch's features. Therefore only an encoder that gets
        no gradients ever waits here. It runs no further ahead than others do.
        """
        works, peers = self._post(what, operations)
        if works:
            self._sent.append(Sent(works, peers, tensor))
        while self._sent and all(work.is_completed() for work in self._sent[0].works):
            self._sent.popleft()
        limit = self.grids.layout.language.pp + self.microbatches_ahead + 1
        while len(self._sent) > limit:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        oldest = self._sent[0]
        with self.trace.wait("bridge messages on their way", Kind.BRIDGE_WAIT, module=self.module, peers=oldest.peers):
            for work in oldest.works:
                work.wait()
        # Its memory may now be used again: on CUDA, the compute stream waits for the messages.
        self._sent.popleft()

    def finish_step(self, *, forward_only: bool) -> None:
        """Wait until everything sent has been received; `forward_only` as in the schedule that has ended."""
        while self._sent:
            self._wait_for_oldest()
        self._is_first_step = self._is_first_step and forward_only

    def _sending(self, tensor: torch.Tensor, rows: list[int]) -> list[dist.P2POp]:
        """List the messages in which this rank sends its part of a tensor to all peers."""
        operations = []
        group = self.gradient_group if self._sends_gradients and self.run_ahead else self.group
        for number, (peer, piece) in enumerate(zip(self.peers, tensor.split(rows), strict=True)):
            operations += [
                dist.P2POp(dist.isend, piece[message.start : message.stop], peer.ranks[message.receiver], group)
                for message in piece_messages(piece.shape[0], len(self.replica), len(peer.ranks), number,
                                              whole=self._sends_whole)
                if message.sender == self.position]
        return operations

    @property
    def _parts(self) -> int:
        """Number of parts, one for each rank of this replica, into which a received piece is cut."""
        return 1 if self._receives_whole else len(self.replica)

    def _buffer(self, rows: list[int]) -> torch.Tensor:
        """Make the buffer for what a replica receives, `[parts, rows of a part, hidden]`.

        A part has the slices of all pieces that one rank receives, each padded to the size of the largest.
        """
        height = sum(slice_rows(count, self._parts) for count in rows)
        return torch.empty((self._parts, height, self.hidden_size), dtype=self.comm_dtype, device=self.device)

    def _receiving(self, buffer: torch.Tensor, rows: list[int]) -> list[dist.P2POp]:
        """List the messages in which this rank receives its part of the pieces of all peers."""
        operations = []
        group = self.group if self._sends_gradients or not self.run_ahead else self.gradient_group
        part = self.position if self._parts > 1 else 0
        starts = accumulate((slice_rows(count, self._parts) for count in rows), initial=0)
        for peer, count, start in zip(self.peers, rows, starts, strict=False):
            first = start - part * slice_rows(count, self._parts)
            operations += [
                dist.P2POp(dist.irecv, buffer[part, first + message.start : first + message.stop],
                           peer.ranks[message.sender], group)
                for message in piece_messages(count, len(peer.ranks), len(self.replica), peer.number,
                                              whole=self._receives_whole)
                if message.receiver == self.position]
        return operations

    def _completed(self, what: str, buffer: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Return the concatenated pieces `[rows, hidden]`, once the replica has gathered what each rank received."""
        if self._parts == 1:
            return buffer[0]
        if buffer.numel():
            with self.watchdog.waiting(f"bridge {what} all-gather", module=self.module, group=self.replica):
                dist.all_gather_into_tensor(buffer.flatten(0, 1), buffer[self.position], group=self.replica_group)
        if len(rows) == 1:
            return buffer.flatten(0, 1)[: rows[0]]  # without a copy: the padding is behind the rows
        heights = [slice_rows(count, self._parts) for count in rows]
        return torch.cat([piece[part, : max(count - part * height, 0)]
                          for piece, count, height in zip(buffer.split(heights, dim=1), rows, heights, strict=True)
                          for part in range(self._parts)])

    def _check(self, tensor: torch.Tensor, rows: list[int], microbatch: int, what: str) -> None:
        if tuple(tensor.shape) != (sum(rows), self.hidden_size) or tensor.dtype != self.comm_dtype:
            raise ValueError(
                f"bridge {self.module} -> language, microbatch {microbatch}: {what} is {tuple(tensor.shape)} "
                f"{tensor.dtype}, but the samples' token counts ask for ({sum(rows)}, {self.hidden_size}) "
                f"{self.comm_dtype}"
            )

    def send_forward(self, tensor_to_send: torch.Tensor) -> None:
        """Send one microbatch's encoder output `[rows, hidden]` to its lanes."""
        rows = self._next_forward()
        self._check(tensor_to_send, rows, self._forward_index - 1, "encoder output")
        self._exchange("send_forward", (self._by_peer(tensor_to_send), rows), None)

    def recv_forward(self) -> torch.Tensor:
        """Receive this lane's encoder output `[rows, hidden]`, a leaf that collects the gradient to send back."""
        received = self._exchange("recv_forward", None, self._next_forward())
        assert received is not None
        return received.requires_grad_(True)

    def send_backward(self, grad_tensor: torch.Tensor | None) -> None:
        """Send the gradient of a received tensor back to the encoder ranks it came from."""
        rows = self._next_backward()
        if self.needs_grad:
            self._exchange("send_backward", (self._gradient(grad_tensor, rows), rows), None)

    def recv_backward(self) -> torch.Tensor | None:
        """Receive the gradient of the oldest sent output `[rows, hidden]`; zeros where nothing of the encoder trains.

        Stages of a frozen encoder still hand gradients back to each other: Megatron Core's pipeline cannot leave it
        out.
        """
        rows = self._next_backward()
        if not self.needs_grad:
            return self._gradient(None, rows)
        return self._as_encoded(self._exchange("recv_backward", None, rows))

    def send_forward_recv_backward(
        self, tensor_to_send: torch.Tensor, grad_shape: tuple[int, ...] | None = None
    ) -> torch.Tensor | None:
        """Do `send_forward` and `recv_backward` in one batch.

        Megatron Core passes `grad_shape`; the row counts of `begin_step` are used instead.
        """
        if not self.needs_grad:
            self.send_forward(tensor_to_send)
            return self.recv_backward()
        rows = self._next_forward()
        self._check(tensor_to_send, rows, self._forward_index - 1, "encoder output")
        return self._as_encoded(self._exchange(
            "send_forward_recv_backward", (self._by_peer(tensor_to_send), rows), self._next_backward()))

    def _by_peer(self, output: torch.Tensor) -> torch.Tensor:
        """Sort the rows of the microbatch that is being sent so that those of each peer lie together."""
        return output if self._orders is None else output.detach()[self._orders[self._forward_index - 1]]

    def _as_encoded(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Put the rows of a received gradient in the order of the encoder's output."""
        if self._orders is None or gradient is None:
            return gradient
        return torch.empty_like(gradient).index_copy_(0, self._orders[self._backward_index - 1], gradient)

    def send_backward_recv_forward(
        self, grad_tensor: torch.Tensor | None, forward_shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Do `send_backward` and `recv_forward` in one batch.

        Megatron Core passes `forward_shape`; the row counts of `begin_step` are used instead.
        """
        if not self.needs_grad:
            self.send_backward(grad_tensor)
            return self.recv_forward()
        rows = self._next_backward()
        sends = (self._gradient(grad_tensor, rows), rows)
        received = self._exchange("send_backward_recv_forward", sends, self._next_forward())
        assert received is not None
        return received.requires_grad_(True)

    def _gradient(self, gradient: torch.Tensor | None, rows: list[int]) -> torch.Tensor:
        if gradient is None:
            # The loss of this microbatch does not depend on the encoder.
            return torch.zeros((sum(rows), self.hidden_size), dtype=self.comm_dtype, device=self.device)
        return gradient

    def destroy(self) -> None:
        for group in {self.group, self.gradient_group}:
            dist.destroy_process_group(group)


def _replica(grid: GridSpec, dp: int, cp: int, stage: int) -> tuple[int, ...]:
    """Return the ranks of a stage of a replica that hold equal copies of its output or input."""
    return tuple(grid.rank_at(tp=tp, cp=cp, dp=dp, pp=stage) for tp in range(grid.tp))
