"""The process pools that the other tests stand on."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist


def total(rank, scale):
    value = torch.tensor([float(rank * scale)])
    dist.all_reduce(value)
    threads = torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]
    assert (dist.get_rank(), os.environ["RANK"], os.environ["LOCAL_RANK"]) == (rank, str(rank), str(rank))
    return rank, dist.get_world_size(), int(os.environ["WORLD_SIZE"]), value, threads


def test_results_come_in_rank_order(pool):
    results = pool.run(total, 5, world_size=2)
    assert [(r[0], r[1], r[2], r[3].item(), r[4]) for r in results] == [
        (0, 2, 2, 5.0, (1, "1")),
        (1, 2, 2, 5.0, (1, "1")),
    ]


def tensor_after_megatron(rank):
    import megatron.core  # noqa: F401

    return torch.arange(3.0)


@pytest.mark.slow
def test_results_do_not_bring_megatron_along(pool):
    code = "import sys, pickle, tests.support.spawn as s; s._load(sys.stdin.buffer.read()); print(*sys.modules)"
    assert "megatron.core" not in run_with_input(code, pool.run(dumped_after_megatron, world_size=1)[0])


def dumped_after_megatron(rank):
    from tests.support.spawn import _dump

    return _dump((True, tensor_after_megatron(rank)))


def run_with_input(code, data):
    return subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, check=True, timeout=60
    ).stdout.decode()


def process_id(rank):
    return os.getpid()


def test_processes_are_kept_and_sub_worlds_work(pool):
    first = pool.run(process_id)
    (alone,) = pool.run(total, 3, world_size=1)
    assert alone[:3] == (0, 1, 1)
    assert pool.run(process_id) == first
    with pytest.raises(ValueError, match="world_size 3"):
        pool.run(process_id, world_size=3)


def fail_on_one(rank):
    if rank == 1:
        raise KeyError("the lost key")
    dist.barrier()


def test_a_failing_rank_shows_its_traceback_and_the_pool_recovers(pool):
    before = pool.run(process_id)
    with pytest.raises(RuntimeError, match="(?s)rank 1 raised:.*fail_on_one.*the lost key"):
        pool.run(fail_on_one)
    assert not set(pool.run(process_id)) & set(before)


def die(rank):
    if rank == 0:
        os._exit(7)
    time.sleep(60)


def test_a_dead_rank_is_named(pool):
    with pytest.raises(RuntimeError, match="rank 0 died with exit code 7"):
        pool.run(die)


def hang(rank):
    if rank == 1:
        time.sleep(600)


@pytest.mark.slow
def test_a_hanging_rank_is_named_and_killed(pool):
    pool.run(process_id)  # processes are up: the limit is for the call alone
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]|ranks \[1\]"):
        pool.run(hang, timeout_s=3)
    assert pool.run(total, 1)[0][3].item() == 1.0
