"""The loop of reinforcement learning: weights to the engine, completions from it, one update on them."""

from __future__ import annotations

import time
from dataclasses import replace

from megatron.core.utils import get_model_config

from mimo import registry
from mimo.checkpoint.save import Saver
from mimo.checkpoint.state import Progress, RunState
from mimo.comm.host import broadcast_object, gather, raise_on_any_rank
from mimo.config.cli import to_toml
from mimo.config.rl_run import RlRunConfig
from mimo.config.validate import train_iterations
from mimo.grid.groups import Grids
from mimo.observability.metrics import RunLogger
from mimo.observability.remote_trackers import CLOSE_LIMIT_S
from mimo.observability.startup import STARTUP, Phase
from mimo.observability.trackers import Generation
from mimo.platform.base import Platform
from mimo.protocols import ModelProvider
from mimo.refit.options import RefitReport
from mimo.refit.sender import connect
from mimo.rl.collector import FIRST_RANK_SPEAKS_S, Collector, Devices, SharedDevices
from mimo.rl.cursor import PromptCursor
from mimo.rl.images import ImageTokens, needs_pixels
from mimo.rl.launch_engine import Engine, refit_options, start_engine
from mimo.rl.offload import Offload
from mimo.rl.policy import PolicyResult, PolicyTrainer
from mimo.rl.probe import RefitProbe
from mimo.rl.prompts import PromptProvider, PromptSet
from mimo.rl.records import PolicyRecord, format_policy_steps
from mimo.rl.reference import reference_policy
from mimo.rl.rollouts import Rollouts, RolloutSource, fit_prompts, rollout_metrics
from mimo.rollout.engine import Sampling
from mimo.rollout.replicas import RolloutClient
from mimo.training.optimizer import current_learning_rates
from mimo.training.run_folder import without_chosen_folder
from mimo.training.setup import kept_objects, setup_trainer, start
from mimo.training.step_metrics import layout_note
from mimo.watchdog.signals import StopSignal
from mimo.watchdog.watchdog import open_watchdog


