"""Reductions over the world node by node are those over all ranks at once, however ranks are on nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow

SUMS = 5


def reduced(rank: int, of_nodes: list[int], num_sums: int) -> tuple[list[list[list[float]]], list[int]]:
    """Return the results of two reductions on a rank of nodes of these sizes, and the sizes of the groups made."""
    from mimo.grid.groups import NodeGroups

    node = next(index for index in range(len(of_nodes)) if rank < sum(of_nodes[: index + 1]))
    os.environ |= {"LOCAL_WORLD_SIZE": str(of_nodes[node]), "LOCAL_RANK": str(rank - sum(of_nodes[:node]))}
    nodes = NodeGroups(dist.new_group(backend="gloo"), timedelta(seconds=60))
    found = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(10 * rank + seed)
        own = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (3, num_sums)]
        before = [each.clone() for each in own]
        found.append([each.tolist() for each in nodes.reduce(*own)])
        assert all(torch.equal(one, two) for one, two in zip(own, before, strict=True)), "the arguments stay"
    return found, [group.size() for group in nodes.groups]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    started = WorkerPool(6)
    yield started
    started.close()


# How many ranks each node has, and of what sizes a leader's groups are: of the leaders and of its node.
@pytest.mark.parametrize(("of_nodes", "groups"), [
    ([2, 2, 2], [3, 2]), ([3, 3], [2, 3]), ([6], []), ([1] * 6, []), ([2, 4], []), ([4, 2], [])], ids=str)
@pytest.mark.parametrize("num_sums", [SUMS, 0])
def test_maxima_and_sums_of_all_ranks(pool, of_nodes, groups, num_sums):
    outcomes = pool.run(reduced, of_nodes, num_sums)
    assert outcomes[0][1] == groups and outcomes[-1][1] == groups[1:]
    for seed in (0, 1):
        rows = []
        for rank in range(6):
            generator = torch.Generator().manual_seed(10 * rank + seed)
            rows.append([torch.randn(size, generator=generator, dtype=torch.float64) for size in (3, num_sums)])
        maxima = torch.stack([row[0] for row in rows]).amax(dim=0).tolist()
        sums = torch.stack([row[1] for row in rows]).sum(dim=0).tolist()
        for found, _ in outcomes:
            assert found[seed][0] == maxima and found[seed][1] == pytest.approx(sums, rel=1e-12)
            assert found[seed] == outcomes[0][0][seed], "the same bits on every rank"
