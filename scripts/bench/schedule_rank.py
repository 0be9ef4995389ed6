"""One rank of scripts/bench/schedule.py: whole steps, and each grid alone on the same microbatches, in turns.

A grid runs alone through the trainer's own schedule, passes in the same order and with as many under way, while the
ranks of the other grids wait: its bridges send nothing, and what they receive is noise of the right shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import torch
import torch.distributed as dist

from mimo.bridge.disjoint import Bridge
from mimo.config.validate import num_microbatches, steps_ahead
from mimo.data.batch import Microbatch
from mimo.model.mtp import begin_mtp_step
from mimo.observability.spans import Interval, Kind, clock_offsets, host_of_clock
from mimo.protocols import LANGUAGE
from mimo.training.loop import TrainingLoop
from mimo.training.step import TrainerParts, forward_step, run_schedule, train_step
from scripts.bench.schedule_figures import OFF, ON, Arm, Block, merge
from scripts.bench.schedule_loss import RankStep
from scripts.bench.synthetic import Synthetic, install


class _NoHandshake:
    """Stands in for the comparison of both sides of a lane where one of them does not take part."""

    waits_for: tuple[int, ...] = ()

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        """Nothing to compare."""


def _noise(bridge: Bridge, what: str, sends: tuple[torch.Tensor, list[int]] | None,
           receives: list[int] | None) -> torch.Tensor | None:
    """Instead of a bridge's transfer: nothing is sent, what is received is noise."""
    if receives is None:
        return None
    return torch.randn((sum(receives), bridge.hidden_size), dtype=bridge.comm_dtype, device=bridge.device)


@contextmanager
def silent_bridges(parts: TrainerParts) -> Iterator[TrainerParts]:
    """Inside, schedules of the parts that it gives move nothing between grids."""
    assert parts.communicator is not None, "disjoint grids have bridges"
    bridges = parts.communicator.bridges
    for bridge in bridges:
        vars(bridge)["_transfer"] = partial(_noise, bridge)
    try:
        yield replace(parts, handshake=_NoHandshake())  # type: ignore[arg-type]
    finally:
        for bridge in bridges:
            del vars(bridge)["_transfer"]


class ScheduleLoop(TrainingLoop):
    """A run whose steps are measured.

    Attributes:
        settings: `blocks`, `warmup_blocks`, `steps` (of an arm in a block) and `synthetic`.
        blocks: all ranks', on the logging rank.
    """

    settings: dict[str, Any]
    blocks: list[Block]
    # To be added to this rank's clock to have that of the first rank.
    _offset_s: float

    def _train(self, loader: Any, logger: Any, stop: Any, began: float) -> str | None:
        """The blocks, in place of the run's iterations; why it stopped early, or None."""
        grids = self.grids
        self.blocks = []
        if self.settings["synthetic"] is not None:
            install(self.parts, Synthetic(*self.settings["synthetic"]), num_microbatches(self.config))
        hosts = [""] * grids.layout.world_size
        dist.all_gather_object(hosts, host_of_clock(), group=grids.host)
        for number in range(-self.settings["warmup_blocks"], self.settings["blocks"]):
            self._offset_s = clock_offsets(hosts, grids.rank, grids.host)[grids.rank]
            block = self._block(loader)
            asked = torch.tensor(float(stop.requested))
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=grids.host)
            if asked.item():
                return stop.name or "another rank"
            gathered: list[Any] | None = [None] * grids.layout.world_size if self.is_logging_rank else None
            dist.gather_object(block, gathered, dst=grids.layout.language.rank_at(pp=-1), group=grids.host)
            if gathered is not None and number >= 0:
                self.blocks.append(merge(gathered))
        return None

    def _block(self, loader: Any) -> Block:
        """One turn of every arm, on this rank."""
        seen: list[list[Microbatch]] = []

        def from_loader() -> tuple[list[Microbatch], list[list[Microbatch]]]:
            seen.append(loader.next_step())
            return seen[-1], []

        block = {OFF: self._steps(from_loader, replace(self.parts, prefetch=None))}
        for module in self.grids.layout.grids:
            block[module] = self._alone(module, seen[1:])
        depth = self.config.train.encoder_prefetch_depth
        if depth:
            ahead = steps_ahead(depth, len(seen[0]))
            # As many more as the queue looks ahead: every step that counts has passes to prefetch. What comes behind
            # them is never asked for.
            again = [*seen, *islice(cycle(seen), ahead)]
            coming = (again[number + 1 : number + 1 + ahead] for number in range(len(again)))
            each = zip(again, coming, strict=True)
            block[ON] = self._steps(partial(next, each), self.parts, more=ahead)
        return block

    def _steps(self, next_step: Callable[[], tuple[list[Microbatch], list[list[Microbatch]]]], parts: TrainerParts,
               more: int = 0) -> Arm:
        """Steps of the trainer, as its own loop has them.

        The first, before which others ran, does not count, nor do `more` at the end.

        Args:
            next_step: gives a step's microbatches and those of steps after it that may be looked at.
            parts: of the trainer.
            more: steps behind those that count.
        """
        arm, begins, count = Arm(), [], self.settings["steps"]
        for number in range(1 + count + more):
            begins.append(time.perf_counter())
            parts.spans.begin_step()
            with self.watchdog.waiting("data", on_loader=True), parts.spans.span(Kind.DATA_WAIT, "data"):
                microbatches, coming = next_step()
            train_step(parts, microbatches, coming=coming)
            parts.spans.end_step()
            self._keep(arm, counts=1 <= number <= count)
            self.progress.iteration += 1
            self.watchdog.progress(iteration=self.progress.iteration)
        begins.append(time.perf_counter())
        arm.seconds = [two - one for one, two in pairwise(begins)][1 : 1 + count]
        return arm

    def _alone(self, module: str, steps: Sequence[list[Microbatch]]) -> Arm:
        """Forward and backward passes of one grid; on ranks of the others an arm without steps."""
        arm = Arm()
        for microbatches in steps:
            self.platform.synchronize()
            with self.watchdog.waiting("the other grids"):
                dist.barrier(group=self.grids.host)
            if module not in self.grids.modules:
                continue
            parts = self.parts
            for wrapped in parts.built.wrapped.values():
                wrapped.zero_grad_buffer()
            begin_mtp_step(parts.built.model.mtp, microbatches, self.grids.collections.get(LANGUAGE),
                           self.platform.device)
            parts.spans.begin_step()
            with silent_bridges(parts) as alone:
                run_schedule(alone, microbatches, forward_step, forward_only=False)
            parts.spans.end_step()
            self._keep(arm)
        dist.barrier(group=self.grids.host)
        return arm

    def _keep(self, arm: Arm, *, counts: bool = True) -> None:
        """Put the last step's intervals into `arm`, on the clock of the first rank, or only read them."""
        intervals = self.parts.spans.intervals()
        if not counts:
            return
        moved = [Interval(each.label, each.begin_s + self._offset_s, each.end_s + self._offset_s)
                 for each in intervals]
        (module,) = self.grids.modules
        lane = self.grids.layout.grids[module].coordinates(self.grids.rank)["dp"]
        arm.steps.append([RankStep(self.grids.rank, module, lane, moved)])
