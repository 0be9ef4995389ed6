"""Whole runs of train_hetero.py from a script: start one on this host, read what it left."""

from __future__ import annotations

import json
import subprocess
import sys
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
    """Ranks that the grids of a run need. Raises ValueError for layout flags that contradict each other."""
    provider = registry.model_provider(config.model.model_provider)
    return required_world_size(config.layout, provider.encoders(config.model_family))


def quiet(config: RunConfig) -> RunConfig:
    """The run without evaluation, generations, console lines in between and checkpoints."""
    return replace(
        config,
        train=replace(config.train, eval_interval=0, eval_iters=0, num_generations=0),
        observe=replace(config.observe, log_interval=max(config.train.train_iters or 1, 1), tensorboard_dir=None,
                        progress=False),
        checkpoint=replace(config.checkpoint, save=None, save_interval=None, keep_last=None, async_save=False),
    )


def command(config: RunConfig, toml: Path) -> list[str]:
    """What starts the run that `toml` describes, one process a rank."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks(config)),
            str(ROOT / "train_hetero.py"), "--config", str(toml)]


def train(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    """Train to the end.

    Args:
        config: the run; its flags go through `folder/flags.toml`.
        folder: gets flags.toml, output.txt and the run's own files.

    Returns:
        The iterations of metrics.jsonl, in order; evaluations are left out.

    Raises:
        RuntimeError: the run failed; the message ends with the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(config, observe=replace(config.observe, run_dir=str(folder)))
    (folder / "flags.toml").write_text(to_toml(config), encoding="utf-8")
    output = folder / "output.txt"
    with output.open("w", encoding="utf-8") as stream:
        done = subprocess.run(command(config, folder / "flags.toml"), check=False, stdout=stream,
                              stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"the run in {folder} ended with code {done.returncode}:\n{output.read_text()[-SHOWN:]}")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "iteration-time" in record]
