"""Runs with encoder windows that fail: killed ones go on as if nothing had happened, an error ends all ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.spawn import WorkerPool
from tests.support.steps import run_loop

pytestmark = pytest.mark.slow

NUM_ITERATIONS, KILLED_AT = 6, 4
LAYOUT = ("--layout", "colocated", "--encoder-dp", "2", "--llm-pp", "2")
# Four samples of none to three images of uneven sizes, which are dealt to both replicas by cost.
FLAGS = (*LAYOUT, *"""--vision-dynamic-resolution --no-vision-class-token --mock-image-size-cv 0.7 --mock-max-length 15
         --hidden-dropout 0.1 --global-batch-size 4 --save-interval 1""".split(), "--train-iters", str(NUM_ITERATIONS))


def train(rank: int, flags: tuple[str, ...], run_dir: str) -> list[tuple[Any, ...]]:
    """Train to the end. Return what there is to compare of each iteration."""
    return [(record.iteration, record.lm_loss, record.grad_norm, record.encoder_imbalance,
             record.encoder_imbalance_unbalanced) for record in run_loop(rank, (*FLAGS, *flags), 2, run_dir)]


def train_until_killed(rank: int, flags: tuple[str, ...], run_dir: str, save: str, place: str) -> None:
    """Train until the second rank is killed: in a step, or in a save before one of its files."""
    from tests.support.saving import die_before_change

    def change(parts: Any) -> None:
        if rank != 1:
            return
        if place != "step":
            die_before_change(Path(save), place)
            return
        (module,), finished = parts.windows._modules, [0]
        finish = module.finish

        def finish_or_die(window: int) -> None:
            finished[0] += window == 0
            if finished[0] == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            finish(window)

        module.finish = finish_or_die

    run_loop(rank, (*FLAGS, *flags), 2, run_dir, change)


@pytest.fixture(scope="module")
def left_alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[tuple[Any, ...]]]]:
    folder = tmp_path_factory.mktemp("left-alone")
    return folder, pool.run(train, ("--save", str(folder / "save")), str(folder / "run"), world_size=2)


@pytest.mark.parametrize("saving", ["", "--async-save"], ids=["sync", "async"])
@pytest.mark.parametrize("place", ["step", f"open .saving_iter_{KILLED_AT:07}/__1"])
def test_a_killed_run_resumes_to_the_bit(pool, left_alone, tmp_path, place, saving):
    from tests.support.stored import stored_tensors

    whole, expected = left_alone
    save, run = tmp_path / "save", str(tmp_path / "run")
    flags = ("--save", str(save), "--load", str(save), *saving.split())
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        pool.run(train_until_killed, flags, run, str(save), place, world_size=2)
    saved = {int(folder.name.removeprefix("iter_")) for folder in save.glob("iter_*")}
    # A save in the background may not have ended when the next step is killed.
    assert KILLED_AT - 1 - bool(saving) <= max(saved) < KILLED_AT
    resumed = pool.run(train, flags, run, world_size=2)
    for records, others in zip(expected, resumed, strict=True):
        assert [record[0] for record in others] == list(range(max(saved) + 1, NUM_ITERATIONS + 1))
        assert others == records[max(saved):]
    assert any(balanced < in_order for *_, balanced, in_order in expected[0]), "something was balanced"
    last = f"iter_{NUM_ITERATIONS:07}"
    ours, theirs = stored_tensors(save / last), stored_tensors(whole / "save" / last)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert [key for key, tensor in theirs.items() if not tensor.equal(ours[key])] == []


def fail_on_the_reader(rank: int, kind: str) -> str:
    """Take a step in which the images of the only lane cannot be listed. Returns the error of this rank."""
    from mimo.training import encoder_windows
    from mimo.training.step import train_step
    from tests.support.steps import trainer_of

    def fail(*_: Any) -> None:
        raise {"ValueError": ValueError, "KeyError": KeyError}[kind]("no such image")

    with pytest.MonkeyPatch.context() as patch, trainer_of(rank, LAYOUT, 2) as (parts, loader):
        patch.setattr(encoder_windows, "images_of", fail)
        with pytest.raises(Exception, match="no such image|reports what is wrong") as error:
            train_step(parts, loader.next_step())
        return f"{error.type.__name__}: {error.value}"


@pytest.mark.parametrize(("kind", "message"), [
    ("ValueError", "ValueError: no such image"), ("KeyError", "KeyError: 'no such image'")])
def test_every_rank_ends_with_the_error_of_the_reader(pool: WorkerPool, kind: str, message: str) -> None:
    found = pool.run(fail_on_the_reader, kind, world_size=2, timeout_s=60)
    assert found == [message, "ReportedElsewhereError: rank 0 reports what is wrong"]
