"""Multi-token prediction on several layouts against plain PyTorch: losses, gradients, parameters, what is masked."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import mtp
from tests.support.equality import TOLERANCE, find_differences
from tests.support.global_state import assemble, worst_errors
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

# name -> further flags
MODELS = {
    "one-depth": "--hybrid-layer-pattern M*/*E --moe-aux-loss-coeff 0.01",
    "two-depths": "--hybrid-layer-pattern ME*-/M*E/M*E --moe-aux-loss-coeff 0.01",
    "tied": "--hybrid-layer-pattern *-/-* --no-untie-embeddings-and-output-weights",
    "packed": "--hybrid-layer-pattern ME*-/*M/*M --moe-aux-loss-coeff 0",
}
# name -> (ranks, flags)
LAYOUTS = {
    "one-process": (1, "--micro-batch-size 2"),
    "pp2": (2, "--llm-pp 2 --logits-chunk-size 7"),
    "tp2": (2, "--llm-tp 2 --sequence-parallel"),
    "dp2-ep2": (2, "--llm-dp 2 --llm-ep 2"),
    "cp2": (2, "--llm-cp 2"),
    "cp2-tp2": (4, "--llm-cp 2 --llm-tp 2 --sequence-parallel --micro-batch-size 2 --logits-chunk-size 9"),
    "recomputed-tp2-pp2": (4, "--llm-tp 2 --llm-pp 2 --sequence-parallel --recompute full"),
    "overlapped-dp2-pp2": (4, "--llm-dp 2 --llm-pp 2 --overlap-grad-reduce --overlap-param-gather"),
}
# Overlapped, the optimizer's shard of the gradients alone is reduced: parameters and norms are compared.
SHARDED = {"overlapped-dp2-pp2"}
CASES = [("two-depths", layout) for layout in LAYOUTS]
CASES += [("one-depth", "one-process"), ("tied", "one-process"), ("tied", "pp2"), ("tied", "overlapped-dp2-pp2"),
          ("packed", "tp2"), ("packed", "pp2")]


@pytest.fixture(scope="module")
def plain(pool: WorkerPool) -> Callable[[str], mtp.MtpOutcome]:
    """Train a model in plain PyTorch."""
    @cache
    def of(model: str) -> mtp.MtpOutcome:
        outcome: mtp.MtpOutcome
        (outcome,) = pool.run(mtp.run_plain, tuple(MODELS[model].split()), model == "packed", world_size=1)
        return outcome

    return of


def run(pool: WorkerPool, model: str, layout: str = "one-process", *more: str,
        **differently: Any) -> list[mtp.MtpOutcome]:
    """Outcomes of the ranks, with more flags or rows made differently."""
    world_size, flags = LAYOUTS[layout]
    if model == "packed":
        flags = flags.replace("--micro-batch-size 2", "")
    return pool.run(mtp.run_layout, (*MODELS[model].split(), *flags.split(), *more), world_size,
                    mtp.Rows(packed=model == "packed", **differently), world_size=world_size)


@pytest.mark.parametrize(("model", "layout"), fast_only([("two-depths", "pp2"), ("packed", "tp2")], CASES))
def test_training_equals_plain_pytorch(pool: WorkerPool, plain: Any, model: str, layout: str) -> None:
    outcomes, expected = run(pool, model, layout), plain(model)
    found = find_differences(expected, outcomes)
    assert not [difference for difference in found if layout not in SHARDED or not difference.startswith("gradient")]
    reporting = [outcome.mtp_losses for outcome in outcomes if outcome.mtp_losses[0]]
    assert len(reporting) == len(outcomes) // (2 if "pp2" in layout else 1)  # the last stage alone
    for losses in reporting:
        assert losses == [pytest.approx(step, rel=TOLERANCE) for step in expected.mtp_losses]


def test_label_of_a_placeholder_has_no_effect(pool: WorkerPool, plain: Any) -> None:
    assert not find_differences(plain("two-depths"), run(pool, "two-depths", image_label=5))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mistake"), [
    ("two-depths", "no loss mask"), ("two-depths", "no path"), ("two-depths", "own divisor left out"),
    ("two-depths", "placeholders train"), ("packed", "sequences joined")])
def test_a_mistake_is_felt(pool: WorkerPool, plain: Any, model: str, mistake: str) -> None:
    found = find_differences(plain(model), run(pool, model, mistake=mistake))
    assert any(difference.startswith("gradient mtp.") or "embedding" in difference for difference in found)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "other"), [
    ("two-depths", "pp2", "tp2"), ("two-depths", "dp2-ep2", "pp2"), ("tied", "pp2", "one-process")])
def test_checkpoint_goes_on_on_another_layout(pool: WorkerPool, plain: Any, tmp_path: Path, model: str, layout: str,
                                              other: str) -> None:
    run(pool, model, layout, "--save", str(tmp_path))
    resumed, expected = run(pool, model, other, "--load", str(tmp_path)), plain(model)
    for outcome in resumed:
        assert outcome.losses == pytest.approx(expected.losses[1:], rel=TOLERANCE)
    errors = worst_errors(assemble(expected.parameters), [outcome.parameters for outcome in resumed])
    assert max(errors.values()) < TOLERANCE
    assert any("mtp.layers.1.eh_proj" in name for name in errors) == (model == "two-depths")


@pytest.mark.slow
def test_weights_load_without_multi_token_prediction(pool: WorkerPool, tmp_path: Path) -> None:
    run(pool, "two-depths", "one-process", "--save", str(tmp_path))
    flags = ("--hybrid-layer-pattern", "ME*-")
    for notes in pool.run(mtp.load_weights_alone, (*flags, "--llm-pp", "2"), 2, str(tmp_path), world_size=2):
        (note,) = [note for note in notes if "multi-token" in note]
        assert note.startswith("multi-token prediction (") and note.endswith(" is passed over: this run has none")
    left = r"in the checkpoint, but not in this run \(\d+\):\n(.*\n)*? +language\.mtp\."
    with pytest.raises(RuntimeError, match=left):
        pool.run(mtp.run_layout, (*flags, "--load", str(tmp_path)), 1, mtp.Rows(), world_size=1)


def test_run_reports_the_losses(pool: WorkerPool, tmp_path: Path) -> None:
    """The whole loop, evaluation and MoE losses of several stages included."""
    flags = (*mtp.BASE, *MODELS["two-depths"].split(), *"--llm-pp 2 --eval-iters 1 --moe-per-layer-logging".split())
    pool.run(mtp.run_loop, flags, 2, str(tmp_path), world_size=2)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "lm loss" in step and "grad-norm" in step]
    assert len(trained) == 3
    for step in trained:
        # Untrained, every one is near that of guessing.
        assert all(2 < step[f"mtp_{depth} loss"] < 6 for depth in (1, 2))
        # Four layers, and an entry for each depth; those without experts are 0.
        assert [step[f"moe/seq_load_balancing_loss_layer_{entry}"] > 0 for entry in range(6)] == [
            False, True, False, False, True, True]
        # The mean is over the three layers with experts, not over all layers.
        by_layer = [step[f"moe/seq_load_balancing_loss_layer_{entry}"] for entry in range(6)]
        assert step["seq_load_balancing_loss"] == pytest.approx(sum(by_layer) / 3)


def test_unread_tokens_are_no_targets() -> None:
    """Rows have predictions that only the path masks: later than an image token, of a text token."""
    rows = [row[0] for row in mtp.make_rows(0, packed=False)]
    assert all(mtp.IMAGE in row.tokens for row in rows)
    for depth in (1, 2):
        kept = sum(len(mtp.targets_of(row, depth)) for row in rows)
        without_path = sum(sum(row.targets[depth + 1:]) for row in rows)
        assert 0 < kept < without_path
