"""One training iteration: handshake, forward and backward over the grids, reduction, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_model_config

from mimo.bridge.handshake import Handshake, destination_rows, source_rows
from mimo.bridge.pipeline import PipelineCommunicator
from mimo.config.trainer import RunConfig
from mimo.data.batch import Microbatch, on_device
from mimo.grid.groups import Grids
from mimo.model.build import GRADIENTS, KINDS, WEIGHTS, BuiltModel
from mimo.model.fp8 import forget_weights
from mimo.model.mtp import begin_mtp_step
from mimo.observability.clock import DeviceTimer
from mimo.observability.spans import Kind, ScheduleSpans, Spans, Trace
from mimo.observability.startup import STARTUP, Phase
from mimo.observability.timeline import lane_tokens
from mimo.platform.base import Platform
from mimo.protocols import LANGUAGE
from mimo.training.encoder_prefetch import EncoderPrefetch
from mimo.training.encoder_windows import EncoderWindows
from mimo.training.fp8_weights import Fp8Weights
from mimo.training.grad_sync import GradSync
from mimo.training.optimizer import HeteroOptimizer
from mimo.training.step_metrics import Workload, num_values, workload
from mimo.watchdog.process_exit import ReportedElsewhereError
from mimo.watchdog.watchdog import Watchdog

# Number of totals of a step that come before those of each encoder, see `_sum_over_world`.
FIXED_TOTALS = 7


@dataclass
class TrainerParts:
    """Everything a step works on, on this rank. Built once by `mimo.training.setup`.

    `schedule_timer` measures forward and backward passes on the device, with bridge waits and gradient reduction.
    `optimizer_timer` measures the optimizer step.
    """

    config: RunConfig
    grids: Grids
    platform: Platform
    watchdog: Watchdog
    built: BuiltModel
    communicator: PipelineCommunicator | None
    handshake: Handshake
    grad_sync: GradSync
    optimizer: HeteroOptimizer
    scheduler: OptimizerParamScheduler
    schedule_spans: ScheduleSpans
    prefetch: EncoderPrefetch | None = None
    windows: EncoderWindows | None = None
    fp8_weights: Fp8Weights | None = None
    schedule_timer: DeviceTimer = field(default_factory=DeviceTimer)
    optimizer_timer: DeviceTimer = field(default_factory=DeviceTimer)

    @property
    def spans(self) -> Spans:
        """Recorder of the parts of the step."""
        return self.schedule_spans.spans

    @property
    def trace(self) -> Trace:
        """Recorder of waits, for the watchdog and the timeline."""
        return Trace(self.watchdog, self.spans)

    @property
    def world(self) -> range:
        """All ranks."""
        return range(self.grids.layout.world_size)

    @property
    def is_last_language_stage(self) -> bool:
        """Whether this rank computes losses."""
        language = self.grids.layout.language
        return self.grids.rank in language.ranks and language.coordinates(self.grids.rank)["pp"] == language.pp - 1

    @property
    def counts_losses(self) -> bool:
        """Whether this rank's losses and targets enter the global sum: one rank for each token of a lane."""
        language = self.grids.layout.language
        return self.is_last_language_stage and language.coordinates(self.grids.rank)["tp"] == 0

    @property
    def reports_lane(self) -> bool:
        """Whether this rank counts the samples and tokens of its lane: one rank of each lane."""
        language = self.grids.layout.language
        return self.counts_losses and language.coordinates(self.grids.rank)["cp"] == 0


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step, equal on all ranks.

    Attributes:
        loss: mean over the targets of the global batch.
        success: whether parameters were updated.
        grad_norm: global norm before clipping; None when skipped.
        num_zeros: zero gradients, where logged.
    """

    loss: float
    success: bool
    grad_norm: float | None
    num_zeros: int | None


@dataclass(frozen=True, kw_only=True)
class StepResult(UpdateResult):
    """Result of one iteration, equal on all ranks.

    Attributes:
        num_tokens: target tokens of the global batch.
        text_tokens, image_tokens: tokens of the global batch, padding excluded.
        stop_requested: some rank was asked to stop.
        work: sequences and images of the global batch.
        bad_samples: samples that the data set skipped while it read the global batch.
        unbalanced_encoded_tokens: tokens that the encoders' layers would have had without balanced packing.
    """

    num_tokens: int
    text_tokens: int
    image_tokens: int
    stop_requested: bool
    work: Workload
    bad_samples: int
    unbalanced_encoded_tokens: int


def loss_function(batch: Microbatch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of the target tokens' losses, their number, and both as a detached float64 pair for the report.

    A mean for each microbatch would be wrong: it would weigh a token by how many others share its microbatch.
    """
    assert batch.text is not None, "losses are computed where text is"
    mask = batch.text.own(batch.text.loss_mask)
    total = (losses.float() * mask).sum()
    count = mask.sum()
    return total, count.to(torch.int), torch.stack([total.detach().double(), count.double()])


