"""A rank that stops ends the run, and one summary names the rank that the others wait for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import ROOT, find_worker, finish, losses, start_torchrun, wait_for_steps
from tests.support.stalled_run import STALLS_AT

pytestmark = pytest.mark.slow

TIMEOUT_S = 8
MODEL = ("--device", "cpu", "--model-provider", "mock", "--no-bf16", "--seq-length", "256", "--eval-iters", "0",
         "--watchdog-timeout-s", str(TIMEOUT_S))
MOCK = ("--dataset-provider", "mock", "--train-iters", "100000")


def start(run_dir: Path, num_processes: int, *flags: str, fault: str = "") -> subprocess.Popen[str]:
    return start_torchrun(num_processes, *MODEL, *flags, "--run-dir", str(run_dir),
                          script="tests/support/stalled_run.py", STALL=fault)


def processes_of(run_dir: Path) -> list[int]:
    """Processes with the run's folder on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(run_dir).encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def summary_of(process: subprocess.Popen[str], run_dir: Path, stalled: float = 0.0) -> tuple[str, str]:
    """The summary of a run that stalls, and all that it printed; by then every process is gone.

    Args:
        process: the launcher.
        run_dir: folder of the run.
        stalled: when the stall began, Unix time; 0 where the run says so itself, or nobody does.
    """
    done = finish(process, 240)
    ended = time.time()
    assert done.returncode != 0
    assert processes_of(run_dir) == []
    path = run_dir / "stall-summary.txt"
    assert path.exists(), done.stdout[-6000:]
    summary = path.read_text()
    printed = [line for line in done.stdout.splitlines() if line.startswith("stall summary [")]
    assert len(printed) == 1, "one rank writes it; torchrun repeats it in its own summary"
    assert summary in done.stdout
    stalled = next((float(line.removeprefix(STALLS_AT)) for line in done.stdout.splitlines()
                    if line.startswith(STALLS_AT)), stalled)
    if stalled:
        print(f"\ntimeout {TIMEOUT_S} s, summary {path.stat().st_mtime - stalled:.1f} s after the stall, all processes "
              f"gone after {ended - stalled:.1f} s")
    return summary, done.stdout


def test_a_rank_that_sleeps_in_its_forward_pass(tmp_path: Path) -> None:
    """Its tensor-parallel peer waits in an all-reduce that nobody announced, the encoder at the bridge for that one."""
    process = start(tmp_path, 3, *MOCK, "--llm-tp", "2", "--global-batch-size", "4", fault="sleep:2")
    summary, output = summary_of(process, tmp_path)
    first, reason = summary.splitlines()[:2]
    assert "everybody waits for rank 2 (language grid, tp 1 cp 0 dp 0 pp 0, lane 0) on host " in first, summary
    assert "not in a tracked wait" in reason and "forward_that_sleeps: time.sleep" in reason
    assert "place: iteration 2, microbatch 1 of 4" in summary
    assert "rank 1 (language grid, tp 0 cp 0 dp 0 pp 0, lane 0)" in summary
    assert "in all_reduce with ranks 1-2" in summary
    assert "rank 0 (vision grid" in summary and "waiting for bridge send_forward" in summary
    for rank in range(3):
        assert f"on rank {rank} (" in (tmp_path / f"stall-rank{rank}.txt").read_text(), "every rank writes its own"
    assert "exitcode  : 17" in output


def test_a_rank_with_too_few_microbatches(tmp_path: Path) -> None:
    process = start(tmp_path, 3, *MOCK, "--llm-dp", "2", "--global-batch-size", "8", fault="count:2")
    summary, _ = summary_of(process, tmp_path)
    first, reason = summary.splitlines()[:2]
    assert "everybody waits for rank 2 (language grid, tp 0 cp 0 dp 1 pp 0, lane 1) on host " in first, summary
    assert "its step has 3 microbatches, that of the other ranks 4" in reason


