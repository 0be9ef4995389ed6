"""Run scripts/preflight.py as the nodes of a job would, all of them on this host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.launch import ROOT


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
