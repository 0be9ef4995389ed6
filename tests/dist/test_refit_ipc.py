"""Refits through shared memory (backend `ipc`, here the host's): a live vLLM engine, and processes that die.

Nothing of the memory is left in any process after a sync, nor anywhere when all that had it are gone.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mimo.refit.options import RefitOptions
from mimo.refit.transport.ipc import HOST_NAME
from mimo.rollout.process import EngineProcess
from tests.support import refit_live, refit_ranks
from tests.support.refit_faults import is_right, refuses
from tests.support.refit_ranks import Fault, engine_in, forkserver, ranks_of

pytestmark = pytest.mark.slow

MODEL = "refit-qwen3-moe"
LAYOUTS = {"one-process": "", "tp2": "--llm-tp 2 --sequence-parallel", "pp2": "--llm-pp 2"}
OPTIONS = RefitOptions(backend="ipc", dtype="float32", timeout_s=60, chunk_bytes=10_000, verify=True)
PROMPTS = [[5, 17, 80, 2, 33, 41], [90, 3, 3, 64]]
LIMIT_S, MORE_S = 3.0, 6.0
AMID = "blocks.3.weight"


@pytest.fixture(scope="module")
def context() -> Any:
    """Starts processes that have imported everything."""
    return forkserver()


@pytest.fixture
def engine(context: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    """A small one with two workers, whose trainers use shared memory."""
    monkeypatch.setattr(refit_ranks, "OPTIONS", dataclasses.replace(refit_ranks.OPTIONS, backend="ipc"))
    with engine_in(context) as process:
        yield process


def holders() -> list[int]:
    """Processes below this one that have shared memory of a refit mapped."""
    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        found += [process.pid] * (HOST_NAME in maps)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_are_the_trainers_after_every_sync(pool, live_engine, layout):
    folder, process = live_engine
    flags = tuple(LAYOUTS[layout].split())
    world_size = 2 if flags else 1
    told = pool.run(refit_live.break_and_mend, MODEL, folder, flags, world_size, process.handle, OPTIONS, PROMPTS,
                    world_size=world_size, timeout_s=300)
    for found in told:
        assert refit_live.largest(found["first"]) <= 1e-5 and refit_live.largest(found["mended"]) <= 1e-5
        assert found["again"] == found["first"][0]
        assert refit_live.largest((found["mended"][0], found["first"][0])) > 1e-2
        assert "no complete weights" in found["refused"]
    assert told[-1]["errors"] == ["OSError: made to fail"]
    assert holders() == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_syncs_leave_no_memory(context: Any, engine: EngineProcess, tmp_path: Path, world_size: int) -> None:
    with ranks_of(context, engine, tmp_path / "ranks", world_size) as fleet:
        assert [message for message, _ in fleet.do("connect")] == [""] * world_size
        for seed in range(3):
            assert [message for message, _ in fleet.do("send", seed)] == [""] * world_size
            assert is_right(engine.handle, seed)
            assert holders() == []
        assert not [each for each in os.listdir("/dev/shm") if HOST_NAME in each]


def test_an_engine_that_is_killed(context: Any, engine: EngineProcess, tmp_path: Path) -> None:
    with ranks_of(context, engine, tmp_path / "ranks") as fleet:
        assert [message for message, _ in fleet.do("connect")] == ["", ""]
        told = fleet.do("send", fault=Fault(0, AMID, engine.process.pid))
        assert all("has ended" in message and seconds <= 20 for message, seconds in told), told
        assert holders() == []


def test_an_engine_that_is_stopped(context: Any, engine: EngineProcess, tmp_path: Path) -> None:
    pid = engine.process.pid
    assert pid is not None
    with ranks_of(context, engine, tmp_path / "ranks") as fleet:
        assert [message for message, _ in fleet.do("connect", timeout_s=LIMIT_S)] == ["", ""]
        told = fleet.do("send", fault=Fault(0, AMID, pid, signal.SIGSTOP), timeout_s=LIMIT_S)
        for message, seconds in told:
            assert "worker " in message and seconds <= LIMIT_S + MORE_S, told
    os.kill(pid, signal.SIGCONT)
    assert refuses(engine.handle)
    with ranks_of(context, engine, tmp_path / "others") as fleet:
        assert [message for message, _ in fleet.do("connect")] == ["", ""]
        assert [message for message, _ in fleet.do("send", seed=2)] == ["", ""]
        assert is_right(engine.handle, 2)
        assert holders() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_rank_that_is_killed(context: Any, engine: EngineProcess, tmp_path: Path, rank: int) -> None:
    with ranks_of(context, engine, tmp_path / "ranks") as fleet:
        assert [message for message, _ in fleet.do("connect", timeout_s=LIMIT_S)] == ["", ""]
        assert [message for message, _ in fleet.do("send", timeout_s=LIMIT_S)] == ["", ""]
        told = fleet.do("send", seed=1, fault=Fault(rank, AMID, 0), timeout_s=LIMIT_S)
        assert told[rank] is None
        message, seconds = told[1 - rank]
        assert f"trainer rank {rank}" in message or "the trainer's first rank serves" in message
        assert seconds <= LIMIT_S + MORE_S
    assert refuses(engine.handle)
    deadline = time.monotonic() + LIMIT_S + MORE_S
    while holders():  # a worker whose proxy is gone waits for its own limit
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with ranks_of(context, engine, tmp_path / "others", world_size=1) as fleet:
        assert [message for message, _ in fleet.do("connect")] == [""]
        assert [message for message, _ in fleet.do("send", seed=3)] == [""]
        assert is_right(engine.handle, 3)
