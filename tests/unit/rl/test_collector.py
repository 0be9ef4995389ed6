"""Answers that were drawn ahead: kept in a checkpoint, and used only for what they were drawn for."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mimo.model.build import OPTIMIZER, WEIGHTS
from mimo.refit.options import RefitReport
from mimo.rl.collector import STREAM, Collector, PromptCursor
from mimo.rl.images import ImageTokens
from mimo.rl.offload import Devices, what_leaves
from mimo.rl.probe import Expected
from mimo.rl.prompts import Prompt
from mimo.rl.rollouts import RolloutSource, rollout_metrics
from mimo.rollout.engine import Rollout, Sampling
from mimo.watchdog.watchdog import Watchdog

GROUP = [Rollout((7, 2), (-0.5, -0.1), "3", "stop"), Rollout((8, 9), (-1.0, -2.0), "3", "length")]


class Prompts:
    end_token_id, pad_token_id = 2, 0

    def __init__(self, seed=0, level=7, truth="truth"):
        self.seed, self.level, self.truth = seed, level, truth

    def prompt(self, index):
        picture = np.full((4, 4, 3), self.level, np.uint8)
        return Prompt(f"p{index}", "?", (10 + self.seed, index, 12), self.truth, {}, ((4, 4),), lambda: [picture])

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))


class Engine:
    def __init__(self):
        self.asked = []

    def generate(self, requests, sampling, seeds=()):
        self.asked.append(len(requests))
        return [[*GROUP] for _ in requests]


def collector(cursor, mode="one-step-off", prompts=None, **sampling):
    made = Collector.__new__(Collector)
    made.cursor, made.watchdog, made.grids = cursor, Watchdog(0, "rank 0"), None
    made.config = SimpleNamespace(prompts_per_step=2, rl=SimpleNamespace(max_refills=0),
                                  rollout=SimpleNamespace(rollout_mode=mode, rollout_timeout_s=60.0))
    images = ImageTokens({"vision": 12}, lambda module, height, width: 1, 3)
    made.source = RolloutSource(Engine(), prompts or Prompts(), lambda _, __, truth, ___: float(truth == "truth"),
                                "own", replace(Sampling(max_tokens=4, n=2), **sampling), 10, lambda: None,
                                images=images)
    made._version, made._engine_limit_s, made.waited_s = 3, 60.0, 0.0
    made._drained = made._prefetched = None
    return made


@pytest.fixture
def drained(monkeypatch):
    """A collector whose engine has answered the prompts of the next iteration."""
    monkeypatch.setattr("mimo.rl.collector.broadcast_object", lambda _, value: value)
    made = collector(PromptCursor(4))
    made.refit = lambda iteration: None
    made.prefetch()
    made.drain(4)
    made.watchdog.close()
    return made


@pytest.fixture
def restored(drained):
    after = PromptCursor()
    after.load_state_dict(drained.cursor.streams(is_first_rank=True))
    assert after == drained.cursor and after.pending is not None
    return after


def test_answers_that_were_drawn_ahead_are_taken_once(drained):
    ahead = drained._prefetched_answers()
    assert (ahead.indices, ahead.version, ahead.answers) == ((4, 5), "3", [GROUP, GROUP])
    drained.cursor = PromptCursor(6)
    assert drained._prefetched_answers() is None and drained.source.engine.asked == [2]


def test_answers_of_a_checkpoint_are_those_that_were_drawn(drained, restored):
    resumed = collector(restored)
    drawn = resumed._prefetched_answers()
    assert (drawn.indices, drawn.version, drawn.seconds) == ((4, 5), "3", restored.pending.seconds)
    assert drawn.answers == [GROUP, GROUP] and [each.key for each in drawn.prompts] == ["p4", "p5"]
    assert resumed.source.score(drawn).completions == drained.source.score(drained._prefetched_answers()).completions


@pytest.mark.parametrize("changed", [
    {"mode": "sync"}, {"n": 4}, {"temperature": 0.5}, {"top_p": 0.9}, {"max_tokens": 3},
    {"prompts": Prompts(seed=1)}, {"prompts": Prompts(level=8)}])
def test_answers_to_other_questions_are_drawn_anew(restored, changed):
    assert collector(restored, **changed)._prefetched_answers() is None


def test_answers_of_a_checkpoint_are_scored_by_the_ground_truth_of_now(restored):
    resumed = collector(restored, prompts=Prompts(truth="another"))
    assert {each.reward for each in resumed.source.score(resumed._prefetched_answers()).completions} == {0.0}


class Named(Prompts):
    def prompt(self, index):
        return replace(super().prompt(index), metadata={"place": index})


class Six(Named):
    num_prompts = 6

    def leave_out(self, keys):
        raise AssertionError("nothing is left out")

    def prompt(self, index):
        return super().prompt(index % 6)


def filling(refills, prompts, cursor):
    """A collector of batches of three prompts. The completions of prompts 4, 5 and 7 all have the same reward."""
    def reward(prompt, completion, ground_truth, metadata):
        return 1.0 if metadata["place"] in (4, 5, 7) else float(metadata["finish_reason"] == "stop")

    made = collector(cursor, "sync", prompts)
    made.config.prompts_per_step, made.config.rl.max_refills, made.source.reward = 3, refills, reward
    made._batch_limit_s, made._finish_rollouts = 60.0, lambda: None
    return made


@pytest.mark.parametrize(("refills", "asked", "batch"), [
    (0, [3], "345"), (1, [3, 2], "346"), (2, [3, 2, 1], "368"), (9, [3, 2, 1], "368")])
def test_further_prompts_replace_those_that_teach_nothing(monkeypatch, refills, asked, batch):
    monkeypatch.setattr("mimo.rl.collector.broadcast_object", lambda _, value: value)
    monkeypatch.setattr("mimo.rl.collector.broadcast_outcome", lambda _, value, failure: value)
    made = filling(refills, Named(), PromptCursor(3))
    found, after = made.collect(3, num_shown=2), made.collect(3)
    made.watchdog.close()
    assert made.source.engine.asked[:len(asked)] == asked and found.num_asked == sum(asked)
    assert [each.key for each in found.completions] == [f"p{place}#{number}" for place in batch for number in range(2)]
    assert [each.prompt for each in found.completions] == [0, 0, 1, 1, 2, 2]
    assert [each.key for each in found.shown] == [f"p{batch[0]}", f"p{batch[1]}"]
    # The next iteration goes on behind all prompts that were asked for, also if the first of them is not in its batch.
    assert made.cursor.first == 3 + found.num_asked + after.num_asked
    # Two of three, three of five and three of six prompts teach nothing.
    figures = found.figures or rollout_metrics(found)
    assert figures["equal-reward-prompts"] == pytest.approx({3: 2 / 3, 5: 3 / 5, 6: 3 / 6}[sum(asked)])


def test_no_prompt_is_asked_for_twice_in_a_batch_of_a_small_set():
    made = filling(9, Six(), PromptCursor(3))
    found = made._batch(made.source, None, 0)
    made.watchdog.close()
    # Prompts 3, 4 and 5, then 0 and 1, which are of the next epoch.
    assert made.source.engine.asked == [3, 2]
    assert [each.index for each in found.completions] == [3, 3, 6, 6, 7, 7]


class DevicesOfASleepingEngine(Devices):
    """Devices whose engine loses its weights while the trainer trains."""

    @property
    def keeps_weights(self):
        return False


@pytest.mark.parametrize(("devices", "version"), [(Devices(), 3), (DevicesOfASleepingEngine(), None)])
def test_only_an_engine_that_lost_its_weights_gets_them_again(devices, version):
    made = collector(PromptCursor())
    made.devices, made.watchdog, made.probe, made._version = devices, Watchdog(0, "rank 0"), None, 3
    made._engine_limit_s = 1.0
    made._finish_rollouts()
    made.watchdog.close()
    assert made._version == version, "the version that `refit` need not send again"


def test_other_ranks_know_the_place_alone(restored):
    after = PromptCursor()
    after.load_state_dict(PromptCursor(4, restored.pending).streams(is_first_rank=False))
    assert after == PromptCursor(4)


def test_scales_of_the_cache_are_in_a_checkpoint_and_go_with_each_refit(monkeypatch):
    monkeypatch.setattr("mimo.rl.collector.broadcast_object", lambda _, value: value)
    before, after = PromptCursor(4, kv_scales={1: (0.5, 2.0, 1.5), 7: (3.0, 4.0, 1.0)}), PromptCursor()
    after.load_state_dict(json.loads(json.dumps(before.streams(is_first_rank=True))))
    assert after == before
    older, without_queries = {"prompts": 4, "pending": None}, PromptCursor()
    without_queries.load_state_dict(
        {"consumed_samples": 4, "streams": {STREAM: older | {"kv_scales": [[7, 3.0, 4.0]]}}})
    assert without_queries.kv_scales == {7: (3.0, 4.0, 1.0)}
    after.load_state_dict({"consumed_samples": 4, "streams": {STREAM: older}})
    sent, made = [], collector(after)
    made.sender = SimpleNamespace(kv_scales=None, verify=False, is_changed=False)

    def send(version):
        sent.append(made.sender.kv_scales)
        return RefitReport(version, seconds={"total": 0.0})

    made.sender.send = send
    made.devices, made.report, made.refit_s, made._num_refits, made._refit_limit_s = Devices(), None, 0.0, 0, 60.0
    made.config.rollout.engine_kv_scales, made.config.rollout.refit_verify_interval = "calibrated", 2
    made.verify_s, made._compare = 0.0, lambda *_: None
    scrambled = Expected([], [], 1.0, {1: (9.0, 9.0)})
    made.probe = SimpleNamespace(expect=lambda: Expected([], [], 1.0, {1: (8.0, 8.0)}),
                                 scrambled=lambda: nullcontext(scrambled))
    for iteration in (4, 5):
        made.refit(iteration)
        after.kv_scales = {1: (0.25, 0.25)}
    made.watchdog.close()
    assert sent == [scrambled.kv_scales, before.kv_scales, {1: (0.25, 0.25)}]


def test_streams_of_another_program_are_refused():
    with pytest.raises(ValueError, match="this checkpoint is from train_hetero.py; --finetune starts a new run"):
        PromptCursor().load_state_dict({"consumed_samples": 3, "streams": {"language/0": {"next": 3}}})


@pytest.mark.parametrize(("refit_room", "rollout_room", "state", "weights"), [
    (0, 0, 0, 0), (0, -1, 1, 0), (0, -60, 60, 0), (0, -61, 60, 10), (0, -90, 60, 10), (-1, 0, 1, 0), (-1, -9, 9, 0),
    (-9, -1, 9, 0), (-61, -61, 60, 10), (-61, -60, 60, 0),
])
def test_what_leaves_a_shared_device(refit_room, rollout_room, state, weights):
    """A refit needs the trainer's weights, so that moving them later makes no room for it."""
    assert what_leaves(refit_room, rollout_room, {OPTIMIZER: 60, WEIGHTS: 10}) == {OPTIMIZER: state, WEIGHTS: weights}