class RlLoop:
    """One run on this rank.

    Args:
        config: validated flags.
        grids: process groups.
        platform: device and backend.
        provider: the model family.
        prompts: the data set.
    """

    def __init__(self, config: RlRunConfig, grids: Grids, platform: Platform, provider: ModelProvider,
                 prompts: PromptProvider) -> None:
        self.config, self.grids, self.platform, self.provider = config, grids, platform, provider
        self.prompt_provider = prompts
        self.total_iterations = train_iterations(config)
        self.is_logging_rank = grids.rank == grids.layout.language.rank_at(pp=-1)
        self.watchdog = open_watchdog(config.train.watchdog_timeout_s, grids, config.observe.run_dir,
                                      config.checkpoint.checkpoint_timeout_s)
        self.progress = Progress()
        self.cursor = PromptCursor()
        self.saver: Saver | None = None
        # Time that checkpoints took since the last record.
        self.checkpoint_s = 0.0

    def run(self) -> None:
        """Train to the end, or until a rank is told to stop; evaluate; summarise."""
        logger, engine, began, failed = None, None, time.monotonic(), True
        stop = StopSignal(self.watchdog)
        try:
            lines = self._set_up()
            # Closed below where all goes well; after an error it ends with this process.
            engine = self._start_engine()
            self._connect(engine)
            logger = self._open_records()
            for line in lines:
                logger.message(line)
            with kept_objects():
                stopped = self._train(logger, stop, began)
            self._save()
            if self.saver is not None:
                self.saver.finish()
            if stopped is None:
                self._evaluate(logger, self.config.train.num_generations)
            logger.summary(self._last_figures, stopped=stopped)
            self.collector.sender.close()
            if engine is not None:
                engine.close()
            failed = False
        finally:
            if logger is not None:
                with self.watchdog.limit(2 * CLOSE_LIMIT_S):
                    logger.close(failed=failed)
            if self.saver is not None:
                self.saver.close()
            stop.close()
            self.watchdog.close(failed=failed)

    def _open_records(self) -> RunLogger:
        with self.watchdog.waiting("start of the run's records", is_work=True):
            logger = RunLogger(self.config.observe, active=self.is_logging_rank,
                               total_iterations=self.total_iterations,
                               config_toml=to_toml(without_chosen_folder(self.config)),
                               resume_iteration=self.progress.iteration, format_records=format_policy_steps)
        self.watchdog.on_stall.append(logger.mark_failed)
        return logger

    def _set_up(self) -> list[str]:
        """Prompts, model and optimizer, at the weights that the run starts from; lines that say which these are."""
        self._tokens = self.provider.token_spec(self.config.model_family)
        self._images = None
        if self.grids.layout.encoders:
            self._images = ImageTokens.of(self.provider, self.config.model_family, self.grids.layout)
        STARTUP.enter(Phase.DATA)
        self._open_prompts()
        # The schedule's sequence is a packed microbatch.
        train = replace(self.config.train, seq_length=self.config.rl.max_tokens_per_microbatch)
        self.parts = parts = setup_trainer(replace(self.config, train=train), self.provider, self.grids, self.platform,
                                           self.watchdog)
        STARTUP.enter(Phase.LOAD)
        self.state = RunState(self.config, self.grids, self.platform, parts.built, parts.optimizer, parts.scheduler,
                              self.cursor.streams(is_first_rank=self.grids.rank == 0))
        if self.config.checkpoint.save is not None:
            self.saver = Saver(self.state, self.watchdog)
        self.progress, lines = start(self.state, self.provider, self.cursor, self.watchdog)
        if self.saver is not None and self.state.source is not None and self.state.source.is_own:
            # It is there: a finished run that is started again has nothing to write.
            self.saver.last_iteration = self.progress.iteration or None
        self._reference, more = reference_policy(self.state, self.provider, self.config.rl, self.watchdog,
                                                 resumed=self.progress.iteration > 0)
        lines += more
        note = layout_note(get_model_config(parts.built.model), in_rl=True)
        return lines if note is None else [*lines, note]

    def _open_prompts(self) -> None:
        """Both splits, on the first rank; every rank stops where prompts are too long, before any model is built."""
        self._splits: dict[str, PromptSet] = {}
        error = None
        with self.watchdog.on_files("the first rank, which measures the prompts"):
            if self.grids.rank == 0:
                try:
                    self._splits = {split: self._prompts(split) for split in ("train", "valid")}
                except ValueError as problem:
                    error = str(problem)
            raise_on_any_rank(self.grids, error)

    def _start_engine(self) -> Engine | None:
        """The engine, on the first rank."""
        self.devices = self._devices()
        self.devices.for_engine_start()
        if self.grids.rank != 0:
            return None
        STARTUP.say("starting vLLM, which loads its model and prepares its kernels")
        limit_s = self.config.rollout.engine_start_timeout_s
        with self.watchdog.limit(limit_s + FIRST_RANK_SPEAKS_S), self.watchdog.waiting("start of the rollout engine"):
            engine = start_engine(self.config, self.provider)
        if isinstance(self.devices, SharedDevices):
            self.devices.client = engine.client
        return engine

    def _devices(self) -> Devices:
        if self.config.rollout.engine_placement != "colocated":
            return Devices()
        return SharedDevices(self.grids, Offload(self.parts.built, self.parts.optimizer),
                             sleeps=self.platform.name == "cuda")

    def _connect(self, engine: Engine | None) -> None:
        """Meet the engine, which every rank sends weights to and the first one talks to."""
        flags = self.config.rollout
        with (self.watchdog.limit(flags.engine_start_timeout_s + 2 * FIRST_RANK_SPEAKS_S),
              self.watchdog.waiting("the first rank, which starts the rollout engine")):
            num_workers = broadcast_object(self.grids, engine.client.num_workers if engine is not None else None)
            self.devices.for_training()
        STARTUP.say("agreeing with vLLM on where each weight goes")
        # An engine's first answer may take as long as its calls may.
        with (self.watchdog.limit(2 * flags.refit_timeout_s + FIRST_RANK_SPEAKS_S),
              self.watchdog.waiting("the rollout engine's agreement on weights")):
            sender = connect(self.parts.built, self.grids, self.provider, self.config.model_family,
                             engine.client if engine is not None else None, num_workers,
                             refit_options(self.config), engine.address if engine is not None else "")
        padding = None
        source: RolloutSource | None = None
        held_out: RolloutSource | None = None
        if engine is not None:
            source, held_out = self._source(engine.client, "train"), self._source(engine.client, "valid")
            padding = source.prompts.pad_token_id
        self.collector = Collector(self.config, self.grids, self.watchdog, sender, source, held_out, self.cursor,
                                   self.devices)
        self.policy = PolicyTrainer(self.parts, self.config.rl, self._tokens.vocab_size,
                                    broadcast_object(self.grids, padding), self._images, self._pixel_prompts(),
                                    self._reference, self.config.max_gen_kl)
        if flags.refit_verify_interval:
            self.collector.probe = RefitProbe(self.config, self.policy, source.prompts if source is not None else None,
                                              engine.client if engine is not None else None, self._tokens.vocab_size)

    def _prompts(self, split: str) -> PromptSet:
        """The prompts of a split, the same in the same order on every rank that opens them."""
        prompts = self.prompt_provider.open(self.config.dataset, self._tokens, split, self.config.train.seed)
        num_asked = (self.total_iterations * self.config.prompts_per_step if split == "train"
                     else self.config.rl.eval_prompts)
        fit_prompts(prompts, split, self.config, self._images, num_asked)
        return prompts

    def _pixel_prompts(self) -> PromptSet | None:
        """Where this rank takes the pixels of completions from, if it encodes images."""
        if not needs_pixels(self.grids.layout, self.grids.rank):
            return None
        # Measures them once more.
        with self.watchdog.on_files("the prompts' measures", is_work=True):
            return self._prompts("train")

    def _source(self, client: RolloutClient, split: str) -> RolloutSource:
        """Prompts of a split, and how they are completed and scored."""
        config, rl, flags = self.config, self.config.rl, self.config.rollout
        prompts = self._splits[split]
        trains = split == "train"
        sampling = Sampling(flags.max_completion_tokens, rl.temperature, rl.top_p, rl.top_k, rl.completions_per_prompt,
                            stop_token_ids=(prompts.end_token_id,))
        if not trains:
            sampling = replace(sampling, temperature=rl.eval_temperature, top_p=1.0, top_k=0, n=1)
        return RolloutSource(client, prompts, registry.reward(rl.reward), rl.reward, sampling, config.train.seq_length,
                             self.watchdog.progress, config.train.seed if flags.rollout_seeds else None,
                             self._images)

    def _train(self, logger: RunLogger, stop: StopSignal, began: float) -> str | None:
        """Run iterations; returns why it stopped early, or None."""
        self._last_figures: dict[str, float | str] = {}
        train, flags, progress = self.config.train, self.config.checkpoint, self.progress
        limit_s = (flags.exit_duration_in_mins or float("inf")) * 60
        if not progress.iteration and not self._is_done:
            self._evaluate(logger)
        STARTUP.say("first weights to vLLM, first completions and first update")
        self.watchdog.forget_longest()  # the start says nothing of an iteration
        while not self._is_done:
            self._iterate(logger)
            over_time = time.monotonic() - began > limit_s
            with self.watchdog.waiting("agreement on whether to stop"):
                own = stop.name or ("--exit-duration-in-mins" if over_time else None)
                agreed = gather(self.grids, (own, self.saver is not None and self.saver.is_writing))
            if self.saver is not None and self.saver.is_pending:
                polled = time.perf_counter()
                self.saver.poll(any(writing for _, writing in agreed))
                self.checkpoint_s += time.perf_counter() - polled
            asked = next((name for name, _ in agreed if name is not None), None)
            if asked is not None:
                return asked
            if flags.save_interval and progress.iteration % flags.save_interval == 0:
                self._save()
            if train.eval_interval and progress.iteration % train.eval_interval == 0 and not self._is_done:
                self._evaluate(logger)
        return None

    def _iterate(self, logger: RunLogger) -> None:
        """Completions, and one update on them."""
        self.devices.take_seconds()  # of the start and of evaluations: no part of this iteration
        began, version = time.perf_counter(), self.progress.iteration
        self.watchdog.progress(iteration=version + 1)
        goes_ahead = self.config.rollout.rollout_mode == "one-step-off" and version + 1 < self.total_iterations
        rollouts = self.collector.collect(version)
        if goes_ahead:
            self.collector.prefetch()
        before = time.perf_counter()
        result = self.policy.update(rollouts.completions)
        update_s = time.perf_counter() - before
        if goes_ahead:
            self.collector.drain(version + 1)
        self.progress.iteration += 1
        self.progress.consumed_samples += result.num_trained
        if not result.success:
            self.progress.skipped_iterations += 1
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
        if self.checkpoint_s:
            seconds["checkpoint"], self.checkpoint_s = self.checkpoint_s, 0.0
        logger.log_step(self._record(report, rollouts, result, seconds))

    @property
    def _is_done(self) -> bool:
        return self.progress.iteration >= self.total_iterations

    def _save(self) -> None:
        """Save the run as it stands, unless this iteration is saved already."""
        if self.saver is None or self.saver.last_iteration == self.progress.iteration:
            return
        began = time.perf_counter()
        self.state.streams = self.cursor.streams(is_first_rank=self.grids.rank == 0)
        self.saver.save(self.progress)
        self.checkpoint_s += time.perf_counter() - began

    def _evaluate(self, logger: RunLogger, num_shown: int = 0) -> None:
        """Score held-out prompts, where there are to be any; the last figure is the run's result."""
        if not self.config.rl.eval_prompts:
            return
        result = self.collector.evaluate(self.progress.iteration, num_shown)
        logger.log_eval(self.progress.iteration, result.metrics, consumed_samples=self.progress.consumed_samples)
        logger.log_generations(self.progress.iteration, [Generation(key, text, f"reward {reward:g}")
                                                         for key, text, reward in result.shown])
        self._last_figures = self._last_figures | {"reward": result.metrics["reward"]}

    def _record(self, report: RefitReport, rollouts: Rollouts, result: PolicyResult,
                seconds: dict[str, float]) -> PolicyRecord:
        rates = current_learning_rates(self.config, self.parts.scheduler,
                                       tuple(encoder.name for encoder in self.grids.layout.encoders))
        figures = rollout_metrics(rollouts) | result.metrics
        self._last_figures = {"gen-kl": f"{figures['gen_kl']:.1e}", "reward": figures["reward"]}
        return PolicyRecord(
            iteration=self.progress.iteration, consumed_samples=self.progress.consumed_samples,
            skipped_iterations=self.progress.skipped_iterations, policy_version=int(rollouts.version),
            success=result.success, grad_norm=result.grad_norm, num_zeros=result.num_zeros,
            learning_rate=next(iter(rates.values())), batch_size=self.config.train.global_batch_size,
            num_tokens=result.num_tokens, num_microbatches=result.num_microbatches,
            world_size=self.grids.layout.world_size, figures=figures, refit_bytes=report.wire_bytes, seconds=seconds,
            moe_losses=result.moe_losses, peak_memory_bytes=result.peak_memory_bytes)
