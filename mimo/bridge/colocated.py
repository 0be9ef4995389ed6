"""Transfers between encoder and language model when both are on the same ranks.

`ColocatedBridge` moves the rows of one microbatch between different data-parallel sizes. `Exchange` carries pixels,
features and gradients of encoder windows (`mimo.training.encoder_windows`) between any ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.mimo.comm.colocated_communicator import BridgeDirection, ColocatedBridgeCommunicator

from mimo.bridge.handshake import Rows
from mimo.grid.groups import Grids
from mimo.observability.clock import DeviceTimer
from mimo.observability.spans import Kind, Trace
from mimo.protocols import LANGUAGE

# What `Exchange` carries.
PIXELS, FEATURES, GRADIENTS = "pixels", "features", "gradients"


class ColocatedBridge(ColocatedBridgeCommunicator):
    """Transforms encoder output from the encoder's replicas to the language model's lanes, and gradients back.

    Fan-in gathers the sibling encoder replicas' rows in forward and takes this replica's rows in backward; fan-out is
    the reverse. Megatron Core's rank mapping and groups are used as they are. Its class needs the same number of tokens
    in every sample. Here row counts come from the step's plan, so samples, lanes and ranks may differ, down to none.

    Args:
        grids: process groups.
        module: the encoder.
        trace: records every wait.
    """

    def __init__(self, grids: Grids, module: str, trace: Trace) -> None:
        super().__init__(
            grids.grids[module],
            grids.grids[LANGUAGE],
            src_module_name=module,
            dest_module_name=LANGUAGE,
            dim_mapping={"b": 0, "h": 1},
        )
        self.module, self.trace = module, trace
        self._source_rows: Rows = []
        self._destination_rows: Rows = []
        self._index = 0
        self.timer = DeviceTimer()

    def begin_step(self, source_rows: Rows, destination_rows: Rows) -> None:
        """Give the row counts of every microbatch: this encoder replica's per lane, this lane's per encoder replica."""
        self._source_rows, self._destination_rows, self._index = source_rows, destination_rows, 0
        self.timer = DeviceTimer()  # measures this schedule alone, as the timer of `Bridge` does

    def communicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Turn the encoder output of this rank's replica `[rows, hidden]` into the rows of this rank's lane.

        Raises:
            ValueError: `tensor` does not have the rows that the samples' token counts ask for.
        """
        to_lanes, from_sources = self._source_rows[self._index], self._destination_rows[self._index]
        self._index += 1
        if tensor.shape[0] != sum(to_lanes):
            raise ValueError(
                f"bridge {self.module} -> language, microbatch {self._index - 1}: encoder output has "
                f"{tensor.shape[0]} rows, but the samples' token counts ask for {sum(to_lanes)}"
            )
        if self.direction is BridgeDirection.EQUAL:
            return tensor
        return _Communicate.apply(tensor, self, to_lanes, from_sources)

    @property
    def forward_slot(self) -> int:
        """Index of this rank among the siblings that share a replica of the other side."""
        position = self.rank_to_dest_pos if self.is_fan_out() else self.rank_to_src_pos
        return position[self.current_rank][0] % self.scale

    def gather(self, tensor: torch.Tensor, rows: list[int], what: str) -> torch.Tensor:
        """Concatenate the siblings' tensors, `rows[i]` rows of sibling i.

        An all-gather moves equally many rows of each, so the shorter tensors are padded on the way. `what` names the
        wait.
        """
        if not sum(rows):
            return tensor.new_empty((0, tensor.shape[1]))
        height = max(rows)
        padded = tensor.new_zeros((height, tensor.shape[1]))
        padded[: tensor.shape[0]] = tensor
        gathered = tensor.new_empty((len(rows) * height, tensor.shape[1]))
        with (self.timer.measure(),
              self.trace.wait(f"colocated bridge {what}", Kind.BRIDGE_WAIT, module=self.module,
                              group=lambda: dist.get_process_group_ranks(self.gather_pg))):
            dist.all_gather_into_tensor(gathered, padded, group=self.gather_pg)
        return torch.cat([gathered[i * height : i * height + count] for i, count in enumerate(rows)])


