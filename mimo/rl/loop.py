"""The loop of reinforcement learning: weights to the engine, completions from it, one update on them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from mimo import registry
from mimo.checkpoint.agree import from_first_rank, gather
from mimo.checkpoint.state import Progress, RunState
from mimo.config.cli import to_toml
from mimo.config.rl_run import RlRunConfig
from mimo.config.validate import train_iterations
from mimo.grid.groups import Grids
from mimo.observe.metrics import RunLogger
from mimo.observe.signals import StopSignal
from mimo.observe.watchdog import Watchdog
from mimo.optim.schedule import current_learning_rates
from mimo.platform.base import Platform
from mimo.protocols import ModelProvider
from mimo.refit.engine import Sampling
from mimo.refit.options import RefitReport
from mimo.refit.trainer import connect
from mimo.rl.engine import Engine, refit_options, start_engine
from mimo.rl.policy import PolicyResult, PolicyTrainer
from mimo.rl.prompts import PromptProvider
from mimo.rl.records import PolicyRecord, format_policy_steps
from mimo.rl.rollouts import Rollouts, RolloutSource, rollout_metrics
from mimo.training.resume import start
from mimo.training.setup import setup_trainer

# Seconds that ranks which only wait for the first one are more patient than it is: it can say what went wrong.
FIRST_RANK_SPEAKS_S = 10.0


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
        self.watchdog = Watchdog(config.train.watchdog_timeout_s, grids.describe(),
                                 report_path=Path(config.observe.run_dir) / f"stall-rank{grids.rank}.txt")
        self.progress = Progress()

    def run(self) -> None:
        """Train to the end, or until a rank is told to stop; summarise."""
        logger, engine = None, None
        stop = StopSignal(self.watchdog)
        try:
            lines = self._set_up()
            # Closed below where all goes well; after an error it ends with this process.
            engine = self._start_engine()
            self._connect(engine)
            logger = RunLogger(self.config.observe, active=self.is_logging_rank, total_iterations=self.total_iterations,
                               config_toml=to_toml(self.config), format_records=format_policy_steps)
            for line in lines:
                logger.message(line)
            stopped = self._train(logger, stop)
            logger.summary(self._last_figures, stopped=stopped)
            self.sender.close()
            if engine is not None:
                engine.close()
        finally:
            if logger is not None:
                logger.close()
            stop.close()
            self.watchdog.close()

    def _set_up(self) -> list[str]:
        """Model and optimizer, at the weights that the run starts from; lines that say which these are."""
        # The schedule's sequence is a packed microbatch.
        train = replace(self.config.train, seq_length=self.config.rl.max_tokens_per_microbatch)
        self.parts = parts = setup_trainer(replace(self.config, train=train), self.provider, self.grids, self.platform,
                                           self.watchdog)
        state = RunState(self.config, self.grids, self.platform, parts.built, parts.optimizer, parts.scheduler)
        _, lines = start(state, self.provider, None, self.watchdog)
        self._tokens = self.provider.token_spec(self.config.model_family)
        return lines

    def _start_engine(self) -> Engine | None:
        """The engine, on the first rank."""
        if self.grids.rank != 0:
            return None
        limit_s = self.config.rollout.engine_start_timeout_s
        with self.watchdog.limit(limit_s + FIRST_RANK_SPEAKS_S), self.watchdog.waiting("start of the rollout engine"):
            return start_engine(self.config, self.provider)

    def _connect(self, engine: Engine | None) -> None:
        """Meet the engine, which every rank sends weights to and the first one talks to."""
        flags, rl = self.config.rollout, self.config.rl
        with (self.watchdog.limit(flags.engine_start_timeout_s + 2 * FIRST_RANK_SPEAKS_S),
              self.watchdog.waiting("the first rank, which starts the rollout engine")):
            num_workers = from_first_rank(self.grids, engine.client.num_workers if engine is not None else None)
        # An engine's first answer may take as long as its calls may.
        with (self.watchdog.limit(2 * flags.refit_timeout_s + FIRST_RANK_SPEAKS_S),
              self.watchdog.waiting("the rollout engine's agreement on weights")):
            self.sender = connect(self.parts.built, self.grids, self.provider, self.config.model_family,
                                  engine.client if engine is not None else None, num_workers,
                                  refit_options(self.config), engine.address if engine is not None else "")
        self.source: RolloutSource | None = None
        padding = None
        if engine is not None:
            prompts = self.prompt_provider.open(self.config.dataset, self._tokens, "train", self.config.train.seed)
            sampling = Sampling(flags.max_completion_tokens, rl.temperature, rl.completions_per_prompt,
                                stop_token_ids=(prompts.end_token_id,))
            self.source = RolloutSource(engine.client, prompts, registry.reward(rl.reward), rl.reward, sampling,
                                        self.config.train.seq_length, self.watchdog.progress)
            padding = prompts.pad_token_id
        self.policy = PolicyTrainer(self.parts, rl, self._tokens.vocab_size, from_first_rank(self.grids, padding))

    def _train(self, logger: RunLogger, stop: StopSignal) -> str | None:
        """Run iterations; returns why it stopped early, or None."""
        self._last_figures: dict[str, float | str] = {}
        while self.progress.iteration < self.total_iterations:
            began = time.perf_counter()
            version = self.progress.iteration
            report = self._refit(version)
            rollouts = self._roll_out(version)
            before = time.perf_counter()
            result = self.policy.update(rollouts.completions)
            update_s = time.perf_counter() - before
            self.progress.iteration += 1
            if result.success:
                self.progress.consumed_samples += self.config.train.global_batch_size
            else:
                self.progress.skipped_iterations += 1
            self.watchdog.progress(iteration=self.progress.iteration)
            seconds = {"refit": report.seconds["total"], "rollout": rollouts.rollout_s, "reward": rollouts.reward_s,
                       "update": update_s, "iteration": time.perf_counter() - began}
            logger.log_step(self._record(version, report, rollouts, result, seconds))
            with self.watchdog.waiting("agreement on whether to stop"):
                asked = next((name for name in gather(self.grids, stop.name) if name is not None), None)
            if asked is not None:
                return asked
        return None

    def _refit(self, version: int) -> RefitReport:
        """Give the engine the weights as they are; on every rank the first one's report."""
        limit_s = 2 * self.config.rollout.refit_timeout_s + FIRST_RANK_SPEAKS_S
        with self.watchdog.limit(limit_s), self.watchdog.waiting("refit of the rollout engine", version=version):
            report: RefitReport = from_first_rank(self.grids, self.sender.send(str(version)))
        return report

    def _roll_out(self, version: int) -> Rollouts:
        """The completions of a global batch, on every rank."""
        rollouts, count, limit_s = None, self.config.prompts_per_step, self.config.rollout.rollout_timeout_s
        if self.source is not None:
            with (self.watchdog.limit(limit_s + FIRST_RANK_SPEAKS_S),
                  self.watchdog.waiting("completions of the rollout engine", version=version)):
                answers = self.source.ask(self.progress.iteration * count, count, str(version))
            with self.watchdog.waiting("rewards"):
                rollouts = self.source.score(answers)
        limit_s += self.config.train.watchdog_timeout_s + 2 * FIRST_RANK_SPEAKS_S
        with (self.watchdog.limit(limit_s),
              self.watchdog.waiting("completions and rewards, which the first rank asks for", version=version)):
            shared: Rollouts = from_first_rank(self.grids, rollouts)
        return shared

    def _record(self, version: int, report: RefitReport, rollouts: Rollouts, result: PolicyResult,
                seconds: dict[str, float]) -> PolicyRecord:
        rates = current_learning_rates(self.config, self.parts.scheduler, ())
        figures = rollout_metrics(rollouts) | result.metrics
        self._last_figures = {"gen-kl": f"{figures['gen_kl']:.1e}", "reward": figures["reward"]}
        return PolicyRecord(
            iteration=self.progress.iteration, consumed_samples=self.progress.consumed_samples,
            skipped_iterations=self.progress.skipped_iterations, policy_version=version, success=result.success,
            grad_norm=result.grad_norm, num_zeros=result.num_zeros, learning_rate=next(iter(rates.values())),
            batch_size=self.config.train.global_batch_size, num_tokens=result.num_tokens,
            num_microbatches=result.num_microbatches, world_size=self.grids.layout.world_size, figures=figures,
            refit_bytes=report.wire_bytes, seconds=seconds)
