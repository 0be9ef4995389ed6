"""The loop of reinforcement learning: weights to the engine, completions from it, one update on them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from types import TracebackType

import torch
from megatron.core.utils import get_model_config

from mimo import registry
from mimo.checkpoint.state import RunState
from mimo.comm import broadcast_object, shared_errors
from mimo.config.rl_run import RlRunConfig
from mimo.grid.groups import Grids
from mimo.model.build import OPTIMIZER, WEIGHTS, layer_impl
from mimo.observability.metrics import RunLogger
from mimo.observability.spans import Kind
from mimo.observability.startup import STARTUP, Phase
from mimo.platform.base import Platform
from mimo.protocols import ModelProvider, TokenGridProvider
from mimo.refit.options import RefitReport
from mimo.refit.rendezvous import RefitError, format_error
from mimo.refit.sender import connect
from mimo.refit.trainer_shards import ModelWeights
from mimo.rl.collector import WATCHDOG_MARGIN_S, Collector, PromptCursor
from mimo.rl.images import ImageTokens, needs_pixels
from mimo.rl.kv_scales import KvRanges
from mimo.rl.launch_engine import (
    CLOSING_S,
    Engine,
    engine_dtype,
    engine_folder,
    engine_memory,
    find_hosts,
    lost_by,
    refit_options,
    start_engine,
)
from mimo.rl.offload import Devices, Offload, SharedDevices
from mimo.rl.placement import engine_weight_bytes
from mimo.rl.policy import PolicyResult, PolicyTrainer
from mimo.rl.probe import RefitProbe
from mimo.rl.prompts import FinitePromptSet, ManyEndsPromptSet, PromptProvider, PromptSet
from mimo.rl.records import PolicyRecord, format_policy_steps
from mimo.rl.reference import reference_policy
from mimo.rl.rollouts import (
    Measured,
    Rollouts,
    RolloutSource,
    check_num_held_out,
    fit_prompts,
    rollout_metrics,
    with_advantages,
)
from mimo.rollout.engine import Sampling
from mimo.rollout.replicas import RolloutClient
from mimo.training.loop import StepObserver
from mimo.training.optimizer import current_learning_rates, unused_rates
from mimo.training.session import Session
from mimo.training.setup import kept_objects, setup_trainer
from mimo.training.step_metrics import FlopsMeter, layout_note
from mimo.watchdog.process_exit import ReportedElsewhereError

# Prompts whose completions are recorded in some iterations, and before the last evaluation.
NUM_SHOWN = 2


class RlLoop:
    """One run on this rank."""

    def __init__(self, config: RlRunConfig, grids: Grids, platform: Platform, provider: ModelProvider,
                 prompts: PromptProvider) -> None:
        self.config, self.grids, self.platform, self.provider = config, grids, platform, provider
        self.prompt_provider = prompts
        self.session = Session(config, grids)
        self.watchdog = self.session.watchdog
        self.cursor = PromptCursor()
        self._engine: Engine | None = None
        self._weights: ModelWeights | None = None
        self._num_restarts = 0
        # Watchdog limits of an engine's start, which may have to end replicas that did not start in time.
        self._closing_s = CLOSING_S * config.rollout.engine_dp
        self._start_limit_s = config.rollout.engine_start_timeout_s + self._closing_s + WATCHDOG_MARGIN_S
        self._follower_limit_s = self._start_limit_s + WATCHDOG_MARGIN_S
        self._leaving: set[str] | None = None  # what left shared devices for the last rollout
        self._last_figures: dict[str, float | str] = {}  # for the summary at the end of the run

    def run(self) -> None:
        """Train to the end, or until a rank is told to stop; evaluate; summarise."""
        with self.session as session, contextlib.ExitStack() as at_end:
            lines = self._set_up()
            # It is closed below. After an error it ends with this process.
            self._engine = self._start_engine()
            self._connect()
            self._make_policy()
            self._add_probe()
            self._calibrate()
            logger = session.open_records(format_policy_steps)
            for line in lines:
                logger.message(line)
            with kept_objects():
                stopped = self._train(logger, at_end)
            self._save(stopped=stopped is not None)
            session.finish_saving()
            if stopped is None:
                self._evaluate(logger, is_last=True)
            logger.summary(self._last_figures, stopped=stopped)
            self.collector.sender.close()
            if self._engine is not None:
                self._engine.close()

    def _set_up(self) -> list[str]:
        """Open the prompts, build model and optimizer, and load the weights that the run starts from.

        Returns:
            Lines for the log that say what was loaded.
        """
        self._tokens = self.provider.token_spec(self.config.model_family)
        self._images = None
        # Positions of three axes need them without images, too.
        if self.grids.layout.encoders or isinstance(self.provider, TokenGridProvider):
            self._images = ImageTokens.of(self.provider, self.config.model_family, self.grids.layout)
        STARTUP.enter(Phase.DATA)
        # The first rank opens both splits. Every rank stops if prompts are too long, before any model is built.
        self._splits: dict[str, PromptSet] = {}
        self._has_videos, num_measured = False, self._num_asked()
        # On the first rank: names of the training prompts that were left out, and number of bad ones of each split.
        self._left_out: tuple[str, ...] = ()
        self._num_bad = {"train": 0, "valid": 0}
        with self.watchdog.on_files("the first rank, which measures the prompts"), shared_errors(self.grids):
            if self.grids.rank == 0:
                engine_folder(self.config)  # refuses one that is not the run's, before any work
                self._splits = {split: self._prompts(split) for split in ("train", "valid")}
        # A sequence of the schedule is a packed microbatch.
        train = replace(self.config.train, seq_length=self.config.rl.max_tokens_per_microbatch)
        self.parts = parts = setup_trainer(replace(self.config, train=train), self.provider, self.grids, self.platform,
                                           self.watchdog)
        STARTUP.enter(Phase.LOAD)
        self.state = RunState(self.config, self.grids, self.platform, parts.built, parts.optimizer, parts.scheduler,
                              self.cursor.streams(is_first_rank=self.grids.rank == 0))
        lines = self.session.resume(self.state, self.provider, self.cursor)
        self._measure_more(num_measured)
        self._reference, more = reference_policy(self.state, self.provider, self.config.rl, self.watchdog,
                                                 resumed=self.session.progress.iteration > 0)
        lines += [*more, *unused_rates(self.config, [encoder.name for encoder in self.grids.layout.encoders])]
        note = layout_note(get_model_config(parts.built.model), in_rl=True)
        return lines if note is None else [*lines, note]

    def _start_engine(self) -> Engine | None:
        """Start the engine, on the first rank. The others make room for it where they share devices.

        While its processes start, all ranks find the weights that it will get.
        """
        flags = self.config.rollout
        self.devices: Devices = Devices()
        if flags.engine_placement == "colocated":
            self._find_weights()  # before they make room
            self.devices = SharedDevices(
                self.grids, Offload(self.parts.built, self.parts.optimizer), self.platform,
                engine_memory(flags) if self.platform.name == "cuda" else None,
                engine_weight_bytes(self.config, self.grids.layout, self.provider))
        self.devices.for_engine_start()
        on_all_hosts = flags.engine_placement == "colocated" and flags.uses_ray
        hosts = find_hosts(self.grids, self.platform) if on_all_hosts else ()
        if self.grids.rank != 0:
            with self.watchdog.waiting_up_to(self._follower_limit_s, "the first rank, which starts the rollout engine"):
                self._find_weights()
            return None
        STARTUP.say("starting vLLM, which loads its model and prepares its kernels")
        with self.watchdog.waiting_up_to(self._start_limit_s, "start of the rollout engine"):
            engine = start_engine(self.config, self.provider, self._has_videos, self._find_weights, hosts)
        if isinstance(self.devices, SharedDevices):
            self.devices.client = engine.client
        return engine

    def _find_weights(self) -> None:
        """Find the tensors for refits and the ranks that hold them. Collective the first time; nothing later."""
        if self._weights is None:
            self._weights = ModelWeights(self.parts.built, self.grids, self.provider, self.config.model_family,
                                         engine_dtype(self.config)).locate()

    def _connect(self) -> None:
        """Agree with the engine on weights, which every rank sends, and make what collects completions."""
        engine = self._engine
        with self.watchdog.waiting_up_to(self._follower_limit_s, "the first rank, which starts the rollout engine"):
            num_workers = broadcast_object(self.grids, engine.client.num_workers if engine is not None else None)
            self.devices.for_training()
        STARTUP.say("agreeing with vLLM on where each weight goes")
        # The engine's first answer may take as long as any of its calls.
        with self.watchdog.waiting_up_to(2 * self.config.rollout.refit_timeout_s + WATCHDOG_MARGIN_S,
                                         "the rollout engine's agreement on weights"):
            sender = connect(self.parts.built, self.grids, self.provider, self.config.model_family,
                             engine.client if engine is not None else None, num_workers,
                             refit_options(self.config), engine.address if engine is not None else "", self._weights)
        source: RolloutSource | None = None
        held_out: RolloutSource | None = None
        if engine is not None:
            source, held_out = self._source(engine.client, "train"), self._source(engine.client, "valid")
        self.collector = Collector(self.config, self.grids, self.watchdog, sender, source, held_out, self.cursor,
                                   self.devices)

    def _make_policy(self) -> None:
        """Make what computes log-probs and updates."""
        source = self.collector.source
        padding, left_out = broadcast_object(
            self.grids, None if source is None else (source.prompts.pad_token_id, self._left_out))
        pixel_prompts = self._pixel_prompts(left_out)
        ranges = None
        if self.config.rollout.engine_kv_scales == "calibrated":
            ranges = KvRanges(self.parts.built, self.grids, self.platform.device)
        self.policy = PolicyTrainer(self.parts, self.config.rl, self._tokens.vocab_size, padding, self._images,
                                    pixel_prompts, self._reference, self.config.max_gen_kl, ranges)

    def _pixel_prompts(self, left_out: Collection[str]) -> PromptSet | None:
        """Open the training prompts on the ranks that encode images; None on the others. Collective over the world.

        `left_out` names the prompts that the first rank has left out. It has measured all of them, which reads every
        image's size and may take an hour, so no other rank measures them again.
        """
        needed, prompts = needs_pixels(self.grids.layout, self.grids.rank), None
        with self.watchdog.on_files("ranks that open the prompts for their images", is_work=needed), \
                shared_errors(self.grids):
            if needed:
                prompts = self._prompts("train", measured=False)
                if left_out:
                    assert isinstance(prompts, FinitePromptSet), "prompts without end are not left out"
                    prompts.leave_out(frozenset(left_out))
        return prompts

    def _add_probe(self) -> None:
        """Have refits verified, see `--refit-verify-interval`."""
        if self.config.rollout.refit_verify_interval:
            self.collector.probe = self._make_probe()

    def _make_probe(self) -> RefitProbe:
        source = self.collector.source
        return RefitProbe(self.config, self.policy, None if source is None else source.prompts,
                          None if self._engine is None else self._engine.client, self._tokens.vocab_size)

    def _calibrate(self) -> None:
        """Measure scales of the engine's cache on training prompts, unless the run's checkpoint has some. Collective.

        Without them, the first completions would come from a cache that clips every number above 448, which keys of
        models with biases reach.
        """
        if self.config.rollout.engine_kv_scales == "calibrated" and broadcast_object(
                self.grids, self.cursor.kv_scales is None):
            self.cursor.kv_scales = (self.collector.probe or self._make_probe()).measure()

    def _with_engine[T](self, logger: RunLogger, part: Callable[[], T]) -> T:
        """Return the result of a part of the run. It begins again with a new engine if the engine is lost."""
        while True:
            try:
                return part()
            except (RefitError, ReportedElsewhereError) as error:
                if self._num_restarts == self.config.rollout.engine_restarts:
                    raise
                self._replace_engine(logger, error)

    def _replace_engine(self, logger: RunLogger, error: Exception) -> None:
        """Start a new engine in place of one that is lost, more than once if it fails. Collective over the world.

        It has no weights, so that it refuses to answer before the collector's first refit, which is verified unless
        --refit-verify-interval is 0.

        Raises:
            RefitError, ReportedElsewhereError: the given error, if another one than the loss of the engine. Or no new
                engine has started and --engine-restarts are used up; this error begins with the cause of the loss.
        """
        limit, causes = self.config.rollout.engine_restarts, [self._fault(error)]
        if not causes[0]:
            raise error
        while causes[-1] and self._num_restarts < limit:
            self._num_restarts += 1
            what = f"the rollout engine is lost: {causes[0]}" if len(causes) == 1 else \
                f"the new engine is lost, too: {causes[-1]}"
            logger.message(f"{what}; a new one takes its place ({self._num_restarts} of --engine-restarts {limit})")
            self.collector.sender.close()
            if self._engine is not None:
                self._engine.close()
                self._engine = None
            causes.append(self._start_again())
        if causes[-1] and self.grids.rank == 0:
            raise RefitError(f"the rollout engine is lost: {causes[0]}; no new one has come up, and --engine-restarts "
                             f"{limit} are used up. The last one: {causes[-1]}") from error
        if causes[-1]:
            raise ReportedElsewhereError("rank 0 reports what is wrong") from error
        self._add_probe()

    def _start_again(self) -> str:
        """Start an engine and agree with it on weights. Return why it failed, on every rank; empty if it did not."""
        problem = ""
        try:
            self._engine = self._start_engine()
        except (RefitError, ValueError) as error:  # on the first rank
            problem = format_error(error)
        # The lost engine has to be closed as well.
        with self.watchdog.waiting_up_to(self._follower_limit_s + self._closing_s,
                                         "the first rank, which starts another rollout engine"):
            problem = broadcast_object(self.grids, problem)
        if problem:
            return problem
        try:
            self._connect()
        except RefitError as error:
            fault = self._fault(error)
            if not fault:
                raise
            return fault
        return ""

    def _fault(self, error: Exception) -> str:
        """Say, on every rank, how an error shows that the engine is lost; empty if it does not."""
        with self.watchdog.waiting("the first rank, which looks for the engine's processes"):
            fault: str = broadcast_object(self.grids, "" if self._engine is None else lost_by(self._engine, error))
            return fault

    def _prompts(self, split: str, measured: bool = True) -> PromptSet:
        """Open the prompts of a split, the same in the same order on every rank that opens them.

        Measuring them reads the sizes of all images and all of each video.
        """
        prompts = self.prompt_provider.open(self.config.dataset, self._tokens, split, self.config.train.seed)
        num_asked = self._num_asked() if split == "train" else self.config.rl.eval_prompts
        if measured:
            self._note(split, fit_prompts(prompts, split, self.config, self._images, num_asked))
        if split == "valid":
            check_num_held_out(prompts, self.config)
        return prompts

    def _note(self, split: str, measured: Measured) -> None:
        """Remember what the measures of a split say of the run."""
        self._has_videos = self._has_videos or measured.has_videos
        self._num_bad[split] += measured.num_bad
        if split == "train":
            self._left_out += measured.left_out

    def _num_asked(self) -> int:
        """Return the largest number of training prompts that the run may come to, as far as it is known now."""
        left = self.session.total_iterations - self.session.progress.iteration
        return self.cursor.first + max(left, 0) * self.config.prompts_per_step * (1 + self.config.rl.max_refills)

    def _measure_more(self, num_measured: int) -> None:
        """Measure the prompts that a resumed run comes to and a new one would not. Collective over the world.

        Its checkpoint may be further among the prompts than its iterations say, after a larger --global-batch-size.
        With --skip-long-prompts all prompts have been measured.
        """
        num_asked = self._num_asked()
        if num_asked <= num_measured or self.config.data.skip_long_prompts:
            return
        with self.watchdog.on_files("the first rank, which measures the prompts"), shared_errors(self.grids):
            if self.grids.rank == 0:
                self._note("train", fit_prompts(self._splits["train"], "train", self.config, self._images, num_asked,
                                                num_measured, self._num_bad["train"]))

    def _source(self, client: RolloutClient, split: str) -> RolloutSource:
        """Make the source of completions of a split: its prompts, and how they are completed and scored."""
        config, rl, flags = self.config, self.config.rl, self.config.rollout
        prompts = self._splits[split]
        ends = prompts.end_token_ids if isinstance(prompts, ManyEndsPromptSet) else (prompts.end_token_id,)
        # Only the prompts know the tokenizer. vLLM's own end token is the default of the architecture's configuration,
        # such as 2 for a Llama, which is an ordinary token of Llama 3's tokenizer.
        sampling = Sampling(flags.max_completion_tokens, rl.temperature, rl.top_p, rl.top_k, rl.completions_per_prompt,
                            stop_token_ids=ends, ignore_eos=True)
        if split != "train":
            sampling = replace(sampling, temperature=rl.eval_temperature, top_p=1.0, top_k=0, n=1)
        return RolloutSource(client, prompts, registry.reward(rl.reward), rl.reward, sampling, config.train.seq_length,
                             self.watchdog.progress, config.train.seed if flags.rollout_seeds else None,
                             self._images, self._num_bad[split], rl.reward_threads)

    def _train(self, logger: RunLogger, at_end: contextlib.ExitStack) -> str | None:
        """Run iterations. Return why they stopped early, or None. `at_end` gets what has to be closed."""
        session = self.session
        self._observer = observer = StepObserver(
            self.parts, self.grids.layout.language.rank_at(pp=-1), session.progress.iteration + 1,
            session.total_iterations)

        def close(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
            observer.close(failed=error is not None)

        at_end.push(close)
        self._meter = None
        if not self.grids.layout.encoders:
            self._meter = FlopsMeter.of(self.config, self.provider, self.grids.layout,
                                        impl=layer_impl(self.config, self.platform),
                                        device_name=self.platform.device_name)
        if self._meter is not None and self._meter.peak is not None:
            logger.message(f"MFU is against {self._meter.peak:g} TFLOP/s per GPU")
        if (not session.progress.iteration and not session.is_done) or session.is_evaluation_due:
            self._evaluate(logger)
            # Before the first iteration nothing is saved, so a start that is longer than the limit of time must go on.
            reason = session.agree_to_stop(by_signal=not session.progress.iteration)
            if reason is not None:
                return reason
        STARTUP.say("first weights to vLLM, first completions and first update")
        session.watchdog.forget_longest()  # the start does not show how long an iteration takes
        while not session.is_done:
            self._iterate(logger)
            reason = session.agree_to_stop()
            if reason is not None:
                return reason
            if session.is_due(self.config.checkpoint.save_interval):
                self._save()
            if session.is_evaluation_due:
                self._evaluate(logger)
                reason = session.agree_to_stop()
                if reason is not None:
                    return reason
        return None

    def _iterate(self, logger: RunLogger) -> None:
        """Collect completions and update the policy with them."""
        progress = self.session.progress
        self.devices.take_seconds()  # of the start and of evaluations: no part of this iteration
        self._observer.begin_step()
        began, version = time.perf_counter(), progress.iteration
        self.watchdog.progress(iteration=version + 1)
        prefetches = self.config.rollout.rollout_mode == "one-step-off" and version + 1 < self.session.total_iterations
        with self.parts.spans.span(Kind.DATA_WAIT, "completions"):
            shows = self.config.observe.records_completions(version + 1, self.session.total_iterations)
            rollouts = self._with_engine(logger, lambda: self.collector.collect(version, NUM_SHOWN if shows else 0))
        # Say what leaves devices that trainer and engine share, once and whenever it changes.
        leaving = {kind: count for kind, count in self.devices.leaving.items() if count}
        if self.devices.leaving and leaving.keys() != self._leaving:
            self._leaving = set(leaving)
            words = {OPTIMIZER: "optimizer state", WEIGHTS: "weights"}
            sizes = ", ".join(f"{count / 2**30:.1f} GiB of {words[kind]}" for kind, count in leaving.items())
            logger.message(f"during a rollout, these are in host memory: {sizes}" if leaving else
                           "during a rollout, the device keeps all of the trainer's weights and optimizer state")
        if prefetches:
            # The engine draws the next iteration's completions with the weights from before this update.
            self.collector.prefetch()
        before = time.perf_counter()
        result = self.policy.update(rollouts.completions)
        update_s = time.perf_counter() - before
        self.cursor.kv_scales = result.kv_scales or None  # for the next refit, which may be the one of `drain`
        if prefetches:
            with self.parts.spans.span(Kind.DATA_WAIT, "completions"):
                self.collector.drain(version + 1)
        self._observer.end_step()
        progress.iteration += 1
        progress.passed_samples += self.config.train.global_batch_size
        progress.consumed_samples += result.num_trained
        if not result.success:
            progress.skipped_iterations += 1
        self.watchdog.progress()
        report = self.collector.report
        assert report is not None, "collecting refits, or has refitted"
        seconds = {"memory": self.devices.take_seconds(), "refit": self.collector.refit_s,
                   "rollout": rollouts.rollout_s, "reward": rollouts.reward_s,
                   "rollout-wait": self.collector.waited_s, "log-probs": result.log_probs_s,
                   "update": update_s - result.log_probs_s - result.reference_s,
                   "iteration": time.perf_counter() - began}
        if self._reference is not None:
            seconds["reference"] = result.reference_s
        if self.collector.verify_s:
            seconds["refit-verify"], self.collector.verify_s = self.collector.verify_s, 0.0
        checkpoint_s = self.session.take_checkpoint_s()
        if checkpoint_s:
            seconds["checkpoint"] = checkpoint_s
        logger.log_step(self._record(report, rollouts, result, seconds))
        logger.log_generations(progress.iteration, with_advantages(rollouts.shown, result.advantages), "training",
                               prints=False)
        while self._observer.lines:
            logger.message(self._observer.lines.pop(0))

    def _save(self, *, stopped: bool = False) -> None:
        self.session.save(lambda: self.cursor.streams(is_first_rank=self.grids.rank == 0), stopped=stopped)

    def _evaluate(self, logger: RunLogger, *, is_last: bool = False) -> None:
        """Score the completions of held-out prompts, unless there are none. The last score is the run's result."""
        if not self.config.rl.eval_prompts:
            return
        progress = self.session.progress
        num_shown = self.config.train.num_generations if is_last else min(NUM_SHOWN, self.config.train.num_generations)
        metrics, shown = self._with_engine(logger, lambda: self.collector.evaluate(progress.iteration, num_shown))
        logger.log_eval(progress.iteration, metrics, consumed_samples=progress.consumed_samples)
        self.session.note_evaluation()
        logger.log_generations(progress.iteration, shown, prints=is_last)
        self._last_figures = self._last_figures | {"reward": metrics["reward"]}

    def _record(self, report: RefitReport, rollouts: Rollouts, result: PolicyResult,
                seconds: dict[str, float]) -> PolicyRecord:
        """Return the record of the iteration that just ended. Collective over the world."""
        progress = self.session.progress
        rates = current_learning_rates(self.config, self.parts.scheduler,
                                       tuple(encoder.name for encoder in self.grids.layout.encoders))
        figures = {**(rollouts.figures or rollout_metrics(rollouts)), **result.metrics}
        if self.config.rl.max_refills:
            figures["asked-prompts"] = rollouts.num_asked
        if rollouts.num_bad is not None:
            figures["bad_samples"] = rollouts.num_bad
        speed = {}
        if self._meter is not None:
            speed = self._meter.policy_figures(
                [each.length for each in rollouts.completions], 1 + (self._reference is not None),
                seconds["log-probs"] + seconds.get("reference", 0.0) + seconds["update"])
        row, summed_row = self._observer.row(result.batches)
        with self.watchdog.waiting("figures of the timeline over the world"):
            largest, summed = self.grids.nodes.reduce(torch.tensor(row, dtype=torch.float64),
                                                      torch.tensor(summed_row, dtype=torch.float64))
        self._last_figures = {"gen-kl": f"{figures['gen_kl']:.1e}", "reward": figures["reward"]}
        return PolicyRecord(
            iteration=progress.iteration, consumed_samples=progress.consumed_samples,
            skipped_iterations=progress.skipped_iterations, policy_version=int(rollouts.version),
            success=result.success, grad_norm=result.grad_norm, num_zeros=result.num_zeros,
            learning_rate=next(iter(rates.values())), batch_size=self.config.train.global_batch_size,
            num_tokens=result.num_tokens, num_microbatches=result.num_microbatches,
            world_size=self.grids.layout.world_size, figures=figures, refit_bytes=report.wire_bytes, seconds=seconds,
            moe_losses=result.moe_losses, peak_memory_bytes=result.peak_memory_bytes, speed=speed,
            timeline=self._observer.figures(largest.tolist(), summed.tolist()))
