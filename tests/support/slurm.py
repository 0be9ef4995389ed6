"""A Slurm job on this host: commands in place of Slurm's and of Python, and "nodes" that are processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.support.launch import ROOT, put_commands

BASH = shutil.which("bash") or "/bin/bash"
# Notes its words and the processes of the trainer's step, and has the exit code of the step.
SRUN = """
echo "$*" >>"$STATE/srun"
nodes="${SLURM_JOB_NUM_NODES:-1}" output=/dev/stdout
while [[ "$1" == --* ]]; do
    case "$1" in
        --nodes=*) nodes="${1#*=}" ;;
        --output=*) output="${1#*=}" ;;
    esac
    shift
done
# Slurm does so in a job that was submitted with --export=NONE.
[[ "${SLURM_EXPORT_ENV:-ALL}" != NONE ]] || unset JOB_HOSTS MASTER_ADDR MASTER_PORT OMP_NUM_THREADS
export SLURM_STEP_ID=7
if [[ "$*" == *torch.distributed.run* && -e "$STATE/stop_at_start" ]]; then
    kill -TERM "$PPID"
    sleep 1
fi
pids=()
for ((node = 0; node < nodes; node++)); do
    SLURM_NODEID=$node "$@" >>"${output//%N/n$((node + 1))}" &
    pids+=($!)
done
[[ "$*" != *torch.distributed.run* ]] || echo "${pids[@]}" >"$STATE/step"
code=0
for pid in "${pids[@]}"; do
    while true; do
        one=0
        wait "$pid" || one=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    ((one <= code)) || code=$one
done
exit $code
"""
# The trainer notes its words and does what the file `mode` says.
TRAINER = r"""
printf '%s\0' "$@" >"$STATE/command"
echo "${PET_NODE_RANK:-}" >>"$STATE/ranks"
ulimit -Sn >>"$STATE/open_files"
[[ -e "$STATE/mode" ]] || exit 0
stopping=
trap 'stopping=1' TERM
touch "$STATE/running$SLURM_NODEID"
while [[ "$(<"$STATE/mode")" == train && -z "$stopping" ]]; do sleep 0.1; done
if [[ -n "$stopping" ]]; then echo saved >"$STATE/saved$SLURM_NODEID"; exit 1; fi
case "$(<"$STATE/mode")" in
    finish) echo -n 999999 >"$STATE/run/checkpoints/latest_checkpointed_iteration.txt" ;;
    duration) echo -n 500 >"$STATE/run/checkpoints/latest_checkpointed_iteration.txt" ;;
    says*)
        [[ "$SLURM_NODEID" != 1 ]] || { read -r _ said <"$STATE/mode" && echo "$said | samples 7"; }
        echo -n 999 >"$STATE/run/checkpoints/latest_checkpointed_iteration.txt"
        ;;
    crash)
        [[ "$SLURM_NODEID" == 0 ]] || exit 1
        # Slurm stops the other nodes then. One that had not started would not start any more.
        until [[ -e "$STATE/running1" ]]; do sleep 0.1; done
        touch "$STATE/run/logs/42-attempt-000/stopped"
        ;;
esac
"""


def put_cluster(folder: Path, python: str, **commands: str) -> None:
    """Put Slurm's commands into `folder/bin`, `python`, which becomes the trainer where it does not end, and more."""
    put_commands(folder, BASH, {
        "python": python + TRAINER, "srun": SRUN, "squeue": 'cat "$STATE/job_state"',
        "scontrol": 'echo "$*" >>"$STATE/scontrol"; [[ "$1" != show ]] || printf "n%s\\n" $(seq $SLURM_JOB_NUM_NODES)',
        "scancel": 'echo "$*" >"$STATE/scancel"; read -r -a pids <"$STATE/step"; kill -TERM "${pids[@]}"'} | commands)
    (folder / "job_state").write_text("RUNNING")


def submit(folder: Path, nodes: int, *arguments: str, **settings: str) -> subprocess.Popen[str]:
    """Start `folder/job.sh` as Slurm does."""
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT),
                   "SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": f"n[1-{nodes}]"}
    return subprocess.Popen([BASH, str(folder / "job.sh"), *arguments], env=environment | settings, text=True,
                            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def end(job: subprocess.Popen[str]) -> str:
    """Wait for a job, and return its output."""
    return job.communicate(timeout=100)[0]


def stop_training(folder: Path, job: subprocess.Popen[str], *, steps: bool = False) -> str:
    """Send SIGTERM to the job's script, or to its steps, when two nodes train; return the job's output."""
    until = time.monotonic() + 60
    while not all((folder / f"running{node}").exists() for node in (0, 1)):
        assert time.monotonic() < until and job.poll() is None, "the trainer did not start"
        time.sleep(0.1)
    if steps:
        subprocess.run([str(folder / "bin" / "scancel")], check=True)
    else:
        job.send_signal(signal.SIGTERM)
    return end(job)


def requeued(folder: Path) -> bool:
    """Whether the job asked for another attempt."""
    asked = folder / "scontrol"
    return asked.exists() and "requeue 42" in asked.read_text()


def run_preflight(folder: Path, *flags: str, gpus_per_node: int = 2, second: dict[str, str] | None = None,
                  first: dict[str, str] | None = None) -> list[tuple[int, str]]:
    """Run two nodes, n1 and n2, and return exit code and output of each.

    Args:
        folder: where the run would save.
        flags: flags of the trainer.
        gpus_per_node: processes of a node.
        first, second: more environment of a node.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(ROOT / "scripts" / "preflight.py"), "--gpus-per-node", str(gpus_per_node), "--",
               "--model-provider", "mock", "--dataset-provider", "mock", "--train-iters", "10", "--save",
               str(folder / "run"), "--run-dir", str(folder / "run"), *flags]
    settings = {"JOB_HOSTS": "n1 n2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    nodes = []
    for node, more in enumerate((first, second)):
        environment = os.environ | settings | {"SLURM_NODEID": str(node)} | (more or {})
        nodes.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT))
    outputs = [node.communicate(timeout=280)[0] for node in nodes]
    return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]