def forward_step(batches: Iterator[Microbatch], model: Any) -> tuple[Any, Any]:
    """Megatron Core's `forward_step_func` for training."""
    batch = next(batches)
    return model(batch), partial(loss_function, batch)


@dataclass(frozen=True)
class LossScale:
    """Factors of the losses of a schedule. With the reciprocal of the number of targets, gradients come out as means.

    A division after the last backward pass would need another pass over all gradients. Gradients of encoders that
    arrive over a bridge contain the factor already.

    Attributes:
        loss: scalar tensor on the device, by which the sum of each microbatch's losses is multiplied.
        aux_loss: the same for load-balancing losses and multi-token prediction.
    """

    loss: torch.Tensor
    aux_loss: torch.Tensor

    def install(self, config: Any) -> None:
        """Have Megatron Core's schedule multiply auxiliary losses; `config` is the model's."""
        # One tensor for each call: the schedule may keep it and write later scales into it.
        config.moe_grad_scale_func = config.mtp_grad_scale_func = self.aux_loss.clone().view(1).clone

    def apply(self, step_function: Any, batches: Iterator[Microbatch], model: Any) -> tuple[Any, Any]:
        """Call `step_function`, and multiply what its loss function returns first."""
        output, loss_function = step_function(batches, model)

        def scaled(*arguments: Any, **options: Any) -> tuple[Any, ...]:
            loss, *others = loss_function(*arguments, **options)
            return loss * self.loss, *others

        return output, scaled


def mean_over_targets(parts: TrainerParts, microbatches: Sequence[Microbatch]) -> LossScale:
    """Return the reciprocal of the number of the global batch's targets. Collective over the language grid's lanes.

    Ranks without the language model compute no loss and get 1.
    """
    device = parts.platform.device
    groups = parts.grids.collections.get(LANGUAGE)
    if groups is None:
        one = torch.ones((), device=device)
        return LossScale(one, one)
    count = 0.0
    for batch in microbatches:
        assert batch.text is not None, "language ranks hold text"
        count += batch.text.loss_mask.sum(dtype=torch.float64).item()
    # `full` does not make the host wait for the device, as a copy from pageable memory does.
    targets = torch.full((), count, dtype=torch.float64, device=device)
    with parts.trace.wait("count of the targets of the global batch", module=LANGUAGE,
                          group=parts.grids.layout.language.ranks):
        dist.all_reduce(targets, group=groups.dp)
    factor = targets.clamp(min=1).reciprocal().float()
    return LossScale(factor, factor)


def begin_schedule(parts: TrainerParts, microbatches: Sequence[Microbatch]) -> None:
    """Compare both sides of every lane and give the bridges their row counts. Needed before each schedule."""
    with parts.trace.wait("comparison of both sides of each lane", peers=lambda: parts.handshake.waits_for):
        parts.handshake.check(microbatches)
    if parts.communicator is not None:
        parts.communicator.begin_step(microbatches, parts.handshake.owners)
    for (name, _), bridge in parts.built.model.colocated_comms.items():
        bridge.begin_step(
            source_rows(name, microbatches), destination_rows(name, parts.grids.layout, parts.grids.rank, microbatches)
        )


def run_schedule(
    parts: TrainerParts,
    microbatches: Sequence[Microbatch],
    step_function: Any,
    *,
    forward_only: bool,
    force_all_reduce: bool = False,
    loss_scale: LossScale | None = None,
) -> list[Any]:
    """Run forward (and backward) passes of a step's microbatches. Return what the loss function reported, in order.

    Without `loss_scale`, gradients are those of the sum of the losses; load-balancing losses and those of multi-token
    prediction keep the factors of the schedule before.
    """
    needed = (WEIGHTS,) if forward_only else (WEIGHTS, GRADIENTS)
    parts.built.residency.require("a forward pass" if forward_only else "forward and backward passes", *needed)
    if parts.fp8_weights is not None:
        parts.fp8_weights.release()
    parts.schedule_spans.begin(len(microbatches))
    if parts.windows is None:
        begin_schedule(parts, microbatches)
    else:
        # Nothing crosses a bridge here. The windows tell all ranks which images there are, and check both sides of a
        # lane where it is read.
        microbatches = parts.windows.begin_step(microbatches, forward_only=forward_only)
    collection = parts.grids.schedule_collection()
    schedule = get_forward_backward_func(pp_size=1, vp_size=None, schedule_pg_collection=collection)
    train = parts.config.train
    if parts.communicator is not None:
        parts.communicator.begin_rows(microbatches)
    parts.grad_sync.force_all_reduce = force_all_reduce
    if loss_scale is not None:
        loss_scale.install(get_model_config(parts.built.model))
        step_function = partial(loss_scale.apply, step_function)
    reports: list[Any] = schedule(
        forward_step_func=step_function,
        data_iterator=on_device(microbatches, parts.platform.device),
        model=[parts.built.model],
        num_microbatches=len(microbatches),
        seq_length=train.seq_length,
        micro_batch_size=train.micro_batch_size,
        forward_only=forward_only,
        p2p_communicator=parts.communicator,
        pg_collection=collection,
        force_all_reduce=force_all_reduce,
    )
    if parts.communicator is not None:
        parts.communicator.finish_step(forward_only=forward_only)
    if parts.windows is not None:
        parts.windows.finish_step()
        if not forward_only:
            parts.grad_sync.finalize([parts.built.model], force_all_reduce=force_all_reduce)
    return reports


