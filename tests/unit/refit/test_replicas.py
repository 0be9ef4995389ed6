"""Several engines behind one client: how prompts are shared out, whose error it is, who waits for whom."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mimo.refit.rendezvous import RefitError
from mimo.rollout import replicas as replicas_module
from mimo.rollout.engine import Rollout, RolloutEngine, Sampling
from mimo.rollout.process import EngineHandle
from mimo.rollout.replicas import Replicas, one_client, share_out
from tests.support.echo_engine import engine_options
from tests.support.refit_faults import OPTIONS, Ranks, is_right, refuses

pytestmark = pytest.mark.timeout(60)
IMPATIENT = dataclasses.replace(OPTIONS, timeout_s=120)
SAMPLING = Sampling(max_tokens=4)


class Told:
    """A client that notes what it is told, and answers a prompt with its tokens; it may fail or never answer.

    Args:
        num_workers: number of workers of its engine.
    """

    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers = num_workers
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.error: Exception | None = None
        self.hangs = threading.Event()
        self.hangs.set()

    def note(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, arguments))
        self.hangs.wait()
        if self.error is not None:
            raise self.error

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.note("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.note("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.note("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.note("finish_weight_update", weight_version)

    def load_from_disk(self, folder: str, version: str | None = None, timeout_s: float = 600.0) -> str:
        self.note("load_from_disk", folder, version)
        return version or f"newest of {id(self)}"

    def generate(self, prompts: Sequence[dict[str, Any]], sampling: Sampling,
                 seeds: Sequence[int] = ()) -> list[list[Rollout]]:
        self.note("generate", list(seeds))
        return [[Rollout(tuple(prompt["prompt_token_ids"]), tuple(map(float, seeds[place:place + 1])), "1", "stop")]
                for place, prompt in enumerate(prompts)]

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        self.note("prompt_logprobs")
        return [[float(token) for token in prompt["prompt_token_ids"]] for prompt in prompts]

    def sleep(self) -> None:
        self.note("sleep")

    def wake_up(self, *tags: str) -> None:
        self.note("wake_up", *tags)


def prompts_of(*sizes: int) -> list[dict[str, Any]]:
    """Prompts of so many tokens, each of which is the prompt's place."""
    return [{"prompt_token_ids": [place] * size} for place, size in enumerate(sizes)]


