"""An engine whose workers are on two nodes of a Ray cluster: its refits, and the loss of a node.

Both nodes are on this machine, with a Ray of their own each, as `ray.cluster_utils` starts them.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import ray
import torch
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from mimo.refit.options import RefitOptions
from mimo.refit.rendezvous import RefitError
from mimo.rollout.process import EngineLostError, answer_of, leave_launcher
from mimo.rollout.ray_actors import RayCluster, RayEngines, Seat
from mimo.rollout.replicas import RolloutClient
from tests.support import refit
from tests.support.spawn import WorkerPool

# Six processes import vLLM at the same time, which takes minutes on two busy cores.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[2]
OPTIONS = RefitOptions(backend="gloo", dtype="float32", timeout_s=60, chunk_bytes=10_000)
NAME = "refit-qwen3-moe"


@pytest.fixture
def cluster() -> Iterator[tuple[Cluster, list[Any]]]:
    """Ray with a head without resources, and its two nodes with two CPUs each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # A lost node is noticed after two seconds instead of a quarter of a minute.
        patch.setenv("RAY_health_check_period_ms", "500")
        patch.setenv("RAY_health_check_failure_threshold", "3")
        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes = [started.add_node(num_cpus=2) for _ in range(2)]
        ray.init(started.address, logging_level="ERROR", log_to_driver=False)
        yield started, nodes
        ray.shutdown()
        started.shutdown()


@contextmanager
def engine(folder: Path, tp: int, pp: int, start_timeout_s: float = 600,
           seats: Sequence[Sequence[Seat]] = ()) -> Iterator[RayEngines]:
    """An engine whose workers are divided between the nodes."""
    options = dataclasses.replace(refit.engine_options(folder, tp, pp), num_nodes=2)
    started = RayEngines([options], RayCluster(""), "CPU", start_timeout_s, 120, {"OMP_NUM_THREADS": "1"},
                         leave_launcher, "127.0.0.1", seats=seats)
    try:
        yield started
    finally:
        started.close()


class Served(RolloutClient):
    """Client of an engine for other processes of this machine, by a thread of this one, the only one that Ray knows."""

    def __init__(self, address: Any, num_workers: int) -> None:
        self.address, self.num_workers = address, num_workers

    def call(self, method: str, *arguments: Any) -> Any:
        with Client(self.address) as connection:
            connection.send((method, arguments))
            succeeded, value = connection.recv()
        if not succeeded:
            raise RefitError(value)
        return value


@contextmanager
def served(client: Any) -> Iterator[Served]:
    """Pass on the calls of other processes."""
    with Listener(("127.0.0.1", 0)) as listener:
        def serve() -> None:
            while True:
                try:
                    connection = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.send(answer_of(client, *connection.recv()))

        Thread(target=serve, daemon=True).start()
        yield Served(listener.address, client.num_workers)


def three_refits(pool: WorkerPool, folder: Path, handle: Served, options: RefitOptions,
                 prompts: dict[str, list[int]]) -> None:
    """Refit from two pipeline stages. After each refit, log-probs of engine and trainer have to agree."""
    by_rank = pool.run(refit.sync, NAME, str(folder), ("--llm-pp", "2"), 2, handle, options, prompts, 3,
                       world_size=2, timeout_s=300)
    for step in range(3):
        ours = {key: each for rank in by_rank for key, each in rank[step]["ours"].items()}
        theirs = by_rank[0][step]["theirs"]
        assert ours.keys() == theirs.keys() == prompts.keys()
        errors = [float((mine - torch.tensor(theirs[key])).abs().max()) for key, mine in ours.items()]
        assert max(errors) <= 1e-5, step


def test_three_refits_of_a_replica_that_shares_the_devices_of_trainers_on_two_nodes(pool, cluster, tmp_path):
    pool.run(refit.save, NAME, str(tmp_path), world_size=1)
    prompts = pool.run(refit.prompts_of, NAME, str(tmp_path), world_size=1)[0]
    addresses = tuple(sorted({node["NodeManagerAddress"] for node in ray.nodes()}))
    free = ray.available_resources()["CPU"]
    with engine(tmp_path, 2, 2, seats=[[Seat(host, f"host {host}", addresses, ()) for host in range(2)]]) as started:
        assert ray.available_resources()["CPU"] == free, "trainer and engine share what the trainer has"
        nodes = {actors(part.actor._ray_actor_id.hex())["Address"]["NodeID"] for part in started._parts}
        assert len(nodes) == 2
        with served(started.client) as handle:
            three_refits(pool, tmp_path, handle, dataclasses.replace(OPTIONS, backend="ipc"), prompts)


def test_three_refits_of_a_replica_on_two_nodes_and_the_loss_of_one(pool, cluster, tmp_path):
    pool.run(refit.save, NAME, str(tmp_path), world_size=1)
    prompts = pool.run(refit.prompts_of, NAME, str(tmp_path), world_size=1)[0]
    with engine(tmp_path, 2, 2) as started:
        client: Any = started.client
        (group,) = started._groups
        assert len(set(placement_group_table(group)["bundles_to_node_id"].values())) == 2
        assert client.num_workers == 4
        with served(client) as handle:
            three_refits(pool, tmp_path, handle, OPTIONS, prompts)
        assert started.fault() == ""
        whole, nodes = cluster
        whole.remove_node(nodes[1], allow_graceful=False)
        began = time.monotonic()
        with pytest.raises(EngineLostError, match=r"the engine in process \d+ on .* \(a Ray actor\)(: its process \d+ "
                                                  r"on .*)? has ended"):
            # Workers answer until they notice that their node is gone.
            while time.monotonic() - began < 60:
                client.prompt_logprobs([{"prompt_token_ids": [1, 2, 3]}])
        assert time.monotonic() - began < 60, "long before the limit of a call"
        assert re.match(r"replica 0: process \d+ on .* has ended", started.fault())
    with pytest.raises(RefitError, match=r"no place for the engine within 2 s: its 1 replicas ask Ray for 4 CPUs, 2 of "
                                         r"them on each of 2 nodes; the cluster has 2, .* on 2 nodes"):
        with engine(tmp_path, 2, 2, start_timeout_s=2):
            pass
