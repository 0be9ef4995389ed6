"""Sends weights to the engine and collects completions from it, between the updates or in parallel with them."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from mimo.checkpoint.paths import SHARED_STREAM
from mimo.comm import broadcast_object, broadcast_outcome
from mimo.config.rl_run import RlRunConfig
from mimo.grid.groups import Grids
from mimo.observability.trackers import Generation
from mimo.refit.options import RefitReport
from mimo.refit.rendezvous import RefitError
from mimo.refit.sender import WeightSender
from mimo.rl.kv_scales import KvScales
from mimo.rl.offload import Devices
from mimo.rl.prompts import FinitePromptSet, Prompt
from mimo.rl.rollouts import (
    Answers,
    Rollouts,
    RolloutSource,
    batch_of,
    places_of_batch,
    rollout_metrics,
    teaches,
)
from mimo.rollout.engine import Rollout
from mimo.watchdog.process_exit import on_daemon_thread
from mimo.watchdog.watchdog import Watchdog

if TYPE_CHECKING:
    from mimo.rl.probe import Expected, RefitProbe

# Seconds by which watchdog limits differ along a chain of waits: a call of the engine, the first rank, which makes it,
# and the other ranks, which wait for the first. So the process closest to a failure reports it.
WATCHDOG_MARGIN_S = 10.0
# Name of the position among the prompts in checkpoints.
STREAM = f"{SHARED_STREAM}/0"


@dataclass(frozen=True)
class Pending:
    """Answers that were drawn and not trained on yet, as plain data for a checkpoint.

    Attributes:
        asked: digest of what the engine was asked for each prompt, beginning with the next one to train on; see
            `mimo.rl.images.request_digest`.
        answers: the engine's answers to each prompt.
        version: policy version that drew them.
        seconds: how long the engine took.
    """

    asked: list[str]
    answers: list[list[Rollout]]
    version: str
    seconds: float


@dataclass
class PromptCursor:
    """Position among the prompts. It is the same on every rank, but only the first rank has the pending answers.

    Attributes:
        first: index of the next iteration's first prompt.
        pending: answers to that iteration's prompts, if they were prefetched (`--rollout-mode one-step-off`).
        kv_scales: scales of the engine's cache for the next refit, see `mimo.rl.kv_scales`; None before the first
            measurement. A checkpoint has them because a refit comes with those of the last update.
    """

    first: int = 0
    pending: Pending | None = None
    kv_scales: KvScales | None = None

    def streams(self, *, is_first_rank: bool) -> dict[str, Any]:
        """Return the position as plain data for `RunState`."""
        scales = None if self.kv_scales is None else [[layer, *each] for layer, each in self.kv_scales.items()]
        own = {STREAM: {"prompts": self.first, "kv_scales": scales,
                        "pending": None if self.pending is None else asdict(self.pending)}}
        return {"consumed_samples": self.first, "streams": own if is_first_rank else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to the position that `streams` returned. Only the first rank needs the stream.

        Raises:
            ValueError: the checkpoint is from another program.
        """
        self.first = state["consumed_samples"]
        found = state["streams"].get(STREAM)
        if state["streams"] and (not isinstance(found, dict) or "prompts" not in found):
            raise ValueError("this checkpoint is from train_hetero.py; --finetune starts a new run with its weights")
        # Checkpoints of older versions have no scales, or none of queries, which were 1.
        if found is not None and found.get("kv_scales") is not None:
            self.kv_scales = {layer: (key, value, query[0] if query else 1.0)
                              for layer, key, value, *query in found["kv_scales"]}
        if found is not None and found["pending"] is not None:
            answers = [[Rollout(tuple(each["token_ids"]), tuple(each["logprobs"]), each["version"],
                                each["finish_reason"]) for each in group] for group in found["pending"]["answers"]]
            # Checkpoints of older versions have no digests, so that the answers are drawn anew.
            asked = list(found["pending"].get("asked", ()))
            self.pending = Pending(asked, answers, found["pending"]["version"], found["pending"]["seconds"])


