"""One rank of scripts/bench/schedule.py: whole steps, and each grid alone on the same microbatches, in turns.

A grid runs alone through the trainer's own schedule, with passes in the same order and as many in flight, while the
ranks of the other grids wait. Its bridges send nothing, and receive noise of the right shape.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from mimo.bridge.disjoint import Bridge
from mimo.comm import gather, gather_at
from mimo.config.validate import num_microbatches, steps_ahead
from mimo.data.batch import Microbatch
from mimo.model.mtp import begin_mtp_step
from mimo.observability.clock import clock_offsets, host_of_clock
from mimo.observability.spans import Interval, Kind
from mimo.protocols import LANGUAGE
from mimo.training.loop import TrainingLoop
from mimo.training.step import TrainerParts, forward_step, run_schedule, train_step
from scripts.bench.schedule_figures import AHEAD, OFF, ON, Arm, Block, RankStep, merge

# Share of the forward pass in a forward and backward pass, as in layers without recomputation.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Synthetic:
    """Milliseconds of a microbatch's passes on one stage, forward and backward together.

    Attributes:
        encoder_ms: time on each encoder.
        language_ms: time on the language model, the mean over its lanes.
        spread: share by which neighbouring lanes of the language model, and a lane's microbatches, take longer and
            shorter in turn.
        encoder_spread: share by which pairs of the encoder's microbatches take longer and shorter in turn.
    """

    encoder_ms: float
    language_ms: float
    spread: float = 0.0
    encoder_spread: float = 0.0


class _Sleep(torch.autograd.Function):
    """Return the tensor unchanged after a sleep, and its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