def train_step(
    parts: TrainerParts,
    microbatches: Sequence[Microbatch],
    *,
    coming: Sequence[Sequence[Microbatch]] = (),
    stop_requested: bool = False,
    force_all_reduce: bool = False,
) -> StepResult:
    """Run one iteration. Collective over the world.

    Args:
        parts: this rank's trainer.
        microbatches: this rank's side of the iteration, on the host.
        coming: microbatches of the next iterations, as far as encoder prefetch may look ahead.
        stop_requested: this process was asked to stop; the result says whether any was.
        force_all_reduce: leave full gradients on every data-parallel rank instead of its shard.

    Raises:
        ValueError: the loss is not finite (with --check-for-nan-in-loss), before anything is updated; names the
            samples.
        ReportedElsewhereError: as above, on ranks that do not hold those samples' losses.
    """
    parts.built.residency.require("a training step", *KINDS)
    clear_gradients(parts)
    scale = mean_over_targets(parts, microbatches)
    if parts.built.model.mtp is not None:
        with parts.trace.wait("count of the targets of multi-token prediction", module=LANGUAGE,
                              group=parts.grids.layout.language.ranks):
            begin_mtp_step(
                parts.built.model.mtp, microbatches, parts.grids.collections.get(LANGUAGE), parts.platform.device)
    # With prefetch, the encoder's input does not go to the device again: its features are or will be in a queue.
    scheduled = microbatches if parts.prefetch is None else parts.prefetch.begin_step(microbatches, coming)
    with parts.schedule_timer.measure():
        reports = run_schedule(parts, scheduled, forward_step, forward_only=False, force_all_reduce=force_all_reduce,
                               loss_scale=scale)
    summed = _sum_over_world(parts, microbatches, reports, stop_requested)
    encoders = [encoder.name for encoder in parts.grids.layout.encoders]
    if parts.config.optim.correct_encoder_grad_for_partial_participation:
        parts.grad_sync.correct_participation(dict(zip(encoders, summed[FIXED_TOTALS:], strict=False)))
    update = update_weights(
        parts, loss_sum=summed[0], num_targets=summed[1],
        num_samples=parts.config.train.global_batch_size,
        refuse_loss=partial(_refuse_loss, parts, microbatches, reports))
    totals = summed.tolist()
    _, num_tokens, text_tokens, image_tokens, stop, bad_samples, unbalanced = totals[:FIXED_TOTALS]
    return StepResult(**vars(update), num_tokens=int(num_tokens), text_tokens=int(text_tokens),
                      image_tokens=int(image_tokens), stop_requested=stop > 0,
                      work=Workload.from_values(totals[-num_values(encoders) :], encoders),
                      bad_samples=int(bad_samples), unbalanced_encoded_tokens=int(unbalanced))


def clear_gradients(parts: TrainerParts) -> None:
    """Zero the gradients, before the first backward pass of an update."""
    for wrapped in parts.built.wrapped.values():
        wrapped.zero_grad_buffer()
    parts.optimizer.zero_grad()


