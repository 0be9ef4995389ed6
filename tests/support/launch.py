"""Start an entry script the way a person does, and read what it leaves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]


def environment(**changes: str) -> dict[str, str]:
    """Environment variables of a run on a machine that does other things, too."""
    return os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
                         "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"} | changes


def start_torchrun(num_processes: int, *flags: str, script: str = "train_hetero.py",
                   launcher: Sequence[str] = ("--standalone",), **changes: str) -> subprocess.Popen[str]:
    """Start an entry script under torchrun; output and errors in one text."""
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(num_processes),
               str(ROOT / script), *flags]
    return subprocess.Popen(command, cwd=ROOT, env=environment(**changes), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a process; TimeoutExpired, and no process left, where it does not come in time."""
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # torchrun ends its workers, which a killed one would leave behind.
            process.terminate()
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output)


def torchrun(num_processes: int, *flags: str, timeout_s: float = 280, script: str = "train_hetero.py",
             **changes: str) -> subprocess.CompletedProcess[str]:
    """Run an entry script under torchrun to its end."""
    return finish(start_torchrun(num_processes, *flags, script=script, **changes), timeout_s)


def torchrun_on_two_hosts(*flags: str, run_dir: Path, timeout_s: float,
                          gpus: tuple[str, str] = ("", "")) -> list[subprocess.CompletedProcess[str]]:
    """Run `train_rl.py` on two hosts of one rank, which are two launchers and two nodes of Ray on this machine.

    Args:
        flags: flags of the run, without its folder and `--ray-address`.
        run_dir: its folder, also the value of the environment variable MARK.
        timeout_s: time limit in seconds.
        gpus: `CUDA_VISIBLE_DEVICES` of each host.
    """
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(environment(RAY_USAGE_STATS_ENABLED="0"))
    try:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        cluster.add_node(num_cpus=2)
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        launchers = [start_torchrun(
            1, *flags, "--ray-address", cluster.address, "--run-dir", str(run_dir), "--engine-env", "MARK",
            script="train_rl.py",
            launcher=("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port",
                      str(port)), MARK=str(run_dir), CUDA_VISIBLE_DEVICES=gpus[node]) for node in range(2)]
        with ThreadPoolExecutor() as threads:  # both print to pipes, which have to be read at the same time
            done = list(threads.map(lambda each: finish(each, timeout_s), launchers))
        # The end of the cluster would end engines that the run has left behind.
        assert wait_for_the_end(str(run_dir)) == []
        return done
    finally:
        cluster.shutdown()


def start_bench(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a program of scripts/bench to its end."""
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "bench" / f"{name}.py"), *flags], check=False,
                          capture_output=True, text=True, timeout=580, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def bench(name: str, *flags: str) -> dict[str, Any]:
    """Run a program of scripts/bench and return the figures on its last line."""
    found: dict[str, Any] = json.loads(start_bench(name, *flags).stdout.splitlines()[-1])
    return found


def wait_for_steps(run_dir: Path, process: subprocess.Popen[str], timeout_s: float = 200) -> None:
    """Wait until a run has recorded an iteration; AssertionError with its output where it does not."""
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + timeout_s
    while not metrics.exists() or not metrics.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate()[0][-3000:])
        time.sleep(0.1)


def find_worker(launcher: int, rank: int) -> int:
    """Process id of a rank under a torchrun process."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise LookupError(f"process {launcher} has no worker of rank {rank}")


def marked(mark: str) -> list[str]:
    """Command lines of the processes whose environment has a variable MARK of this value."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark:
                found.append(" ".join(process.cmdline())[:200])
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def wait_for_the_end(mark: str) -> list[str]:
    """Wait for the processes of a run to end, and return those that are left after three minutes.

    The agents of a Ray that is killed while it starts look for its server for 11 s, and much longer on a busy machine.
    """
    deadline = time.monotonic() + 180
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    return marked(mark)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def generations(run_dir: Path) -> list[dict[str, Any]]:
    """Return all lines of generations.jsonl."""
    return [json.loads(line) for line in (run_dir / "generations.jsonl").read_text(encoding="utf-8").splitlines()]


def broken_off_and_whole(folder: Path, *flags: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train with train_rl.py for four iterations, broken off in the third and resumed, and in one go: both records.

    `flags` name a reward of `tests.support.rl_rewards`.
    """
    whole, parts, saved = folder / "whole", folder / "parts", ["--save", str(folder / "saved")]
    done = torchrun(2, *flags, "--run-dir", str(whole), script="train_rl.py")
    assert done.returncode == 0, done.stdout[-3000:]
    module, name = flags[flags.index("--reward") + 1].split(":")
    scored = sum(8 * int(step.get("asked-prompts", 4)) for step in records(whole)[:2])
    done = torchrun(2, *flags, *saved, "--save-interval", "2", "--reward", f"{module}:ending", "--run-dir", str(parts),
                    script="train_rl.py", SCORED=str(scored), LIKE=name)
    assert done.returncode != 0 and "enough" in done.stdout, done.stdout[-3000:]
    done = torchrun(2, *flags, *saved, "--load", saved[1], "--run-dir", str(parts), script="train_rl.py")
    assert done.returncode == 0 and "loaded " in done.stdout, done.stdout[-3000:]
    found = records(parts)
    assert [step["iteration"] for step in found] == [1, 2, 3, 4]
    # Lines of a resumed run are those of the whole one: the same prompts, completions, rewards, advantages and images.
    assert generations(parts) == generations(whole) != []
    return found, records(whole)


def losses(run_dir: Path) -> list[float]:
    """Training loss of each iteration."""
    return [record["lm loss"] for record in records(run_dir) if "lm loss" in record]


def put_commands(folder: Path, shell: str, commands: dict[str, str]) -> None:
    """Commands in `folder/bin` that stand for others: shell code by name, in which STATE is `folder`."""
    (folder / "bin").mkdir()
    for name, body in commands.items():
        (folder / "bin" / name).write_text(f"#!{shell}\nSTATE='{folder}'\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
