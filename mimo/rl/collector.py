"""Send weights to the engine and collect completions from it, between the updates or in parallel with them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mimo.comm.host import broadcast_object, gather
from mimo.config.rl_run import RlRunConfig
from mimo.grid.groups import Grids
from mimo.model.build import GRADIENTS, OPTIMIZER, WEIGHTS
from mimo.observability.trackers import Generation
from mimo.platform.base import Platform
from mimo.refit.options import RefitReport
from mimo.refit.rendezvous import RefitError
from mimo.refit.sender import WeightSender
from mimo.rl.cursor import Pending, PromptCursor
from mimo.rl.offload import Offload
from mimo.rl.rollouts import Answers, Rollouts, RolloutSource, rollout_metrics
from mimo.rollout.replicas import RolloutClient
from mimo.watchdog.process_exit import ReportedElsewhereError
from mimo.watchdog.watchdog import Watchdog

if TYPE_CHECKING:
    from mimo.rl.probe import Expected, RefitProbe

# Seconds that other ranks wait longer than the first rank, so that the first rank can say what went wrong.
FIRST_RANK_SPEAKS_S = 10.0


class Devices:
    """Memory of the devices that engine and trainer use. Here they use different ones, so there is nothing to do.

    `SharedDevices` is for an engine on the trainer's devices. Every method is collective.

    Attributes:
        leaving: bytes of the trainer's optimizer state and weights that left a shared device for the last rollout, by
            name from `mimo.model.build.KINDS`. Of all ranks' numbers, this is the largest.
    """

    leaving: Mapping[str, int] = MappingProxyType({})

    def for_engine_start(self) -> None:
        """Give the engine all the memory it wants, for its start."""

    def for_refit(self) -> None:
        """Make room for the weights of both trainer and engine."""

    def for_rollout(self) -> None:
        """Give the engine all the memory it needs to generate."""

    def for_training(self) -> None:
        """Give the trainer all its memory back. The engine may lose its weights, see `keeps_weights`."""

    @property
    def keeps_weights(self) -> bool:
        """Whether an engine keeps its weights while the trainer trains."""
        return True

    def take_seconds(self) -> float:
        """Return the seconds spent on moving memory since the last call."""
        return 0.0


@dataclass(frozen=True)
class HeldOut:
    """Result of an evaluation.

    Attributes:
        metrics: figures of the completions by name, as `rollout_metrics` returns them.
        shown: some of the prompts with their completions as text.
    """

    metrics: Mapping[str, float]
    shown: tuple[Generation, ...]


class Collector:
    """Completions of the policy as it is (`--rollout-mode sync`) or as it was one update before (`one-step-off`).

    Every method is collective over the trainer's world, but for `prefetch`, which only starts the engine.

    Args:
        config: the run.
        grids: process groups.
        watchdog: told about every wait.
        sender: gives the engine weights.
        source: draws and scores, on the first rank; None on the others.
        held_out: the same for evaluations.
        cursor: position of the run among its prompts.
        devices: moves memory between trainer and engine if they share devices.

    Attributes:
        probe: compares both sides' log-probs, see `--refit-verify-interval`; None without it.
        report: report of the last refit.
        refit_s: seconds of refits since the last `collect` began.
        waited_s: seconds since then that ranks waited for completions.
        verify_s: seconds of verifications since this was last set to 0; no part of the others.
    """

    def __init__(self, config: RlRunConfig, grids: Grids, watchdog: Watchdog, sender: WeightSender,
                 source: RolloutSource | None, held_out: RolloutSource | None, cursor: PromptCursor,
                 devices: Devices) -> None:
        self.config, self.grids, self.watchdog, self.sender = config, grids, watchdog, sender
        self.source, self.held_out, self.cursor, self.devices = source, held_out, cursor, devices
        self.probe: RefitProbe | None = None
        self.report: RefitReport | None = None
        self.waited_s = self.refit_s = self.verify_s = 0.0
        self._num_refits = 0
        self._version: int | None = None
        self._prefetched: Future[Answers] | None = None

    def collect(self, iteration: int, num_shown: int = 0) -> Rollouts:
        """Collect the completions to train on after `iteration` updates, on every rank.

        Args:
            iteration: number of updates.
            num_shown: number of prompts to return with their completions as text.

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
        failure = None
        if not has_answers and self.source is not None:
            try:
                with (self._engine_timeout(),
                      self.watchdog.waiting("completions of the rollout engine", version=self._version)):
                    answers = self.source.ask(self.cursor.first, self.config.prompts_per_step, str(self._version))
            except RefitError as error:
                failure = error
        rollouts = self._scored(answers, failure, num_shown)
        self.cursor.first += self.config.prompts_per_step
        self.cursor.pending = None
        self._finish_rollouts()
        self.waited_s = time.perf_counter() - began
        return rollouts

    def prefetch(self) -> None:
        """Start on the next iteration's completions while the update runs (`one-step-off`). On the first rank."""
        if self.source is not None:
            result: Future[Answers] = Future()
            # A daemon thread, because a call that the engine never answers must not keep this process alive.
            Thread(target=self._fill, args=(result, self.cursor.first), name="rollouts", daemon=True).start()
            self._prefetched = result

    def drain(self, iteration: int) -> None:
        """Wait for the completions that `prefetch` started, then give the engine the weights after `iteration` updates.

        Raises:
            ValueError, RefitError: on the first rank, see `RolloutSource`.
        """
        began = time.perf_counter()
        with (self._engine_timeout(),
              self.watchdog.waiting("completions drawn beside the update", version=self._version)):
            if self._prefetched is not None:
                answers = self._prefetched.result()
                self._prefetched = None
                asked = [prompt.token_ids for prompt in answers.prompts]
                self.cursor.pending = Pending(asked, answers.answers, answers.version, answers.seconds)
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
            self._refit_scrambled(probe, iteration)
        self.sender.verify = self.sender.is_changed = expected is not None
        before = time.perf_counter()
        self.report = self._send(iteration)
        self.refit_s += self.report.seconds["total"]
        self._ready_for_rollouts()
        after = time.perf_counter()
        if probe is not None and expected is not None:
            self._compare(probe, expected, iteration, "the weights")
            self.verify_s += before - began + time.perf_counter() - after
        self._version = iteration
        self._num_refits += 1

    def _refit_scrambled(self, probe: RefitProbe, iteration: int) -> None:
        """Give the engine scrambled weights, compare log-probs, and get ready for the real ones."""
        self.sender.verify, self.sender.is_changed = True, False
        with probe.scrambled() as expected:
            self._send(iteration)
        self._ready_for_rollouts()
        self._compare(probe, expected, iteration, "scrambled weights")
        self._finish_rollouts()

    def _send(self, iteration: int) -> RefitReport:
        with (self.watchdog.limit(self._refit_limit_s),
              self.watchdog.waiting("refit of the rollout engine", version=iteration)):
            self.devices.for_refit()
            report: RefitReport = broadcast_object(self.grids, self.sender.send(str(iteration)))
            return report

    def _ready_for_rollouts(self) -> None:
        with self.watchdog.limit(self._refit_limit_s), self.watchdog.waiting("memory of the rollout engine"):
            self.devices.for_rollout()

    def _compare(self, probe: RefitProbe, expected: Expected, iteration: int, weights: str) -> None:
        with (self._engine_timeout() if self.source is not None else self._follower_timeout(),
              self.watchdog.waiting("log-probs of the rollout engine, to verify a refit", version=iteration)):
            probe.compare(expected, weights)

    @property
    def _refit_limit_s(self) -> float:
        return 2 * self.config.rollout.refit_timeout_s + FIRST_RANK_SPEAKS_S

    def evaluate(self, iteration: int, num_shown: int) -> HeldOut:
        """Score completions of the held-out prompts, drawn by the policy after `iteration` updates.

        Args:
            iteration: number of updates.
            num_shown: number of prompts to return with their completions as text.

        Raises:
            ValueError, RefitError, ReportedElsewhereError: as in `collect`.
        """
        self.refit(iteration)
        result, failure = None, None
        if self.held_out is not None:
            try:
                with (self._engine_timeout(),
                      self.watchdog.waiting("completions of held-out prompts", version=self._version)):
                    answers = self.held_out.ask(0, self.config.rl.eval_prompts, str(iteration))
            except RefitError as error:
                failure = error
            else:
                with self.watchdog.waiting("rewards"):
                    rollouts = self.held_out.score(answers, num_shown)
                result = HeldOut(rollout_metrics(rollouts), rollouts.shown)
        with self._follower_timeout(), self.watchdog.waiting("the evaluation, which the first rank asks for"):
            shared: HeldOut = self._shared(result, failure)
        self._finish_rollouts()
        return shared

    def _finish_rollouts(self) -> None:
        with self._engine_timeout(), self.watchdog.waiting("memory of the trainer"):
            self.devices.for_training()
        if not self.devices.keeps_weights:
            self._version = None

    def _prefetched_answers(self) -> Answers | None:
        """Return the answers that were prefetched for this iteration, if they are what the flags ask for now.

        A resumed run may have other prompts, or another number of completions, than the one that drew them.
        """
        pending, first, count = self.cursor.pending, self.cursor.first, self.config.prompts_per_step
        if self.source is None or pending is None or self.config.rollout.rollout_mode == "sync":
            return None
        prompts = tuple(self.source.prompts.prompt(index) for index in range(first, first + count))
        # Comparing names is not enough: a prompt has the same name whatever the seed.
        if pending.prompts != [prompt.token_ids for prompt in prompts] or any(
                len(group) != self.config.rl.completions_per_prompt for group in pending.answers):
            return None
        return Answers(first=first, prompts=prompts, answers=pending.answers, version=pending.version,
                       seconds=pending.seconds)

    def _fill(self, result: Future[Answers], first: int) -> None:
        assert self.source is not None
        try:
            result.set_result(self.source.ask(first, self.config.prompts_per_step, str(self._version)))
        except BaseException as error:  # `drain` raises any error again on the main thread.
            result.set_exception(error)

    def _shared(self, value: Any, failure: RefitError | None) -> Any:
        """Return the first rank's value on every rank, or raise its failure there and ReportedElsewhereError elsewhere.

        All ranks go on together from a failure, so that another engine can take the place of one that is lost.
        """
        value, has_failed = broadcast_object(self.grids, (value, failure is not None))
        if failure is not None:
            raise failure
        if has_failed:
            raise ReportedElsewhereError("rank 0 reports what is wrong")
        return value

    def _scored(self, answers: Answers | None, failure: RefitError | None, num_shown: int) -> Rollouts:
        rollouts = None
        if self.source is not None and failure is None:
            assert answers is not None
            with self.watchdog.waiting("rewards"):
                rollouts = self.source.score(answers, num_shown)
        with (self._follower_timeout(),
              self.watchdog.waiting("completions and rewards, which the first rank asks for", version=self._version)):
            shared: Rollouts = self._shared(rollouts, failure)
        return shared

    def _engine_timeout(self) -> AbstractContextManager[None]:
        """Watchdog limit while rank 0 waits for vLLM."""
        return self.watchdog.limit(self.config.rollout.rollout_timeout_s + FIRST_RANK_SPEAKS_S)

    def _follower_timeout(self) -> AbstractContextManager[None]:
        """Watchdog limit of the ranks that wait for rank 0, which waits for vLLM and then for rewards."""
        return self.watchdog.limit(self.config.rollout.rollout_timeout_s + self.config.train.watchdog_timeout_s
                                   + 2 * FIRST_RANK_SPEAKS_S)


