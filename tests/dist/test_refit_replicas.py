"""Live engines that are several, and one under Ray: the same answers as those of one in a child process."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from mimo.refit.options import RefitOptions
from mimo.refit.rendezvous import RefitError
from mimo.rollout.engine import EngineOptions, Rollout, Sampling
from mimo.rollout.process import EngineProcess, leave_launcher, start_processes
from mimo.rollout.replicas import Replicas
from tests.dist.test_refit import MAX_ERROR, OPTIONS
from tests.support import refit
from tests.support.spawn import WorkerPool

DRAWN = Sampling(max_tokens=8, temperature=1.0, n=2, ignore_eos=True)


def draw(client: Any, prompts: dict[str, list[int]]) -> list[list[Rollout]]:
    """Completions of each prompt, from a seed of its own."""
    answers: list[list[Rollout]] = client.generate([{"prompt_token_ids": tokens} for tokens in prompts.values()], DRAWN,
                                                   list(range(len(prompts))))
    return answers


@dataclass
class UnderRay:
    """A trainer's view of its engine under Ray.

    Attributes:
        steps: as `tests.support.refit.sync`.
        drawn: completions after the last one.
        error: error of a call after its process was killed.
        seconds: that this call took.
        signal_is_kept: whether SIGTERM still has the handler of before.
        left: command lines of processes that are there after the end.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    drawn: list[list[Rollout]] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    signal_is_kept: bool = False
    left: list[str] = field(default_factory=list)


def sync_under_ray(rank: int, name: str, folder: str, engine: EngineOptions, options: RefitOptions,
                   prompts: dict[str, list[int]], steps: int) -> UnderRay:
    """Start an engine under a Ray of this process, give it weights, ask it, kill it, end Ray."""
    from mimo.rl.placement import forwarded
    from mimo.rollout.ray_actors import RayCluster, RayEngines

    before = signal.getsignal(signal.SIGTERM)
    started = RayEngines([engine], RayCluster(""), "CPU", 900, 300, forwarded(os.environ), leave_launcher, "127.0.0.1")
    found = UnderRay()
    try:
        found.signal_is_kept = signal.getsignal(signal.SIGTERM) == before
        client: Any = started.client
        process = psutil.Process(int(re.findall(r"process (\d+)", client.name)[0]))
        found.steps = refit.sync(rank, name, folder, (), 1, client, options, prompts, steps)
        found.drawn = draw(client, prompts)
        process.kill()
        began = time.monotonic()
        try:
            draw(client, prompts)
        except RefitError as error:
            found.error = str(error)
        found.seconds = time.monotonic() - began
    finally:
        children = psutil.Process().children(recursive=True)
        started.close()
    gone, left = psutil.wait_procs(children, timeout=30)
    assert gone, "Ray has processes"
    found.left = [" ".join(each.cmdline()) for each in left]
    return found


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


@pytest.mark.parametrize("tp", [1, 2])
def test_replicas_that_share_experts_are_one_engine(tp: int, pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(refit.save, NAME, str(tmp_path), world_size=1, timeout_s=600)
    prompts = pool.run(refit.prompts_of, NAME, str(tmp_path), world_size=1)[0]
    options = dataclasses.replace(refit.engine_options(tmp_path, tp), data_parallel_size=2)
    processes = start_processes([options, dataclasses.replace(options, data_parallel_rank=1)], 900)
    try:
        client = Replicas(tuple(each.handle for each in processes), in_step=True)
        steps = pool.run(refit.sync, NAME, str(tmp_path), ("--llm-tp", "2", "--sequence-parallel"), 2, client, OPTIONS,
                         prompts, 3, world_size=2, timeout_s=600)
        for step in range(3):
            ours = {key: each for rank in steps for key, each in rank[step]["ours"].items()}
            for key, mine in ours.items():
                difference = mine - torch.tensor(steps[0][step]["theirs"][key])
                assert float(difference.abs().max()) <= MAX_ERROR, (step, key)
        if tp == 1:
            # Both replicas take every tensor, but half of each expert. Where vLLM packs experts for this kind of CPU,
            # its loader needs whole ones.
            report = steps[0][-1]["report"]
            sizes = {name: tensor.nbytes for name, tensor in load_file(tmp_path / "model.safetensors").items()}
            experts = sum(size for name, size in sizes.items() if ".experts." in name)
            halves = experts if report.direct_bytes > experts else 0
            assert report.wire_bytes == 2 * sum(sizes.values()) - halves > 2 * experts
        # The second replica has no prompt, and computes its part of the experts all the same.
        key, tokens = next(iter(prompts.items()))
        asked = [{"prompt_token_ids": tokens}]
        assert client.prompt_logprobs(asked)[0] == pytest.approx(steps[0][-1]["theirs"][key], abs=1e-5)
        [[one, other]] = client.generate(asked, DRAWN, [5])
        assert (one.version, len(one.token_ids), len(other.token_ids)) == ("step 2", 8, 8)
    finally:
        for process in processes:
            process.close()


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