@pytest.fixture
def three() -> Iterator[tuple[Told, Told, Told]]:
    """Engines of two, one and three workers; who hangs is let go at the end."""
    made = Told(2), Told(), Told(3)
    yield made
    for each in made:
        each.hangs.set()


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 6))
def test_every_prompt_goes_to_one_replica_and_the_shares_are_even(sizes: list[int], count: int) -> None:
    shares = share_out(sizes, count)
    assert sorted(place for share in shares for place in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    totals = [sum(sizes[place] for place in share) for share in shares]
    assert max(totals) - min(totals) <= max(sizes, default=0), "no more apart than the longest prompt"
    assert shares == share_out(list(sizes), count)


def test_long_prompts_do_not_all_go_to_one_replica() -> None:
    assert share_out([9, 1, 9, 1, 9, 1, 9, 1], 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert share_out([], 2) == [[], []]


def test_answers_come_back_in_order_with_the_seeds_of_their_prompts(three: tuple[Told, Told, Told]) -> None:
    client, prompts = Replicas(three), prompts_of(3, 1, 4, 1, 5, 2, 6)
    answers = client.generate(prompts, SAMPLING, [10, 11, 12, 13, 14, 15, 16])
    assert [answer.token_ids for answer, in answers] == [tuple(each["prompt_token_ids"]) for each in prompts]
    assert [answer.logprobs for answer, in answers] == [(10 + place,) for place in range(7)]
    assert sorted(len(each.calls[0][1][0]) for each in three) == [2, 2, 3]
    assert client.prompt_logprobs(prompts) == [[float(place)] * size for place, size in
                                               enumerate((3, 1, 4, 1, 5, 2, 6))]
    assert [answer.token_ids for answer, in client.generate(prompts, SAMPLING)][2] == (2, 2, 2, 2)


def test_seeds_that_are_not_one_a_prompt_are_refused(three: tuple[Told, Told, Told]) -> None:
    with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
        Replicas(three).generate(prompts_of(1, 1, 1), SAMPLING, [1, 2])


def test_every_replica_learns_the_numbers_of_its_workers(three: tuple[Told, Told, Told]) -> None:
    client = Replicas(three)
    assert client.num_workers == 6
    client.init_weight_transfer_engine({"address": "here", "port": 1, "timeout_s": 2})
    assert [each.calls[0][1][0] for each in three] == [
        {"address": "here", "port": 1, "timeout_s": 2, "first_worker": first} for first in (0, 2, 3)]


def test_calls_reach_all_replicas_at_the_same_time(three: tuple[Told, Told, Told]) -> None:
    for each in three:
        each.hangs.clear()
    running = threading.Thread(target=Replicas(three).update_weights, args=({"sync": 1},), daemon=True)
    running.start()
    deadline = time.monotonic() + 20
    while not all(each.calls for each in three) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [each.calls for each in three] == [[("update_weights", ({"sync": 1},))]] * 3
    for each in three:
        each.hangs.set()
    running.join(20)
    assert not running.is_alive()


@pytest.mark.parametrize("error", [RefitError("the weights are of another model"), OSError("made to fail")])
def test_the_replica_that_fails_is_named_and_the_others_are_not_waited_for(three, error):
    three[1].error = error
    three[2].hangs.clear()
    with pytest.raises(RefitError, match=f"^replica 1: .*{error}$"):
        Replicas(three).start_weight_update()


def test_a_replica_that_does_not_answer_is_named_in_time(three, monkeypatch):
    monkeypatch.setattr(replicas_module, "GRACE_S", 0.2)
    three[0].hangs.clear()
    three[2].hangs.clear()
    with pytest.raises(RefitError, match=r"^replica 0, 2: no answer to finish_weight_update within 0\.4 s$"):
        Replicas(three, timeout_s=0.2).finish_weight_update("7")


def test_a_replica_that_answers_too_few_prompts_is_named(three, monkeypatch):
    monkeypatch.setattr(three[1], "prompt_logprobs", lambda prompts: [])
    with pytest.raises(RefitError, match="replica 1: 0 answers of prompt_logprobs to 2 prompts"):
        Replicas(three).prompt_logprobs(prompts_of(1, 1, 1, 1, 1))


def test_all_replicas_load_the_weights_that_the_first_one_found(three: tuple[Told, Told, Told]) -> None:
    loaded = Replicas(three).load_from_disk("folder")
    assert loaded == f"newest of {id(three[0])}"
    assert [each.calls for each in three] == [[("load_from_disk", ("folder", version))]
                                              for version in (None, loaded, loaded)]
    three[2].error = RefitError("no such version")
    with pytest.raises(RefitError, match="^replica 2: no such version"):
        Replicas(three).load_from_disk("folder", "7")


def test_replicas_that_share_experts_all_take_part(three: tuple[Told, Told, Told]) -> None:
    for in_step, called in ((False, [1, 0, 0]), (True, [1, 1, 1])):
        for each in three:
            each.calls.clear()
        Replicas(three, in_step=in_step).prompt_logprobs(prompts_of(1))
        assert [len(each.calls) for each in three] == called
    with pytest.raises(RefitError, match="load_from_disk here: replicas that share experts take weights from a refit"):
        Replicas(three, in_step=True).load_from_disk("here")


def test_the_rest_of_an_engine_reaches_every_replica(three: tuple[Told, Told, Told]) -> None:
    client = Replicas(three)
    client.sleep()
    client.wake_up("weights")
    assert [each.calls for each in three] == [[("sleep", ()), ("wake_up", ("weights",))]] * 3


def test_one_replica_needs_no_client_around_its_own() -> None:
    alone = Told()
    assert one_client([alone], 1.0) is alone
    with pytest.raises(ValueError, match="an engine needs a replica"):
        Replicas(())
    handle = EngineHandle(("127.0.0.1", 5), b"key", 1)
    with pytest.raises(ValueError, match="replica 2 is replica 0 again"):
        Replicas((handle, dataclasses.replace(handle, address=("127.0.0.1", 6)), EngineHandle(*handle_fields(handle))))
    other = Replicas((handle, dataclasses.replace(handle, address=("127.0.0.1", 6))))
    assert pickle.loads(pickle.dumps(other)) == other


def handle_fields(handle: EngineHandle) -> tuple[tuple[str, int], bytes, int]:
    return handle.address, handle.key, handle.num_workers


@pytest.mark.usefixtures("plain_engine")
def test_every_replica_has_the_weights_after_every_refit() -> None:
    engines = RolloutEngine(engine_options(2)), RolloutEngine(engine_options())
    client, ranks = Replicas(engines), Ranks.of(2)
    assert ranks.connect(client, client.num_workers, dataclasses.replace(IMPATIENT, verify=True)) == [None, None]
    for seed in range(2):
        ranks.set(seed)
        assert [report.version for report in ranks.send(f"policy {seed}")] == [f"policy {seed}"] * 2
        assert all(is_right(engine, seed) and engine.version == f"policy {seed}" for engine in engines)
        assert is_right(client, seed)


@pytest.mark.usefixtures("plain_engine")
def test_a_replica_with_the_numbers_of_another_is_refused_by_name() -> None:
    class Same(Replicas):
        """Gives every replica the numbers of the first."""

        @property
        def first_workers(self) -> list[int]:
            return [0 for _ in self.replicas]

    engines = RolloutEngine(engine_options()), RolloutEngine(engine_options())
    raised = Ranks.of(1).connect(Same(engines), 2, IMPATIENT)
    assert "worker 0 is there twice, as process " in str(raised[0]), raised
    assert all(map(refuses, engines))


@pytest.mark.usefixtures("plain_engine")
def test_more_workers_than_the_trainer_counts_are_refused() -> None:
    engines = RolloutEngine(engine_options()), RolloutEngine(engine_options())
    raised = Ranks.of(1).connect(Replicas(engines), 1, IMPATIENT)
    assert "worker 1: the trainer sends to 1 workers, numbered from 0" in str(raised[0]), raised


@pytest.mark.usefixtures("plain_engine")
def test_a_refit_that_one_replica_refuses_leaves_none_serving() -> None:
    engines = RolloutEngine(engine_options()), RolloutEngine(engine_options())
    client, ranks = Replicas(engines), Ranks.of(2)
    ranks.connect(client, 2, IMPATIENT)
    ranks.send("policy")
    with torch.no_grad():
        # Its parameter has another shape than it had when the plan was made.
        engines[1]._llm.workers[0].model.head.weight = torch.nn.Parameter(torch.zeros(3, 3))
    raised = ranks.send("broken")
    assert all("worker 1" in str(each) for each in raised), raised
    assert all(map(refuses, engines))
