"""The loop of reinforcement learning around its iterations: when it evaluates and saves."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mimo.checkpoint.state import Progress
from mimo.config.cli import parse_as
from mimo.config.rl_run import DESCRIPTION, RlRunConfig
from mimo.rl import loop
from mimo.training.session import Session


def train(monkeypatch: pytest.MonkeyPatch, progress: Progress, stops_at: int | None = None,
          stops_in: int | None = None) -> tuple[list[str], list[Progress]]:
    """Train from a checkpoint's progress to iteration 6, evaluating every 2 and saving every 4 iterations.

    The run is told to stop in iteration `stops_at`, or in the evaluation of iteration `stops_in`.

    Returns:
        What was done, in order, and the progress in each checkpoint.
    """
    config = parse_as(RlRunConfig, ["--model-provider", "causal_lm", "--save", "saved", "--save-interval", "4",
                                    "--eval-prompts", "1", "--eval-interval", "2", "--train-iters", "6"], DESCRIPTION)
    done, saved = list[str](), list[Progress]()
    session: Any = Session.__new__(Session)
    session._config, session.progress, session.total_iterations = config, replace(progress), 6
    session.watchdog = SimpleNamespace(waiting=lambda _: nullcontext(), forget_longest=lambda: None)
    session.agree_to_stop = lambda by_signal=False: "SIGTERM" if (
        session.progress.iteration == stops_at or f"evaluate {stops_in}" in done) else None
    session._state, session.checkpoint_s = SimpleNamespace(), 0.0

    class Saver:
        is_writing = is_pending = False
        last_iteration = progress.iteration or None

        def save(self, progress: Progress) -> None:
            done.append(f"save {progress.iteration}")
            saved.append(replace(progress))
            self.last_iteration = progress.iteration

        def mark_evaluated(self, iteration: int) -> None:
            if saved and saved[-1].iteration == iteration:
                saved[-1].evaluated_iteration = iteration

    def evaluate(iteration: int, _: int) -> Any:
        done.append(f"evaluate {iteration}")
        return {"reward": 0.5}, ()

    def iterate(_: Any) -> None:
        session.progress.iteration += 1
        done.append(f"train {session.progress.iteration}")

    session.saver = Saver()
    run: Any = loop.RlLoop.__new__(loop.RlLoop)
    run.config, run.session, run.parts, run._last_figures = config, session, None, {}
    run.grids = SimpleNamespace(rank=0, layout=SimpleNamespace(
        encoders=("vision",), language=SimpleNamespace(rank_at=lambda pp: 0)))
    run.cursor = SimpleNamespace(streams=lambda is_first_rank: {})
    run.collector = SimpleNamespace(evaluate=evaluate)
    run._iterate, run._with_engine = iterate, lambda _, part: part()
    logger = SimpleNamespace(log_eval=lambda *_, **__: None, log_generations=lambda *_, **__: None)
    monkeypatch.setattr(loop, "StepObserver", lambda *_: SimpleNamespace(close=lambda failed: None))
    with ExitStack() as at_end:
        stopped = run._train(logger, at_end)
        run._save(stopped=stopped is not None)
    return done, saved


WHOLE = ["evaluate 0", "train 1", "train 2", "evaluate 2", "train 3", "train 4", "save 4", "evaluate 4", "train 5",
         "train 6", "save 6"]


def test_an_evaluation_comes_after_the_checkpoint_of_its_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    done, saved = train(monkeypatch, Progress())
    assert done == WHOLE
    assert [each.evaluated_iteration for each in saved] == [4, 6]
    assert train(monkeypatch, saved[0])[0] == WHOLE[8:], "a run that was killed after its evaluation"
    before = replace(saved[0], evaluated_iteration=2)
    assert train(monkeypatch, before)[0] == WHOLE[7:], "a run that was killed in its evaluation"


@pytest.mark.parametrize(("stops_in", "last"), [(0, ["evaluate 0"]), (2, ["train 2", "evaluate 2", "save 2"]),
                                                (4, ["train 4", "save 4", "evaluate 4"])])
def test_a_stop_in_an_evaluation_ends_the_run_without_another_iteration(monkeypatch: pytest.MonkeyPatch, stops_in: int,
                                                                       last: list[str]) -> None:
    done, saved = train(monkeypatch, Progress(), stops_in=stops_in)
    assert done[-len(last):] == last
    assert [each.evaluated_iteration for each in saved] == ([stops_in] if stops_in else [])
    rest, _ = train(monkeypatch, saved[-1] if saved else Progress())
    assert rest == WHOLE[0 if not saved else WHOLE.index(f"evaluate {stops_in}") + 1:]


@pytest.mark.parametrize("stops_at", [1, 2, 3, 4, 5, 6])
def test_a_resumed_run_makes_the_evaluation_that_a_stop_has_left_out(monkeypatch: pytest.MonkeyPatch,
                                                                    stops_at: int) -> None:
    done, saved = train(monkeypatch, Progress(), stops_at)
    assert done[-2:] == [f"train {stops_at}", f"save {stops_at}"]
    rest, _ = train(monkeypatch, saved[-1])
    both = [each for each in (*done, *rest) if each != f"save {stops_at}"]
    assert both == [each for each in WHOLE if each != f"save {stops_at}"]
