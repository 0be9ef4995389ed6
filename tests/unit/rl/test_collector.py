"""Answers that were drawn ahead: kept in a checkpoint, and used only for what they were drawn for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mimo.model.build import OPTIMIZER, WEIGHTS
from mimo.rl.collector import Collector, Pending, PromptCursor
from mimo.rl.offload import Devices, what_leaves
from mimo.rl.prompts import Prompt
from mimo.rollout.engine import Rollout
from mimo.watchdog.watchdog import Watchdog

GROUP = [Rollout((7, 2), (-0.5, -0.1), "3", "stop"), Rollout((8, 9), (-1.0, -2.0), "3", "length")]


def prompt(index, seed=0):
    return Prompt(f"p{index}", "?", (10 + seed, index), "truth", {})


def collector(cursor, mode="one-step-off", completions=2, seed=0):
    made = Collector.__new__(Collector)
    made.cursor = cursor
    made.config = SimpleNamespace(prompts_per_step=2,
                                  rollout=SimpleNamespace(rollout_mode=mode, rollout_timeout_s=60.0),
                                  rl=SimpleNamespace(completions_per_prompt=completions))
    made.source = SimpleNamespace(prompts=SimpleNamespace(prompt=lambda index: prompt(index, seed)))
    return made


def restored():
    before = PromptCursor(4, Pending([prompt(4).token_ids, prompt(5).token_ids], [GROUP, GROUP], "3", 1.5))
    after = PromptCursor()
    after.load_state_dict(before.streams(is_first_rank=True))
    assert after == before
    return after


def test_answers_of_a_checkpoint_are_those_that_were_drawn():
    drawn = collector(restored())._prefetched_answers()
    assert (drawn.first, drawn.version, drawn.seconds, drawn.answers) == (4, "3", 1.5, [GROUP, GROUP])
    assert [each.key for each in drawn.prompts] == ["p4", "p5"]


@pytest.mark.parametrize("changed", [{"mode": "sync"}, {"completions": 4}, {"seed": 1}])
def test_answers_to_other_questions_are_drawn_anew(changed):
    assert collector(restored(), **changed)._prefetched_answers() is None


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


def test_other_ranks_know_the_place_alone():
    after = PromptCursor()
    after.load_state_dict(PromptCursor(4, restored().pending).streams(is_first_rank=False))
    assert after == PromptCursor(4)


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
