"""Several engines as one: all replicas take the weights at the same time, and each completes a part of the prompts.

Replicas do not know of each other, unless they share experts. A worker's number in a refit is its number in the replica
plus that of the replica's first worker.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mimo.refit.rendezvous import RefitError, format_error
from mimo.rollout.engine import Rollout, Sampling
from mimo.watchdog.process_exit import on_daemon_thread

# Extra seconds to wait for an answer, so that a replica can report by itself that it has reached its own limit.
GRACE_S = 30.0


class AnsweredError(RefitError):
    """A replica has answered a call with an error. The others may still work on their parts of it."""


class RolloutClient(ABC):
    """The methods of `RolloutEngine` for an engine, or several, in other processes. A subclass implements `call`.

    Calls block, and raise RefitError if they fail or there is no answer in time.

    Attributes:
        num_workers: number of workers that take in weights.
    """

    num_workers: int

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> Any:
        """Call any method of the engine."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)

    def load_from_disk(self, folder: str, version: str | None = None, timeout_s: float = 600.0) -> str:
        """Call `load_from_disk`. `timeout_s` does not extend the time limit of a single engine's call."""
        loaded: str = self.call("load_from_disk", folder, version, timeout_s)
        return loaded

    def generate(self, prompts: Sequence[dict[str, Any]], sampling: Sampling,
                 seeds: Sequence[int] = ()) -> list[list[Rollout]]:
        answers: list[list[Rollout]] = self.call("generate", prompts, sampling, seeds)
        return answers

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        logprobs: list[list[float]] = self.call("prompt_logprobs", prompts)
        return logprobs

    def sleep(self) -> None:
        self.call("sleep")

    def wake_up(self, *tags: str) -> None:
        self.call("wake_up", *tags)


@dataclass(frozen=True)
class Replicas(RolloutClient):
    """Client that calls all replicas at the same time. It can be pickled if its replicas can.

    A call ends when every replica has answered, or with the first error, which names the replica. It does not wait for
    the others then. In a refit, they learn of the failure from the refit's own store.

    Attributes:
        replicas: client of each engine.
        timeout_s: seconds that a call may take.
        in_step: whether the replicas share experts. Each then has to take part while another one generates.
        num_workers: number of workers of all replicas.

    Raises:
        ValueError: there is no replica, or one of them is there twice.
    """

    replicas: tuple[RolloutClient, ...]
    timeout_s: float = 600.0
    in_step: bool = False
    num_workers: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("an engine needs a replica")
        for (one, first), (other, second) in itertools.combinations(enumerate(self.replicas), 2):
            if first == second:
                raise ValueError(f"replica {other} is replica {one} again: {second}")
        object.__setattr__(self, "num_workers", sum(each.num_workers for each in self.replicas))

    @property
    def first_workers(self) -> list[int]:
        """Number of each replica's first worker."""
        return list(itertools.accumulate((each.num_workers for each in self.replicas[:-1]), initial=0))

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every replica with the same arguments, and return all results."""
        return self._together(method, [partial(getattr(each, method), *arguments) for each in self.replicas])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect every replica with the trainer. Each gets the number of its first worker."""
        self._together("init_weight_transfer_engine", [
            partial(each.init_weight_transfer_engine, init_info | {"first_worker": first})
            for each, first in zip(self.replicas, self.first_workers, strict=True)])

    def load_from_disk(self, folder: str, version: str | None = None, timeout_s: float = 600.0) -> str:
        """Load weights from a folder, the same in all replicas even if the newest are asked for.

        Raises:
            RefitError: the replicas share experts. Each would have to take every tensor of the folder.
        """
        if self.in_step:
            raise RefitError(f"load_from_disk {folder}: replicas that share experts take weights from a refit only")
        first, *others = self.replicas
        loaded: str = self._together("load_from_disk", [
            partial(first.load_from_disk, folder, version, timeout_s)], timeout_s)[0]
        self._together("load_from_disk", [
            partial(each.load_from_disk, folder, loaded, timeout_s) for each in others], timeout_s, number=1)
        return loaded

    def generate(self, prompts: Sequence[dict[str, Any]], sampling: Sampling,
                 seeds: Sequence[int] = ()) -> list[list[Rollout]]:
        """Generate completions of each prompt, in order, whichever replica made them."""
        if seeds and len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts")
        return self._shared("generate", prompts, lambda replica, places: replica.generate(
            [prompts[place] for place in places], sampling, [seeds[place] for place in places] if seeds else ()))

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Return log-probs of each prompt's tokens from the second on, in order."""
        return self._shared("prompt_logprobs", prompts, lambda replica, places: replica.prompt_logprobs(
            [prompts[place] for place in places]))

    def _shared[T](self, method: str, prompts: Sequence[dict[str, Any]],
                   ask: Callable[[RolloutClient, list[int]], list[T]]) -> list[T]:
        """Return the replicas' answers to their shares, in the order of the prompts.

        Raises:
            AnsweredError: a replica raised an error, or did not answer in time, which is then the error's cause.
        """
        # A prompt's size is its number of tokens, or of characters if it is text.
        texts = [prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"] for prompt in prompts]
        shares = share_out([len(text) for text in texts], len(self.replicas))
        try:
            given = self._together(method, [
                partial(ask, each, share) if share or self.in_step else list
                for each, share in zip(self.replicas, shares, strict=True)])
        except RefitError as error:
            raise AnsweredError(str(error)) from error
        answers: dict[int, T] = {}
        for number, (share, found) in enumerate(zip(shares, given, strict=True)):
            if len(found) != len(share):
                raise RefitError(f"replica {number}: {len(found)} answers of {method} to {len(share)} prompts")
            answers.update(zip(share, found, strict=True))
        return [answers[place] for place in range(len(prompts))]

    def _together(self, method: str, calls: Sequence[Callable[[], Any]], extra_s: float = 0.0,
                  number: int = 0) -> list[Any]:
        """Make calls at the same time and return their results. The first call is that of replica `number`.

        Raises:
            RefitError: a call raised an error. The other calls are not waited for.
        """
        asked = [on_daemon_thread(call, f"replica-{number + place}") for place, call in enumerate(calls)]
        limit_s = self.timeout_s + extra_s + GRACE_S
        done, left = wait(asked, limit_s, FIRST_EXCEPTION)
        for place, answer in enumerate(asked):
            error = answer.exception() if answer in done else None
            if error is not None:
                raise RefitError(f"replica {number + place}: {format_error(error)}") from error
        if left:
            late = [str(number + place) for place, answer in enumerate(asked) if answer in left]
            raise RefitError(f"replica {', '.join(late)}: no answer to {method} within {limit_s:g} s")
        return [answer.result() for answer in asked]


def one_client(replicas: Sequence[RolloutClient], timeout_s: float, in_step: bool = False) -> RolloutClient:
    """Return the client of a single replica, or one client for all of them; see `Replicas`."""
    return replicas[0] if len(replicas) == 1 else Replicas(tuple(replicas), timeout_s, in_step)


def share_out(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Assign prompts to replicas so that numbers of prompts differ by at most one, and totals of tokens are even.

    The number of prompts comes first, because the lengths of completions are not known beforehand.

    Returns:
        Indices of each replica's prompts, ascending. They depend only on the sizes.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        least = min(range(count), key=lambda replica: (len(shares[replica]), totals[replica], replica))
        shares[least].append(place)
        totals[least] += sizes[place]
    return [sorted(share) for share in shares]