@pytest.mark.parametrize("flags", [(), ("--async-save",)], ids=["save", "async-save"])
def test_a_rank_whose_checkpoint_is_never_written(tmp_path: Path, flags: tuple[str, ...]) -> None:
    process = start(tmp_path, 2, *MOCK, "--save", str(tmp_path / "saved"), "--save-interval", "1",
                    "--checkpoint-timeout-s", str(TIMEOUT_S), *flags, fault="save:1")
    summary, output = summary_of(process, tmp_path)
    first, reason = summary.splitlines()[:2]
    assert "everybody waits for rank 1 (language grid, tp 0 cp 0 dp 0 pp 0, lane 0) on host " in first, summary
    assert f"--checkpoint-timeout-s {TIMEOUT_S:g}" in reason and "checkpoint" in reason, summary
    assert "write_that_stays" in output, "where the writer is, as a Python stack"


def test_a_lane_without_data(tmp_path: Path) -> None:
    process = start(tmp_path, 2, "--dataset-provider", "tests.support.stalling_data:provider",
                    "--train-iters", "3")
    summary, output = summary_of(process, tmp_path)
    assert len(losses(tmp_path)) == 1, "the first iteration was trained and recorded"
    first, reason = summary.splitlines()[:2]
    assert "everybody waits for rank 1 (language grid, tp 0 cp 0 dp 0 pp 0, lane 0) on host " in first, summary
    assert "its data loader has no data: streams language/0 of this rank" in reason
    assert summary.splitlines()[2].startswith("place: iteration 2, no progress for "), summary
    assert "StallingStream" in output or "stalling_data.py" in output, "where it waited, as a Python stack"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_a_signal_has_stopped(tmp_path: Path, rank: int) -> None:
    """Also the one that would hold the store without a launcher. The process ends, stopped as it is."""
    process = start(tmp_path, 2, *MOCK)
    wait_for_steps(tmp_path, process)
    pid = find_worker(process.pid, rank)
    os.kill(pid, signal.SIGSTOP)
    summary, _ = summary_of(process, tmp_path, time.time())
    grid = ["vision grid, tp 0 cp 0 dp 0 pp 0, lane 0", "language grid, tp 0 cp 0 dp 0 pp 0, lane 0"][rank]
    first, reason = summary.splitlines()[:2]
    assert f"everybody waits for rank {rank} ({grid}) on host " in first and f", pid {pid}" in first, summary
    assert "its process is stopped" in reason


def test_a_rank_whose_interpreter_is_locked(tmp_path: Path) -> None:
    """It cannot answer, and its stack is printed all the same."""
    process = start(tmp_path, 2, *MOCK, "--global-batch-size", "2", fault="lock:1")
    summary, output = summary_of(process, tmp_path)
    first, reason = summary.splitlines()[:2]
    assert "everybody waits for rank 1 (language grid, tp 0 cp 0 dp 0 pp 0, lane 0) on host " in first, summary
    assert "a call into C keeps the interpreter's lock" in reason
    assert "in train_step_in_c" in output


def test_without_a_launcher_a_stopped_first_rank_takes_the_summary_away_but_not_the_exit(tmp_path: Path) -> None:
    """The store of the process groups is in its process, so nobody can gather."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "train_hetero.py", *MODEL, *MOCK, "--run-dir", str(tmp_path)]
    settings = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port)}
    first, second = (subprocess.Popen(command, cwd=ROOT, env=os.environ | settings | {"RANK": rank, "LOCAL_RANK": rank},
                                      text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in "01")
    try:
        wait_for_steps(tmp_path, second)
        first.send_signal(signal.SIGSTOP)
        done = finish(second, 120)
    finally:
        first.kill()
        first.communicate()
    assert done.returncode == 17
    assert "stall on rank 1 (language grid, tp 0 cp 0 dp 0 pp 0, lane 0)" in done.stdout, done.stdout[-4000:]
    assert ("no answer from the process of rank 0 (vision grid, tp 0 cp 0 dp 0 pp 0, lane 0), which is "
            "stopped or gone" in done.stdout)
