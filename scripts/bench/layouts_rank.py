"""One rank of scripts/bench/layouts.py: several runs of the trainer, one after the other, each on its own layout.

The argument is a JSON file with the runs. A run leaves a file in its folder that says how it ended: `done`, or
`out-of-memory-rank<N>` from a rank that ran out of memory.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo import registry
from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from mimo.platform.base import Platform
from mimo.training.run import launch
from mimo.watchdog.process_exit import FailFast
from scripts.bench.harness import exit_when_out_of_memory, limit_memory

STD = 0.02


@torch.no_grad()
def set_weights(model: Any, seed: int) -> None:
    """Draw every matrix of this rank's model from a normal distribution, alike on every layout.

    Megatron draws the shard of each rank by itself, so the same seed gives another model with another tensor-parallel
    size. Here each rank draws whole tensors, seeded by their names, and keeps its part. Vectors (norms, biases) stay as
    built.

    Args:
        model: a model whose sharded state dict says which part of each tensor this rank holds.
        seed: seed of the run.
    """
    # Imported here because megatron must come after the platform is installed.
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = model.sharded_state_dict()
    apply_factories(state)
    for entry in nested_values(state):
        if not isinstance(entry, ShardedTensor) or entry.data is None or not entry.data.is_floating_point():
            continue
        # Layers of one kind may be one tensor with an axis for the layers.
        layers = entry.prepend_axis_num
        shape, offset = entry.global_shape[layers:], entry.global_offset[layers:]
        if len(shape) < 2:
            continue
        name = f"{entry.key.replace('.module.', '.')} {tuple(entry.global_offset[:layers])} {seed}"
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
        generator = torch.Generator(device=entry.data.device).manual_seed(number)
        whole = torch.randn(tuple(shape), generator=generator, device=entry.data.device) * STD
        for axis, (start, length) in enumerate(zip(offset, entry.data.shape, strict=True)):
            whole = whole.narrow(axis, start, length)
        entry.data.copy_(whole)


DONE, OUT_OF_MEMORY = "done", "out-of-memory-rank"


def repeat(loader: Any, count: int) -> None:
    """Let a loader repeat its first steps.

    The first occurrence of a shape costs the compilation of kernels and plans of cuDNN. With repeated steps, this
    happens before the timed ones.
    """
    next_step, seen, given = loader.next_step, [], itertools.count()

    def again() -> Any:
        index = next(given) % count
        if index == len(seen):
            seen.append(next_step())
        return seen[index]

    loader.next_step = again


def train(config: RunConfig, platform: Platform, rank: int, world_size: int, num_batches: int) -> None:
    """Train to the end. A rank that runs out of memory leaves a file and exits; then torchrun ends the others."""
    from mimo.grid.groups import Grids
    from mimo.training.loop import TrainingLoop

    class SameStart(TrainingLoop):
        """A run that starts from weights that depend on the seed alone, unless the flags name others."""

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

    def report(text: str) -> None:
        (folder / f"{OUT_OF_MEMORY}{rank}").write_text(text, encoding="utf-8")

    platform.reset_peak_memory()
    with Grids(validate(config, world_size, rank), platform.backend) as grids, FailFast(grids.describe()):
        loop = SameStart(config, grids, platform, registry.model_provider(config.model.model_provider),
                         config.find_dataset(config.data.dataset_provider))
        # It exits before groups are destroyed, because the other ranks wait in a collective.
        with exit_when_out_of_memory(report):
            loop.run()
        platform.synchronize()
    if rank == 0:
        (folder / DONE).touch()


def main() -> int:
    """Run under torchrun and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Path, help="JSON file that layouts.py writes")
    settings = json.loads(parser.parse_args().settings.read_text(encoding="utf-8"))
    sys.path.append(os.getcwd())
    runs = settings["runs"]
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    config = parse(["--config", runs[0]["flags"]])
    layout = validate(config, world_size, rank)

    def body(_config: RunConfig, _grids: Any, platform: Platform) -> None:
        limit_memory(settings["memory_limit_gib"], platform)
        for run in runs:
            train(parse(["--config", run["flags"]]), platform, rank, world_size, run["num_batches"])
            # Free the memory that the run held on the device.
            gc.collect()
            if platform.name == "cuda":
                torch.cuda.empty_cache()

    return launch(config, layout, body)


if __name__ == "__main__":
    sys.exit(main())
