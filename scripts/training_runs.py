"""Start runs of train_hetero.py, or other programs of ranks, on this host, and read their metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from mimo import registry
from mimo.config.cli import to_toml
from mimo.config.trainer import RunConfig
from mimo.grid.layout import required_world_size

ROOT = Path(__file__).resolve().parents[1]
# Characters of a failed run's output that are shown.
SHOWN = 3000


def num_ranks(config: RunConfig) -> int:
    """Return the number of ranks that the grids of a run need. Raises ValueError for contradicting layout flags."""
    provider = registry.model_provider(config.model.model_provider)
    return required_world_size(config.layout, provider.encoders(config.model_family))


def quiet(config: RunConfig) -> RunConfig:
    """Return the run without evaluations, generations, checkpoints and console lines before its end."""
    return replace(
        config,
        train=replace(config.train, eval_interval=0, eval_iters=0, num_generations=0),
        observe=replace(config.observe, log_interval=max(config.train.train_iters or 1, 1), tensorboard_dir=None,
                        progress=False),
        checkpoint=replace(config.checkpoint, save=None, save_interval=None, keep_last=None, async_save=False),
    )


def torchrun(script: str | Path, ranks: int, arguments: Sequence[str], *, output: Path | None = None,
             meanwhile: Callable[[], None] = lambda: None, **environment: str) -> int:
    """Run a script in a process for each rank on this host, and return torchrun's exit code.

    Args:
        script: the program of a rank.
        ranks: number of processes.
        arguments: the program's arguments.
        output: file for everything that the ranks print; if left out, they print where this process does.
        meanwhile: called twice a second while they run.
        environment: variables of the ranks, besides those of this process.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
               str(script), *arguments]
    with output.open("w", encoding="utf-8") if output is not None else nullcontext() as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=None if stream is None else subprocess.STDOUT,
                                   env={**os.environ, **environment})
        try:
            while True:
                try:
                    return process.wait(0.5)
                except subprocess.TimeoutExpired:
                    meanwhile()
        finally:
            # If this process has to end early, torchrun ends its ranks, so that none outlives it.
            process.terminate()
            process.wait()


def iterations(folder: Path) -> list[dict[str, Any]]:
    """Read the iterations in a run folder's metrics.jsonl, in order. Evaluations are left out."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "iteration-time" in record]


def train(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    """Train to the end and return the `iterations`.

    Args:
        config: the run. It reads its flags from `folder/flags.toml`.
        folder: receives flags.toml, output.txt and the files that the run writes.

    Raises:
        RuntimeError: the run failed. The message ends with the last lines of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(config, observe=replace(config.observe, run_dir=str(folder)))
    (folder / "flags.toml").write_text(to_toml(config), encoding="utf-8")
    output = folder / "output.txt"
    code = torchrun(ROOT / "train_hetero.py", num_ranks(config), ["--config", str(folder / "flags.toml")],
                    output=output)
    if code:
        raise RuntimeError(f"the run in {folder} ended with code {code}:\n{output.read_text()[-SHOWN:]}")
    return iterations(folder)