class _Communicate(torch.autograd.Function):
    """Fan-in: gather forward, take own rows backward. Fan-out: the reverse."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, bridge: ColocatedBridge, to_lanes: list[int], from_sources: list[int]
    ) -> torch.Tensor:
        ctx.bridge, ctx.to_lanes, ctx.from_sources = bridge, to_lanes, from_sources
        if bridge.is_fan_in():
            return bridge.gather(tensor, from_sources, "forward gather")
        return tensor.split(to_lanes)[bridge.forward_slot].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gradient, bridge = gradients[0].contiguous(), ctx.bridge
        if bridge.is_fan_in():
            return gradient.split(ctx.from_sources)[bridge.forward_slot].contiguous(), None, None, None
        return bridge.gather(gradient, ctx.to_lanes, "backward gather"), None, None, None


class Exchange:
    """Messages of exact sizes between any ranks of a colocated layout, one at a time with each peer.

    Ranks of the first language stage meet at the same places of their schedules, so their messages to each other are
    posted together and waited for together. A later stage is ahead or behind: it sends features before the first stage
    asks for them and takes pixels and gradients after they were sent. Such a sender does not wait, and NCCL runs the
    messages of a communicator in order; so pixels, features and gradients between stages have a communicator each, on
    which a rank either only sends or only receives. Still, a message that exceeds NCCL's buffers is under way until it
    is received, and a host that allocates memory or loads a kernel may wait for all that is under way. The order of
    the messages must therefore be such that nothing would stop if every sender waited (`WindowSchedule`).

    Args:
        grids: process groups.
        device: where the payloads are.
        backend: `nccl` or `gloo`.
        trace: records every wait.

    Attributes:
        timer: measures the device's time in transfers since the last `begin_step`.
    """

    def __init__(self, grids: Grids, *, device: torch.device, backend: str, trace: Trace) -> None:
        self._grids, self._device, self._trace = grids, device, trace
        language = grids.layout.language
        self._first_stage = {rank for rank in language.ranks if language.coordinates(rank)["pp"] == 0}
        self._together = self._new_group(backend)
        outer = (PIXELS, FEATURES, GRADIENTS) if language.pp > 1 else ()
        self._between = {what: self._new_group(backend) for what in outer}
        # For each kind of message, the peers that this rank has sent to (0) or received from (1).
        self._linked: dict[tuple[str, int], set[int]] = defaultdict(set)
        # Messages that were sent and not waited for yet, with the tensors that they read.
        self._sent: list[tuple[list[dist.Work], list[torch.Tensor]]] = []
        self.timer = DeviceTimer()

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        group = dist.new_group(backend=backend)
        # NCCL wants all ranks of a group in its first call; later calls are between pairs.
        dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        return group

    def begin_step(self) -> None:
        """Start measuring anew. The step before must have ended with `flush`."""
        assert not self._sent, "the step before was not flushed"
        self.timer = DeviceTimer()

    def link(self, what: str, sends: set[int], receives: set[int]) -> None:
        """Connect this rank with peers of the coming messages. Collective: all ranks call it, in one order of `what`.

        NCCL connects two ranks of a communicator in their first message, and then the sender's host waits for the
        receiver. Inside the schedule it must not: the receiver may be waiting for another message of that sender.

        Args:
            what: as in `staged`.
            sends: peers to which this rank will send; each of them names this rank among those it receives from.
            receives: peers from which this rank will receive.
        """
        new = [peers - self._linked[what, kind] for kind, peers in enumerate((sends, receives))]
        for kind, peers in enumerate(new):
            self._linked[what, kind] |= peers
        tensors = [{peer: torch.zeros(1, device=self._device) for peer in sorted(peers)} for peers in new]
        for group, other in ((self._between.get(what), True), (self._together, False)):
            chosen = [self._between_stages(each, other) for each in tensors]
            if group is not None and any(chosen):
                self._wait(what, self._post(group, *chosen), *chosen)

    def staged(self, what: str, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None:
        """Exchange messages of a window. Each rank calls it at its own place of the schedule.

        Args:
            what: `FEATURES`, which go to the first language stage, or `PIXELS` or `GRADIENTS`, which come from there.
            sends: contiguous tensor for each peer. One for this rank itself is copied.
            receives: where to put the message of each peer.
        """
        for kind, peers in enumerate((sends, receives)):
            assert set(peers) - {self._grids.rank} <= self._linked[what, kind], (what, kind, set(peers))
        if self._grids.rank in receives:
            receives[self._grids.rank].copy_(sends[self._grids.rank])
        inner, outer = (self._between_stages(sends, False), self._between_stages(receives, False)), (
            self._between_stages(sends, True), self._between_stages(receives, True))
        # Messages to other stages are posted first, so that no other stage waits for what this one waits for.
        works = self._post(self._between[what], *outer) if any(outer) else []
        self._wait(what, self._post(self._together, *inner), *inner)
        while self._sent and all(work.is_completed() for work in self._sent[0][0]):
            self._sent.pop(0)
        if outer[1]:
            self._wait(what, works, *outer)
        elif works:
            self._sent.append((works, list(outer[0].values())))

    def flush(self) -> None:
        """Wait until everything sent has been received."""
        while self._sent:
            works, _ = self._sent[0]
            with self._trace.wait("encoder windows: messages to other stages", Kind.BRIDGE_WAIT):
                for work in works:
                    work.wait()
            self._sent.pop(0)

    def destroy(self) -> None:
        for group in (self._together, *self._between.values()):
            dist.destroy_process_group(group)

    def _between_stages(self, messages: dict[int, torch.Tensor], other: bool) -> dict[int, torch.Tensor]:
        """Select the messages between the first stage and `other` ones, or those inside the first stage."""
        inside = self._grids.rank in self._first_stage
        return {peer: tensor for peer, tensor in messages.items()
                if peer != self._grids.rank and (inside and peer in self._first_stage) != other}

    def _post(self, group: dist.ProcessGroup, sends: dict[int, torch.Tensor],
              receives: dict[int, torch.Tensor]) -> list[dist.Work]:
        operations = self._operations(dist.isend, sends, group) + self._operations(dist.irecv, receives, group)
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
        return works

    def _operations(self, operation: Callable[..., dist.Work | None], messages: dict[int, torch.Tensor],
                    group: dist.ProcessGroup) -> list[dist.P2POp]:
        return [dist.P2POp(operation, tensor, peer, group) for peer, tensor in messages.items()
                if peer != self._grids.rank and tensor.numel()]

    def _wait(self, what: str, works: list[dist.Work], sends: dict[int, torch.Tensor],
              receives: dict[int, torch.Tensor]) -> None:
        if not works:
            return
        peers = tuple(sorted({*sends, *receives}))
        with self.timer.measure(), self._trace.wait(f"encoder windows: {what}", Kind.BRIDGE_WAIT, peers=peers):
            for work in works:
                work.wait()
