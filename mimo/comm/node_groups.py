"""Sums and maxima over all ranks on the host, node by node.

gloo's all-reduce is a ring. With 800 ranks it would send 1600 messages one after the other in every iteration. Here the
ranks of a node send their values to the node's first rank, and only the first ranks exchange them.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


class NodeGroups:
    """Groups of a node's ranks, and of the first ranks of all nodes. Collective over the world.

    A node has the ranks that torchrun has started there. If nodes have different numbers of ranks, if there is only one
    node, or if each has one rank, `host` is used for everything.

    Args:
        host: gloo group of the world.
        timeout: time limit of the groups.

    Attributes:
        groups: the groups that were made here; the caller has to destroy them.
    """

    def __init__(self, host: dist.ProcessGroup, timeout: timedelta) -> None:
        self._host, self.groups = host, list[dist.ProcessGroup]()
        self._node: dist.ProcessGroup | None = None
        self._leaders: dist.ProcessGroup | None = None
        rank, world_size = dist.get_rank(), dist.get_world_size()
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if int(os.environ.get("LOCAL_RANK", "0")) != rank % size:
            size = 1  # ranks are not numbered node by node
        # Every rank has to come to the same conclusion, and nodes may differ.
        extremes = torch.tensor([size, -size], dtype=torch.int64)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=host)
        are_equal = extremes[0].item() == -extremes[1].item()
        if not are_equal or world_size % size or size in (1, world_size):
            return
        self._first, self._size, self._num_nodes = rank - rank % size, size, world_size // size
        self._leaders = self._make(list(range(0, world_size, size)), timeout)
        for first in range(0, world_size, size):
            self._node = self._make(list(range(first, first + size)), timeout) or self._node

    def reduce(self, maxima: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the maxima of `maxima` and the sums of `sums` over all ranks. All ranks get the same bits.

        Args:
            maxima: float64 `[n]`, with the same `n` on every rank.
            sums: float64 `[m]`, with the same `m` on every rank. `m` may be 0.
        """
        if self._node is None:
            maxima, sums = maxima.clone(), sums.clone()
            work = dist.all_reduce(sums, group=self._host, async_op=True) if len(sums) else None
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._host)
            if work is not None:
                work.wait()
            return maxima, sums
        own = torch.cat([maxima, sums])
        leads = dist.get_rank() == self._first
        found = [torch.empty_like(own) for _ in range(self._size)] if leads else None
        dist.gather(own, found, dst=self._first, group=self._node)
        if found is not None:
            own = _reduce(found, len(maxima))
            of_nodes = [torch.empty_like(own) for _ in range(self._num_nodes)]
            dist.all_gather(of_nodes, own, group=self._leaders)
            own = _reduce(of_nodes, len(maxima))
        dist.broadcast(own, src=self._first, group=self._node)
        return own[: len(maxima)], own[len(maxima) :]

    def _make(self, ranks: list[int], timeout: timedelta) -> dist.ProcessGroup | None:
        """Make a group. Every rank has to call this; ranks that are not in the group get None."""
        group = dist.new_group(ranks, timeout=timeout, backend="gloo")
        if dist.get_rank() not in ranks:
            return None
        self.groups.append(group)
        return group


def _reduce(rows: list[torch.Tensor], num_maxima: int) -> torch.Tensor:
    stacked = torch.stack(rows)
    return torch.cat([stacked[:, :num_maxima].amax(dim=0), stacked[:, num_maxima:].sum(dim=0)])
