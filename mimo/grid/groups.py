"""Process groups of every grid, built from a validated `Layout` through Megatron Core's `HyperCommGrid`.

`parallel_state` stays uninitialised: each Megatron part gets its groups explicitly.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection

from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE

# Waits on the host, such as for a checkpoint or the rollout engine, are ended by the watchdog at the limit of their
# phase. This limit is longer than any that the flags can ask for.
HOST_TIMEOUT = timedelta(days=30)

# The name under which Megatron Core's optimizer looks for expert groups.
EXPERT_VIEW = "expert"

# Field of ProcessGroupCollection -> dimensions of the base view.
BASE_GROUPS = {
    "tp": ["tp"],
    "cp": ["cp"],
    "dp": ["dp"],
    "pp": ["pp"],
    "dp_cp": ["cp", "dp"],
    "tp_cp": ["tp", "cp"],
    "tp_dp_cp": ["tp", "cp", "dp"],
    "mp": ["tp", "pp"],
    "intra_dist_opt": ["tp", "cp", "dp", "pp"],
}
# Field of ProcessGroupCollection -> dimensions of the expert view.
EXPERT_GROUPS = {
    "expt_tp": ["expt_tp"],
    "ep": ["ep"],
    "tp_ep": ["expt_tp", "ep"],
    "expt_dp": ["expt_dp"],
    "tp_ep_pp": ["expt_tp", "ep", "pp"],
}


def make_grid(spec: GridSpec, backend: str) -> HyperCommGrid:
    """Make Megatron Core's grid object for `spec`, without process groups."""
    grid = HyperCommGrid(
        [spec.tp, spec.cp, spec.dp, spec.pp], ["tp", "cp", "dp", "pp"], rank_offset=spec.offset, backend=backend
    )
    grid.register_view(
        EXPERT_VIEW,
        [spec.expt_tp, spec.ep, spec.expt_dp, spec.pp],
        ["expt_tp", "ep", "expt_dp", "pp"],
        shared_dims=["pp"],
    )
    return grid


class Grids:
    """All process groups of a run on this rank; a context manager that destroys them.

    Every rank creates every group of every grid in the same order, as `torch.distributed` requires. A group whose
    rank set equals one made before is still its own communicator: two modules never share one, so their collectives
    cannot interleave. Groups of devices have the time limit of `Platform.init_process_group`.

    Attributes:
        layout: the plain-data layout.
        rank: this process's global rank.
        grids: Megatron Core's grid of each module.
        collections: this rank's process groups, for the modules it holds.
        host: gloo group of the whole world, for host-side messages, with `HOST_TIMEOUT`.
        nodes: reductions over the world on the host.
    """

    def __init__(self, layout: Layout, backend: str) -> None:
        self.layout = layout
        self.rank = dist.get_rank()
        self.grids: dict[str, HyperCommGrid] = {}
        self.collections: dict[str, ProcessGroupCollection] = {}
        self._extra_groups: list[dist.ProcessGroup] = []
        self._before_destroy: list[Callable[[], None]] = []
        try:
            for name, spec in layout.grids.items():
                self.grids[name] = make_grid(spec, backend)
                self._create_groups(name, spec, backend)
            self.host = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)
            self._extra_groups.append(self.host)
            self.nodes = NodeGroups(self.host, HOST_TIMEOUT)
            self._extra_groups += self.nodes.groups
        except BaseException:  # No group is left behind, whatever ends the set-up, Ctrl-C included.
            self.destroy()
            raise
        # Megatron Core's tensor-parallel layers take scratch memory from here; nothing else of parallel_state is set.
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # an earlier run in this process may have left one
            parallel_state._set_global_memory_buffer()

    def _create_groups(self, name: str, spec: GridSpec, backend: str) -> None:
        grid = self.grids[name]
        groups = {field: grid.create_pg(dims) for field, dims in BASE_GROUPS.items()}
        for field, dims in EXPERT_GROUPS.items():
            groups[field] = grid.create_pg(dims, view=EXPERT_VIEW)
        # Encoders have no word embeddings; Megatron Core would look for them on ranks that have these groups.
        embedding: dict[str, dist.ProcessGroup | None] = {"embd": None, "pos_embd": None}
        if name == LANGUAGE:
            for dp, cp, tp in itertools.product(range(spec.dp), range(spec.cp), range(spec.tp)):
                # The ends of a pipeline share word embeddings; position embeddings are on the first stage alone.
                ends = sorted({spec.rank_at(tp=tp, cp=cp, dp=dp, pp=0), spec.rank_at(tp=tp, cp=cp, dp=dp, pp=-1)})
                for field, ranks in (("embd", ends), ("pos_embd", ends[:1])):
                    # Every rank takes part in making each group, also those that are not in it.
                    group = dist.new_group(ranks, backend=backend)
                    if self.rank in ranks:
                        embedding[field] = group
                        self._extra_groups.append(group)
        if self.rank in spec.ranks:
            self.collections[name] = ProcessGroupCollection(**groups, **embedding)

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules this rank holds, encoders first."""
        return self.layout.modules_of(self.rank)

    @property
    def bridged(self) -> bool:
        """Whether encoders have ranks of their own, so that bridges are part of the pipeline."""
        return self.layout.kind == "disjoint"

    def schedule_collection(self) -> ProcessGroupCollection | MultiModuleProcessGroupCollection:
        """Return the process groups for Megatron Core's schedules.

        With bridges, they are those of every module on this rank; otherwise, those of the language model.
        """
        if not self.bridged and self.layout.language.pp == 1:
            return self.collections[LANGUAGE]
        if not self.bridged:
            return MultiModuleProcessGroupCollection(module_pgs={LANGUAGE: self.collections[LANGUAGE]},
                                                     language_model_module_name=LANGUAGE)
        has_language = LANGUAGE in self.collections
        return MultiModuleProcessGroupCollection(
            module_pgs=self.collections, language_model_module_name=LANGUAGE if has_language else None
        )

    def describe(self) -> str:
        """Describe this rank's position for messages: `rank 3 (language grid, tp 1 cp 0 dp 0 pp 0, lane 0)`."""
        return self.layout.describe(self.rank)

    def before_destroy(self, free: Callable[[], None]) -> None:
        """Have `destroy` first call a function that frees what would keep it waiting, such as CUDA graphs."""
        self._before_destroy.append(free)

    def destroy(self) -> None:
        """Destroy every group that this rank is a member of. Safe to call twice and on a half-built object."""
        while self._before_destroy:
            self._before_destroy.pop()()
        for grid in self.grids.values():
            grid.destroy()
        for group in self._extra_groups:
            dist.destroy_process_group(group)
        self._extra_groups.clear()
        self.grids.clear()
        self.collections.clear()

    def __enter__(self) -> Grids:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()


class NodeGroups:
    """Sums and maxima over all ranks on the host, node by node. Construction is collective over the world.

    gloo's all-reduce is a ring. With 800 ranks it would send 1600 messages one after the other in every iteration. Here
    the ranks of a node send their values to the node's first rank, and only the first ranks exchange them.

    A node has the ranks that torchrun has started there. If nodes have different numbers of ranks, if there is only one
    node, or if each has one rank, `host` is used for everything.

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

        Both are float64 vectors of the same length on every rank; `sums` may be empty.
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
