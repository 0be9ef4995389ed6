"""Measure what checkpoints cost: the time that a save stalls training, against a bare copy of the same bytes.

    python scripts/bench/checkpoint.py --device cpu
    python scripts/bench/checkpoint.py --device cuda --dir /scratch
    python scripts/bench/checkpoint.py --device cpu --nproc 2

The last line of output is JSON. A stall is all the time that the main thread of the slowest rank spends on a save:
until `save` returns and, for an asynchronous save, in the `poll` calls that publish it later. Each kind of save runs
once before it is timed, because the first one plans and allocates what later ones reuse.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.harness import argument_parser, as_flags, device_name, free_port, slowest
from scripts.training_runs import torchrun

if TYPE_CHECKING:
    from mimo.checkpoint.save import Saver
    from mimo.checkpoint.state import Progress, RunState
    from mimo.data.loader import StepLoader
    from mimo.training.step import TrainerParts

# About 140 and 480 million parameters of 14 bytes each (bf16 weights, fp32 copy and two moments). Copying them takes
# much longer than the few milliseconds that a save needs besides.
SIZES = {"cpu": {"hidden_size": 1024, "num_layers": 8, "seq_length": 128, "global_batch_size": 1},
         "cuda": {"hidden_size": 1536, "num_layers": 12, "seq_length": 2048, "global_batch_size": 4}}
ASYNC_SHARE, COPY_SHARE = 0.05, 1.2


def flags() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--nproc", type=int, default=1, help="processes to start, unless torchrun has started this one")
    parser.add_argument("--dir", help="folder for checkpoints, emptied at the end (default: a temporary one)")
    parser.add_argument("--repeats", type=int, default=5, help="timed saves of each kind")
    parser.add_argument("--steps", type=int, default=6, help="timed steps without a save")
    for name in ("hidden-size", "num-layers", "seq-length", "global-batch-size"):
        parser.add_argument(f"--{name}", type=int)
    return parser.parse_args()


@dataclass
class Bench:
    """The trainer on this rank."""

    parts: TrainerParts
    loader: StepLoader
    state: RunState
    progress: Progress

    def agreed(self, seconds: float) -> float:
        return slowest(seconds, self.parts.grids.host)

    def timed(self, action: Callable[[], Any]) -> float:
        """Seconds of `action` on the slowest rank. All ranks start together."""
        self.parts.platform.synchronize()
        self.agreed(0.0)
        began = time.perf_counter()
        action()
        self.parts.platform.synchronize()
        return self.agreed(time.perf_counter() - began)

    def step(self) -> None:
        from mimo.training.step import train_step

        train_step(self.parts, self.loader.next_step())
        self.progress.iteration += 1
        self.progress.consumed_samples += self.parts.config.train.global_batch_size

    def save(self, saver: Saver) -> float:
        """Save, and return the seconds until `save` returns."""
        self.state.streams = self.loader.state_dict()
        return self.timed(lambda: saver.save(self.progress))


def make_trainer(arguments: argparse.Namespace, folder: str) -> Bench:
    """Build the mock model in the wanted size on a layout for this many processes."""
    from mimo.config.cli import parse
    from mimo.config.validate import num_microbatches, validate
    from mimo.platform import get_platform

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sizes = {name: vars(arguments)[name] or size for name, size in SIZES[arguments.device].items()}
    hidden, micro = sizes["hidden_size"], max(sizes["global_batch_size"] // world_size, 1)
    options: dict[str, Any] = {
        **sizes, "ffn_hidden_size": 4 * hidden, "num_attention_heads": 8, "num_query_groups": 8,
        "device": arguments.device, "model_provider": "mock", "dataset_provider": "mock", "train_iters": 100000,
        "save": folder, "keep_last": 1, "layout": "colocated", "encoder_dp": world_size, "llm_dp": world_size,
        "micro_batch_size": micro, "global_batch_size": micro * world_size}
    config = parse(as_flags(options))
    layout = validate(config, world_size)
    device = get_platform(arguments.device)
    device.set_device(int(os.environ["LOCAL_RANK"]))
    device.init_process_group(rank, world_size, 600.0)
    # Imported here because megatron must come after the platform is installed.
    from mimo.checkpoint.state import Progress
    from mimo.data.loader import open_loader
    from mimo.grid.groups import Grids
    from mimo.registry import dataset_provider, model_provider
    from mimo.training.setup import run_state, setup_trainer
    from mimo.watchdog.watchdog import Watchdog

    grids = Grids(layout, device.backend)
    provider = model_provider("mock")
    parts = setup_trainer(config, provider, grids, device, Watchdog(0.0, f"rank {rank}"))
    loader = open_loader(
        layout, rank, model_provider=provider, model_config=config.model_family,
        data_provider=dataset_provider("mock"), data_config=config.dataset, micro_batch_size=micro,
        num_microbatches=num_microbatches(config), seq_length=config.train.seq_length, seed=1,
        microbatch_order=config.data.microbatch_order)
    return Bench(parts, loader, run_state(parts, loader), Progress())


def make_saver(bench: Bench, *, async_save: bool) -> Saver:
    """Return a saver after its first save."""
    from mimo.checkpoint.save import Saver

    config = bench.parts.config
    config = replace(config, checkpoint=replace(config.checkpoint, async_save=async_save))
    saver = Saver(replace(bench.state, config=config), bench.parts.watchdog)
    saver.save(bench.progress)
    saver.finish()
    return saver


def measure_sync(bench: Bench, repeats: int) -> list[float]:
    saver = make_saver(bench, async_save=False)
    found = []
    for _ in range(repeats):
        bench.step()
        found.append(bench.save(saver))
    return found


def measure_async(bench: Bench, repeats: int) -> dict[str, Any]:
    """Measure stalls of saves that write in the background, and the steps meanwhile."""
    saver = make_saver(bench, async_save=True)
    begins, publishing, steps, written = [], [], [], []
    for _ in range(repeats):
        bench.step()
        began = time.perf_counter()
        begins.append(bench.save(saver))
        publishing.append(0.0)
        while saver.is_pending:
            while (writing := bench.agreed(float(saver.is_writing))) and len(steps) < 1000:
                steps.append(bench.timed(bench.step))
            publishing[-1] += bench.timed(lambda: saver.poll(bool(writing)))  # noqa: B023 (called immediately)
        written.append(bench.agreed(time.perf_counter() - began))
    return {"begin_s": begins, "publish_s": publishing, "step_s": steps, "until_published_s": written,
            "bytes": saver.last_bytes, "iteration": saver.last_iteration}


def measure_copy(bench: Bench, num_bytes: int, repeats: int) -> list[float]:
    """Seconds of a bare copy of as many bytes to host memory allocated before (page-locked on CUDA)."""
    import torch

    device = bench.parts.platform.device
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    taken = []
    for _ in range(repeats + 1):
        # As before a save, the caches then hold what a step left there, not what is copied.
        bench.step()
        taken.append(bench.timed(lambda: target.copy_(source, non_blocking=True)))
    return taken[1:]


def measure_load(bench: Bench, folder: Path) -> float:
    """Seconds to load the last checkpoint in place with all checksums. The files are in the page cache."""
    from mimo.checkpoint.load import load_checkpoint

    return bench.timed(lambda: load_checkpoint(bench.state, folder, bench.parts.watchdog))


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return all figures. Times are in seconds."""
    bench = make_trainer(arguments, folder)
    steps = [bench.timed(bench.step) for _ in range(arguments.steps + 2)][2:]
    sync = measure_sync(bench, arguments.repeats)
    background = measure_async(bench, arguments.repeats)
    copies = measure_copy(bench, background["bytes"], arguments.repeats)
    load_s = measure_load(bench, Path(folder) / f"iter_{background['iteration']:07d}")
    sync_s, copy_s = statistics.median(sync), statistics.median(copies)
    stalls = [begin + publish for begin, publish in zip(background["begin_s"], background["publish_s"], strict=True)]
    async_s, step_s = statistics.median(stalls), statistics.median(steps)
    during = statistics.median(background["step_s"]) if background["step_s"] else None
    bench.loader.close()
    return {
        "device": arguments.device, "device_name": device_name(arguments.device),
        "world_size": bench.parts.grids.layout.world_size, "bytes_per_rank": background["bytes"],
        "sync_stall_s": sync_s, "async_stall_s": async_s,
        "async_save_s": statistics.median(background["begin_s"]),
        "async_publish_s": statistics.median(background["publish_s"]),
        "until_published_s": statistics.median(background["until_published_s"]),
        "copy_s": copy_s, "copy_bytes_per_s": background["bytes"] / copy_s,
        "async_over_sync": async_s / sync_s, "async_over_copy": async_s / copy_s,
        "meets_target": async_s < ASYNC_SHARE * sync_s or async_s <= COPY_SHARE * copy_s,
        "step_s": step_s, "step_during_save_s": during,
        "step_slowdown": None if during is None else during / step_s, "load_s": load_s,
        "all": {"sync_stall_s": sync, "async_stall_s": stalls, "copy_s": copies, "step_s": steps},
    }


def start_processes(arguments: argparse.Namespace) -> int:
    """Start this program again under torchrun, without --nproc, which torchrun would read as its own flag."""
    given = {name: value for name, value in vars(arguments).items() if value is not None and name != "nproc"}
    return torchrun(__file__, arguments.nproc, as_flags(given))


def main() -> int:
    arguments = flags()
    if "RANK" not in os.environ:
        if arguments.nproc > 1:
            return start_processes(arguments)
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(free_port()))
    # Warnings of Megatron Core and torch at every start say nothing about the benchmark.
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    folder = Path(arguments.dir or tempfile.gettempdir()) / f"checkpoint-bench-{os.environ['MASTER_PORT']}"
    try:
        figures = measure(arguments, str(folder))
        import torch.distributed as dist

        dist.destroy_process_group()
    finally:
        if os.environ["RANK"] == "0":
            shutil.rmtree(folder, ignore_errors=True)
    if os.environ["RANK"] == "0":
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
