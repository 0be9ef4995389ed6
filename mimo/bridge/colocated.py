"""The bridge when encoder and language model share ranks with different data-parallel sizes.

Megatron Core's `ColocatedBridgeCommunicator` needs the same number of tokens in every sample; here row counts come from
the step's plan, so samples, lanes and ranks may differ, down to none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.mimo.comm.colocated_communicator import BridgeDirection, ColocatedBridgeCommunicator

from mimo.bridge.handshake import Rows
from mimo.grid.groups import Grids
from mimo.observability.clock import DeviceTimer
from mimo.observability.spans import Kind, Trace
from mimo.protocols import LANGUAGE


class ColocatedBridge(ColocatedBridgeCommunicator):
    """Transforms encoder output from the encoder's replicas to the language model's lanes, and gradients back.

    Fan-in gathers the sibling encoder replicas' rows in forward and takes this replica's rows in backward; fan-out is
    the reverse. Megatron Core's rank mapping and groups are used as they are.

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