def sleep_in(module: torch.nn.Module, seconds: Iterator[float]) -> None:
    """Prolong each pass through `module` by `next(seconds)`.

    A third of that is in the forward pass and the rest in the backward pass. If nothing before the output trains, all
    of it is in the forward pass.
    """
    def sleep(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        whole = next(seconds)
        if not output.requires_grad:
            time.sleep(whole)
            return output
        slept: torch.Tensor = _Sleep.apply(output, FORWARD_SHARE * whole, (1 - FORWARD_SHARE) * whole)
        return slept

    module.register_forward_hook(sleep)


def install(parts: TrainerParts, synthetic: Synthetic, num_microbatches: int) -> None:
    """Let this rank's modules take the times of `synthetic`."""
    model, grids = parts.built.model, parts.grids
    for name in grids.modules:
        if name == LANGUAGE:
            lane = grids.layout.language.coordinates(grids.rank)["dp"]
            times = [synthetic.language_ms / 1000 * (1 + synthetic.spread * (-1) ** (lane + number))
                     for number in range(num_microbatches)]
            sleep_in(unwrap_model(model.language_model), itertools.cycle(times))
            continue
        submodule = unwrap_model(model.modality_submodules[name])
        # A frozen encoder may run long before its projector does.
        frozen = not any(parameter.requires_grad for parameter in submodule.encoder.parameters())
        times = [synthetic.encoder_ms / 1000 * (1 + synthetic.encoder_spread * (-1) ** (number // 2))
                 for number in range(num_microbatches)]
        sleep_in(submodule.encoder if frozen else submodule, itertools.cycle(times))


class _NoHandshake:
    """Replaces the comparison of both sides of a lane when only one of them takes part."""

    waits_for: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.owners: dict[str, Any] = {}

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        """Do nothing."""


def _noise(bridge: Bridge, what: str, sends: tuple[torch.Tensor, list[int]] | None,
           receives: list[int] | None) -> torch.Tensor | None:
    """Replace a bridge's transfer: send nothing and receive noise."""
    if receives is None:
        return None
    return torch.randn((sum(receives), bridge.hidden_size), dtype=bridge.comm_dtype, device=bridge.device)


@contextmanager
def no_run_ahead(parts: TrainerParts) -> Iterator[None]:
    """Run steps inside with the schedule's own order of the encoder's passes, whatever --encoder-run-ahead says."""
    assert parts.communicator is not None, "disjoint grids have bridges"
    given = [(bridge, bridge.run_ahead) for bridge in parts.communicator.bridges]
    for bridge, _ in given:
        bridge.run_ahead = 0
    try:
        yield
    finally:
        for bridge, ahead in given:
            bridge.run_ahead = ahead


@contextmanager
def silent_bridges(parts: TrainerParts) -> Iterator[TrainerParts]:
    """Yield the parts of the trainer with bridges that move nothing between grids."""
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
        blocks: the timed blocks of all ranks, on the logging rank.
    """

    settings: dict[str, Any]
    blocks: list[Block]
    # Difference between the first rank's clock and this rank's.
    _offset_s: float

    def _train(self, loader: Any, logger: Any) -> str | None:
        """Run the blocks in place of iterations. Returns why the run stopped early, or None."""
        grids = self.grids
        self.blocks = []
        if self.settings["synthetic"] is not None:
            install(self.parts, Synthetic(*self.settings["synthetic"]), num_microbatches(self.config))
        hosts = gather(grids, host_of_clock())
        for number in range(-self.settings["warmup_blocks"], self.settings["blocks"]):
            self._offset_s = clock_offsets(hosts, grids.rank, grids.host)[grids.rank]
            block = self._block(loader)
            reason = self.session.stop_reason()
            asked = torch.tensor(float(reason is not None))
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=grids.host)
            if asked.item():
                return reason or "another rank"
            gathered = gather_at(grids, block, grids.layout.language.rank_at(pp=-1))
            if gathered is not None and number >= 0:
                self.blocks.append(merge(gathered))
        return None

    def _block(self, loader: Any) -> Block:
        """Give every arm its turn, and return what this rank did."""
        seen: list[list[Microbatch]] = []

        def from_loader() -> tuple[list[Microbatch], list[list[Microbatch]]]:
            seen.append(loader.next_step())
            return seen[-1], []

        with no_run_ahead(self.parts):
            block = {OFF: self._steps(from_loader, replace(self.parts, prefetch=None))}
            for module in self.grids.layout.grids:
                block[module] = self._alone(module, seen[1:])
        if self.config.layout.encoder_run_ahead:
            again = iter([(step, []) for step in seen])
            block[AHEAD] = self._steps(partial(next, again), self.parts)
        depth = self.config.train.encoder_prefetch_depth
        if depth:
            ahead = steps_ahead(depth, len(seen[0]))
            # With as many more steps as the queue looks ahead, every step that counts has passes to prefetch. Steps
            # behind these are never requested.
            again = [*seen, *islice(cycle(seen), ahead)]
            coming = (again[number + 1 : number + 1 + ahead] for number in range(len(again)))
            each = zip(again, coming, strict=True)
            block[ON] = self._steps(partial(next, each), self.parts, more=ahead)
        return block

    def _steps(self, next_step: Callable[[], tuple[list[Microbatch], list[list[Microbatch]]]], parts: TrainerParts,
               more: int = 0) -> Arm:
        """Run steps as the trainer's own loop does.

        The first step does not count, because another arm ran before it, nor do the last `more` steps.

        Args:
            next_step: returns a step's microbatches, and those of the steps after it that may be prefetched.
            parts: parts of the trainer.
            more: number of steps after those that count.
        """
        arm, begins, count = Arm(), [], self.settings["steps"]
        for number in range(1 + count + more):
            begins.append(time.perf_counter())
            parts.spans.begin_step()
            with parts.trace.wait("data", Kind.DATA_WAIT, on_loader=True):
                microbatches, coming = next_step()
            train_step(parts, microbatches, coming=coming)
            parts.spans.end_step()
            self._keep(arm, counts=1 <= number <= count)
            self.session.progress.iteration += 1
            self.watchdog.progress(iteration=self.session.progress.iteration)
        begins.append(time.perf_counter())
        arm.seconds = [two - one for one, two in pairwise(begins)][1 : 1 + count]
        return arm

    def _alone(self, module: str, steps: Sequence[list[Microbatch]]) -> Arm:
        """Run forward and backward passes of one grid alone. On ranks of other grids, the arm has no steps."""
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
        """Read the last step's intervals and, if it counts, put them into `arm` on the clock of the first rank."""
        intervals = self.parts.spans.intervals()
        if not counts:
            return
        moved = [Interval(each.label, each.begin_s + self._offset_s, each.end_s + self._offset_s)
                 for each in intervals]
        (module,) = self.grids.modules
        lane = self.grids.layout.grids[module].coordinates(self.grids.rank)["dp"]
        arm.steps.append([RankStep(self.grids.rank, module, lane, moved)])
