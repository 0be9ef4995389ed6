"""Train several configurations in the same processes, one after the other, and return the figures of each.

`run_all` starts this program under torchrun. Its argument is a JSON file with the runs. A run leaves a file in its
folder that says how it ended: `done`, or `out-of-memory-rank<N>` from a rank that ran out of memory.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo import registry
from mimo.config.cli import parse, to_toml
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from mimo.protocols import LANGUAGE
from scripts.bench.harness import exit_when_out_of_memory, limit_memory
from scripts.training_runs import SHOWN, iterations, torchrun

if TYPE_CHECKING:
    from mimo.platform.base import Platform

OUT_OF_MEMORY, KILLED = "out of memory", "killed: out of memory?"
FULL = (OUT_OF_MEMORY, KILLED)
DONE, OUT_OF_MEMORY_FILE = "done", "out-of-memory-rank"
# Standard deviation of random weights.
STD = 0.02


@dataclass
class Outcome:
    """Figures of a run's timed iterations. Tokens/s and TFLOP/s are per GPU.

    Attributes:
        error: why the run has no figures; empty if it has them.
        tokens_per_s: tokens of text and images without padding.
        tflops: those of the model. None if its provider does not know its FLOPs.
        step_ms: median time of a step.
        peak_gib: high-water mark of the module and rank that needs most memory.
        losses: losses of all iterations.
        flops: FLOPs of a step by module.
        busy_s: GPU-seconds of the passes of a step by module.
        grad_norms: gradient norms of all iterations; None for one that was skipped.
        hardware_flops: FLOPs of a step by module, with padding and recomputation.
        allocation_retries: how often the device was full in a timed step, on the rank with the most. Each time, the
            allocator waits for the device and frees what it had kept, so such steps are slow.
    """

    error: str = ""
    tokens_per_s: float = 0.0
    tflops: float | None = None
    step_ms: float = 0.0
    peak_gib: float = 0.0
    losses: list[float] = field(default_factory=list)
    flops: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float | None] = field(default_factory=list)
    hardware_flops: dict[str, float] = field(default_factory=dict)
    allocation_retries: float = 0.0


def outcome_of(config: RunConfig, records: Sequence[dict[str, Any]], warmup: int, ranks: int) -> Outcome:
    """Return the figures of a run that did not fail, from its `iterations`."""
    timed = records[warmup:]
    seconds = sum(record["iteration-time"] for record in timed)
    tokens = sum(record["image-tokens"] + record["text-tokens"] for record in timed)
    flops = {name.partition("/")[2]: statistics.fmean(record[name] for record in timed)
             for name in timed[0] if name.startswith("flops/")}
    computed = {name: statistics.fmean(record.get(f"hardware-flops/{name}", value) for record in timed)
                for name, value in flops.items()}
    layout = config.layout
    sizes = {LANGUAGE: layout.llm_tp * layout.llm_cp * layout.llm_dp * layout.llm_pp}
    busy = {}
    for name in flops:
        size = sizes.get(name, layout.encoder_tp * layout.encoder_dp * layout.encoder_pp)
        parts = [f"timeline/{name}/{part}-s" for part in ("forward", "backward")]
        if all(part in timed[0] for part in parts):
            busy[name] = size * statistics.fmean(sum(record[part] for part in parts) for record in timed)
    return Outcome(
        tokens_per_s=tokens / seconds / ranks, flops=flops, hardware_flops=computed, busy_s=busy,
        tflops=sum(flops.values()) * len(timed) / seconds / ranks / 1e12 if flops else None,
        step_ms=1000 * statistics.median(record["iteration-time"] for record in timed),
        peak_gib=max(record[name] for record in records for name in record if name.startswith("peak-memory-bytes/"))
        / 2**30, losses=[record["lm loss"] for record in records],
        grad_norms=[record["grad-norm"] for record in records],
        # Records have them by module, and only those that are not zero.
        allocation_retries=statistics.fmean(
            max((count for name, count in record.items() if name.startswith("allocation-retries/")), default=0)
            for record in timed))


def run_all(configs: Sequence[RunConfig], names: Sequence[str], folder: Path, ranks: int, warmup: int,
            num_batches: int, memory_limit_gib: float | None, *, fresh: bool = False,
            until_failure: bool = False) -> list[Outcome]:
    """Run all configurations in order.

    One launch runs them one after the other in the same processes, so that there is one start. If a run fails, another
    launch continues with the next one.

    Args:
        configs: the runs.
        names: name of each run for messages.
        folder: receives a folder for each run.
        ranks: number of processes.
        warmup: iterations of each run that its figures leave out.
        num_batches: number of global batches that a run repeats.
        memory_limit_gib: memory that a rank may use; None for all there is.
        fresh: whether each run has a launch of its own.
        until_failure: whether the first run that fails is the last one.
    """
    folders, runs = [], []
    for config, name in zip(configs, names, strict=True):
        place = folder / "".join(letter if letter.isalnum() else "-" for letter in name)
        if place.exists():  # left by an earlier invocation
            shutil.rmtree(place)
        place.mkdir(parents=True)
        flags = place / "flags.toml"
        flags.write_text(to_toml(replace(config, observe=replace(config.observe, run_dir=str(place)))),
                         encoding="utf-8")
        folders.append(place)
        runs.append({"flags": str(flags), "folder": str(place), "num_batches": num_batches})
    waiting = dict(enumerate(folders))

    def show_ended() -> None:
        """Print the figures of runs that have ended, so that a benchmark that is stopped has shown what it knew."""
        for index in [index for index, place in waiting.items() if (place / DONE).exists()]:
            found = outcome_of(configs[index], iterations(waiting.pop(index)), warmup, ranks)
            full = f", full {found.allocation_retries:.1f} times a step" if found.allocation_retries else ""
            print(f"{names[index]}: {found.step_ms:,.0f} ms a step, {found.tokens_per_s:,.0f} tokens/s per GPU, "
                  f"{found.peak_gib:.1f} GiB{full}", file=sys.stderr, flush=True)

    outcomes: list[Outcome] = []
    while len(outcomes) < len(runs) and not (until_failure and outcomes and outcomes[-1].error):
        first, last = len(outcomes), len(outcomes) + 1 if fresh else len(runs)
        more = f" and {last - first - 1} more" if last - first > 1 else ""
        print(f"{names[first]}{more}", file=sys.stderr, flush=True)

        output = launch(runs[first:last], folders[first], ranks, memory_limit_gib, show_ended)
        show_ended()
        for index in range(first, last):
            if not (folders[index] / DONE).exists():
                outcomes.append(Outcome(error=failure(folders[index], names[index], output)))
                break
            outcomes.append(outcome_of(configs[index], iterations(folders[index]), warmup, ranks))
    return outcomes


def launch(runs: Sequence[dict[str, Any]], folder: Path, ranks: int, memory_limit_gib: float | None,
           meanwhile: Callable[[], None]) -> Path:
    """Run this program on all ranks and return the file with its output. `meanwhile` is called twice a second."""
    settings, output = folder / "runs.json", folder / "output.txt"
    settings.write_text(json.dumps({"runs": runs, "memory_limit_gib": memory_limit_gib}), encoding="utf-8")
    torchrun(__file__, ranks, [str(settings)], output=output, meanwhile=meanwhile)
    return output


def failure(folder: Path, name: str, output: Path) -> str:
    """Say why a run failed. Its output goes to standard error."""
    said = output.read_text(encoding="utf-8", errors="replace")
    full = sorted(folder.glob(f"{OUT_OF_MEMORY_FILE}*"))
    if full:
        print(f"{name}: {full[0].name}: {full[0].read_text(encoding='utf-8')}", file=sys.stderr, flush=True)
        return OUT_OF_MEMORY
    print(f"{name}:\n{said[-SHOWN:]}", file=sys.stderr, flush=True)
    killed = f"Signal {signal.SIGKILL.value} (SIGKILL)" in said
    return KILLED if killed else "the run failed"


def set_weights(model: Any, seed: int) -> None:
    """Draw every matrix of this rank's model from a normal distribution, alike on every layout.

    Megatron draws the shard of each rank by itself, so the same seed gives another model with another tensor-parallel
    size. Here each rank draws whole tensors, seeded by their names, and keeps its part. Vectors (norms, biases) stay as
    built.

    Args:
        model: a model whose sharded state dict says which part of each tensor this rank holds.
        seed: seed of the run.
    """
    import torch

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
        with torch.no_grad():
            entry.data.copy_(whole)


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
    from mimo.watchdog.process_exit import FailFast

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
        (folder / f"{OUT_OF_MEMORY_FILE}{rank}").write_text(text, encoding="utf-8")

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
    """Run one rank under torchrun and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Path, help="JSON file that `launch` writes")
    settings = json.loads(parser.parse_args().settings.read_text(encoding="utf-8"))
    sys.path.append(os.getcwd())
    import torch

    from mimo.training.run import launch as run_rank

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

    return run_rank(config, layout, body)


if __name__ == "__main__":
    sys.exit(main())