# Trainer and engine on the same GPUs take turns: each gives the other the memory that it does not need.
#
# The engine sleeps while the trainer trains. It then has neither weights nor a KV cache (vLLM's sleep level 2, because
# each refit brings all weights anyway). For a refit the trainer first frees its gradients and moves optimizer state to
# the host, and the engine takes memory for its weights. Then the trainer's weights go to the host too, and the engine
# takes memory for the KV cache. What has room beside the engine stays: the weights, and as much of the optimizer state
# as possible. The rest comes back while log-probs and the update's passes run, which do not need it. On the CPU, where
# vLLM cannot sleep, only the trainer's memory moves.

# vLLM's names of what a waking engine can take memory for.
ENGINE_WEIGHTS, KV_CACHE = "weights", "kv_cache"
# Fraction of a device that stays free beside the trainer and an engine that uses all of --engine-memory.
SPARE_MEMORY = 0.04


def what_leaves(refit_room: int, rollout_room: int, num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Choose how many bytes of optimizer state and of weights leave a device for a rollout: as few as possible.

    Optimizer state leaves first. It comes back behind passes, which weights cannot. Weights leave wholly or not at all.

    Args:
        refit_room: bytes that would be left in a refit if nothing moved; negative where something has to.
        rollout_room: bytes that would be left in a rollout if nothing moved.
        num_bytes: bytes of optimizer state and of weights. A refit needs the weights in any case.
    """
    state = min(max(0, -refit_room, -rollout_room), num_bytes[OPTIMIZER])
    return {OPTIMIZER: state, WEIGHTS: num_bytes[WEIGHTS] if rollout_room + state < 0 else 0}


class SharedDevices(Devices):
    """Memory of devices that trainer and engine share. Every method is collective over the trainer's world.

    Args:
        grids: process groups.
        offload: moves this rank's memory to the host and back.
        platform: says how much memory the device has.
        engine_memory: fraction of it that the engine may use while it is awake; None for an engine that cannot sleep,
            as on CPUs.
        engine_weight_bytes: bytes of a worker's weights.

    Attributes:
        client: the engine, on the first rank, once it is there.
        seconds: seconds spent on moving memory since the last `take_seconds`.
    """

    def __init__(self, grids: Grids, offload: Offload, platform: Platform, engine_memory: float | None,
                 engine_weight_bytes: float) -> None:
        self.client: RolloutClient | None = None
        self._grids, self._offload, self._platform = grids, offload, platform
        self._engine_memory, self._engine_weight_bytes = engine_memory, engine_weight_bytes
        self.seconds = 0.0

    @property
    def keeps_weights(self) -> bool:
        """Whether an engine keeps its weights while the trainer trains."""
        return self._engine_memory is None

    def for_engine_start(self) -> None:
        """Leave the devices to the engine, which takes all its memory once to see that it is there."""
        self._offload.everything()
        gather(self._grids, None)

    def for_refit(self) -> None:
        """Make room for the weights of both: free gradients, and move optimizer state that has no room to the host."""
        began = time.perf_counter()
        self._offload.gradients()
        leaves = self._what_leaves()
        self._offload.optimizer(leaves[OPTIMIZER])
        # Ranks that share a module have to move its weights together.
        of_ranks = gather(self._grids, leaves)
        self.leaving = {kind: max(rank[kind] for rank in of_ranks) for kind in leaves}
        self._wake_up(ENGINE_WEIGHTS)
        self.seconds += time.perf_counter() - began

    def _what_leaves(self) -> dict[str, int]:
        """Choose what leaves this device for an engine that is awake and uses all the memory it may."""
        num_bytes = {kind: self._offload.num_bytes(kind) for kind in (OPTIMIZER, WEIGHTS)}
        if self._engine_memory is None:
            return num_bytes
        free, total = self._platform.device_memory()
        free -= round(SPARE_MEMORY * total)
        refit_room, rollout_room = free - round(self._engine_weight_bytes), free - round(self._engine_memory * total)
        return what_leaves(refit_room, rollout_room, num_bytes)

    def for_rollout(self) -> None:
        """Make room for the engine's KV cache: the trainer's weights go to the host, too, unless there is room."""
        began = time.perf_counter()
        if self.leaving[WEIGHTS]:
            self._offload.weights()
        gather(self._grids, None)
        self._wake_up(KV_CACHE)
        self.seconds += time.perf_counter() - began

    def for_training(self) -> None:
        """Put the engine to sleep and bring the trainer's memory back; optimizer state arrives behind passes."""
        began = time.perf_counter()
        if self.client is not None and self._engine_memory is not None:
            self.client.sleep()
        broadcast_object(self._grids, None)
        self._offload.bring_back(WEIGHTS, GRADIENTS)
        self._offload.prefetch_optimizer()
        self.seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """Return `seconds` and reset them."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def _wake_up(self, tag: str) -> None:
        if self.client is not None and self._engine_memory is not None:
            self.client.wake_up(tag)
        broadcast_object(self._grids, None)
