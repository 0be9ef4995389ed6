"""Prompts that leave no room for a completion: refused before a run begins, or left out."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mimo.checkpoint.state import Progress
from mimo.config.cli import parse_as
from mimo.config.rl_run import RlRunConfig
from mimo.rl import loop
from mimo.rl.collector import PromptCursor
from mimo.rl.images import ImageTokens
from mimo.rl.loop import RlLoop
from mimo.rl.prompts import BadPromptError, Prompt
from mimo.rl.rollouts import Measured, check_num_held_out, fit_prompts

IMAGE = 3
IMAGES = ImageTokens({"vision": IMAGE}, lambda module, height, width: height * width, 1)


class Endless:
    """Prompt `index` has `index + 1` tokens."""

    end_token_id, pad_token_id = 2, 0

    def prompt(self, index):
        return Prompt(f"p{index}", "?", (9,) * (index + 1), "")

    def decode(self, token_ids):
        return ""


class Finite(Endless):
    """Prompts of some lengths, with an image of two tokens each where asked."""

    def __init__(self, lengths, images=False):
        self.lengths, self.images = dict(enumerate(lengths)), images

    @property
    def num_prompts(self):
        return len(self.lengths)

    def leave_out(self, keys):
        self.lengths = {number: length for number, length in self.lengths.items() if f"p{number}" not in keys}

    def prompt(self, index):
        number = list(self.lengths)[index % len(self.lengths)]
        image = {"image_sizes": ((1, 2),)} if self.images else {}
        ids = (9,) * (self.lengths[number] - self.images) + (IMAGE,) * self.images
        return Prompt(f"p{number}", "?", ids, "", **image)


def config(*flags):
    given = ["--model-provider", "causal_lm", "--seq-length", "20", "--max-completion-tokens", "12", *flags]
    return parse_as(RlRunConfig, given, "")


def test_long_prompts_that_a_run_comes_to_are_refused_in_one_error():
    prompts = Finite([3, 8, 9, 4, 30, 8])
    with pytest.raises(ValueError) as found:
        fit_prompts(prompts, "train", config(), None, 100)
    assert str(found.value) == (
        "2 of 6 prompts of the train split of arithmetic have more than the 8 tokens that --seq-length 20 leaves "
        "beside --max-completion-tokens 12; the longest, p4, has 30: give --seq-length 42 or more, or "
        "--skip-long-prompts")
    with pytest.raises(ValueError, match="^1 of 4 prompts of the valid split .* p2, has 9: give --seq-length 21 or"):
        fit_prompts(prompts, "valid", config(), None, 4)
    assert fit_prompts(prompts, "train", config(), None, 2) == Measured(has_videos=False), "no prompt has a video"
    assert prompts.num_prompts == 6


class WithBad(Finite):
    """Prompts without a length cannot be used."""

    max_bad_samples = 2

    def prompt(self, index):
        number = list(self.lengths)[index % len(self.lengths)]
        if self.lengths[number] is None:
            raise BadPromptError(f"line:{number}: has no answer", f"p{number}")
        return super().prompt(index)


def test_prompts_that_cannot_be_used_are_left_out_and_others_are_measured_in_their_place(caplog):
    prompts = WithBad([3, None, 4, 8, None, 9, 3])
    found = fit_prompts(prompts, "train", config(), None, 2)
    assert found == Measured(False, ("p1",), 1) and list(prompts.lengths) == [0, 2, 3, 4, 5, 6]
    assert "a prompt cannot be used, it is left out: line:1: has no answer" in caplog.text
    # A longer run finds more of them, and the prompts before these keep their places.
    again = WithBad([3, None, 4, 8, None, 3, 9])
    assert fit_prompts(again, "train", config(), None, 4) == Measured(False, ("p1", "p4"), 2)
    assert list(again.lengths)[:3] == list(prompts.lengths)[:3] == [0, 2, 3]
    with pytest.raises(ValueError, match="^1 of 5 prompts of the train split .* p5, has 9"):
        fit_prompts(prompts, "train", config(), None, 4, num_measured=2, num_bad=1)
    assert fit_prompts(WithBad([3, None, 30, None]), "train", config("--skip-long-prompts"), None, 1) == Measured(
        False, ("p1", "p3", "p2"), 2)


def test_too_many_prompts_that_cannot_be_used_end_a_run():
    expected = "^--max-bad-samples 2: 3 prompts of the run could not be used; the last: line:2: has no answer"
    with pytest.raises(ValueError, match=expected):
        fit_prompts(WithBad([None, None, None, 4]), "train", config(), None, 1)
    with pytest.raises(ValueError, match=expected):
        fit_prompts(WithBad([4, 4, None, 4]), "train", config(), None, 3, num_bad=2)
    with pytest.raises(ValueError, match="^none of the 2 prompts of the valid split of arithmetic can be used"):
        fit_prompts(WithBad([None, None]), "valid", config(), None, 1)


def test_prompts_that_were_found_to_fit_are_not_measured_again():
    prompts = Finite([3, 9, 4, 30, 8])
    assert fit_prompts(prompts, "train", config(), None, 3, num_measured=2) == Measured(has_videos=False)
    with pytest.raises(ValueError, match="^1 of 5 prompts of the train split .* p3, has 30"):
        fit_prompts(prompts, "train", config(), None, 100, num_measured=2)
    fit_prompts(prompts, "train", config(), None, 100, num_measured=50)


def set_up(monkeypatch, lengths, cursor, iteration, *flags):
    """Set up a run of 2 prompts an iteration, from a checkpoint of an iteration, and return whether it has videos."""
    class Data(Finite):
        def open(self, *_):
            return self

        def prompt(self, index):
            # The last prompt has a video.
            videos = (None,) if index % self.num_prompts == len(lengths) - 1 else ()
            return replace(super().prompt(index), videos=videos)

    run = RlLoop.__new__(RlLoop)
    run.config = config("--global-batch-size", "8", "--completions-per-prompt", "4", "--train-iters", "4", *flags)
    run.grids = SimpleNamespace(rank=0, layout=SimpleNamespace(encoders=()))
    run.provider = SimpleNamespace(token_spec=lambda _: None)
    run.platform, run.cursor, run.prompt_provider = None, PromptCursor(), Data(lengths)
    run.watchdog = SimpleNamespace(on_files=lambda *_, **__: nullcontext())
    run.session = SimpleNamespace(total_iterations=4, progress=Progress())

    def resume(*_):
        run.session.progress, run.cursor.first = Progress(iteration), cursor
        return []

    run.session.resume = resume
    built = SimpleNamespace(built=SimpleNamespace(model=None), optimizer=None, scheduler=None)
    for name, stands_in in {"setup_trainer": lambda *_: built, "RunState": lambda *_: None,
                            "reference_policy": lambda *_, **__: (None, []), "shared_errors": lambda _: nullcontext(),
                            "get_model_config": lambda _: None, "layout_note": lambda *_, **__: None}.items():
        monkeypatch.setattr(loop, name, stands_in)
    run._set_up()
    return run._has_videos


def test_a_folder_in_place_of_the_runs_is_refused_before_prompts_are_measured(monkeypatch, tmp_path):
    (tmp_path / "engine" / "src").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"^--run-dir {tmp_path}: .* was not written by it"):
        set_up(monkeypatch, [30], 0, 0, "--run-dir", str(tmp_path))


def test_a_resumed_run_measures_the_prompts_that_it_comes_to(monkeypatch):
    """The checkpoint may be of a run with a larger batch. A new run of these flags would come to 8 prompts."""
    long_one = [3] * 10 + [9] + [3] * 9
    for cursor, iteration in ((0, 0), (2, 1), (6, 2), (10, 4)):
        assert set_up(monkeypatch, long_one, cursor, iteration) is False
    with pytest.raises(ValueError, match="^1 of 12 prompts of the train split .* p10, has 9: give --seq-length 21 or"):
        set_up(monkeypatch, long_one, 8, 2)
    assert set_up(monkeypatch, long_one, 8, 2, "--skip-long-prompts")
    assert set_up(monkeypatch, [3] * 12, 8, 2), "the last prompt has a video"
    assert not set_up(monkeypatch, [3] * 12, 7, 2)


def test_a_rank_with_pixels_leaves_out_what_the_first_rank_has_and_measures_nothing(monkeypatch):
    class Data(Finite):
        def open(self, *_):
            return self

        def prompt(self, index):
            raise AssertionError("a prompt is measured again")

    waits = []
    run = RlLoop.__new__(RlLoop)
    run.config = config("--skip-long-prompts")
    run.grids = SimpleNamespace(rank=1, layout=None)
    run._tokens, run._left_out, run.prompt_provider = None, (), Data([3, 9, 4])
    run.watchdog = SimpleNamespace(on_files=lambda *_, is_work: waits.append(is_work) or nullcontext())
    run.collector = SimpleNamespace(source=None)
    run.cursor, run.session = PromptCursor(), SimpleNamespace(total_iterations=4, progress=Progress())
    for name in ("parts", "_images", "_reference", "_tokens"):
        setattr(run, name, SimpleNamespace(vocab_size=9))
    made = {}
    for name, stands_in in {"shared_errors": lambda _: nullcontext(), "broadcast_object": lambda *_: (0, ("p1",)),
                            "PolicyTrainer": lambda *given: made.update(prompts=given[5])}.items():
        monkeypatch.setattr(loop, name, stands_in)
    monkeypatch.setattr(loop, "needs_pixels", lambda *_: True)
    run._make_policy()
    assert list(made["prompts"].lengths) == [0, 2] and waits == [True]
    monkeypatch.setattr(loop, "needs_pixels", lambda *_: False)
    run._make_policy()
    # The other ranks wait for it as long as for any work on files, not only until the ordinary watchdog ends them.
    assert made["prompts"] is None and waits == [True, False]


def test_the_seq_length_that_is_asked_for_is_enough():
    fit_prompts(Finite([3, 8, 9, 4, 30, 8]), "train", config("--seq-length", "42"), None, 100)


@pytest.mark.parametrize("num_asked", [0, 2, 100])
def test_they_are_left_out_on_request_however_far_the_run_goes(num_asked, caplog):
    prompts = Finite([3, 8, 9, 4, 30, 8])
    with caplog.at_level(logging.INFO, "mimo.rl"):
        found = fit_prompts(prompts, "train", config("--skip-long-prompts"), None, num_asked)
    assert found.left_out == ("p2", "p4")
    assert list(prompts.lengths) == [0, 1, 3, 5]
    assert "--skip-long-prompts: 2 of 6 prompts of the train split" in caplog.text


def test_tokens_of_images_count():
    fit_prompts(Finite([7, 7], images=True), "train", config(), IMAGES, 2)
    with pytest.raises(ValueError, match="p1, has 9: give --seq-length 21"):
        fit_prompts(Finite([7, 8], images=True), "train", config(), IMAGES, 2)


def test_prompts_that_cannot_be_left_out_are_refused():
    with pytest.raises(ValueError, match="--skip-long-prompts leaves nothing: 2 of 2 prompts"):
        fit_prompts(Finite([9, 10]), "train", config("--skip-long-prompts"), None, 5)
    with pytest.raises(ValueError, match="--skip-long-prompts: --dataset-provider arithmetic has no list of prompts"):
        fit_prompts(Endless(), "train", config("--skip-long-prompts"), None, 5)
    fit_prompts(Endless(), "train", config(), None, 50)


def test_more_held_out_prompts_than_there_are_cannot_be_evaluated():
    prompts = Finite([3, 8, 9, 4])
    check_num_held_out(prompts, config("--eval-prompts", "4"))
    check_num_held_out(Endless(), config("--eval-prompts", "50"))
    with pytest.raises(ValueError, match="^--eval-prompts 5: the valid split of arithmetic has 4 prompts.* 4 or less"):
        check_num_held_out(prompts, config("--eval-prompts", "5"))
    skips = config("--eval-prompts", "4", "--skip-long-prompts")
    fit_prompts(prompts, "valid", skips, None, 4)
    with pytest.raises(ValueError, match="^--eval-prompts 4: the valid split of arithmetic has 3 prompts"):
        check_num_held_out(prompts, skips)