class Collector:
    """Collects completions of the present policy (`--rollout-mode sync`) or of the one before the last update
    (`one-step-off`).

    Every method except `prefetch` is collective over the trainer's world. `source` and `held_out` (for evaluations) are
    None on all ranks but the first.

    Attributes:
        probe: compares both sides' log-probs, see `--refit-verify-interval`; None without it.
        report: report of the last refit.
        refit_s: seconds of refits since the last `collect` began.
        waited_s: seconds since then that ranks waited for completions.
        verify_s: seconds of verifications since this was last set to 0. The other seconds do not include them.
    """

    def __init__(self, config: RlRunConfig, grids: Grids, watchdog: Watchdog, sender: WeightSender,
                 source: RolloutSource | None, held_out: RolloutSource | None, cursor: PromptCursor,
                 devices: Devices) -> None:
        self.config, self.grids, self.watchdog, self.sender = config, grids, watchdog, sender
        self.source, self.held_out, self.cursor, self.devices = source, held_out, cursor, devices
        self.probe: RefitProbe | None = None
        self.report: RefitReport | None = None
        self.waited_s = self.refit_s = self.verify_s = 0.0
        # Watchdog limits: of refits, of rank 0 while it waits for vLLM, and of the other ranks while they wait for rank
        # 0, which waits for vLLM and then for rewards, and for a batch may do so several times.
        self._refit_limit_s = 2 * config.rollout.refit_timeout_s + WATCHDOG_MARGIN_S
        self._engine_limit_s = config.rollout.rollout_timeout_s + WATCHDOG_MARGIN_S
        draw_s = self._engine_limit_s + config.train.watchdog_timeout_s
        self._follower_limit_s = draw_s + WATCHDOG_MARGIN_S
        self._batch_limit_s = (1 + config.rl.max_refills) * draw_s + WATCHDOG_MARGIN_S
        self._num_refits = 0
        self._version: int | None = None
        self._prefetched: Future[tuple[Answers, Pending]] | None = None
        self._drained: Answers | None = None

    def collect(self, iteration: int, num_shown: int = 0) -> Rollouts:
        """Collect the completions to train on after `iteration` updates, on every rank.

        The first `num_shown` prompts come with their completions as text.

        Raises:
            ValueError, RefitError: on the first rank, see `RolloutSource`. A refit raises RefitError on every rank.
            ReportedElsewhereError: on the other ranks.
        """
        began = time.perf_counter()
        self.refit_s = 0.0
        answers = self._prefetched_answers()
        has_answers = broadcast_object(self.grids, answers is not None)
        # The engine of a resumed run has no weights, even if the checkpoint brought answers.
        if not has_answers or self._version is None:
            self.refit(iteration)
        rollouts, failure = None, None
        if self.source is not None:
            try:
                rollouts = self._batch(self.source, answers, num_shown)
            except RefitError as error:
                failure = error
        with self.watchdog.waiting_up_to(
                self._batch_limit_s, "completions and rewards, which the first rank asks for",
                version=self._version):
            shared: Rollouts = broadcast_outcome(self.grids, rollouts, failure)
        self.cursor.first += shared.num_asked
        self.cursor.pending = None
        self._finish_rollouts()
        self.waited_s = time.perf_counter() - began
        return shared

    def _batch(self, source: RolloutSource, answers: Answers | None, num_shown: int) -> Rollouts:
        """Ask for the completions of an iteration, unless there are `answers`, and score them.

        With --max-refills, further prompts replace those whose completions all have the same reward.

        Raises:
            ValueError, RefitError: see `RolloutSource`.
        """
        count, prompts, drawn, missing = self.config.prompts_per_step, list[Prompt](), list[Rollouts](), 0
        for _ in range(1 + self.config.rl.max_refills):
            answers = answers or self._ask(source, self.cursor.first + len(prompts), missing or count)
            with self.watchdog.waiting("rewards"):
                drawn.append(source.score(answers))
            prompts += answers.prompts
            answers = None
            groups = [group for each in drawn for group in each.groups]
            missing = count - sum(map(teaches, groups))
            # Beyond the last prompt, those of this iteration would come again.
            if missing <= 0 or (isinstance(source.prompts, FinitePromptSet)
                                and len(prompts) + missing > source.prompts.num_prompts):
                break
        places = places_of_batch(groups, count)
        return replace(batch_of(drawn, places), shown=tuple(
            source.as_text(prompts[place], groups[place]) for place in places[:num_shown]))

    def _ask(self, source: RolloutSource, first: int, count: int) -> Answers:
        with self.watchdog.waiting_up_to(self._engine_limit_s, "completions of the rollout engine",
                                         version=self._version):
            return source.ask(first, count, str(self._version))

    def prefetch(self) -> None:
        """Start on the next iteration's completions while the update runs (`one-step-off`). On the first rank."""
        source = self.source
        if source is None:
            return
        first, count, version = self.cursor.first, self.config.prompts_per_step, str(self._version)

        def ask() -> tuple[Answers, Pending]:
            answers = source.ask(first, count, version)
            return answers, Pending(source.digests(answers.requests), answers.answers, version, answers.seconds)

        self._prefetched = on_daemon_thread(ask, "rollouts")

    def drain(self, iteration: int) -> None:
        """Wait for the completions that `prefetch` started, then give the engine the weights after `iteration` updates.

        Raises:
            ValueError, RefitError: on the first rank, see `RolloutSource`.
        """
        began = time.perf_counter()
        with self.watchdog.waiting_up_to(self._engine_limit_s, "completions drawn beside the update",
                                         version=self._version):
            if self._prefetched is not None:
                self._drained, self.cursor.pending = self._prefetched.result()
                self._prefetched = None
            broadcast_object(self.grids, None)
        self.waited_s += time.perf_counter() - began
        self.refit(iteration)

    def refit(self, iteration: int) -> None:
        """Give the engine the weights after `iteration` updates, unless it has them.

        Raises:
            RefitError: the `probe` finds that engine and trainer compute with different weights.
        """
        if self._version == iteration:
            return
        probe, interval = self.probe, self.config.rollout.refit_verify_interval
        began, expected = time.perf_counter(), None
        if probe is not None and self._num_refits % interval == 0:
            # Computed before any refit, because on shared devices the trainer's weights are offloaded while the
            # engine answers.
            expected = probe.expect()
            # A refit that misses a tensor hardly changes log-probs between two updates. Therefore the engine first
            # gets scrambled weights, with which every missed tensor shows.
            self.sender.verify, self.sender.is_changed = True, False
            with probe.scrambled() as with_scrambled:
                self._send(iteration, with_scrambled.kv_scales)
            self._ready_for_rollouts()
            self._compare(probe, with_scrambled, iteration, "scrambled weights")
            self._finish_rollouts()
        self.sender.verify = self.sender.is_changed = expected is not None
        before = time.perf_counter()
        self.report = self._send(iteration, self.cursor.kv_scales)
        self.refit_s += self.report.seconds["total"]
        self._ready_for_rollouts()
        after = time.perf_counter()
        if probe is not None and expected is not None:
            self._compare(probe, expected, iteration, "the weights")
            self.verify_s += before - began + time.perf_counter() - after
        self._version = iteration
        self._num_refits += 1

    def _send(self, iteration: int, kv_scales: KvScales | None) -> RefitReport:
        if self.config.rollout.engine_kv_scales == "calibrated":
            self.sender.kv_scales = kv_scales or {}
        with self.watchdog.waiting_up_to(self._refit_limit_s, "refit of the rollout engine", version=iteration):
            self.devices.for_refit()
            report: RefitReport = broadcast_object(self.grids, self.sender.send(str(iteration)))
            return report

    def _ready_for_rollouts(self) -> None:
        with self.watchdog.waiting_up_to(self._refit_limit_s, "memory of the rollout engine"):
            self.devices.for_rollout()

    def _compare(self, probe: RefitProbe, expected: Expected, iteration: int, weights: str) -> None:
        with self.watchdog.waiting_up_to(
                self._engine_limit_s if self.source is not None else self._follower_limit_s,
                "log-probs of the rollout engine, to verify a refit", version=iteration):
            probe.compare(expected, weights)

    def evaluate(self, iteration: int, num_shown: int) -> tuple[dict[str, float], tuple[Generation, ...]]:
        """Score completions of the held-out prompts, drawn by the policy after `iteration` updates.

        Returns:
            Figures of the completions, see `rollout_metrics`, and these prompts.

        Raises:
            ValueError, RefitError, ReportedElsewhereError: as in `collect`.
        """
        self.refit(iteration)
        result, failure = None, None
        if self.held_out is not None:
            try:
                with self.watchdog.waiting_up_to(self._engine_limit_s, "completions of held-out prompts",
                                                 version=self._version):
                    answers = self.held_out.ask(0, self.config.rl.eval_prompts, str(iteration))
            except RefitError as error:
                failure = error
            else:
                with self.watchdog.waiting("rewards"):
                    rollouts = self.held_out.score(answers, num_shown)
                result = rollout_metrics(rollouts), rollouts.shown
        with self.watchdog.waiting_up_to(self._follower_limit_s, "the evaluation, which the first rank asks for"):
            shared: tuple[dict[str, float], tuple[Generation, ...]] = broadcast_outcome(self.grids, result, failure)
        self._finish_rollouts()
        return shared

    def _finish_rollouts(self) -> None:
        with self.watchdog.waiting_up_to(self._engine_limit_s, "memory of the trainer"):
            self.devices.for_training()
        if not self.devices.keeps_weights:
            self._version = None

    def _prefetched_answers(self) -> Answers | None:
        """Return the answers that were prefetched for this iteration, if they are what the run asks for now.

        A resumed run may have other prompts, images or sampling than the one that drew them. Answers are scored by
        the reward and the ground truth of now, so those may have changed.
        """
        drained, self._drained = self._drained, None
        pending, first, count = self.cursor.pending, self.cursor.first, self.config.prompts_per_step
        if drained is not None or self.source is None or pending is None or (
                self.config.rollout.rollout_mode == "sync"):
            return drained
        indices, prompts, requests = self.source.usable(first, count)
        if pending.asked != self.source.digests(requests):
            return None
        return Answers(indices, prompts, requests, pending.answers, pending.version, pending.seconds)
