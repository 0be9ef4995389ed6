"""The bridge between an encoder grid and the language grid on different ranks.

Same six operations as Megatron Core's `BridgeCommunicator`, so Megatron Core's 1F1B schedule drives it. Lifted here:
shapes come from the step's plan instead of the device, all peers' payloads travel in one batch of P2P operations,
uneven row counts work in both directions (fan-out and fan-in), a side without rows moves nothing, and nothing is summed
for a log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

from mimo.bridge.handshake import Rows, lanes_of, sources_of
from mimo.grid.groups import Grids
from mimo.observability.clock import DeviceTimer
from mimo.observability.spans import Kind, Spans
from mimo.protocols import LANGUAGE
from mimo.watchdog.watchdog import Watchdog


class Bridge(BridgeCommunicator):
    """Moves activations of one encoder to the language grid, and gradients back.

    The leader of each replica (tensor-parallel rank 0 of the encoder's last stage, of the language model's first stage)
    sends and receives; it broadcasts inside its tensor-parallel group. Encoder output is replicated over that group.

    Args:
        grids: process groups.
        module: the encoder.
        micro_batch_size: samples of one lane in one microbatch.
        hidden_size: columns of a row.
        dtype: dtype of the payload, both ways.
        needs_grad: whether anything of the encoder trains; if not, no gradient is sent back.
        watchdog: told about every wait.
        spans: likewise.

    Attributes:
        while_waiting: called in every transfer, on all ranks of a replica alike: what is sent is on its way, what is
            received not yet waited for.
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
        device: torch.device,
        backend: str,
        watchdog: Watchdog,
        spans: Spans,
    ) -> None:
        # Megatron Core's constructor is replaced, not extended: it makes NCCL groups by name and refuses uneven fan-in.
        self.grids, self.module, self.device, self.watchdog, self.spans = grids, module, device, watchdog, spans
        self.src_grid, self.dest_grid = grids.grids[module], grids.grids[LANGUAGE]
        self.src_module_name, self.dest_module_name = module, LANGUAGE
        self.comm_dtype, self.hidden_size, self.needs_grad = dtype, hidden_size, needs_grad
        self.current_rank = grids.rank
        layout = grids.layout
        encoder, language = layout.grids[module], layout.language
        leaders = [encoder.rank_at(dp=dp, pp=-1) for dp in range(encoder.dp)]
        leaders += [language.rank_at(dp=dp) for dp in range(language.dp)]
        self.group = dist.new_group(leaders, backend=backend)
        if self.current_rank in leaders:
            # NCCL wants all ranks of a group in its first call; later calls are between pairs.
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        self.replica_group: dist.ProcessGroup | None = None
        self.peers: list[int] = []
        self.leader = -1
        if self.current_rank in encoder.ranks:
            self.replica_group = grids.collections[module].tp
            self.leader = encoder.rank_at(dp=encoder.coordinates(self.current_rank)["dp"], pp=-1)
            self.peers = [
                language.rank_at(dp=lane) for lane in lanes_of(encoder, layout, self.current_rank, micro_batch_size)
            ]
        elif self.current_rank in language.ranks:
            self.replica_group = grids.collections[LANGUAGE].tp_cp
            self.leader = language.rank_at(dp=language.coordinates(self.current_rank)["dp"])
            self.peers = [
                encoder.rank_at(dp=dp, pp=-1) for dp in sources_of(encoder, layout, self.current_rank, micro_batch_size)
            ]
        self.while_waiting: Callable[[], None] | None = None
        self.timer = DeviceTimer()
        self._rows: Rows = []
        self._forward_index = self._backward_index = 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank talks to the other grid."""
        return self.current_rank == self.leader

    def begin_step(self, rows: Rows) -> None:
        """Give the row counts of every microbatch of the coming schedule, per peer in `self.peers` order."""
        self._rows = rows
        self._forward_index = self._backward_index = 0
        # Of this schedule alone: evaluations and policy updates come here too, and nobody asks for their times.
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
        """One batch of P2P with all peers: send the pieces of a tensor, receive and concatenate theirs."""
        microbatch = (self._backward_index if what.endswith("backward") else self._forward_index) - 1
        with self.spans.span(Kind.BRIDGE_WAIT, what, microbatch=microbatch):
            return self._transfer(what, sends, receives)

    def _transfer(
        self, what: str, sends: tuple[torch.Tensor, list[int]] | None, receives: list[int] | None
    ) -> torch.Tensor | None:
        received = None
        if receives is not None:
            received = torch.empty((sum(receives), self.hidden_size), dtype=self.comm_dtype, device=self.device)
        if sends is not None:
            # Held here until it has been waited for: it may be a copy.
            sends = (sends[0].detach().contiguous(), sends[1])
        works = self._post(what, sends, receives, received) if self.is_leader else []
        if self.while_waiting is not None:
            self.while_waiting()
        with self.timer.measure():
            if works:
                with self.watchdog.waiting(f"bridge {what}", module=self.module, peers=self.peers):
                    for work in works:
                        work.wait()
            if received is not None and received.shape[0] and self._replica_size > 1:
                with self.watchdog.waiting(f"bridge {what} broadcast", module=self.module, source=self.leader):
                    dist.broadcast(received, src=self.leader, group=self.replica_group)
        return received

    def _post(self, what: str, sends: tuple[torch.Tensor, list[int]] | None, receives: list[int] | None,
              received: torch.Tensor | None) -> list[dist.Work]:
        """Start a leader's messages."""
        operations = []
        if sends is not None:
            operations += self._messages(dist.isend, *sends)
        if receives is not None and received is not None:
            operations += self._messages(dist.irecv, received, receives)
        if not operations:
            return []
        with self.watchdog.waiting(f"bridge {what}", module=self.module, peers=self.peers):
            works: list[dist.Work] = dist.batch_isend_irecv(operations)
        return works

    def _messages(self, operation: Callable[..., Any], tensor: torch.Tensor, rows: list[int]) -> list[dist.P2POp]:
        """One message a peer, none for a piece without rows."""
        return [dist.P2POp(operation, piece, peer, self.group)
                for piece, peer in zip(tensor.split(rows), self.peers, strict=True) if piece.shape[0]]

    @property
    def _replica_size(self) -> int:
        return 1 if self.replica_group is None else self.replica_group.size()

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
        self._exchange("send_forward", (tensor_to_send, rows), None)

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
        return self._exchange("recv_backward", None, rows) if self.needs_grad else self._gradient(None, rows)

    def send_forward_recv_backward(
        self, tensor_to_send: torch.Tensor, grad_shape: tuple[int, ...] | None = None
    ) -> torch.Tensor | None:
        """`send_forward` and `recv_backward` in one batch.

        `grad_shape` is Megatron Core's and unused: the plan knows.
        """
        if not self.needs_grad:
            self.send_forward(tensor_to_send)
            return self.recv_backward()
        rows = self._next_forward()
        self._check(tensor_to_send, rows, self._forward_index - 1, "encoder output")
        return self._exchange("send_forward_recv_backward", (tensor_to_send, rows), self._next_backward())

    def send_backward_recv_forward(
        self, grad_tensor: torch.Tensor | None, forward_shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """`send_backward` and `recv_forward` in one batch.

        `forward_shape` is Megatron Core's and unused: the plan knows.
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
        """Release the group of leaders."""
        dist.destroy_process_group(self.group)