def update_weights(
    parts: TrainerParts,
    *,
    loss_sum: torch.Tensor,
    num_targets: torch.Tensor,
    num_samples: int,
    refuse_loss: Callable[[float], NoReturn],
) -> UpdateResult:
    """Turn the gradients of a global batch into one optimizer step. Collective over the world.

    Gradients, which are means over the targets, are clipped and applied. Where one is not finite, on any rank, all
    ranks skip the step: weights, schedule and expert biases stay as they were.

    Args:
        parts: this rank's trainer; the schedule has reduced its gradients inside each module.
        loss_sum: sum of the losses of the global batch, float64 scalar on the device.
        num_targets: number of its targets, likewise; no targets count as one.
        num_samples: how far the learning-rate schedule advances.
        refuse_loss: raises for a loss that is not finite (with --check-for-nan-in-loss), before anything is updated.
    """
    STARTUP.enter(Phase.UPDATE)
    forget_weights()
    if parts.fp8_weights is not None:
        parts.fp8_weights.allocate()
    # Until the norms are read, the host runs ahead of the device.
    with parts.trace.wait("norms of the gradients", Kind.OPTIMIZER, group=parts.world), parts.optimizer_timer.measure():
        parts.optimizer.prepare()
    total, count = torch.stack([loss_sum, num_targets]).tolist()
    loss = total / max(count, 1.0)
    if parts.config.train.check_for_nan_in_loss and not math.isfinite(loss):
        refuse_loss(loss)
    with parts.trace.wait("optimizer step", Kind.OPTIMIZER, group=parts.world), parts.optimizer_timer.measure():
        success, grad_norm, num_zeros = parts.optimizer.step()
    if parts.fp8_weights is not None:
        parts.fp8_weights.finish_update(updated=success)
    if success:
        parts.scheduler.step(num_samples)
    else:
        # The schedule moved them by the load of the microbatches, before it was known that the step is skipped.
        parts.grad_sync.undo_expert_biases()
    return UpdateResult(loss, success, grad_norm, num_zeros)


def _sum_over_world(
    parts: TrainerParts, microbatches: Sequence[Microbatch], reports: list[torch.Tensor], stop_requested: bool
) -> torch.Tensor:
    """Sum everything that a step needs to know of the global batch, in one float64 all-reduce.

    In order: loss sum, target tokens, text tokens, image tokens, stop requests, bad samples, encoded tokens without
    balanced packing, data-parallel ranks of each encoder that saw an image, values of the workload.
    """
    encoders = parts.grids.layout.encoders
    names = [encoder.name for encoder in encoders]
    totals = torch.zeros(FIXED_TOTALS + len(encoders) + num_values(names), dtype=torch.float64)
    totals[4] = float(stop_requested)
    if parts.reports_lane:
        totals[3], totals[2] = lane_tokens(microbatches)
        for batch in microbatches:
            assert batch.text is not None, "language ranks hold text"
            totals[5] += len(batch.text.skipped)
            totals[6] += batch.text.unbalanced_encoded_tokens
        values = workload(microbatches, names).values()
        totals[FIXED_TOTALS + len(encoders) :] = torch.tensor(values, dtype=torch.float64)
    # Only the correction for partial participation asks, which encoder windows have no need of.
    for index, encoder in enumerate(encoders if parts.windows is None else ()):
        if parts.grids.rank in encoder.ranks:
            place = encoder.coordinates(parts.grids.rank)
            saw_image = any(sum(batch.encoders[encoder.name].token_counts) for batch in microbatches)
            totals[FIXED_TOTALS + index] = float(saw_image and not place["tp"] and not place["cp"] and not place["pp"])
    # From page-locked memory, so that the host does not wait for the device, but finds gradients while it computes.
    totals = totals.pin_memory().to(parts.platform.device, non_blocking=True)
    if parts.counts_losses:
        totals[:2] += torch.stack(reports).sum(dim=0)
    with parts.trace.wait("sum of losses and tokens over the world", group=parts.world):
        work = dist.all_reduce(totals, async_op=True)
        # While the other ranks arrive, the encoder computes features of coming iterations.
        if parts.prefetch is not None:
            parts.prefetch.fill()
            parts.prefetch.end_step()
        assert work is not None, "every rank is a member of the world"
        work.wait()
    return totals


def _refuse_loss(
    parts: TrainerParts, microbatches: Sequence[Microbatch], reports: list[torch.Tensor], loss: float
) -> NoReturn:
    """Raise an error for a loss that is not finite.

    On lanes that have such a loss, one rank names the samples. All other ranks refer to it.
    """
    message = f"the loss of the global batch is {loss}; nothing was updated (--no-check-for-nan-in-loss goes on)"
    if parts.counts_losses:
        for index, (batch, report) in enumerate(zip(microbatches, reports, strict=True)):
            if not math.isfinite(report[0].item()):
                assert batch.text is not None, "language ranks hold text"
                lane = parts.grids.layout.grids[LANGUAGE].coordinates(parts.grids.rank)["dp"]
                raise ValueError(f"{message}; lane {lane}, microbatch {index}, samples {', '.join(batch.text.keys)}")
    raise ReportedElsewhereError(f"{message}; the lane that it comes from names the samples")
