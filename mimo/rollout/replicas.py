"""Several engines as one: every replica takes the weights at the same time, and each completes its part of the prompts.

Replicas know nothing of each other. A worker's number in a refit is that of its replica's first worker plus its own.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from mimo.refit.rendezvous import RefitError, format_error
from mimo.refit.sender import EngineClient
from mimo.rollout.engine import Rollout, Sampling

# Seconds that an answer may come later than its own limit says, before the replica is given up without a word of it.
GRACE_S = 30.0


class RolloutClient(EngineClient, Protocol):
    """An engine, or several, in other processes. Calls block; they raise RefitError where no answer comes in time."""

    @property
    def num_workers(self) -> int:
        """Number of workers that take in weights."""
        ...

    def generate(self, prompts: Sequence[dict[str, Any]], sampling: Sampling,
                 seeds: Sequence[int] = ()) -> list[list[Rollout]]:
        """Do as the method of `mimo.rollout.engine.RolloutEngine` does, as all methods below."""
        ...

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Return log-probs of each prompt's tokens from the second on."""
        ...

    def load_from_disk(self, folder: str, version: str | None = None, timeout_s: float = 600.0) -> str:
        """Take in weights that were written to a folder."""
        ...

    def sleep(self) -> None:
        """Give the device's memory back."""
        ...

    def wake_up(self, *tags: str) -> None:
        """Allocate GPU memory again."""
        ...


@dataclass(frozen=True)
class Replicas:
    """Calls all replicas at the same time; a client of the same methods. Can be pickled where its replicas can.

    A call ends when every replica has answered, or with the first error, which names the replica: the others are not
    waited for. In a refit they learn of it from the refit's own store.

    Attributes:
        replicas: a client of each engine.
        timeout_s: seconds that a call may take.

    Raises:
        ValueError: no replica, or one of them twice.
    """

    replicas: tuple[RolloutClient, ...]
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("an engine needs a replica")
        for (one, first), (other, second) in itertools.combinations(enumerate(self.replicas), 2):
            if first == second:
                raise ValueError(f"replica {other} is replica {one} again: {second}")

    @property
    def num_workers(self) -> int:
        """Number of workers that take in weights, of all replicas."""
        return sum(each.num_workers for each in self.replicas)

    @property
    def first_workers(self) -> list[int]:
        """Number of each replica's first worker."""
        return list(itertools.accumulate((each.num_workers for each in self.replicas[:-1]), initial=0))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Meet the trainer, each replica with the numbers of its own workers."""
        self._together("init_weight_transfer_engine", [
            partial(each.init_weight_transfer_engine, init_info | {"first_worker": first})
            for each, first in zip(self.replicas, self.first_workers, strict=True)])

    def start_weight_update(self) -> None:
        """Serve nothing from now on."""
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve the new weights under a version."""
        self._all("finish_weight_update", weight_version)

    def load_from_disk(self, folder: str, version: str | None = None, timeout_s: float = 600.0) -> str:
        """Take in weights from a folder; all replicas the same, also where it is to be the newest there is."""
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

    def sleep(self) -> None:
        """Give the devices' memory back."""
        self._all("sleep")

    def wake_up(self, *tags: str) -> None:
        """Allocate GPU memory again."""
        self._all("wake_up", *tags)

    def _all(self, method: str, *arguments: Any) -> None:
        self._together(method, [partial(getattr(each, method), *arguments) for each in self.replicas])

    def _shared[T](self, method: str, prompts: Sequence[dict[str, Any]],
                   ask: Callable[[RolloutClient, list[int]], list[T]]) -> list[T]:
        """Return the replicas' answers to their shares, in the order of the prompts."""
        shares = share_out([prompt_size(prompt) for prompt in prompts], len(self.replicas))
        given = self._together(method, [
            partial(ask, each, share) if share else list
            for each, share in zip(self.replicas, shares, strict=True)])
        answers: dict[int, T] = {}
        for number, (share, found) in enumerate(zip(shares, given, strict=True)):
            if len(found) != len(share):
                raise RefitError(f"replica {number}: {len(found)} answers of {method} to {len(share)} prompts")
            answers.update(zip(share, found, strict=True))
        return [answers[place] for place in range(len(prompts))]

    def _together(self, method: str, calls: Sequence[Callable[[], Any]], extra_s: float = 0.0,
                  number: int = 0) -> list[Any]:
        """Make calls of replicas, from so many on, at the same time; what each returned.

        Raises:
            RefitError: the first error that there was, at once.
        """
        done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        for place, call in enumerate(calls):
            # Daemons: a call that is never answered must not keep this process from ending.
            threading.Thread(target=_run, args=(place, call, done), name=f"replica-{number + place}",
                             daemon=True).start()
        limit_s = self.timeout_s + extra_s + GRACE_S
        deadline = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        while len(answers) < len(calls):
            try:
                place, answer, error = done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = [str(number + place) for place in range(len(calls)) if place not in answers]
                raise RefitError(f"replica {', '.join(late)}: no answer to {method} within {limit_s:g} s") from None
            if error is not None:
                raise RefitError(f"replica {number + place}: {format_error(error)}") from error
            answers[place] = answer
        return [answers[place] for place in range(len(calls))]


def one_client(replicas: Sequence[RolloutClient], timeout_s: float) -> RolloutClient:
    """Return the client of a single replica, or one client for all of them."""
    return replicas[0] if len(replicas) == 1 else Replicas(tuple(replicas), timeout_s)


def _run(place: int, call: Callable[[], Any], done: queue.SimpleQueue[tuple[int, Any, BaseException | None]]) -> None:
    try:
        answer = call()
    except Exception as error:  # of any kind: it is raised where the answers are waited for
        done.put((place, None, error))
    else:
        done.put((place, answer, None))


def prompt_size(prompt: dict[str, Any]) -> int:
    """Count the tokens of a prompt; the characters if it is text."""
    return len(prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"])


def share_out(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Assign prompts to replicas: equal numbers of prompts (they differ by one at most), then even totals of tokens.

    How long completions get is not known beforehand, so the number of prompts comes first.

    Args:
        sizes: of each prompt.
        count: replicas.

    Returns:
        Places of prompts, ascending, for each replica. The same for the same sizes.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        least = min(range(count), key=lambda replica: (len(shares[replica]), totals[replica], replica))
        shares[least].append(place)
        totals[least] += sizes[place]
    return [sorted(share) for share in shares]
