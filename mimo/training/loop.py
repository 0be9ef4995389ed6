"""The loop around the step: data, schedule, evaluation, records, stopping."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import batched
from pathlib import Path

import torch
from megatron.core.utils import get_model_config

from mimo.comm import broadcast_object, gather, shared_errors
from mimo.compat import process_group_names
from mimo.config.trainer import RunConfig
from mimo.config.validate import num_microbatches, row_multiple, steps_ahead
from mimo.data.batch import Microbatch
from mimo.data.loader import StepLoader, open_loader
from mimo.data.sources import check_bad_samples
from mimo.grid.groups import Grids
from mimo.grid.lanes import describe_images, describe_videos
from mimo.model.build import layer_impl
from mimo.model.mtp import mtp_losses
from mimo.observability.metrics import RunLogger, StepRecord
from mimo.observability.profiler import StepProfiler
from mimo.observability.spans import Interval, Kind
from mimo.observability.startup import STARTUP, Phase, report_of
from mimo.observability.timeline import Gantt, Timeline, TimelineSignal
from mimo.observability.trackers import Answer, Generation
from mimo.platform.base import Platform
from mimo.protocols import LANGUAGE, DataProvider, ModelProvider
from mimo.training.evaluate import Evaluation, evaluate, gather_images, greedy_decode
from mimo.training.optimizer import current_learning_rates, unused_rates
from mimo.training.session import Session
from mimo.training.setup import kept_objects, run_state, setup_trainer
from mimo.training.step import StepResult, TrainerParts, train_step
from mimo.training.step_metrics import FlopsMeter, MoeLosses, encoded_tokens, imbalance, layout_note

log = logging.getLogger(__name__)


class StepObserver:
    """Timeline and profiler of one run, step by step.

    Attributes:
        spans: records what this rank does in a step.
        lines: messages for the run's log; the loop takes them out.
    """

    def __init__(self, parts: TrainerParts, writer: int, first: int, last: int) -> None:
        grids, flags = parts.grids, parts.config.observe
        self._grids, self.spans, self._watchdog, self._iteration = grids, parts.spans, parts.watchdog, first - 1
        self._handshake, self._last, self._limit_s = parts.handshake, last, 2 * parts.config.train.watchdog_timeout_s
        self._timeline = Timeline(grids.layout, grids.rank, reports_lane=parts.reports_lane,
                                  has_device=parts.platform.name == "cuda")
        self._gantt = Gantt(grids, writer, flags.run_dir, interval=flags.timeline_interval, first=first, last=last)
        self._profiler = StepProfiler(flags, parts.spans, grids.rank, cuda=parts.platform.name == "cuda")
        self._signal = TimelineSignal()
        self._intervals: list[Interval] = []
        self.lines: list[str] = []

    def begin_step(self) -> None:
        """Note that the next iteration begins."""
        self._iteration += 1
        self._profiler.begin_step(self._iteration)
        self.spans.begin_step()

    def end_step(self) -> None:
        """Note that the iteration is over, except for its record. Collective over the world where traces end."""
        self.spans.end_step()
        if not self._profiler.ends_after(self._iteration, self._last):
            return
        if self._profiler.is_running:
            self._handshake.flush()
        # Writing a trace takes long, and all ranks wait for it.
        with self._watchdog.waiting_up_to(self._limit_s, "traces of --profile-ranks"):
            for line in gather(self._grids, self._profiler.close()):
                self._say(line)

    def row(self, microbatches: Sequence[Microbatch]) -> tuple[list[float], list[float]]:
        """Return this rank's numbers of the step. `figures` needs their maxima and sums over all ranks.

        Returns:
            The numbers whose maxima are needed, and the numbers whose sums are needed.
        """
        requested = float(self._signal.take())
        if not self.spans.enabled:
            return [requested], []
        self._intervals = self.spans.intervals()
        own = self._timeline.own(self._intervals, microbatches)
        return [requested, *own], own

    def figures(self, largest: Sequence[float], summed: Sequence[float]) -> dict[str, float]:
        """Compute the timeline's figures, and write the Gantt chart if it is due. Collective over the world.

        The arguments are the maxima and the sums over all ranks of what `row` returned.
        """
        if not self.spans.enabled:
            return {}
        requested, *largest = largest
        if requested or self._gantt.is_due(self._iteration):
            with self._watchdog.waiting("timeline of all ranks"):
                lanes = self._timeline.lanes(summed)
                self._say(self._gantt.write(self._iteration, self._intervals, lanes))
        return self._timeline.figures(largest, summed)

    def close(self, *, failed: bool) -> None:
        """End a running trace and restore the signal's former handler.

        If an error ends the run, here or elsewhere, the trace is dropped, because writing it needs the other ranks.
        """
        if not failed and self._profiler.is_running:
            self._handshake.flush()
            line = self._profiler.close()
            if line is not None:
                log.warning(line)  # a warning, because only the first rank shows other lines
        self._signal.close()

    def _say(self, line: str | None) -> None:
        if line is not None:
            self.lines.append(line)


class TrainingLoop:
    """One run on this rank.

    Attributes:
        observer_type: class of the observer of the steps.
    """

    observer_type = StepObserver

    def __init__(
        self, config: RunConfig, grids: Grids, platform: Platform, provider: ModelProvider, dataset: DataProvider
    ) -> None:
        self.config, self.grids, self.platform, self.provider, self.dataset = config, grids, platform, provider, dataset
        self.session = Session(config, grids)
        self.watchdog = self.session.watchdog
        self.last_evaluation: Evaluation | None = None
        self.observer: StepObserver | None = None
        # Size of the validation split, once it was asked for; None in it is a split without end.
        self.num_valid_samples: tuple[int | None, ...] = ()
        # Number of loaders opened so far, the same on all ranks. It tags a loader's messages, so that those of several
        # loaders do not mix. The handshake has tag 0.
        self._opened = 0

    def run(self) -> None:
        """Train to the end, or until a rank is told to stop; evaluate; summarise."""
        with self.session as session:
            loader, failed = None, True
            try:
                # Before the model is built, so that a data set that cannot be opened is reported at once.
                STARTUP.enter(Phase.DATA)
                loader = self._open_training_data()
                self.parts = setup_trainer(self.config, self.provider, self.grids, self.platform, self.watchdog)
                self.moe_losses = MoeLosses(
                    self.parts.built.model, self.grids.collections.get(LANGUAGE), self.platform.device,
                    per_layer=self.config.observe.moe_per_layer_logging)
                self.meter = FlopsMeter.of(self.config, self.provider, self.grids.layout,
                                           impl=layer_impl(self.config, self.platform),
                                           device_name=self.platform.device_name)
                logger = self._start(loader)
                with kept_objects():
                    stopped = self._train(loader, logger)
                session.save(loader.state_dict, stopped=stopped is not None)
                session.finish_saving()
                figures = {}
                if not stopped:
                    stopped = self._finish(logger)
                if not stopped and self.last_evaluation is not None:
                    figures = {"held-out loss": self.last_evaluation.loss,
                               "exact match": self.last_evaluation.exact_match}
                logger.summary(figures, stopped=stopped)
                # The groups of the bridges, in one order on every rank.
                self.parts.built.model.destroy()
                if self.parts.communicator is not None:
                    self.parts.communicator.destroy()
                failed = False
            finally:
                if self.observer is not None:
                    self.observer.close(failed=failed)
                if loader is not None:
                    self._close(loader, failed=failed)

    def _open_training_data(self) -> StepLoader:
        """Open the training split, or stop all ranks with one message.

        Raises:
            ValueError: the data set refuses its configuration, or cannot read a file.
        """
        with shared_errors(self.grids):
            try:
                return self._open("train", prefetch=True)
            except OSError as problem:
                raise ValueError(f"--dataset-provider {self.config.data.dataset_provider}: {problem}") from problem

    def _open(self, split: str, *, prefetch: bool) -> StepLoader:
        train = self.config.train
        self._opened += 1
        return open_loader(
            self.grids.layout,
            self.grids.rank,
            model_provider=self.provider,
            model_config=self.config.model_family,
            data_provider=self.dataset,
            data_config=self.config.dataset,
            micro_batch_size=train.micro_batch_size,
            num_microbatches=num_microbatches(self.config),
            seq_length=train.seq_length,
            row_multiple=row_multiple(self.config, self.grids.layout),
            seed=train.seed,
            split=split,
            lane_loader=self.config.data.lane_loader,
            microbatch_order=self.config.data.microbatch_order,
            host=self.grids.host,
            tag=self._opened,
            prefetch=prefetch,
            pin_memory=self.platform.name == "cuda",
        )

    def _start(self, loader: StepLoader) -> RunLogger:
        """Load what the run starts from, open its records and log what the reader should know."""
        STARTUP.enter(Phase.LOAD)
        lines = self.session.resume(run_state(self.parts, loader), self.provider, loader)
        STARTUP.enter(Phase.RECORDS)
        logger = self.session.open_records()
        shown = [describe(self.config, self.provider) for describe in (describe_images, describe_videos)]
        unused = unused_rates(self.config, self.provider.encoders(self.config.model_family))
        for line in [*lines, *filter(None, shown), *unused]:
            logger.message(line)
        if self.meter is not None and self.meter.peak is not None:
            logger.message(f"MFU is against {self.meter.peak:g} TFLOP/s per GPU")
        note = layout_note(get_model_config(self.parts.built.model))
        if note is not None:
            logger.message(note)
        logger.message(f"training {self.session.total_iterations} iterations on {self.grids.layout.kind} grids")
        return logger

    def _train(self, loader: StepLoader, logger: RunLogger) -> str | None:
        """Run iterations; returns why it stopped early, or None."""
        session, train, progress = self.session, self.config.train, self.session.progress
        first = progress.iteration + 1
        self.observer = observer = self.observer_type(self.parts, self.grids.layout.language.rank_at(pp=-1), first,
                                                      session.total_iterations)
        if session.is_evaluation_due:  # the run was stopped before it
            STARTUP.enter(Phase.EVALUATION)
            reason = self._evaluate(logger) or session.agree_to_stop()
            if reason is not None:
                return reason
        STARTUP.enter(Phase.DATA)
        self.watchdog.forget_longest()  # the start does not show how long an iteration takes
        while not session.is_done:
            observer.begin_step()
            begin = time.perf_counter()
            self.watchdog.progress(iteration=progress.iteration + 1)
            self.watchdog.loader = loader.status  # an evaluation has had its own
            with self.parts.trace.wait("data", Kind.DATA_WAIT, state=loader.describe, on_loader=True):
                microbatches = loader.next_step()
                # Prefetch must not ask for iterations beyond the end: a data set may have no more.
                left = session.total_iterations - progress.iteration - 1
                coming = loader.peek(min(left, steps_ahead(train.encoder_prefetch_depth, len(microbatches))))
            STARTUP.enter(Phase.PASSES)
            reason = session.stop_reason()
            # The wish to stop travels with the sum of the losses, so that agreeing on it costs no collective.
            result = train_step(self.parts, microbatches, coming=coming, stop_requested=reason is not None)
            progress.iteration += 1
            progress.passed_samples += train.global_batch_size
            if result.success:
                progress.consumed_samples += train.global_batch_size
            else:
                progress.skipped_iterations += 1
            self.watchdog.progress()
            progress.bad_samples += result.bad_samples
            seconds = time.perf_counter() - begin
            observer.end_step()
            if progress.iteration == first:
                self._report_start(logger)
            logger.log_step(self._record(result, microbatches, loader.last_wait_s, seconds, observer))
            while observer.lines:
                logger.message(observer.lines.pop(0))
            check_bad_samples(self.parts, self.dataset, progress.bad_samples, microbatches)
            if result.stop_requested:
                with self.watchdog.waiting("reasons to stop of all ranks"):
                    reasons = gather(self.grids, reason)
                return next(reason for reason in reasons if reason is not None)
            if session.is_due(self.config.checkpoint.save_interval):
                session.save(loader.state_dict)
            if session.is_evaluation_due:
                reason = self._evaluate(logger) or session.agree_to_stop()
                if reason is not None:
                    return reason
        return None

    def _report_start(self, logger: RunLogger) -> None:
        """Say what the start has cost, in the log and in startup.json. Collective over the world."""
        self.platform.synchronize()
        ended_unix_s = time.time()
        with self.watchdog.waiting("times of the start of all ranks"):
            phases = gather(self.grids, STARTUP.close(list(process_group_names().values())))
        report = report_of(phases, ended_unix_s)
        if report is not None and self.session.is_logging_rank:
            logger.message(report.line())
            report.write(Path(self.config.observe.run_dir) / "startup.json")

    def _record(self, result: StepResult, microbatches: list[Microbatch], data_wait_s: float, seconds: float,
                observer: StepObserver) -> StepRecord:
        """Gather the figures of one iteration. Collective over the world."""
        timers = [bridge.timer for bridge in self.parts.built.model.colocated_comms.values()]
        if self.parts.communicator is not None:
            timers += [bridge.timer for bridge in self.parts.communicator.bridges]
        if self.parts.windows is not None:
            timers.append(self.parts.windows.exchange.timer)
        # One reduction over the hosts carries everything: timers, memory by module, encoded tokens of each microbatch
        # and the timeline's numbers. A module's numbers count only on its own ranks.
        names = list(self.grids.layout.grids)
        own = (float(self.platform.peak_memory_bytes()), self.parts.schedule_timer.drain_s(),
               self.parts.optimizer_timer.drain_s(), float(self.platform.drain_allocation_retries()))
        prefetch = self.parts.prefetch
        maxima = [data_wait_s, sum(timer.drain_s() for timer in timers), prefetch.drain_s() if prefetch else 0.0]
        maxima += [value if name in self.grids.modules else 0.0 for value in own for name in names]
        maxima.append(float(self.session.is_writing))
        encoded, unbalanced = encoded_tokens(microbatches)
        row, summed_row = observer.row(microbatches)
        with self.watchdog.waiting("figures of the step over the world"):
            agreed, summed = self.grids.nodes.reduce(
                torch.tensor([*maxima, *encoded, *unbalanced, *row], dtype=torch.float64),
                torch.tensor(summed_row, dtype=torch.float64))
        largest, lanes = agreed.tolist(), self.grids.layout.num_lanes
        largest, largest_row = largest[: -len(row)], largest[-len(row) :]
        data_wait_s, bridge_wait_s, prefetch_s, *by_module, writing = largest[: len(maxima)]
        peaks, schedules, updates, retries = (dict(zip(names, part, strict=True))
                                              for part in batched(by_module, len(names)))
        most_encoded, most_unbalanced = largest[len(maxima) : -len(unbalanced)], largest[-len(unbalanced) :]
        self.session.continue_saving(bool(writing))
        uneven = (imbalance(most_encoded, sum(images.tokens for images in result.work.images.values()), lanes),
                  imbalance(most_unbalanced, result.unbalanced_encoded_tokens, lanes))
        if self.parts.windows is not None:
            uneven = self.parts.windows.imbalance or (None, None)
        progress = self.session.progress
        rates = current_learning_rates(self.config, self.parts.scheduler,
                                       self.provider.encoders(self.config.model_family))
        return StepRecord(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            lm_loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=next(iter(rates.values())),
            module_learning_rates=rates,
            batch_size=self.config.train.global_batch_size,
            iteration_time_s=seconds,
            success=result.success,
            skipped_iterations=progress.skipped_iterations,
            num_zeros=result.num_zeros,
            tokens_per_s_per_gpu=(result.text_tokens + result.image_tokens) / seconds / self.grids.layout.world_size,
            image_tokens=result.image_tokens,
            text_tokens=result.text_tokens,
            packing_utilisation=(result.text_tokens + result.image_tokens) / max(result.work.padded.tokens, 1),
            bad_samples=progress.bad_samples,
            encoder_imbalance=uneven[0],
            encoder_imbalance_unbalanced=uneven[1],
            data_wait_s=data_wait_s,
            bridge_wait_s=bridge_wait_s,
            encoder_prefetch_s=prefetch_s if self.config.train.encoder_prefetch_depth else None,
            checkpoint_s=self.session.take_checkpoint_s(),
            forward_backward_s=schedules,
            optimizer_s=updates,
            timeline=observer.figures(largest_row, summed.tolist()),
            peak_memory_bytes={name: int(peak) for name, peak in peaks.items()},
            allocation_retries={name: int(count) for name, count in retries.items() if count},
            moe_losses=self.moe_losses.take(num_microbatches(self.config)),
            mtp_losses=mtp_losses(self.parts.built.model.mtp, self.grids.collections.get(LANGUAGE)),
            **({} if self.meter is None else self.meter.figures(result.work, seconds)),
        )

    def _next_step(self, loader: StepLoader) -> list[Microbatch]:
        """Read the next step of an evaluation or of samples to decode."""
        self.watchdog.loader = loader.status
        with self.watchdog.waiting("data of an evaluation", state=loader.describe, on_loader=True):
            microbatches = loader.next_step()
        return microbatches

    def _close(self, loader: StepLoader, *, failed: bool = False) -> None:
        """Close a loader, which waits for data that is still under way."""
        with self.watchdog.waiting("data that is still under way", state=loader.describe, on_loader=True):
            loader.close(failed=failed)

    def _evaluate(self, logger: RunLogger) -> str | None:
        """Evaluate on held-out samples. Collective over the world.

        Returns:
            The signal that has ended the evaluation early, so that it has to be made again; otherwise None. The limit
            of --exit-duration-in-mins lets it end, so that a run whose evaluations take longer still gets on.
        """
        train = self.config.train
        if not train.eval_iters:
            return None
        loader = self._open("valid", prefetch=True)
        if not self.num_valid_samples:  # only one rank is asked, because others may not have opened the data
            found = self.dataset.num_samples(self.config.dataset, "valid") if self.grids.rank == 0 else None
            self.num_valid_samples = (broadcast_object(self.grids, found),)
        (num_samples,) = self.num_valid_samples
        status, stopped = self.watchdog.loader, None

        def steps() -> Iterator[list[Microbatch]]:
            nonlocal stopped
            for _ in range(train.eval_iters):
                stopped = self.session.agree_to_stop(by_signal=True)
                if stopped is not None:
                    return
                yield self._next_step(loader)

        result = evaluate(self.parts, steps(), num_samples)
        self._close(loader)
        self.watchdog.loader = status
        if stopped is not None:
            return stopped
        self.last_evaluation = result
        figures = {"lm loss": result.loss, "exact match": result.exact_match, "samples": result.num_samples}
        progress = self.session.progress
        logger.log_eval(progress.iteration, figures, consumed_samples=progress.consumed_samples)
        self.session.note_evaluation()
        return None

    def _finish(self, logger: RunLogger) -> str | None:
        """Run the last evaluation and, on the logging rank, a few decoded samples. Returns what `_evaluate` does."""
        stopped = self._evaluate(logger)
        wanted = self.config.train.num_generations
        if stopped is not None or not self.config.train.eval_iters or not wanted:
            return stopped
        loader = self._open("valid", prefetch=False)
        per_step = num_microbatches(self.config) * self.config.train.micro_batch_size
        steps = [self._next_step(loader) for _ in range(-(-wanted // per_step))]
        self._close(loader)
        # A small split repeats; each of its samples is shown once.
        decoded = {sample[0]: sample for microbatches in steps for sample in greedy_decode(self.parts, microbatches)}
        shown = list(decoded.values())[:wanted] if self.session.is_logging_rank else []
        images = {}
        if self.config.observe.tensorboard_dir is not None or self.config.observe.generations_mib:
            with self.watchdog.waiting("images of the decoded samples"):
                images = gather_images(self.parts, self.provider, steps, [key for key, _, _ in shown])
        generations = []
        for key, expected, answer in shown:
            text, truth = (self.dataset.decode(self.config.dataset, tokens) for tokens in (answer, expected))
            generations.append(Generation(key, [Answer(text)], truth, images=images.get(key, ())))
        logger.log_generations(self.session.progress.iteration, generations)
        return None
