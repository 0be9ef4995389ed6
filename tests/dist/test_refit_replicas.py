"""Live engines that are several, and one under Ray: the same answers as those of one in a child process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.refit.rendezvous import RefitError
from mimo.rollout.engine import Rollout
from mimo.rollout.process import EngineProcess, start_processes
from mimo.rollout.replicas import Replicas
from tests.dist.test_refit import MAX_ERROR, OPTIONS
from tests.support import refit
from tests.support.refit_replicas import draw, sync_under_ray
from tests.support.spawn import WorkerPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NAME = "refit-qwen3-moe"
STEPS = 2


@dataclass
class Case:
    """Two replicas after two refits from a trainer of two ranks.

    Attributes:
        folder: folder of the saved model.
        prompts: by key.
        processes: processes of the replicas.
        steps: what the trainer's ranks saw.
    """

    folder: Path
    prompts: dict[str, list[int]]
    processes: list[EngineProcess]
    steps: list[list[dict[str, Any]]]

    @property
    def client(self) -> Replicas:
        """Client of both replicas."""
        return Replicas(tuple(each.handle for each in self.processes))


@pytest.fixture(scope="module")
def case(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(NAME)
    pool.run(refit.save, NAME, str(folder), world_size=1, timeout_s=600)
    prompts = pool.run(refit.prompts_of, NAME, str(folder), world_size=1)[0]
    options = refit.engine_options(folder)
    processes = start_processes([options, dataclasses.replace(options, seed=1)], 900)
    try:
        made = Case(folder, prompts, processes, [])
        made.steps = pool.run(refit.sync, NAME, str(folder), ("--llm-tp", "2", "--sequence-parallel"), 2, made.client,
                              OPTIONS, prompts, STEPS, world_size=2, timeout_s=600)
        yield made
    finally:
        for process in processes:
            process.close()


def tokens_of(drawn: list[list[Rollout]]) -> list[tuple[int, ...]]:
    return [answer.token_ids for group in drawn for answer in group]


def test_both_replicas_have_the_weights_after_every_refit(case: Case) -> None:
    for step in range(STEPS):
        ours = {key: each for rank in case.steps for key, each in rank[step]["ours"].items()}
        theirs = case.steps[0][step]["theirs"]  # of both replicas, each of some prompts
        assert ours.keys() == theirs.keys() == case.prompts.keys()
        for key, mine in ours.items():
            assert float((mine - torch.tensor(theirs[key])).abs().max()) <= MAX_ERROR, (step, key)
    asked = [{"prompt_token_ids": tokens} for tokens in case.prompts.values()]
    for process in case.processes:
        own = process.handle.prompt_logprobs(asked)
        for mine, each in zip(own, case.client.prompt_logprobs(asked), strict=True):
            assert mine == pytest.approx(each, abs=1e-6)


def test_completions_are_those_of_one_replica_whoever_draws_them(case: Case) -> None:
    together = draw(case.client, case.prompts)
    assert {answer.version for group in together for answer in group} == {f"step {STEPS - 1}"}
    assert len(set(tokens_of(together))) > 1
    for process in case.processes:
        alone = draw(process.handle, case.prompts)
        assert tokens_of(alone) == tokens_of(together)
        for one, other in zip(alone, together, strict=True):
            assert one[0].logprobs == pytest.approx(other[0].logprobs, abs=1e-5)


def test_an_engine_under_ray_answers_as_one_in_a_child_process(pool: WorkerPool, case: Case) -> None:
    found = pool.run(sync_under_ray, NAME, str(case.folder), refit.engine_options(case.folder), OPTIONS, case.prompts,
                     STEPS, world_size=1, timeout_s=1200)[0]
    for step in range(STEPS):
        for key, mine in found.steps[step]["ours"].items():
            assert float((mine - torch.tensor(found.steps[step]["theirs"][key])).abs().max()) <= MAX_ERROR, (step, key)
    assert tokens_of(found.drawn) == tokens_of(draw(case.processes[0].handle, case.prompts))
    assert found.signal_is_kept
    assert "(a Ray actor) has ended: generate got no answer" in found.error and found.seconds < 60
    assert found.left == []


def test_a_replica_that_is_killed_is_named(case: Case) -> None:
    """The last test of these processes."""
    case.processes[1].process.kill()
    case.processes[1].process.join()
    with pytest.raises(RefitError, match=r"^replica 1: the engine at 127\.0\.0\.1:\d+ has ended: generate"):
        draw(case.client, case.prompts)
