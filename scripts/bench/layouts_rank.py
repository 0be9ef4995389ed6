"""One rank of scripts/bench/layouts.py: several runs of the trainer, one after the other, each on a layout of its own.

Its argument is a file with the runs as JSON. What a run leaves in its folder says how it went: `done`, or of a rank
that ran out of memory `out-of-memory-rank<N>`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo import registry
from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from mimo.platform.base import Platform
from mimo.training.run import launch
from mimo.watchdog.process_exit import fail_fast
from scripts.bench.rl_sweep_rank import is_out_of_memory, limit_memory

DONE, OUT_OF_MEMORY = "done", "out-of-memory-rank"


def repeat(loader: Any, count: int) -> None:
    """Have a loader give its first steps over and over: what a shape costs when it first comes up, kernels that are
    compiled and plans of cuDNN, is then paid for before the steps that are timed.
    """
    next_step, seen, given = loader.next_step, [], itertools.count()

    def again() -> Any:
        index = next(given) % count
        if index == len(seen):
            seen.append(next_step())
        return seen[index]

    loader.next_step = again


def train(config: RunConfig, platform: Platform, rank: int, world_size: int, num_batches: int) -> None:
    """One run, to its end. Where there is not enough memory the rank says so and ends; torchrun ends the others."""
    from mimo.grid.groups import Grids
    from mimo.training.loop import TrainingLoop
    from scripts.bench.same_weights import set_weights

    class SameStart(TrainingLoop):
        """Starts from weights that depend on nothing but the seed, unless the flags name others."""

        def _open(self, split: str, *, prefetch: bool) -> Any:
            loader = super()._open(split, prefetch=prefetch)
            # Encoder prefetch looks ahead in the loader itself.
            if split == "train" and not self.config.train.encoder_prefetch_depth:
                repeat(loader, num_batches)
            return loader

        def _start(self, loader: Any) -> Any:
            logger = super()._start(loader)
            flags = self.config.checkpoint
            if flags.load is None and not flags.has_pretrained:
                set_weights(self.parts.built.model, self.config.train.seed)
                self.parts.optimizer.reload_model_params()
            return logger

    folder = Path(config.observe.run_dir)
    platform.reset_peak_memory()
    with Grids(validate(config, world_size, rank), platform.backend) as grids, fail_fast(grids.describe()):
        loop = SameStart(config, grids, platform, registry.model_provider(config.model.model_provider),
                         config.find_dataset(config.data.dataset_provider))
        try:
            loop.run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = " ".join(str(error).split()) or type(error).__name__
            (folder / f"{OUT_OF_MEMORY}{rank}").write_text(text, encoding="utf-8")
            # Before groups are destroyed: the others wait in a collective.
            os._exit(1)
        platform.synchronize()
    if rank == 0:
        (folder / DONE).touch()


def free(platform: Platform) -> None:
    """Give back what the last run held on the device."""
    gc.collect()
    if platform.name == "cuda":
        import torch

        torch.cuda.empty_cache()


def run_all(runs: list[dict[str, Any]], platform: Platform, memory_limit_gib: float | None) -> None:
    """Every run in turn."""
    import torch.distributed as dist

    limit_memory(memory_limit_gib, platform)
    for run in runs:
        train(parse(["--config", run["flags"]]), platform, dist.get_rank(), dist.get_world_size(),
              run["num_batches"])
        free(platform)


def main() -> int:
    """Under torchrun; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Path, help="JSON file, as layouts_runs.py writes it")
    settings = json.loads(parser.parse_args().settings.read_text(encoding="utf-8"))
    sys.path.append(os.getcwd())
    runs = settings["runs"]
    config = parse(["--config", runs[0]["flags"]])
    layout = validate(config, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))

    def body(_config: RunConfig, _grids: Any, platform: Platform) -> None:
        run_all(runs, platform, settings["memory_limit_gib"])

    return launch(config, layout, body)


if __name__ == "__main__":
    sys.exit(main())
