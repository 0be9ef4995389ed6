"""The schedule benchmark on made-up steps: every wait goes to one part, and bounds are what arithmetic says."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.config.trainer import LayoutConfig
from mimo.grid.layout import build_layout
from mimo.observability.spans import Interval, Kind, Label
from scripts.bench import schedule
from scripts.bench.layout_search import split_efficiency
from scripts.bench.schedule_figures import (
    PARTS,
    Arm,
    RankStep,
    UnexplainedTimeError,
    bound_of_eta,
    bubble_share,
    charge,
    cut,
    figures,
    mean_pass_seconds,
    merge,
    merged,
    prefetch_bound,
    prefetch_bound_of_step,
    split,
)

WORDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "x": Kind.BRIDGE_WAIT, "p": Kind.PIPELINE_WAIT, "d": Kind.DATA_WAIT,
         "g": Kind.GRADIENT_SYNC, "o": Kind.OPTIMIZER, "i": Kind.IDLE, ".": Kind.OTHER}


def rank(number: int, module: str, text: str, lane: int = 0) -> RankStep:
    """Return a step drawn as text: a letter a second, see WORDS."""
    intervals, passes = [], {"F": 0, "B": 0}
    for second, letter in enumerate(text):
        if intervals and text[second - 1] == letter:
            intervals[-1] = Interval(intervals[-1].label, intervals[-1].begin_s, second + 1)
            continue
        microbatch = passes[letter] if letter in passes else None
        if letter in passes:
            passes[letter] += 1
        intervals.append(Interval(Label(WORDS[letter], letter, module, microbatch), second, second + 1))
    return RankStep(number, module, lane, intervals)


# Ranks as (module, step, lane), the critical module, its ideal, and the parts that are not zero.
SPLITS = {
    "the first and the last pass of the encoder are fill and drain": (
        [("vision", "dFFxFFxBBxxBBgoo"), ("language", "dxxxFFBBFFBBiioo")], "language", 8,
        {"fill and drain": 2 + 1, "bridge": 1, "data": 1, "optimizer": 2, "gradient sync": 1}),
    # The later stage waits for 2 s of encoder, then 2 for the first stage, and 4 s after it has done its only passes.
    "waits of a pipeline are bubble and waits for the encoder before it are not": (
        [("vision", "FFxxxxxxxxxxBB.."), ("language", "xxFFppBBFFBBii.."), ("language", "ppppFFBBppppii..")],
        "language", 6, {"fill and drain": 2 + 2, "bubble": 1 + 3, "other": 2}),
    "a wait for a stage is bubble though the encoder works meanwhile": (
        [("vision", "FFFFFF.."), ("language", "xxFFBB.."), ("language", "ppFppB..")], "language", 3,
        {"fill and drain": 2, "bubble": 1, "other": 2}),
    "a longer lane is imbalance and what follows it gradient sync": (
        [("vision", "F.........."), ("language", "xFFFFBBBBgg"), ("language", "xFFBBgggggg", 1)], "language", 6,
        {"fill and drain": 1, "imbalance": 2, "gradient sync": 2}),
    # From second 5 to 8 the language model waits for the encoder; then for the transfer.
    "in the steady part the encoder's longer microbatch is imbalance": (
        [("vision", "FxFFFFFFxBxB"), ("language", "xFFBBxxxxFBi")], "language", 6,
        {"fill and drain": 2, "imbalance": 3, "bridge": 1}),
    "an encoder's wait for the first gradient is fill": (
        [("vision", "FFxxBBFFxBBx"), ("language", "xxFBxxxxFxxB")], "vision", 8, {"fill and drain": 2 + 1 + 1}),
    "and for later ones imbalance": (
        [("vision", "FFxxBBxFFBB."), ("language", "xxFBxxFBxxx.")], "vision", 8,
        {"fill and drain": 2, "imbalance": 1, "other": 1}),
    "late data of another rank is data and longer passes than alone are named": (
        [("vision", "dddFxxBo"), ("language", "diixFBoo")], "language", 1.5,
        {"slower passes": 0.5, "data": 3, "fill and drain": 1, "optimizer": 2}),
}


@pytest.mark.parametrize("case", SPLITS)
def test_every_wait_goes_to_one_part(case: str) -> None:
    ranks, critical, ideal, expected = SPLITS[case]
    steps = [rank(number, *each) for number, each in enumerate(ranks)]
    found = split(steps, critical, ideal)
    own = [step.seconds for step in steps if step.module == critical]
    assert sum(found.values()) == pytest.approx(sum(own) / len(own))
    assert {name: value for name, value in found.items() if value} == {"ideal": ideal, **expected}


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair))), max_size=8)


@given(spans, spans, spans)
def test_all_of_a_wait_is_charged_once(waits, one, two):
    for wait in waits:
        parts = dict.fromkeys("abc", 0.0)
        charge(wait, [(merged(one), "a"), (merged(two), "b")], "c", parts)
        seconds = set(range(*wait))
        covered = [{second for span in cover for second in range(*span)} for cover in (one, two)]
        assert parts == {"a": len(seconds & covered[0]), "b": len(seconds & covered[1] - covered[0]),
                         "c": len(seconds - covered[0] - covered[1])}


@given(spans)
def test_merged_spans_neither_touch_nor_lose_anything(found):
    joined = merged(found)
    assert all(one[1] < two[0] for one, two in zip(joined, joined[1:], strict=False))
    assert sum(end - begin for begin, end in joined) == len({each for span in found for each in range(*span)})
    assert all(cut(span, joined)[1] == [] for span in found if span[1] > span[0])


@given(st.lists(st.text("FBxpdgoi.", min_size=30, max_size=30), min_size=3, max_size=5), st.integers(0, 4))
def test_the_parts_sum_to_the_step_whatever_the_ranks_do(texts, lanes):
    steps = [rank(number, "vision" if number == 0 else "language", text, number % (lanes + 1))
             for number, text in enumerate(texts)]
    for module in ("vision", "language"):
        found = split(steps, module, mean_pass_seconds(steps, module))
        assert tuple(found) == PARTS and sum(found.values()) == pytest.approx(30)
        assert min(found.values()) > -1e-9 and found["slower passes"] == pytest.approx(0)


def test_bounds():
    assert prefetch_bound(1, 1) == 2 and prefetch_bound(1, 3) == pytest.approx(4 / 3)
    assert prefetch_bound_of_step(1, 3, 1) == prefetch_bound(1, 3)
    assert prefetch_bound_of_step(3, 1, 1) == prefetch_bound(3, 1)
    assert prefetch_bound_of_step(2, 2, 4) == pytest.approx(5 / 4)
    # Two stages of 60 behind an encoder of 30, and stages of 30 behind one of 60.
    assert prefetch_bound_of_step(30, 60, 1, 2) == prefetch_bound(30, 120) == pytest.approx(150 / 120)
    assert prefetch_bound_of_step(60, 30, 1, 2) == pytest.approx(120 / 60)
    assert prefetch_bound_of_step(30, 60, 3, 2) == pytest.approx((30 + 120 + 120) / 240)
    assert prefetch_bound_of_step(1, 3, 10**6) == pytest.approx(1, rel=1e-5)
    assert bubble_share(1, 4) == 0 and bubble_share(4, 4) == pytest.approx(3 / 7)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_split_is_whole_where_each_grid_has_gpus_as_it_has_work(encoder, language, one, two):
    ranks = {"vision": encoder, "language": language}
    assert split_efficiency(ranks, {"vision": 3.0 * encoder, "language": 3.0 * language}) == pytest.approx(1)
    found = split_efficiency(ranks, {"vision": one, "language": two})
    share = one / (one + two)
    expected = min(encoder / (encoder + language) / share, language / (encoder + language) / (1 - share))
    assert found == pytest.approx(expected) and 0 < found <= 1 + 1e-9


def block(step_s: float) -> dict[str, Arm]:
    """Return one microbatch on one encoder rank and one language rank; the step takes `step_s`, its intervals 8 s."""
    whole = [rank(0, "vision", "FxxxxxBo"), rank(1, "language", "xFFBBBio")]
    alone = {name: Arm([[each]]) for name, each in (("vision", rank(0, "vision", "FB")),
                                                    ("language", rank(1, "language", "FFBBB")))}
    return {"off": merge([{"off": Arm([[each]], [step_s])} for each in whole])["off"], **alone}


LAYOUT = build_layout(LayoutConfig(), 2, ("vision",))


def test_figures_are_those_of_the_slower_grid_and_the_block_in_the_middle():
    found = figures([block(8.2), block(8.1), block(7.9)], LAYOUT, 1)
    assert (found["critical"], found["ideal_ms"], found["step_ms"]) == ("language", 5000, 8100)
    assert sum(found["parts_ms"].values()) + found["unexplained_ms"] == pytest.approx(8100)
    assert found["parts_ms"]["fill and drain"] == 2000 and found["eta"] == pytest.approx(5 / 8.1)
    assert found["eta_split"] == pytest.approx(0.5 / (5 / 7))
    assert found["prefetch"]["bound"] == pytest.approx(7 / 5) and "speedup" not in found["prefetch"]


def test_parts_that_miss_the_step_are_an_error():
    with pytest.raises(UnexplainedTimeError, match=r"language grid.*8000.00 ms.*8400.00 ms: 4.8 %"):
        figures([block(8.4)], LAYOUT, 1)


def test_prefetch_is_the_ratio_of_both_arms():
    blocks = [{**block(8.0), "on": Arm([[rank(1, "language", "dF"), rank(0, "vision", "ddF")]], [7.0 + number])}
              for number in range(3)]
    found = figures(blocks, LAYOUT, 1)["prefetch"]
    # The rank that waited longest for data waited 2 s of each.
    assert (found["off_ms"], found["on_ms"], found["speedup"]) == (8000, 6000, pytest.approx(8 / 6))
    assert found["achieved"] == found["achieved_of_step"] == pytest.approx(8 / 6 / (7 / 5))


def test_eta_without_and_with_run_ahead():
    blocks = [{**block(8.0), "ahead": Arm([[rank(1, "language", "FFBBB"), rank(0, "vision", "F..B")]], [6.0 + number])}
              for number in range(3)]
    found = figures(blocks, LAYOUT, 1)
    assert found["run_ahead"] == {"off_ms": 8000, "eta_off": 5 / 8, "on_ms": 7000, "eta_on": 5 / 7, "speedup": 8 / 7}
    assert not figures([block(8.0)], LAYOUT, 1)["run_ahead"]
    assert found["bound_of_eta"] == pytest.approx(5 / 7), "the encoder takes 2 s before and after the 5 s"
    # Behind an encoder that is slower, the language model hides all of its time but with few microbatches.
    assert bound_of_eta(60, 60, 50, 12) == 1 and bound_of_eta(60, 60, 50, 2) == pytest.approx(120 / 160)
    assert bound_of_eta(30, 30, 60, 12, 2) == pytest.approx(720 / 810)
    # A short microbatch at each end leaves the language model less to wait for.
    assert bound_of_eta(30, 10, 60, 12) == pytest.approx(720 / 730)


def test_more_ranks_than_gpus_are_refused(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert schedule.main(["--device", "cuda", "--encoder-dp", "1", "--llm-dp", "2"]) == 2
    assert "--device cuda: the grids have 3 ranks, this host has 2 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["h200", "h200-even"])
def test_presets_for_gpus_are_runs_that_fit_each_other(preset):
    from mimo.config.cli import parse
    from mimo.config.validate import validate
    from scripts.bench import presets

    flags = [*presets.flags("cuda", preset), "--train-iters", "1"]
    for layout, ranks in ((["--encoder-dp", "1"], 2), (["--encoder-dp", "1", "--llm-dp", "3"], 4),
                          (["--encoder-tp", "2", "--llm-tp", "2", "--sequence-parallel"], 4)):
        config = parse([*flags, *layout])
        validate(config, ranks)
    family, data = config.model_family, config.dataset
    longest = data.mock_images_max * family.num_tokens + data.mock_max_length
    assert 0.9 * config.train.seq_length < longest <= config.train.seq_length


def test_the_arm_without_run_ahead_may_come_first_and_leaves_the_flag_to_the_other():
    from mimo.bridge.disjoint import Bridge
    from scripts.bench.schedule_rank import no_run_ahead

    bridge = Bridge.__new__(Bridge)
    bridge.run_ahead, bridge._is_first_step, bridge._sent = 3, True, deque()
    with no_run_ahead(SimpleNamespace(communicator=SimpleNamespace(bridges=[bridge]))):
        for _ in range(2):
            assert bridge.microbatches_ahead == 0
            bridge.finish_step(forward_only=False)
    assert bridge.microbatches_ahead == 3
