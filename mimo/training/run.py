"""Entry point of a training run: from flags to exit code."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from mimo.config.trainer import RunConfig
from mimo.config.validate import check_device
from mimo.grid.spec import Layout
from mimo.observability.remote_trackers import are_left
from mimo.observability.startup import STARTUP, Phase, end_imports
from mimo.platform import get_platform, import_megatron, quieten_megatron
from mimo.platform.base import Platform
from mimo.registry import model_provider
from mimo.watchdog.process_exit import STDERR_FD, FailFast, exit_now

if TYPE_CHECKING:
    from mimo.grid.groups import Grids

# Seconds from the first process group to the watchdog, which needs the groups.
START_LIMIT_S = 1800.0


def run(config: RunConfig, layout: Layout) -> int:
    """Train as configured, as one process of a torchrun launch (or alone).

    Returns:
        Exit code: 0 at the end of the run or after SIGTERM.

    Raises:
        ValueError: the device does not exist, or a flag needs another device. Raised before any process group exists.
    """
    return launch(config, layout, _train)


def launch[C: RunConfig](config: C, layout: Layout, body: Callable[[C, Grids, Platform], None], *,
                         longest_wait_s: float = 0.0) -> int:
    """Run `body` on this rank with the process groups of a layout; otherwise like `run`.

    Args:
        config: the run's flags; `body` gets them with the device that was found.
        layout: layout of the run.
        body: the rank's work, which begins with opening the watchdog. An error in it ends the process.
        longest_wait_s: seconds for which a rank may wait for others on the devices, if that is longer than the
            watchdog's usual limit.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        # The store chooses a free port, because several single-process runs may share a host.
        os.environ.setdefault("MASTER_PORT", "0")
    STARTUP.open()
    _show_log(rank)
    quieten_megatron()
    # SIGUSR2 asks for a Gantt chart. It must not end a process that is not ready for it, or that makes none.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    platform = get_platform(config.train.device)
    check_device(config.observe, platform.name)
    config = replace(config, train=replace(config.train, device=platform.name))
    with FailFast(f"rank {rank}"):
        _with_groups(config, layout, platform, rank, world_size, body, longest_wait_s)
    if are_left():
        exit_now(0)
    return 0


def _show_log(rank: int) -> None:
    """Show this package's log on the first rank, and warnings on all. Megatron Core's log is not shown."""
    log = logging.getLogger("mimo")
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.propagate = False


def _train(config: RunConfig, grids: Grids, platform: Platform) -> None:
    STARTUP.enter(Phase.IMPORTS)
    from mimo.training.loop import TrainingLoop

    provider, dataset = model_provider(config.model.model_provider), config.find_dataset(config.data.dataset_provider)
    TrainingLoop(config, grids, platform, provider, dataset).run()


def _with_groups[C: RunConfig](config: C, layout: Layout, platform: Platform, rank: int, world_size: int,
                               body: Callable[[C, Grids, Platform], None], longest_wait_s: float) -> None:
    # Megatron Core, and everything that imports it, may only be imported after the platform is installed.
    import_megatron()
    import torch.distributed as dist

    from mimo.grid.groups import Grids
    from mimo.observability.profiler import MemorySnapshot
    from mimo.training.session import with_run_folder

    end_imports()
    STARTUP.enter(Phase.GROUPS)
    if config.train.deterministic_mode:
        platform.make_deterministic()
    platform.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # The watchdog should end a hang first, because it names what is waited for. The backend's limit is a backup.
    platform.init_process_group(rank, world_size, 2 * max(config.train.watchdog_timeout_s, longest_wait_s, 30.0))
    # Until the watchdog replaces this timer, it ends a start that hangs.
    faulthandler.dump_traceback_later(START_LIMIT_S, exit=True, file=STDERR_FD)
    with Grids(layout, platform.backend) as grids, FailFast(grids.describe()):
        config = with_run_folder(config, grids)
        with MemorySnapshot(config.observe, grids.rank):
            body(config, grids, platform)
    dist.destroy_process_group()
