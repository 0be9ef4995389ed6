"""Sums and maxima over all ranks on the host, node by node.

gloo's all-reduce is a ring: at 800 ranks 1600 messages one after the other, in every iteration. Here the ranks of a
node give theirs to its first one, and only those exchange them.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


class NodeGroups:
    """Groups of a node's ranks, and of the first ranks of all nodes. Collective over the world.

    Nodes are as torchrun has started them. Where they have different numbers of ranks, or there is only one, or one
    rank on each, everything goes over `host`.

    Args:
        host: gloo group of the world.
        timeout: of the groups.

    Attributes:
        groups: what was made here, for whoever destroys them.
    """

    def __init__(self, host: dist.ProcessGroup, timeout: timedelta) -> None:
        self._host, self.groups = host, list[dist.ProcessGroup]()
        self._node: dist.ProcessGroup | None = None
        self._leaders: dist.ProcessGroup | None = None
        rank, world_size = dist.get_rank(), dist.get_world_size()
        size = _ranks_of_a_node(host)
        if size == 1 or size == world_size:
            return
        self._first, self._size, self._num_nodes = rank - rank % size, size, world_size // size
        self._leaders = self._make(list(range(0, world_size, size)), timeout)
        for first in range(0, world_size, size):
            self._node = self._make(list(range(first, first + size)), timeout) or self._node

    def reduce(self, maxima: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The maximum of each of `maxima` over all ranks, and the sum of each of `sums`; the same bits on every rank.

        Args:
            maxima: float64 `[n]`, `n` the same everywhere.
            sums: float64 `[m]`, which may be 0.
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
        """A group, which every rank has to make; None on ranks that are not in it."""
        group = dist.new_group(ranks, timeout=timeout, backend="gloo")
        if dist.get_rank() not in ranks:
            return None
        self.groups.append(group)
        return group


def _reduce(rows: list[torch.Tensor], num_maxima: int) -> torch.Tensor:
    stacked = torch.stack(rows)
    return torch.cat([stacked[:, :num_maxima].amax(dim=0), stacked[:, num_maxima:].sum(dim=0)])


def _ranks_of_a_node(host: dist.ProcessGroup) -> int:
    """Ranks of each node; 1 where nodes differ or ranks are not numbered node by node."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if int(os.environ.get("LOCAL_RANK", "0")) != rank % size:
        size = 1
    extremes = torch.tensor([size, -size], dtype=torch.int64)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=host)
    most, least = extremes[0].item(), -extremes[1].item()
    return size if most == least and world_size % size == 0 else 1
