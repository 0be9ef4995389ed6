"""A trainer that breaks its syncs with a live vLLM engine, and mends them; inside worker processes."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mimo.refit.options import RefitOptions
from mimo.refit.rendezvous import RefitError
from mimo.refit.sender import WeightSender
from mimo.rollout.process import EngineHandle
from tests.support import hf_families, refit
from tests.support.refit_faults import Watched


class Live:
    """This rank of a trainer that has loaded a saved model.

    Args:
        rank: rank in the world.
        parts: the trainer.
        handle: handle of the engine.
        options: options of syncs.
    """

    def __init__(self, rank: int, parts: Any, handle: EngineHandle, options: RefitOptions) -> None:
        from mimo.registry import model_provider

        self.rank, self.parts, self.handle, self.options = rank, parts, handle, options
        self.provider = model_provider(parts.config.model.model_provider)

    def connect(self) -> WeightSender:
        """Return a new sender."""
        from mimo.refit.sender import connect

        return connect(self.parts.built, self.parts.grids, self.provider, self.parts.config.model_family, self.handle,
                       self.handle.num_workers, self.options, address="127.0.0.1")

    def change(self, step: int) -> None:
        """Other weights in other memory."""
        with torch.no_grad():
            refit.change(self.parts, step)

    def theirs(self, prompts: list[list[int]]) -> list[list[float]]:
        """Return the engine's log-probs, on every rank."""
        found: list[Any] = [None]
        if self.rank == 0:
            found = [self.handle.prompt_logprobs([{"prompt_token_ids": tokens} for tokens in prompts])]
        dist.broadcast_object_list(found, src=0, group=self.parts.grids.host)
        answers: list[list[float]] = found[0]
        return answers

    def ours(self, prompts: list[list[int]]) -> list[list[float]]:
        """The trainer's, on every rank."""
        from tests.support.prompt_logprobs import prompt_logprobs

        return prompt_logprobs(self.parts, self.provider, prompts)

    def error_of(self, part: Callable[[], Any]) -> str:
        """Return the error that a call raised."""
        try:
            part()
        except (RefitError, ValueError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return ""


@contextmanager
def live(rank: int, name: str, folder: str, layout: tuple[str, ...], world_size: int, handle: EngineHandle,
         options: RefitOptions) -> Iterator[Live]:
    """A trainer with a saved model's weights."""
    refit.register()
    with hf_families.trainer_of(hf_families.flags_of(name, folder, layout), world_size) as parts:
        hf_families.load(parts, model=folder)
        yield Live(rank, parts, handle, options)


def struck(sender: WeightSender, strike: Callable[[], None], after: int) -> None:
    """Do something in the midst of the sender's next sync, when tensors were used so many times."""
    prepare = sender.weights.prepare
    uses = itertools.count(1)

    def prepared() -> Mapping[str, torch.Tensor]:
        return Watched(prepare(), lambda name: strike() if next(uses) == after else None)

    sender.weights.prepare = prepared  # type: ignore[method-assign]


def fail() -> None:
    """Fail on a rank during a sync."""
    raise OSError("made to fail")


def break_and_mend(rank: int, name: str, folder: str, layout: tuple[str, ...], world_size: int, handle: EngineHandle,
                   options: RefitOptions, prompts: list[list[int]]) -> dict[str, Any]:
    """A good sync, the same again, one that the last rank breaks, and a good one by a new sender.

    Returns:
        Log-probs of both sides at each step; `errors` of this rank; `refused`: what the engine says when asked.
    """
    found: dict[str, Any] = {"errors": []}
    with live(rank, name, folder, layout, world_size, handle, options) as trainer:
        sender = trainer.connect()
        sender.send("first")
        found["first"] = trainer.theirs(prompts), trainer.ours(prompts)
        sender.send("again")
        found["again"] = trainer.theirs(prompts)
        trainer.change(1)
        if rank == world_size - 1:
            struck(sender, fail, after=20)
        found["errors"].append(trainer.error_of(lambda: sender.send("broken")))
        dist.barrier(group=trainer.parts.grids.host)
        found["refused"] = trainer.error_of(lambda: handle.prompt_logprobs([{"prompt_token_ids": [1, 2]}]))
        sender = trainer.connect()
        sender.send("mended")
        found["mended"] = trainer.theirs(prompts), trainer.ours(prompts)
        sender.close()
    return found


def refused(rank: int, name: str, folder: str, layout: tuple[str, ...], world_size: int, handle: EngineHandle,
            options: RefitOptions) -> str:
    """Return the error of a trainer whose model is not the engine's."""
    with live(rank, name, folder, layout, world_size, handle, options) as trainer:
        return trainer.error_of(trainer.connect)


def killed(rank: int, name: str, folder: str, layout: tuple[str, ...], world_size: int, handle: EngineHandle,
           options: RefitOptions, pid: int) -> str:
    """Return this rank's error when the engine is killed during a sync."""
    with live(rank, name, folder, layout, world_size, handle, options) as trainer:
        sender = trainer.connect()
        if rank == 0:
            struck(sender, lambda: os.kill(pid, signal.SIGKILL), after=20)
        return trainer.error_of(lambda: sender.send("never"))


def largest(both: tuple[list[list[float]], list[list[float]]]) -> float:
    """Difference of two sides' log-probs."""
    return max(abs(theirs - ours) for pair in zip(*both, strict=True) for theirs, ours in zip(*pair, strict=True))
